"""The process that clients talk to: one ROUTER socket, one thread, no model.

It checks every request, queues it, hands batches to the worker and answers: each well-enveloped request gets exactly
one reply, whatever becomes of the worker. It never imports torch: nothing that a model does can take the socket along.

Not covered: encryption (CURVE keys would be set in `_open_router`, and checked in `_answer_zap`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket as sockets
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq

from opd import __version__, wire
from opd.errors import ConfigError, WireError
from opd.serving.job import Job, Piece, Values
from opd.serving.queue import Batch, Queue
from opd.serving.supervisor import EngineFailed, Settings, Supervisor

logger = logging.getLogger(__name__)

MAX_HOPS = 16  # frames in an envelope: the peer, its correlation id, proxies on the way
MAX_ENVELOPE_BYTES = 4096
MESSAGES_PER_TURN = 256  # read from the socket before the worker and the clock get their turn
KILLS_BEFORE_POISON = 2
MAX_SUSPECTS = 65_536
TRACK_BYTES = 65_536  # replies from here on are sent without a copy, and counted until the peer has taken them
LINGER_MS = 5000
ZAP_DOMAIN = b"opd"
RETRY_LOADING_MS = 1000


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the front needs to know; the command line fills it."""

    bind: str
    worker: Settings
    limits: wire.Limits = wire.Limits()
    max_queued_tokens: int = 1 << 25
    max_queued_reply_bytes: int = 1 << 30
    drain_s: float = 30.0


class _Tracked:
    """A big reply that its peer has not taken yet."""

    def __init__(self, client: str, nbytes: int, frames: list[zmq.Frame]):
        self.client = client
        self.nbytes = nbytes
        self._trackers = [frame.tracker for frame in frames]

    @property
    def done(self) -> bool:
        return all(tracker.done for tracker in self._trackers)


class Front:
    """The server. bind() first, so that a taken address fails before anything is loaded, then run()."""

    def __init__(self, options: Options, *, on_ready: Callable[[str, wire.ModelInfo, float], None]):
        self._options = options
        self._on_ready = on_ready
        self._address = ""  # the one that was bound
        self._boot = os.urandom(8).hex()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        # before bind: without a handler libzmq takes an HTTP request for an old peer and hands us its bytes
        self._zap.bind("inproc://zeromq.zap.01")
        self._router = self._open_router()
        self._queue = Queue(max_tokens=options.max_queued_tokens, max_reply_bytes=options.max_queued_reply_bytes)
        self._supervisor = Supervisor(self._context, options.worker)
        self._flying: dict[int, tuple[Batch, np.ndarray]] = {}  # by seq: what the worker has, checksums of its rows
        self._kills: dict[bytes, int] = {}  # row digest -> workers that died with it
        self._poison = False  # whether any of them reached the limit
        self._unsent: list[_Tracked] = []
        self._draining_until: float | None = None
        self._announced = False
        self._counts: Counter[str] = Counter()
        self._exit: int | None = None
        self._poller = zmq.Poller()
        self._polled: list[zmq.Socket] = []
        self._next_complaint, self._complaints = 0.0, 0

    def _open_router(self) -> zmq.Socket:
        router = self._context.socket(zmq.ROUTER)
        options: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.ROUTER_MANDATORY: 1,  # a reply that cannot be delivered is counted, not dropped in silence
            zmq.SNDHWM: 1000,  # messages; the bytes are bounded by what `_unsent` counts
            zmq.RCVHWM: 16,
            zmq.MAXMSGSIZE: self._options.limits.max_request_bytes + (1 << 20),  # a little more gets a clear error
            zmq.BACKLOG: 1024,
            zmq.HANDSHAKE_IVL: 5000,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 30,
            zmq.TCP_KEEPALIVE_INTVL: 10,
            zmq.TCP_KEEPALIVE_CNT: 3,
            zmq.TCP_MAXRT: 60_000,  # a peer that takes no bytes for a minute is cut, and its replies are freed
            zmq.IPV6: int("[" in self._options.bind),
            zmq.ZAP_DOMAIN: ZAP_DOMAIN,
            zmq.ZAP_ENFORCE_DOMAIN: 1,
        }
        for option, value in options.items():
            router.setsockopt(option, value)
        return router

    def bind(self) -> str:
        """Bind, and return the address with the port that was taken.

        Raises:
            ConfigError: the address is taken or is none.
        """
        address = self._options.bind
        try:
            self._router.bind(address)
        except zmq.ZMQError as e:
            if e.errno == zmq.EADDRINUSE:
                reason = "is taken: another server may still run; stop it, or choose another port with --bind"
            else:
                reason = f"cannot be bound ({e}); give --bind an address of this machine, like tcp://127.0.0.1:15555"
            raise ConfigError(f"{address} {reason}") from None
        self._address = self._router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
        return self._address

    def run(self) -> int:
        """Serve until a signal or a failure; returns the exit code.

        Raises:
            EngineFailed: the worker cannot be brought up; everybody who waited was told.
        """
        wake_read, wake_write = sockets.socketpair()
        for end in (wake_read, wake_write):
            end.setblocking(False)
        signals = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # not under nohup
            signals.append(signal.SIGHUP)
        for number in signals:
            signal.signal(number, lambda *_: None)  # the loop reads their numbers from the wakeup descriptor
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        for source in (self._router, self._zap, wake_read):
            self._poller.register(source, zmq.POLLIN)
        failure: EngineFailed | None = None
        try:
            self._supervisor.start(time.monotonic())
            while self._exit is None:
                self._turn(wake_read)
        except EngineFailed as e:
            failure = e
            self._supervisor.state, self._supervisor.detail = "failed", wire.clip(str(e))
        finally:
            self._supervisor.stop()
            self._close()
        if failure is not None:
            raise failure
        return self._exit or 0

    def _turn(self, wake_read: sockets.socket) -> None:
        """Wait for something to happen, and deal with it."""
        self._follow_worker()
        ready = dict(self._poller.poll(self._timeout_ms()))
        if wake_read.fileno() in ready:
            for number in wake_read.recv(4096):
                self._on_signal(number)
        if self._zap in ready:
            self._answer_zap()
        now = time.monotonic()
        for scores, frames in self._supervisor.receive(now):
            self._on_scores(scores, frames, now)
        lost = self._supervisor.tick(now)
        if lost is not None:
            self._isolate(lost)
        self._announce()
        if self._router in ready:
            self._read_requests()
        now = time.monotonic()
        for job in self._queue.expired(now):
            self._finish(job, status="expired", code="expired", message="its time budget is used up", retryable=True)
        self._dispatch(now)
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

    def _answer_zap(self) -> None:
        """Let every peer of our domain in that uses no mechanism; the point is that a peer must speak ZMTP 3 to ask."""
        while True:
            try:
                frames = self._zap.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            fits = len(frames) >= 6 and frames[0] == b"1.0" and frames[2] == ZAP_DOMAIN and frames[5] == b"NULL"
            code, text = (b"200", b"OK") if fits else (b"400", b"refused")
            self._zap.send_multipart([b"1.0", frames[1] if len(frames) > 1 else b"", code, text, b"", b""])

    def _announce(self) -> None:
        if self._supervisor.state == "ready" and not self._announced and self._supervisor.info is not None:
            self._announced = True
            self._on_ready(self._address, self._supervisor.info, self._supervisor.load_seconds)

    # requests

    def _read_requests(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                frames = self._router.recv_multipart(flags=zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            # REQ-compatible: everything up to and including the first empty frame goes back as it came
            hops = next((i for i in range(1, min(len(frames), MAX_HOPS + 1)) if len(frames[i]) == 0), None)
            if hops is None or sum(len(frame) for frame in frames[: hops + 1]) > MAX_ENVELOPE_BYTES:
                self._counts["dropped"] += 1
                self._complain("a message without the empty frame of a REQ envelope was dropped: it cannot be answered")
                continue
            envelope = [frame.bytes for frame in frames[: hops + 1]]
            try:
                self._on_body(envelope, frames[hops + 1 :])
            except WireError as e:
                body: Any = frames[hops + 1].buffer if len(frames) > hops + 1 else b""
                self._refuse(envelope, wire.read_id(body), e.code, str(e))
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
        if isinstance(request, wire.ScoreRequest):
            self._on_score(envelope, request)
        else:
            self._send(envelope, self._new_reply(request.id, "ok", info=self._info()))

    def _info(self) -> wire.ServerInfo:
        supervisor = self._supervisor
        draining = self._draining_until is not None
        return wire.ServerInfo(
            state="draining" if draining else supervisor.state,
            detail="ends as soon as what it holds is answered" if draining else wire.clip(supervisor.detail),
            version=__version__,
            limits=self._options.limits,
            model=supervisor.info,
            worker_age_ms=int(supervisor.age_s(time.monotonic()) * 1000),
            queued_tokens=self._queue.tokens,
        )

    def _on_score(self, envelope: list[bytes], request: wire.ScoreRequest) -> None:
        arrived = time.monotonic()
        question = wire.unpack(request, self._options.limits)
        if self._draining_until is not None:
            return self._refuse(envelope, request.id, "draining", "this server is ending", status="draining")
        model = self._supervisor.info
        if self._supervisor.state == "failed":
            return self._refuse(envelope, request.id, "engine_failed", f"the teacher failed: {self._supervisor.detail}")
        if model is None or self._supervisor.state != "ready":
            message = f"not ready: {self._supervisor.detail}"
            return self._busy(envelope, request.id, self._supervisor.state, message, RETRY_LOADING_MS)
        _check_model(request, model)
        bad_rows = wire.check_rows(question, model)
        job = Job(
            question,
            request_id=request.id,
            envelope=envelope,
            client=request.client or envelope[0].hex(),
            topk=request.topk,
            temperature=request.temperature,
            arrived=arrived,
            deadline=arrived + request.budget_ms / 1000,
            bad_rows=bad_rows,
        )
        if request.budget_ms == 0:
            return self._reply_to(job, status="expired", code="expired", message="no time budget", retryable=True)
        if not job.missing:
            return self._reply_values(job)
        self._unsent = [reply for reply in self._unsent if not reply.done]
        refusal = self._queue.offer(
            job,
            arrived,
            unsent=sum(reply.nbytes for reply in self._unsent),
            client_unsent=sum(reply.nbytes for reply in self._unsent if reply.client == job.client),
        )
        if refusal is not None:
            self._busy(envelope, request.id, *refusal)

    # batches

    def _dispatch(self, now: float) -> None:
        """Keep the worker busy: a second batch waits in its link when there is a full one, else more may join it."""
        while self._supervisor.state == "ready" and len(self._flying) < (1 if self._kills_in_doubt() else 2):
            batch = self._queue.next_batch(self._options.worker.load.max_tokens, full_only=bool(self._flying))
            if batch is None:
                return
            if self._poison:
                batch = self._without_poison(batch)
            if not batch.pieces:
                continue
            for piece in batch.pieces:
                if piece.job.dispatched is None:
                    piece.job.dispatched = now
            self._supervisor.send(batch, now)
            # after sending, so that the worker does not wait for the two checksums
            self._flying[batch.seq] = (batch, np.concatenate([piece.crcs() for piece in batch.pieces]))
            for piece in batch.pieces:
                piece.job.digest = piece.job.digest or wire.digest(*piece.job.question.arrays())

    def _kills_in_doubt(self) -> bool:
        """While rows are tried alone nothing else may be with the worker, else the blame would be shared."""
        return self._queue.isolating or any(batch.alone for batch, _ in self._flying.values())

    def _on_scores(self, scores: Any, frames: list[zmq.Frame], now: float) -> None:
        """Give a batch's values to its jobs, after checking that they belong to what was asked."""
        if scores.seq not in self._flying:
            self._supervisor.lose("it answered a batch that it was not given", now)
            return
        batch, crcs = self._flying[scores.seq]
        parts = [_values(piece, batch.topk, frames, index) for index, piece in enumerate(batch.pieces)]
        if not np.array_equal(np.frombuffer(scores.crcs, dtype=np.uint32), crcs) or None in parts:
            self._supervisor.lose("it answered for other ids than it was given", now)
            return
        del self._flying[scores.seq]
        errors: dict[int, list[wire.RowError]] = defaultdict(list)
        for number, row, code, message in scores.errors:
            errors[number].append(wire.RowError(row, code, message))
        if scores.seconds:
            self._queue.observe(batch.tokens, scores.seconds)
        for number, (piece, values) in enumerate(zip(batch.pieces, parts, strict=True)):
            assert values is not None
            if self._kills:
                for row in range(piece.lo, piece.hi):
                    self._kills.pop(piece.job.row_digest(row), None)
            if piece.job.open:
                piece.job.score_ms += scores.seconds * 1000
                piece.job.put(piece, values, errors[number])
                self._finish_if_complete(piece.job)
        logger.info(
            "batch %d: %d rows of %d requests, %d tokens, %.1f ms; %d tokens queued",
            *(batch.seq, batch.num_rows, len(batch.pieces), batch.tokens, scores.seconds * 1000, self._queue.tokens),
        )

    def _isolate(self, reason: str) -> None:
        """The worker was lost: every row that was with it is suspect, and goes alone to the next one."""
        pieces = [piece for batch, _ in self._flying.values() for piece in batch.pieces if piece.job.open]
        self._flying = {}
        # a set: rows with the same ids are one suspect, and this was one death
        for digest in {piece.job.row_digest(row) for piece in pieces for row in range(piece.lo, piece.hi)}:
            self._kills[digest] = self._kills.pop(digest, 0) + 1
            if self._kills[digest] >= KILLS_BEFORE_POISON:
                self._poison = True
                logger.error(
                    "a row stopped the worker %d times (%s) and is refused from now on", KILLS_BEFORE_POISON, reason
                )
        while len(self._kills) > MAX_SUSPECTS:
            del self._kills[next(iter(self._kills))]
        for piece in pieces:
            self._queue.retry_alone(piece)

    def _without_poison(self, batch: Batch) -> Batch:
        """The batch without rows that are known to kill; their requests are told."""
        pieces = []
        for piece in batch.pieces:
            lo = piece.lo
            for row in range(piece.lo, piece.hi):
                if self._kills.get(piece.job.row_digest(row), 0) >= KILLS_BEFORE_POISON:
                    pieces += [Piece(piece.job, lo, row)] if lo < row else []
                    lo = row + 1
                    message = f"stopped the worker {KILLS_BEFORE_POISON} times and is not tried again"
                    piece.job.fail_row(row, "poison", message)
            pieces += [Piece(piece.job, lo, piece.hi)] if lo < piece.hi else []
            self._finish_if_complete(piece.job)
        return dataclasses.replace(batch, pieces=pieces)

    # replies

    def _finish_if_complete(self, job: Job) -> None:
        if not job.missing:
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
        (logprobs, topk_ids, topk_logprobs), errors = job.answer()
        reply = self._new_reply(
            job.request_id,
            "ok",
            logprobs=wire.to_bin(logprobs, np.float32),
            row_errors=[(error.row, error.code, wire.clip(error.message)) for error in errors],
            ids_digest=job.digest or wire.digest(*job.question.arrays()),
            queue_ms=((job.dispatched or job.arrived) - job.arrived) * 1000,
            score_ms=job.score_ms,
        )
        self._send(job.envelope, reply, topk_ids, topk_logprobs, client=job.client)

    def _refuse(
        self, envelope: list[bytes], request_id: bytes, code: str, message: str, status: wire.Status = "error"
    ) -> None:
        self._complain(f"{status} ({code}): {message}")
        retryable = status != "error" or code in ("internal", "engine_failed")
        fields = {"code": code, "message": wire.clip(message), "retryable": retryable}
        self._send(envelope, self._new_reply(request_id, status, **fields))

    def _busy(self, envelope: list[bytes], request_id: bytes, code: str, message: str, retry_after_ms: int) -> None:
        fields = {"code": code, "message": wire.clip(message), "retryable": True, "retry_after_ms": retry_after_ms}
        self._send(envelope, self._new_reply(request_id, "busy", **fields))

    def _complain(self, text: str) -> None:
        """Log what peers do wrong, at most once a second: they must not be able to fill the disk."""
        now = time.monotonic()
        if now < self._next_complaint:
            self._complaints += 1
            return
        more = f" ({self._complaints} more like this were not logged)" if self._complaints else ""
        logger.warning("%s%s", wire.clip(text), more)
        self._next_complaint, self._complaints = now + 1.0, 0

    def _new_reply(self, request_id: bytes, status: wire.Status, **fields: Any) -> wire.Reply:
        info = self._supervisor.info
        if info is not None:
            fields |= {"model": info.model, "tokenizer": info.tokenizer}
        return wire.Reply(id=request_id, status=status, boot=self._boot, **fields)

    def _send(
        self,
        envelope: list[bytes],
        reply: wire.Reply,
        topk_ids: np.ndarray | None = None,
        topk_logprobs: np.ndarray | None = None,
        *,
        client: str = "",
    ) -> None:
        """Hand a reply to the socket; it never waits for a slow peer."""
        frames = wire.encode_reply(reply, topk_ids, topk_logprobs)
        sizes = [memoryview(frame).nbytes for frame in frames]
        out, tracked = list(frames), []
        for index, size in enumerate(sizes):
            if size >= TRACK_BYTES:
                out[index] = zmq.Frame(frames[index], copy=False, track=True)
                tracked.append(out[index])
        try:
            self._router.send_multipart([*envelope, *out], flags=zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._counts["undeliverable"] += 1
            why = "it is gone" if e.errno == zmq.EHOSTUNREACH else "it does not read its replies"
            self._complain(f"a reply of {sum(sizes)} bytes could not be sent to its peer: {why}")
            return
        self._counts[reply.status] += 1
        if tracked:
            self._unsent.append(_Tracked(client, sum(sizes), tracked))

    def _close(self) -> None:
        """Tell everybody who still waits, give the replies a moment to leave, and let go of the address."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(
                number, signal.SIG_DFL
            )  # the worker is gone: from here on a signal may simply end this process
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
        logger.info("answered: %s", ", ".join(f"{k} {v}" for k, v in sorted(self._counts.items())) or "nothing")
        self._router.close(linger=200 if at_once else LINGER_MS)
        self._zap.close(linger=0)
        self._context.term()


def _check_model(request: wire.ScoreRequest, model: wire.ModelInfo) -> None:
    """What a request asks of the model as a whole.

    Raises:
        WireError: code model_mismatch, limit or temperature.
    """
    if request.expect is not None:
        for name in ("model", "tokenizer"):
            want, have = getattr(request.expect, name), getattr(model, name)
            if want != have:
                message = f"the client expects the {name} {wire.clip(want)!r}, this teacher has {have!r}"
                raise WireError("model_mismatch", message)
    if request.topk > model.max_topk:
        raise WireError("limit", f"topk {request.topk} is above this teacher's {model.max_topk}")
    if request.temperature != 1.0 and not model.temperature:
        message = f"this teacher's backend {model.backend} scores at temperature 1 only, not {request.temperature:g}"
        raise WireError("temperature", message)


def _values(piece: Piece, topk: int, frames: list[zmq.Frame], index: int) -> Values | None:
    """The worker's arrays for one piece, as views; None if their sizes are wrong."""
    per_piece = 3 if topk else 1
    mine = [frame.buffer for frame in frames[index * per_piece : (index + 1) * per_piece]]
    count = piece.num_values
    if [memory.nbytes for memory in mine] != [4 * count, 4 * count * topk, 4 * count * topk][:per_piece]:
        return None
    logprobs = np.frombuffer(mine[0], dtype=np.float32)
    if not topk:
        return Values(logprobs, None, None)
    ids, topk_logprobs = np.frombuffer(mine[1], dtype=np.int32), np.frombuffer(mine[2], dtype=np.float32)
    return Values(logprobs, ids.reshape(count, topk), topk_logprobs.reshape(count, topk))
