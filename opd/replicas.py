"""All replicas of one teacher: waited for together, and held to the same model.

Shared by everything that a client does; one call at a time uses it (opd/client.py has the lock).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import zmq

from opd.deadline import Backoff, Deadline
from opd.errors import ConfigError, OPDError, TeacherMismatch
from opd.replica import Answer, Replica, Timing
from opd.wire import Expect, ModelInfo

MAX_POLL_S = 0.25  # how soon a close() from another thread is noticed


class Replicas:
    """See the module.

    Raises:
        ConfigError: an address that no socket can connect to.
    """

    def __init__(self, addresses: Sequence[str], *, client_name: str, timing: Timing, seed: int | None):
        self.timing = timing
        self.backoff = Backoff(first_s=timing.first_backoff_s, most_s=timing.most_backoff_s, rng=random.Random(seed))
        self.pinned: Expect | None = None  # fingerprints of the first model that was heard of,
        self.pinned_by = ""  # and the address that it was heard from
        self.closing = False  # set from another thread, perhaps
        self._context = zmq.Context()
        self._all: list[Replica] = []
        try:
            for address in addresses:
                replica = Replica(
                    self._context,
                    address,
                    client_name=client_name,
                    timing=timing,
                    backoff=self.backoff,
                    accept=self._accept,
                )
                self._all.append(replica)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Replica:
        return self._all[index]

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self._all if replica.up]

    def begin(self) -> None:
        for replica in self._all:
            replica.begin()

    def forget(self) -> None:
        for replica in self._all:
            replica.forget()

    def reset(self) -> None:
        for replica in self._all:
            replica.reset()

    def close(self) -> None:
        for replica in self._all:
            replica.close()
        self._context.destroy(linger=0)

    def turn(self, deadline: Deadline, *, wake_at: float | None = None) -> list[Answer]:
        """Let every replica do what is due, wait for a message, a timer or the deadline, and take in what came.

        Raises:
            OPDError: another thread closes them.
            TeacherMismatch: a replica has another model or tokenizer than was pinned.
        """
        if self.closing:
            raise OPDError("this TeacherClient was closed by another thread")
        now = time.monotonic()
        times = [replica.turn(now) for replica in self._all]
        if wake_at is not None:
            times.append(wake_at)
        wait_s = min(min(times) - now, deadline.left_s, MAX_POLL_S)
        if any(replica.lost for replica in self._all):
            wait_s = 0.0
        poller = zmq.Poller()
        for replica in self._all:
            for socket in replica.sockets:
                poller.register(socket, zmq.POLLIN)
        poller.poll(max(0, int(wait_s * 1000) + 1) if wait_s > 0 else 0)
        return [answer for replica in self._all for answer in replica.receive()]

    def _accept(self, replica: Replica, model: ModelInfo) -> None:
        """Pin the first model that is heard of; every other one has to be the same."""
        found = Expect(model=model.model, tokenizer=model.tokenizer)
        if self.pinned is None:
            self.pinned, self.pinned_by = found, replica.address
        elif found != self.pinned:
            raise TeacherMismatch(
                f"the teacher at {replica.address} has model {found.model!r}, tokenizer {found.tokenizer!r} "
                f"({model.name!r}); pinned are model {self.pinned.model!r}, tokenizer {self.pinned.tokenizer!r} "
                f"from {self.pinned_by}: all replicas, and a teacher that restarts, must serve the same model"
            )

    def describe(self) -> str:
        return "; ".join(replica.describe() for replica in self._all)


def refuse_stranger(replica: Replica) -> None:
    """Give up on an address where no teacher listens.

    Raises:
        ConfigError: it told so.
    """
    if replica.refused:
        raise ConfigError(f"teacher address {replica.address}: {replica.refused}; is it the right port?")
