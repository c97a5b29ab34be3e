"""Keeps one worker process alive: starts it, watches it, starts it again.

Owned by the front's only thread, which calls receive() when the link is readable and tick() when wakeup() is due;
nothing here blocks. A worker is lost when it exits, when a batch makes no progress for `worker_timeout_s`, or when
loading takes longer than `load_timeout_s`; its whole process group is killed then.

The worker dies with the front: it runs in its own session and asks the kernel for SIGKILL when its parent dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from opd.errors import OPDError
from opd.scoring.scorer import LoadOptions
from opd.serving import link
from opd.serving.queue import Batch
from opd.wire import COPY_BYTES, ModelInfo, State, clip, to_bin

logger = logging.getLogger(__name__)

FAST_RESTARTS = 2  # losses in a row that are answered with a restart at once; a row that kills needs two to be found
MAX_BACKOFF_S = 10.0


class EngineFailed(OPDError):
    """The worker cannot be brought up (again); `config` when a setting is the reason."""

    def __init__(self, message: str, *, config: bool = False):
        super().__init__(message)
        self.config = config


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How the worker is run and when it counts as lost."""

    backend: str
    load: LoadOptions
    worker_timeout_s: float = 600.0
    load_timeout_s: float = 1800.0
    max_start_failures: int = 3
    log_level: str = "info"


class _Process:
    """One worker process and its two sockets."""

    def __init__(self, context: zmq.Context, settings: Settings):
        self.folder = Path(tempfile.mkdtemp(prefix="opd-"))  # mode 0700: nobody else can connect
        self.batches = context.socket(zmq.PAIR)
        self.beats = context.socket(zmq.PULL)
        self.unheard = {link.BATCHES, link.BEATS}  # sockets on which nothing has come yet
        for socket, name in ((self.batches, link.BATCHES), (self.beats, link.BEATS)):
            socket.copy_threshold = COPY_BYTES
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # the front bounds what is in flight
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(f"ipc://{self.folder / name}")
        self.popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "opd.serving.worker", "--folder", str(self.folder)),
                *("--parent", str(os.getpid()), "--backend", settings.backend),
                *("--options", msgspec.json.encode(settings.load).decode(), "--log-level", settings.log_level),
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """All messages that have come by now, heartbeats last."""
        for socket, name in ((self.batches, link.BATCHES), (self.beats, link.BEATS)):
            while not socket.closed and socket.poll(0):
                frames = socket.recv_multipart(flags=zmq.DONTWAIT, copy=False)
                if name in self.unheard:
                    self.unheard.discard(name)
                    if not self.unheard:  # both are connected: nobody needs the paths, and they cannot be left behind
                        shutil.rmtree(self.folder, ignore_errors=True)
                yield frames

    def end(self) -> None:
        """Kill the whole group and forget everything that was under way."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.batches.close()
        self.beats.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Supervisor:
    """The worker as the front sees it."""

    def __init__(self, context: zmq.Context, settings: Settings):
        self.state: State = "loading"
        self.detail = f"loading {clip(settings.load.model)}"
        self.info: ModelInfo | None = None
        self.load_seconds = 0.0
        self.no_sleep = ""  # why this backend cannot sleep
        self.vocabulary = b""  # what info.tokenizer is the fingerprint of; empty where the scorer does not know
        self._can_sleep = False  # without ending the process
        self._context = context
        self._settings = settings
        self._process: _Process | None = None
        self._started = 0.0
        self._restart_at: float | None = None
        self._loss: str | None = None  # why the worker was lost, until tick() has told
        self._last_sign = 0.0  # any message
        self._last_progress = 0.0  # of the batch that runs
        self._running = 0  # batches sent and not answered
        self._losses = 0  # in a row, without a scored batch in between
        self._start_failures = 0  # in a row

    @property
    def sockets(self) -> list[zmq.Socket]:
        """What to poll, while there is a worker."""
        return [self._process.batches, self._process.beats] if self._process is not None else []

    def start(self, now: float) -> None:
        self._restart_at = None
        self._process = _Process(self._context, self._settings)
        self._started = self._last_sign = self._last_progress = now
        self._running = 0
        settings = self._settings
        logger.info("worker %d starts: %s, %s", self._process.popen.pid, settings.backend, clip(settings.load.model))

    def send(self, batch: Batch, now: float) -> None:
        """Hand a batch to a ready worker; if that is just dying, the batch is lost with it."""
        assert self._process is not None and self.state == "ready"
        deadline = max(piece.job.deadline for piece in batch.pieces)
        rows = [piece.hi - piece.lo for piece in batch.pieces]
        head = link.Batch(batch.seq, batch.topk, batch.temperature, deadline, rows, batch.num_candidates)
        lengths = np.concatenate([piece.lengths for piece in batch.pieces])
        starts = np.concatenate([piece.starts for piece in batch.pieces])
        arrays = [array for piece in batch.pieces for array in (piece.ids, piece.candidates) if array is not None]
        frames = [link.encode(head), *(to_bin(array, np.int32) for array in (lengths, starts, *arrays))]
        if self._running == 0:
            self._last_progress = now
        self._running += 1
        try:
            self._process.batches.send_multipart(frames, copy=False, flags=zmq.DONTWAIT)
        except zmq.Again:  # nobody at the other end any more; the signal of its death is on its way
            self.lose("its link was closed", now)

    def sleep(self, now: float) -> None:
        """Let a ready worker without batches free its accelerator's memory; `state` is "sleeping" when that is done."""
        assert self.state == "ready" and not self._running
        if self._can_sleep and self._order(link.Sleep()):
            self.state, self.detail, self._started = "draining", "goes to sleep", now
        else:
            self._sleeps()

    def _sleeps(self, *, kept: bool = False) -> None:
        if not kept:
            self.stop()
        self.state, self.detail = "sleeping", "its memory is free; it has to be woken before it can score"
        logger.info("worker sleeps%s", "" if kept else ": its process was ended")

    def wake(self, now: float) -> None:
        """Bring a worker back that sleeps or is about to."""
        assert self.state in ("sleeping", "draining")
        self.state, self.detail, self._started = "loading", "wakes up", now
        if self._process is None or not self._order(link.Wake()):
            self.stop()
            self.start(now)

    def _order(self, order: link.Sleep | link.Wake) -> bool:
        assert self._process is not None
        try:
            self._process.batches.send(link.encode(order), flags=zmq.DONTWAIT)
        except zmq.Again:  # nobody at the other end any more
            return False
        return True

    def receive(self, now: float) -> Iterator[tuple[link.Scores, list[zmq.Frame]]]:
        """Read what the worker has sent, and yield the answers to batches.

        Raises:
            EngineFailed: the worker could not load, and another attempt makes no sense.
        """
        if self._process is None:
            return
        for frames in self._process.receive():
            self._last_sign = now
            try:
                message: Any = link.decode_from_worker(frames[0].buffer)
            except msgspec.MsgspecError as e:
                self.lose(f"it sent a message that cannot be read: {e}", now)
                return
            match message:
                case link.Beat():
                    self._last_progress = max(self._last_progress, now - message.idle_s)
                case link.Loaded():
                    self._loaded(message)
                case link.LoadFailed():
                    self._load_failed(message, now)
                case link.Slept():
                    if self.state == "draining":  # else it was woken again meanwhile
                        self._sleeps(kept=True)
                case link.Scores():
                    self._running -= 1
                    self._losses = 0
                    self._last_progress = now
                    yield message, frames[1:]

    def _loaded(self, message: link.Loaded) -> None:
        old, new = self.info, message.info
        if old is not None and old != new:
            changed = [name for name in new.__struct_fields__ if getattr(old, name) != getattr(new, name)]
            raise EngineFailed(
                f"after its restart the worker has another model than before ({', '.join(changed)} changed); "
                f"start a new server, so that its clients notice"
            )
        self.info = new
        self.load_seconds = message.seconds
        self._can_sleep, self.no_sleep = message.can_sleep, message.no_sleep
        self.vocabulary = message.vocabulary
        self._start_failures = 0
        self.state, self.detail = "ready", clip(f"{new.backend} scores with {new.name}")
        logger.info("worker ready after %.1f s", message.seconds)

    def _load_failed(self, message: link.LoadFailed, now: float) -> None:
        if self.info is None:  # a person is waiting for the first start: tell at once
            raise EngineFailed(message.message, config=message.config)
        self.lose(f"could not load again: {message.message}", now)

    def tick(self, now: float) -> str | None:
        """Look after the worker; returns why it was lost, if it was.

        Raises:
            EngineFailed: it was lost too often while starting.
        """
        if self._process is None:
            if self._restart_at is not None and now >= self._restart_at:
                self.start(now)
        elif (code := self._process.popen.poll()) is not None:
            if self.state in ("sleeping", "draining"):
                self._sleeps()  # it holds nothing now, which is all that was asked
            else:
                self.lose(_why_it_ended(code), now)
        elif self.state == "sleeping":
            pass
        elif self.state != "ready" and now - self._started > self._settings.load_timeout_s:
            self.lose(f"loading took longer than {self._settings.load_timeout_s:g} s", now)
        elif self._running and now - self._last_progress > self._settings.worker_timeout_s:
            self.lose(f"no progress in a batch for {self._settings.worker_timeout_s:g} s", now)
        reason, self._loss = self._loss, None
        return reason

    def lose(self, reason: str, now: float) -> None:
        """End a worker that died or misbehaves; tick() passes the reason on."""
        self.stop()
        if self.state == "ready":
            self._losses += 1
        else:
            self._start_failures += 1
            if self._start_failures >= self._settings.max_start_failures:
                raise EngineFailed(f"the worker did not start {self._start_failures} times in a row; last: {reason}")
        count = self._start_failures or max(self._losses - FAST_RESTARTS, 0)
        delay = min(0.5 * 2**count, MAX_BACKOFF_S) if count else 0.0
        self._restart_at = now + delay
        self.state = "restarting" if self.info is not None else "loading"
        self.detail = clip(f"worker lost: {reason}; starts again in {delay:g} s")
        self._loss = reason
        logger.warning("worker lost: %s; starts again in %g s", clip(reason), delay)

    def wakeup(self) -> float | None:
        """When tick() must be called even if nothing happens."""
        if self._process is None:
            return self._restart_at
        if self.state == "sleeping":
            return None
        if self.state != "ready":
            return self._started + self._settings.load_timeout_s
        return self._last_progress + self._settings.worker_timeout_s if self._running else None

    def age_s(self, now: float) -> float:
        """Seconds since the worker's last sign of life."""
        return max(now - self._last_sign, 0.0)

    def stop(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def _why_it_ended(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    hint = " (the system's memory may have run out)" if code == -signal.SIGKILL else ""
    return f"it was killed by {signal.Signals(-code).name}{hint}"
