"""One teacher process, as one client sees it: its socket, its pings, and what it still owes.

A replica is `up` from the moment it has answered, on this connection, that it is ready. A fault (silence, a lost
connection, a bad reply, a hung worker) closes the connection, and the attempts that were under way become `lost`; after
a pause it is opened again, and a good answer to `info` brings the replica back.

ZMTP heartbeats are not used: a hung process still answers them, and behind a large reply they cut a healthy connection.
Instead the front answers `ping`, with the age of its worker's last sign of life.

Not covered: which request goes where, and what to do with an answer. That is the client's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import zmq

from opd.chunks import Chunk, request_bytes
from opd.connection import Connection, Event
from opd.deadline import Backoff
from opd.errors import TeacherMismatch, WireError
from opd.question import Question
from opd.wire import (
    InfoRequest,
    ModelInfo,
    PingRequest,
    Reply,
    Request,
    ServerInfo,
    SleepRequest,
    VocabRequest,
    WakeRequest,
    clip,
    decode_reply,
    encode_request,
    new_id,
    reply_bytes,
)

logger = logging.getLogger(__name__)

_RETRY_SEND_S = 0.05
Order: TypeAlias = type[SleepRequest] | type[WakeRequest] | type[VocabRequest]


@dataclass(frozen=True)
class Timing:
    """How patient a client is. The defaults suit a teacher in the same cluster; all of them are in seconds."""

    ping_every_s: float = 2.0  # while an answer is owed
    ask_every_s: float = 0.5  # while a teacher loads or restarts
    silent_after_s: float = 10.0  # no answer to a ping for so long: closed and opened again
    slowest_link_bytes_per_s: float = 4 << 20  # a ping waits behind what is under way, which extends the silence
    worker_hung_after_s: float = 120.0  # the teacher's worker gave no sign of life: its work goes elsewhere
    first_backoff_s: float = 0.1  # pauses are random between 0 and this, doubled after each failure,
    most_backoff_s: float = 5.0  # up to this
    log_every_s: float = 10.0  # progress of a call that takes long


@dataclass
class Counts:
    """What went wrong on the way to the answers of one call."""

    late_replies: int = 0  # to requests that were given up; dropped
    faults: int = 0  # times that a replica was taken out
    boot_changes: int = 0  # restarts with the same model
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(eq=False)
class Attempt:
    """A score request under way."""

    chunk: Chunk
    question: Question
    digest: bytes
    topk: int
    budget_s: float
    sent_at: float
    ends_at: float
    boot: str

    @property
    def wire_bytes(self) -> int:
        """What it moves over the link, there and back."""
        scored, candidates = self.chunk.scored, self.question.num_candidates
        sent = request_bytes(len(self.chunk.rows), self.chunk.tokens, scored * candidates)
        return sent + reply_bytes(scored, self.topk, candidates)


class Answer(NamedTuple):
    replica: Replica
    attempt: Attempt
    reply: Reply
    raw: dict[str, Any]


class Replica:
    """See the module. All methods are for the one thread that holds the client's lock."""

    def __init__(
        self,
        context: zmq.Context,
        address: str,
        *,
        client_name: str,
        timing: Timing,
        backoff: Backoff,
        accept: Callable[[Replica, ModelInfo], None],
    ):
        self.address = address
        self.counts = Counts()
        self.inflight: dict[bytes, Attempt] = {}
        self.lost: list[Attempt] = []  # for the client to send again
        self.info: ServerInfo | None = None  # the last one heard, also from an earlier connection
        self.vocabulary = b""  # the answer to VocabRequest
        self.boot = ""
        self.up = False
        self.was_up = False
        self.usable_at = 0.0  # time.monotonic(); it gets no request before
        self.busy = ""  # why, if it said so
        self.refused = ""  # set when it is no teacher, or not one for us: a setting is wrong
        self.generation = 0  # answers to info or ping so far
        self.order: Order | None = None  # to be sent in place of the next ping,
        self.order_refused = ("", "")  # and why it was refused: code and message
        self._order_sent: Order | None = None  # the outstanding ping is this order
        self._context, self._client_name, self._timing, self._backoff = context, client_name, timing, backoff
        self._accept = accept  # checks a model against the pinned one; raises TeacherMismatch
        self._faults_in_a_row = 0
        self._problem = "no connection yet"
        self._last_fault = ""
        self._since = time.monotonic()  # of the problem
        self._connection: Connection | None = None
        self._open_at = 0.0
        self._ping_id: bytes | None = None
        self._ping_at = 0.0  # when the outstanding one was sent, or when the next one is due
        self._heard_at = 0.0
        self.open()

    # ------------------------------------------------------------------------------------------------ connection

    def open(self) -> None:
        self._connection = Connection(self._context, self.address)
        self._ping_id, self._ping_at = None, 0.0
        self.refused = ""

    def close(self) -> None:
        """Drop the connection and whatever was half sent or half received on it."""
        self.up = False
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def reset(self) -> None:
        """Forget everything under way, as after an interrupt; the next call starts on a new connection."""
        self.close()
        self.forget()
        self._open_at = 0.0

    def forget(self) -> None:
        """Nobody waits any more: answers that still come are late."""
        self.inflight.clear()
        self.lost.clear()

    def fail(self, problem: str) -> None:
        """A fault of this replica: take it out, give its work back, come again later on a new connection."""
        self.close()
        self._note(problem)
        self._last_fault = problem
        self.counts.faults += 1
        self._faults_in_a_row += 1
        self._open_at = time.monotonic() + self._backoff.pause_s(self._faults_in_a_row)
        self._give_back(list(self.inflight))
        logger.warning("teacher %s is out: %s", self.address, problem)

    def suspect(self, problem: str) -> None:
        """It answers pings but not a request: no more work until the next good ping. The connection stays."""
        self.up = False
        self._note(problem)
        self.counts.faults += 1
        self.usable_at = max(self.usable_at, time.monotonic() + self._backoff.pause_s(1))
        self._ask_at(0.0)
        logger.warning("teacher %s is suspect: %s", self.address, problem)

    def worked(self) -> None:
        """It gave a good answer to a request."""
        self._faults_in_a_row = 0
        self.busy = ""

    def spare(self, after_s: float, why: str) -> None:
        """It asked for a pause."""
        self.usable_at = max(self.usable_at, time.monotonic() + after_s)
        self.busy = why

    def ask_again(self) -> None:
        """Trust nothing that was heard before: the next good answer brings it up again."""
        self.up = False
        self._ask_at(0.0)

    def begin(self) -> None:
        """A call begins: take in what happened since the last one, and ping at once rather than believe old news."""
        self.counts = Counts()
        self.receive()
        self._ask_at(0.0)

    def _give_back(self, ids: list[bytes]) -> None:
        self.lost.extend(self.inflight.pop(request_id) for request_id in ids)

    def _note(self, problem: str) -> None:
        self._problem, self._since = problem, time.monotonic()

    # ------------------------------------------------------------------------------------------------ sending

    def send_score(self, request_id: bytes, body: bytes, attempt: Attempt) -> bool:
        """Send a request and remember it; False when the connection does not take it now."""
        if not self._send(body):
            self.usable_at = time.monotonic() + _RETRY_SEND_S
            return False
        self.inflight[request_id] = attempt
        return True

    def _send(self, body: bytes) -> bool:
        if self._connection is None or not self._connection.send(body):
            return False
        self.counts.sent_bytes += len(body)
        return True

    def turn(self, now: float) -> float:
        """Do what is due; returns when it wants to be called again."""
        if self._connection is None:
            if now < self._open_at:
                return self._open_at
            self.open()
        self._expire(now)
        if self._ping_id is not None:
            silent_at = max(self._ping_at, self._heard_at) + self._silence_s()
            if now >= silent_at:
                self.fail(f"no answer to a ping for {self._silence_s():.1f} s")
                return self._open_at
            return self._next_end(silent_at)
        if now >= self._ping_at:
            request_id = new_id()
            request: Request
            self._order_sent = self.order
            if self.order is not None:
                request = self.order(id=request_id, client=self._client_name)
            elif self.up:
                request = PingRequest(id=request_id, client=self._client_name)
            else:
                request = InfoRequest(id=request_id, client=self._client_name)
            if self._send(encode_request(request)):
                self._ping_id, self._ping_at = request_id, now
                return self._next_end(now + self._silence_s())
            self._ping_at = now + self._timing.ask_every_s  # the handshake's event makes it due sooner
        return self._next_end(self._ping_at)

    def _next_end(self, otherwise: float) -> float:
        return min([otherwise, *(attempt.ends_at for attempt in self.inflight.values())])

    def _expire(self, now: float) -> None:
        late = [request_id for request_id, attempt in self.inflight.items() if now >= attempt.ends_at]
        if late:
            budget_s = self.inflight[late[0]].budget_s
            self._give_back(late)
            self.suspect(f"no answer to a request in {budget_s:.1f} s")

    def _silence_s(self) -> float:
        owed_bytes = sum(attempt.wire_bytes for attempt in self.inflight.values())
        return self._timing.silent_after_s + owed_bytes / self._timing.slowest_link_bytes_per_s

    def _ask_at(self, when: float) -> None:
        if self._ping_id is None:
            self._ping_at = when

    # ------------------------------------------------------------------------------------------------ receiving

    @property
    def sockets(self) -> list[zmq.Socket]:
        return [] if self._connection is None else self._connection.sockets

    @property
    def model(self) -> ModelInfo:
        """Of a replica that is or was up."""
        assert self.info is not None and self.info.model is not None, "a replica is up without a model"
        return self.info.model

    @property
    def outstanding_tokens(self) -> int:
        return sum(attempt.chunk.tokens for attempt in self.inflight.values())

    def receive(self) -> list[Answer]:
        """Everything that has arrived. Answers before events: a reply that came before the connection broke counts."""
        if self._connection is None:
            return []
        connection, answers = self._connection, []
        for frames in connection.messages():
            self._heard_at = time.monotonic()
            self.counts.received_bytes += sum(frame.nbytes for frame in frames)
            answer = self._read(frames)
            if answer is not None:
                answers.append(answer)
        for event in connection.events():
            self._take_event(event)
        return answers

    def _read(self, frames: list[memoryview]) -> Answer | None:
        try:
            if len(frames[0]):
                raise WireError("schema", "the first frame is not empty")
            reply, raw = decode_reply(frames[1:])
        except WireError as e:
            if e.code == "version":
                raise TeacherMismatch(f"{self.address}: {e}") from None
            self.fail(f"a reply that breaks the protocol: {e} [{e.code}]")
            for attempt in self.lost:  # any of them may be the one that was answered so
                attempt.chunk.bad_replies += 1
            return None
        if reply.id == self._ping_id:
            self._ping_id = None
            self._take_info(reply)
            return None
        if reply.id not in self.inflight:
            # To a request that was given up, or that nobody made. Only its id tells, so nothing else of it is read.
            self.counts.late_replies += 1
            return None
        attempt = self.inflight.pop(reply.id)
        self._take_boot(reply.boot)
        return Answer(self, attempt, reply, raw)

    def _take_info(self, reply: Reply) -> None:
        now = time.monotonic()
        self._ping_at = now + self._timing.ask_every_s
        info = reply.info
        # a late answer to an earlier call's order must not pass for the answer to this one's
        is_answer = self._order_sent is not None and self._order_sent is self.order
        if is_answer and reply.status == "ok":
            self.order = None
            self.vocabulary = bytes(reply.vocab) or self.vocabulary
        elif is_answer and not reply.retryable:
            self.order_refused = (clip(reply.code), clip(reply.message))
        if reply.status != "ok" or info is None:
            self.up = False
            self._note(f"answers {reply.status}: {clip(reply.message)} [{clip(reply.code)}]")
            return
        self._take_boot(reply.boot)
        # `model` may be left out of a ping; what this start of the process said before still holds
        model = info.model or (self.info.model if self.info is not None else None)
        if info.model is not None:
            self._accept(self, info.model)
        if info.model is None and model is not None:
            info = _with_model(info, model)
        self.info = info
        self.generation += 1
        # a worker that loads may be too busy to beat
        if info.state == "ready" and info.worker_age_ms > 1000 * self._timing.worker_hung_after_s:
            self.fail(f"its worker gave no sign of life for {info.worker_age_ms / 1000:.1f} s")
            return
        ready = info.state == "ready" and model is not None
        if not ready:
            self._note(f"{info.state} ({info.detail})" if info.detail else info.state)
        elif not self.up:
            logger.info("teacher %s is up", self.address)
        self.up = ready
        self.was_up |= ready
        if ready:
            self._ping_at = now + self._timing.ping_every_s

    def _take_boot(self, boot: str) -> None:
        if boot == self.boot:
            return
        if self.boot:
            logger.warning("teacher %s has restarted (boot %s, before %s)", self.address, boot, self.boot)
            self.counts.boot_changes += 1
            self.ask_again()
        self.boot = boot
        # what was sent to the process before it (through a proxy, say) will not be answered
        self._give_back([request_id for request_id, attempt in self.inflight.items() if attempt.boot != boot])

    def _take_event(self, event: Event) -> None:
        if event in (Event.CONNECTED, Event.READY):
            self._note(event.value)
            if event is Event.READY:
                self._ask_at(0.0)
            return
        self.fail(event.value)
        if event is not Event.LOST:
            self.refused = event.value

    # ------------------------------------------------------------------------------------------------ for people

    def describe(self) -> str:
        """One phrase on its state, for logs and errors."""
        if self.up:
            owed = f", {len(self.inflight)} requests owed ({self.outstanding_tokens} tokens)" if self.inflight else ""
            return f"{self.address}: up{owed}{', it said: ' + self.busy if self.busy else ''}"
        before = f"; last fault: {self._last_fault}" if self._last_fault not in ("", self._problem) else ""
        return f"{self.address}: {self._problem} (for {time.monotonic() - self._since:.1f} s{before})"


def _with_model(info: ServerInfo, model: ModelInfo) -> ServerInfo:
    return ServerInfo(**{name: getattr(info, name) for name in info.__struct_fields__} | {"model": model})
