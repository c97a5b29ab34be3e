"""One replica of the pool: a thread that places it, starts it, watches it, and starts it again.

A replica is lost when its process ends, when its actor or node is gone, or when the server does not answer `info` for
`silent_s`. It then starts again in the same bundle of the placement group, so on the same node, unless Ray had to move
the bundle because the node is gone. What fails before a replica was ever ready is a wrong setting and ends the pool.

Not covered: a worker that dies or hangs; its server restarts it and the replica stays.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from opd.client import TeacherClient
from opd.deadline import Backoff
from opd.errors import OPDError, TeacherUnavailable
from opd.pool.host import Host, Place
from opd.pool.placement import Size

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
ACTOR_PATIENCE_S = 30.0  # an actor that answers nothing for so long is given up
LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class Plan:
    """What all replicas of a pool share."""

    group: PlacementGroup  # replica i lives in bundle i
    size: Size
    server_arguments: Sequence[str]  # without --bind
    base_port: int  # replica i serves on base_port + i, wherever it is
    metrics_port: int | None  # the same for /metrics
    loopback: bool
    silent_s: float
    grace_s: float  # for the server to drain


class Event(NamedTuple):
    """What the pool has to know."""

    replica: int
    kind: str  # ready, lost, wrong
    text: str  # address, or what happened
    model: str = ""  # its fingerprint


class _Lost(Exception):
    """This start of the replica is over; the message says why."""


class _Wrong(Exception):
    """Starting it again cannot help."""


class _Stopped(Exception):
    """The pool ends."""


class Replica(threading.Thread):
    """See the module."""

    def __init__(self, index: int, plan: Plan, events: queue.SimpleQueue[Event]):
        super().__init__(name=f"replica {index}", daemon=True)
        self.index = index
        self._plan = plan
        self._events = events
        self._stopping = threading.Event()
        self._was_ready = False
        self._backoff = Backoff(first_s=0.5, most_s=30.0, rng=random.Random())

    def stop(self) -> None:
        """Drain and stop it; returns at once, join() waits."""
        self._stopping.set()

    def run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                self._live()
            except _Stopped:
                return
            except _Wrong as e:
                self._events.put(Event(self.index, "wrong", str(e)))
                return
            except (_Lost, RayError) as e:
                reason = str(e) if isinstance(e, _Lost) else f"its actor or node is gone ({type(e).__name__})"
                failures = 1 if time.monotonic() - began > 60 else failures + 1
                pause_s = self._backoff.pause_s(failures)
                self._events.put(Event(self.index, "lost", f"{reason}; starts again in {pause_s:.1f} s"))
                self._stopping.wait(pause_s)

    def _live(self) -> None:
        """One life of the replica, from its actor to its end; always leaves by an exception."""
        plan = self._plan
        where = PlacementGroupSchedulingStrategy(plan.group, placement_group_bundle_index=self.index)
        host: Any = ray.remote(Host)
        actor: Any = host.options(num_cpus=plan.size.cpus, num_gpus=plan.size.gpus, scheduling_strategy=where).remote()
        try:
            place = self._ask(actor.place.remote(), None, "room on a node")
            try:
                address = self._start(actor, place)
                with TeacherClient(address, client_name=f"pool-{self.index}") as client:
                    self._watch(actor, client, address)
            except _Stopped:
                self._drain(actor)
                raise
        finally:
            ray.kill(actor)

    def _start(self, actor: Any, place: Place) -> str:
        host = "127.0.0.1" if self._plan.loopback else place.ip
        address = f"tcp://{f'[{host}]' if ':' in host else host}:{self._plan.base_port + self.index}"
        logger.info(
            "replica %d: node %s (%s), actor %d, %s", self.index, place.node_id[:8], place.ip, place.pid, address
        )
        arguments = [*self._plan.server_arguments, "--bind", address]
        if self._plan.metrics_port is not None:
            arguments += ["--metrics-port", str(self._plan.metrics_port + self.index)]
        self._ask(actor.start.remote(arguments), ACTOR_PATIENCE_S, "its start")
        return address

    def _watch(self, actor: Any, client: TeacherClient, address: str) -> None:
        heard, ready = time.monotonic(), False
        while True:
            code, said = self._ask(actor.poll.remote(), ACTOR_PATIENCE_S, "its state")
            if code is not None:
                wrong = code in (1, 2) and not self._was_ready
                raise (_Wrong if wrong else _Lost)(f"its server ended with exit code {code}: {said}")
            try:
                info = client.info(timeout_s=CHECK_EVERY_S)
                heard = time.monotonic()
                if info.state == "ready" and info.model is not None and not ready:
                    ready = self._was_ready = True
                    self._events.put(Event(self.index, "ready", address, f"{info.model.model} {info.model.tokenizer}"))
            except TeacherUnavailable:
                if time.monotonic() - heard > self._plan.silent_s:
                    raise _Lost(f"its server did not answer for {self._plan.silent_s:g} s") from None
            except OPDError as e:  # another program answers, or another model than a moment ago
                raise _Lost(f"what answers at {address} is not its server: {e}") from None
            if self._stopping.wait(CHECK_EVERY_S):
                raise _Stopped

    def _ask(self, ref: Any, patience_s: float | None, what: str) -> Any:
        """The result of an actor's method, while the pool does not end."""
        began = log_at = time.monotonic()
        while not self._stopping.is_set():
            try:
                return ray.get(ref, timeout=0.5)
            except GetTimeoutError:
                now = time.monotonic()
                if patience_s is not None and now - began > patience_s:
                    raise _Lost(f"its actor did not answer for {patience_s:g} s") from None
                if now - log_at > LOG_EVERY_S:
                    log_at = now
                    logger.info("replica %d: waiting for %s since %.0f s", self.index, what, now - began)
        raise _Stopped

    def _drain(self, actor: Any) -> None:
        try:
            ray.get(actor.stop.remote(self._plan.grace_s), timeout=self._plan.grace_s + 5.0)
        except RayError as e:  # it is gone, or gets killed next
            logger.debug("replica %d did not drain: %s", self.index, e)
