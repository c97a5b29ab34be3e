"""The process that clients talk to: one ROUTER socket, one thread, no model.

It checks every request, hands it to the dispatcher and answers: each well-enveloped request gets exactly one reply,
whatever becomes of the worker. It never imports torch: nothing that a model does can take the socket along.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq

from opd import __version__, wire
from opd.errors import WireError
from opd.question import check_model, check_rows, unpack
from opd.serving.counts import Counts
from opd.serving.dispatcher import Dispatcher
from opd.serving.endpoint import Endpoint
from opd.serving.job import Job
from opd.serving.memory import keep_freed_memory
from opd.serving.queue import Queue
from opd.serving.signals import Signals
from opd.serving.supervisor import EngineFailed, Settings, Supervisor

logger = logging.getLogger(__name__)

LINGER_MS = 5000
RETRY_LOADING_MS = 1000


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the front needs to know; the command line fills it."""

    bind: str
    worker: Settings
    limits: wire.Limits = wire.Limits()
    max_queued_tokens: int = 1 << 25
    max_queued_reply_bytes: int = 1 << 30
    drain_s: float = 30.0
    cache_bytes: int = 256 << 20


class Front:
    """The server. bind() first, so that a taken address fails before anything is loaded, then run()."""

    def __init__(self, options: Options, *, on_ready: Callable[[str, wire.ModelInfo, float], None]):
        self._options = options
        self._on_ready = on_ready
        self._boot = os.urandom(8).hex()
        self._context = zmq.Context()
        # a message that is a little too long gets a clear error
        most = options.limits.max_request_bytes + (1 << 20)
        self._endpoint = Endpoint(self._context, options.bind, max_message_bytes=most)
        self._queue = Queue(max_tokens=options.max_queued_tokens, max_reply_bytes=options.max_queued_reply_bytes)
        self._supervisor = Supervisor(self._context, options.worker)
        self.counts = Counts()
        self._dispatcher = Dispatcher(
            self._queue,
            self._supervisor,
            self.counts,
            batch_tokens=options.worker.load.max_tokens,
            cache_bytes=options.cache_bytes,
            on_complete=self._complete,
        )
        self._to_sleep = False  # asked to sleep and not to wake again
        self._draining_until: float | None = None
        self._announced = False
        self._exit: int | None = None
        self._poller = zmq.Poller()
        self._polled: list[zmq.Socket] = []

    def bind(self) -> str:
        """Bind, and return the address with the port that was taken.

        Raises:
            ConfigError: the address is taken or is none.
        """
        return self._endpoint.bind()

    def run(self) -> int:
        """Serve until a signal or a failure; returns the exit code.

        Raises:
            EngineFailed: the worker cannot be brought up; everybody who waited was told.
        """
        keep_freed_memory()
        signals = Signals()
        for source in (self._endpoint.router, self._endpoint.zap, signals.source):
            self._poller.register(source, zmq.POLLIN)
        failure: EngineFailed | None = None
        try:
            self._supervisor.start(time.monotonic())
            while self._exit is None:
                self._turn(signals)
        except EngineFailed as e:
            failure = e
            self._supervisor.state, self._supervisor.detail = "failed", wire.clip(str(e))
        finally:
            self._supervisor.stop()
            self._close()
        if failure is not None:
            raise failure
        return self._exit or 0

    def _turn(self, signals: Signals) -> None:
        """Wait for something to happen, and deal with it."""
        self._follow_worker()
        ready = dict(self._poller.poll(self._timeout_ms()))
        if signals.source.fileno() in ready:
            for number in signals.read():
                self._on_signal(number)
        if self._endpoint.zap in ready:
            self._endpoint.answer_zap()
        now = time.monotonic()
        for scores, frames in self._supervisor.receive(now):
            self._dispatcher.on_scores(scores, frames, now)
        lost = self._supervisor.tick(now)
        if lost is not None:
            self._dispatcher.isolate(lost, now)
        self._announce()
        if self._endpoint.router in ready:
            self._read_requests()
        now = time.monotonic()
        for job in self._queue.expired(now):
            self._finish(job, status="expired", code="expired", message="its time budget is used up", retryable=True)
        self._dispatcher.dispatch(now)
        if self._to_sleep and self._supervisor.state == "ready" and self._dispatcher.idle:
            self._supervisor.sleep(now)
        if self._draining_until is not None and (not self._queue.open_jobs() or now >= self._draining_until):
            self._exit = 0

    def _timeout_ms(self) -> int | None:
        """Until the next thing that happens by the clock alone; None: sleep until a message or a signal comes."""
        times = [self._queue.next_deadline(), self._supervisor.wakeup(), self._draining_until]
        due = [at for at in times if at is not None]
        return max(int((min(due) - time.monotonic()) * 1000) + 1, 0) if due else None

    def _follow_worker(self) -> None:
        """Poll the link of the worker that runs now."""
        sockets_now = self._supervisor.sockets
        if sockets_now != self._polled:
            for socket in self._polled:
                self._poller.unregister(socket)
            for socket in sockets_now:
                self._poller.register(socket, zmq.POLLIN)
            self._polled = sockets_now

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return  # tick() looks
        name = signal.Signals(number).name
        if number == signal.SIGINT or self._draining_until is not None:
            logger.info("%s: ending at once", name)
            self._exit = 128 + number
        else:
            logger.info("%s: draining for at most %g s, %d requests", name, self._options.drain_s, self._queue.num_jobs)
            self._draining_until = time.monotonic() + self._options.drain_s

    def _announce(self) -> None:
        if self._supervisor.state == "ready" and not self._announced and self._supervisor.info is not None:
            self._announced = True
            self._on_ready(self._endpoint.address, self._supervisor.info, self._supervisor.load_seconds)

    # requests

    def _read_requests(self) -> None:
        for envelope, body in self._endpoint.receive():
            try:
                self._on_body(envelope, body)
            except WireError as e:
                self._refuse(envelope, wire.read_id(body[0].buffer) if body else b"", e.code, str(e))
            except Exception as e:  # whatever a request does to us, its sender is told and the others go on
                logger.exception("a request made the server fail")
                self._refuse(envelope, b"", "internal", f"the server failed on this request: {type(e).__name__}")

    def _on_body(self, envelope: list[bytes], frames: list[zmq.Frame]) -> None:
        """Decode and answer one request, or queue it.

        Raises:
            WireError: it breaks the protocol.
        """
        if len(frames) == 0 or (len(frames) == 1 and len(frames[0]) == 0):
            raise WireError("empty_body", "the message has no body")
        if len(frames) > 1:
            raise WireError("extra_frames", f"{len(frames)} frames follow the envelope; a request has one")
        if len(frames[0]) > self._options.limits.max_request_bytes:
            limit = self._options.limits.max_request_bytes
            raise WireError("limit", f"the request has {len(frames[0])} bytes; this server takes {limit}")
        request = wire.decode_request(frames[0].buffer)
        match request:
            case wire.ScoreRequest():
                self._on_score(envelope, request)
            case wire.PrefetchRequest():
                self._on_prefetch(envelope, request)
            case wire.SleepRequest():
                self._on_sleep(envelope, request)
            case wire.WakeRequest():
                self._on_wake(envelope, request)
            case wire.VocabRequest():
                self._on_vocab(envelope, request)
            case _:
                self._send(envelope, self._new_reply(request.id, "ok", info=self.info()))

    def info(self) -> wire.ServerInfo:
        """How this server is. Reads only, so that another thread may ask too."""
        supervisor = self._supervisor
        state, detail = supervisor.state, wire.clip(supervisor.detail)
        if self._draining_until is not None:
            state, detail = "draining", "ends as soon as what it holds is answered"
        elif self._to_sleep and state == "ready":
            state, detail = "draining", "goes to sleep as soon as what it holds is answered"
        return wire.ServerInfo(
            state=state,
            detail=detail,
            version=__version__,
            limits=self._options.limits,
            model=supervisor.info,
            worker_age_ms=int(supervisor.age_s(time.monotonic()) * 1000),
            queued_tokens=self._queue.tokens,
            counters=self.counts.counters(
                queued_requests=self._queue.num_jobs,
                undeliverable=self._endpoint.undeliverable,
                dropped=self._endpoint.dropped,
                cache_hits=self._dispatcher.cache.hits if self._options.cache_bytes else None,
                cache_misses=self._dispatcher.cache.misses if self._options.cache_bytes else None,
            ),
        )

    def _on_score(self, envelope: list[bytes], request: wire.ScoreRequest) -> None:
        job = self._new_job(envelope, request)
        if job is None:
            return
        if request.budget_ms == 0:
            return self._reply_to(job, status="expired", code="expired", message="no time budget", retryable=True)
        unsent, mine = self._endpoint.unsent_bytes(job.client)
        refusal = self._dispatcher.admit(job, job.arrived, unsent=unsent, client_unsent=mine)
        if refusal is not None:
            self._busy(envelope, request.id, *refusal)
        elif not job.missing:
            self._reply_values(job)

    def _on_prefetch(self, envelope: list[bytes], request: wire.PrefetchRequest) -> None:
        if not self._options.cache_bytes:
            raise WireError("no_cache", "this server keeps no values; start it with --cache-mb above 0")
        job = self._new_job(envelope, request)
        if job is None:
            return
        refusal = self._dispatcher.prefetcher.offer(job, job.arrived)
        if refusal is not None:
            return self._busy(envelope, request.id, *refusal)
        self._send(envelope, self._new_reply(request.id, "ok"))

    def _new_job(self, envelope: list[bytes], request: wire.ScoreRequest | wire.PrefetchRequest) -> Job | None:
        """The rows of a request that the teacher can take now; None: its sender was told that it cannot.

        Raises:
            WireError: they cannot be scored by this teacher at any time.
        """
        arrived = time.monotonic()
        question = unpack(request, self._options.limits)
        model = self._model_if_ready(envelope, request.id)
        if model is None:
            return None
        if self._to_sleep:
            self._busy(envelope, request.id, "sleeping", "asleep, or about to be; wake it first", RETRY_LOADING_MS)
            return None
        check_model(request, model)
        return Job(
            question,
            request_id=request.id,
            envelope=envelope,
            client=request.client or envelope[0].hex(),
            topk=request.topk,
            temperature=request.temperature,
            arrived=arrived,
            deadline=arrived + request.budget_ms / 1000,
            bad_rows=check_rows(question, model),
            model=model.model,
        )

    def _model_if_ready(self, envelope: list[bytes], request_id: bytes) -> wire.ModelInfo | None:
        """The model of a teacher that works, be it asleep; else the sender is told why it does not."""
        supervisor, model = self._supervisor, self._supervisor.info
        if self._draining_until is not None:
            self._refuse(envelope, request_id, "draining", "this server is ending", status="draining")
        elif supervisor.state == "failed":
            self._refuse(envelope, request_id, "engine_failed", f"the teacher failed: {supervisor.detail}")
        elif model is None or (supervisor.state != "ready" and not self._to_sleep):
            self._busy(envelope, request_id, supervisor.state, f"not ready: {supervisor.detail}", RETRY_LOADING_MS)
        else:
            return model
        return None

    def _on_sleep(self, envelope: list[bytes], request: wire.SleepRequest) -> None:
        model = self._model_if_ready(envelope, request.id)
        if model is None:
            return
        if self._supervisor.no_sleep:
            raise WireError("no_sleep", f"backend {model.backend} cannot sleep: {self._supervisor.no_sleep}")
        self._to_sleep = True  # when nobody waits any more, see _turn
        self._dispatcher.prefetcher.clear()
        self._send(envelope, self._new_reply(request.id, "ok", info=self.info()))

    def _on_wake(self, envelope: list[bytes], request: wire.WakeRequest) -> None:
        self._to_sleep = False
        if self._supervisor.state in ("sleeping", "draining"):
            self._supervisor.wake(time.monotonic())
        self._send(envelope, self._new_reply(request.id, "ok", info=self.info()))

    def _on_vocab(self, envelope: list[bytes], request: wire.VocabRequest) -> None:
        model = self._model_if_ready(envelope, request.id)
        if model is None:
            return
        if not self._supervisor.vocabulary:
            raise WireError("no_vocab", f"backend {model.backend} does not know which token each id is")
        vocab = memoryview(self._supervisor.vocabulary)
        self._send(envelope, self._new_reply(request.id, "ok", info=self.info(), vocab=vocab))

    # replies

    def _complete(self, job: Job) -> None:
        """No row of a job that was let in is missing any more."""
        if time.monotonic() < job.deadline:
            self._queue.close(job)
            self._reply_values(job)
        else:
            self._finish(job, status="expired", code="expired", message="scored too late", retryable=True)

    def _finish(self, job: Job, **fields: Any) -> None:
        self._queue.close(job)
        self._reply_to(job, **fields)

    def _reply_to(self, job: Job, *, status: wire.Status, **fields: Any) -> None:
        self._send(job.envelope, self._new_reply(job.request_id, status, **fields), client=job.client)

    def _reply_values(self, job: Job) -> None:
        (logprobs, *others), errors = job.answer()
        reply = self._new_reply(
            job.request_id,
            "ok",
            logprobs=wire.to_bin(logprobs, np.float32),
            row_errors=[(error.row, error.code, wire.clip(error.message)) for error in errors],
            ids_digest=job.digest(),
            queue_ms=((job.dispatched or job.arrived) - job.arrived) * 1000,
            score_ms=job.score_ms,
            cached_rows=job.num_known,
        )
        self._send(job.envelope, reply, *others, client=job.client)
        self._dispatcher.cache.hits += job.num_known
        self._dispatcher.cache.misses += len(job.lengths)
        if job.dispatched is not None:
            self.counts.scored(job.dispatched - job.arrived, time.monotonic() - job.arrived)

    def _refuse(
        self, envelope: list[bytes], request_id: bytes, code: str, message: str, status: wire.Status = "error"
    ) -> None:
        self._endpoint.complain(f"{status} ({code}): {message}")
        retryable = status != "error" or code in ("internal", "engine_failed")
        fields = {"code": code, "message": wire.clip(message), "retryable": retryable}
        self._send(envelope, self._new_reply(request_id, status, **fields))

    def _busy(self, envelope: list[bytes], request_id: bytes, code: str, message: str, retry_after_ms: int) -> None:
        fields = {"code": code, "message": wire.clip(message), "retryable": True, "retry_after_ms": retry_after_ms}
        self._send(envelope, self._new_reply(request_id, "busy", **fields))

    def _new_reply(self, request_id: bytes, status: wire.Status, **fields: Any) -> wire.Reply:
        info = self._supervisor.info
        if info is not None:
            fields |= {"model": info.model, "tokenizer": info.tokenizer}
        return wire.Reply(id=request_id, status=status, boot=self._boot, **fields)

    def _send(
        self,
        envelope: list[bytes],
        reply: wire.Reply,
        *arrays: np.ndarray | None,
        client: str = "",
    ) -> None:
        if self._endpoint.send(envelope, reply, *arrays, client=client):
            self.counts.reply(reply)

    def _close(self) -> None:
        """Tell everybody who still waits, give the replies a moment to leave, and let go of the address."""
        Signals.let_go()  # the worker is gone
        failed = self._supervisor.state == "failed"
        at_once = self._exit is not None and self._exit != 0
        for job in self._queue.open_jobs():
            if failed:
                message = f"the teacher failed: {self._supervisor.detail}"
                self._finish(job, status="error", code="engine_failed", message=wire.clip(message), retryable=True)
            else:
                message = "this server ended before it could score this"
                self._finish(job, status="draining", code="draining", message=message, retryable=True)
        if not failed:
            self._draining_until = 0.0
        self._read_requests()  # what has reached the socket by now is told the same
        logger.info("answered: %s", ", ".join(f"{k} {v}" for k, v in sorted(self.counts.replies.items())) or "nothing")
        self._endpoint.close(200 if at_once else LINGER_MS)
        self._context.term()
