"""The trainer's side of the wire: a batch of token ids in, the teacher's log-probs out, or a typed error.

One call of `score` cuts the batch into requests, keeps a few under way on every replica, sends again what a replica
lost, checks every reply, and puts the values back into the caller's order. The caller sees one deadline. No value
leaves this module that did not pass opd/checks.py, and a row without a value is None, never a number.

Nothing runs between calls: no thread, no timer. A client belongs to the process that made it; its calls may come from
several threads and then follow one another.

Shapes: B = rows, N_i = scored positions of row i, K = topk.

Not covered: what the rows mean (opd/align.py), and hedging: a request is never under way twice.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from opd.checks import Values, check_reply
from opd.chunks import Caps, Chunk, common_limits, number, plan, prompt_digests
from opd.deadline import Backoff, Deadline
from opd.errors import (
    BadReply,
    ConfigError,
    OPDError,
    RequestRefused,
    RowError,
    RowsFailed,
    TeacherMismatch,
    TeacherUnavailable,
)
from opd.homes import Homes
from opd.replica import Answer, Attempt, Replica, Timing
from opd.wire import (
    Expect,
    ModelInfo,
    PrefetchRequest,
    Question,
    ScoreRequest,
    ServerInfo,
    SleepRequest,
    State,
    WakeRequest,
    clip,
    digest,
    encode_request,
    new_id,
)
from opd.wire import to_bin as _bin

logger = logging.getLogger(__name__)

_MAX_BAD_REPLIES = 2  # of one request, each on a new connection or another replica; one more is raised
_MISMATCH_CODES = ("mismatch", "model_mismatch", "tokenizer_mismatch", "version")
_NOT_UP = ("loading", "restarting", "sleeping")  # codes of a teacher that scores for nobody
_MAX_RETRY_AFTER_S = 60.0
_MAX_POLL_S = 0.25  # how soon a close() from another thread is noticed
_MAX_ID = np.iinfo(np.int32).max


@dataclass
class Stats:
    """What one call of `score` cost."""

    rows: int = 0
    tokens: int = 0  # ids in the batch
    scored: int = 0  # values asked for
    seconds: float = 0.0
    requests: int = 0  # sent, retries included
    retries: int = 0
    late_replies: int = 0  # to requests that were given up; dropped
    faults: int = 0  # times that a replica was taken out
    boot_changes: int = 0  # restarts of a teacher with the same model
    sent_bytes: int = 0
    received_bytes: int = 0
    queue_ms: float = 0.0  # longest wait of a request in a teacher's queue
    score_ms: float = 0.0  # the teachers' time on all requests together
    cached: int = 0  # rows whose values a teacher had already


@dataclass(frozen=True)
class Scores:
    """The teacher's answer to one batch, in the order of its rows."""

    logprobs: list[np.ndarray | None]  # float32 [N_i] each; None for the rows in row_errors
    topk_ids: list[np.ndarray | None] | None  # int32 [N_i, K] each, most probable first; None when topk was 0
    topk_logprobs: list[np.ndarray | None] | None  # float32 [N_i, K] each
    row_errors: list[RowError]
    stats: Stats


@dataclass
class _Call:
    """A batch while it is being scored."""

    rows: list[np.ndarray]
    starts: list[int]
    lengths: list[int]
    prompts: list[bytes]  # digest of each row's prompt
    groups: list[int]  # the same as numbers
    topk: int
    temperature: float
    deadline: Deadline
    stats: Stats
    waiting: list[Chunk] = field(default_factory=list)
    homes: dict[int, Replica] = field(default_factory=dict)  # of the prompts that were cut
    row_errors: list[RowError] = field(default_factory=list)
    logprobs: list[np.ndarray | None] = field(default_factory=list)
    topk_ids: list[np.ndarray | None] = field(default_factory=list)
    topk_logprobs: list[np.ndarray | None] = field(default_factory=list)

    def cut(self, wanted: Sequence[int], caps: Caps, prefer: str = "") -> None:
        """Queue these rows as requests; those that no request can hold have their error now."""
        chunks, too_big = plan(wanted, self.lengths, self.starts, self.groups, caps)
        for chunk in chunks:
            chunk.prefer = prefer
        self.waiting.extend(chunks)
        for row in too_big:
            message = f"row {row} has {self.lengths[row]} ids: alone it exceeds what the teacher takes in one request"
            self.row_errors.append(RowError(row, "limit", message))

    def question(self, chunk: Chunk) -> Question:
        return Question(
            np.array([self.lengths[row] for row in chunk.rows], dtype=np.int32),
            np.array([self.starts[row] for row in chunk.rows], dtype=np.int32),
            np.concatenate([self.rows[row] for row in chunk.rows]),
        )

    def store(self, chunk: Chunk, values: Values) -> None:
        """Give each row a view of its part of the reply."""
        failed = {error.row for error in values.row_errors}
        end = 0
        for row in chunk.rows:
            begin, end = end, end + self.lengths[row] - self.starts[row]
            if row in failed:
                continue
            self.logprobs[row] = values.logprobs[begin:end]
            if values.topk_ids is not None and values.topk_logprobs is not None:
                self.topk_ids[row] = values.topk_ids[begin:end]
                self.topk_logprobs[row] = values.topk_logprobs[begin:end]
        self.row_errors.extend(values.row_errors)


class TeacherClient:
    """Scores token ids with one teacher or several replicas of it. Use it as a context manager, or call `close`.

    Args:
        addresses: `tcp://host:port` of each replica; a string may hold several, separated by commas.
        max_tokens_per_request: prompt and response ids in one request. A row longer than that goes alone.
        requests_in_flight: per replica; the next ones wait here, so that they can still go to another.
        client_name: how the teacher's logs and its fairness call this client. Has to be unique; the default is.
        timing: how patient it is with one replica. The caller's own patience is `timeout_s` of each call.
        seed: of the random pauses, for tests.

    Raises:
        ConfigError: no address, one twice, or one that no socket can connect to.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str,
        *,
        max_tokens_per_request: int = 65_536,
        requests_in_flight: int = 3,
        client_name: str = "",
        timing: Timing | None = None,
        seed: int | None = None,
    ):
        if max_tokens_per_request < 1 or not 1 <= requests_in_flight <= 8:
            raise ConfigError(
                f"max_tokens_per_request={max_tokens_per_request} must be positive and "
                f"requests_in_flight={requests_in_flight} within [1, 8]"
            )
        self._max_tokens = max_tokens_per_request
        self._depth = requests_in_flight
        self._timing = timing or Timing()
        self._name = clip(client_name or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}")
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closing = False
        self._pinned: Expect | None = None
        self._pinned_by = ""
        rng = random.Random(seed)
        self._backoff = Backoff(first_s=self._timing.first_backoff_s, most_s=self._timing.most_backoff_s, rng=rng)
        self._homes = Homes()
        self._context = zmq.Context()
        self._replicas: list[Replica] = []
        try:
            for address in _parse(addresses):
                replica = Replica(
                    self._context,
                    address,
                    client_name=self._name,
                    timing=self._timing,
                    backoff=self._backoff,
                    accept=self._accept,
                )
                self._replicas.append(replica)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------------ public calls

    def wait_until_ready(self, timeout_s: float = 600.0) -> ModelInfo:
        """Wait until every replica has loaded the same model, and pin its fingerprints for all calls to come.

        Raises:
            TeacherUnavailable: not all ready in time, or one of them says that it has failed; names each and its state.
            TeacherMismatch: two replicas, or a replica and the pins, differ in model or tokenizer.
            ConfigError: an address where no teacher listens, or none that talks to us.
        """
        with self._exclusively(timeout_s) as deadline:
            heard_before = {replica: replica.generation for replica in self._replicas}
            for replica in self._replicas:
                replica.ask_again()
            log_at = self._timing.log_every_s
            while True:
                self._turn(deadline)
                if all(replica.up for replica in self._replicas):
                    return self._model(self._replicas[0])
                for replica, before in heard_before.items():
                    _refuse_stranger(replica)
                    news = replica.info if replica.generation > before else None
                    if news is not None and news.state == "failed":
                        raise TeacherUnavailable(f"the teacher at {replica.address} failed: {news.detail}")
                if deadline.passed:
                    raise TeacherUnavailable(
                        f"no teacher ready after {deadline.timeout_s:.1f} s: {self._describe()}; "
                        "start it first, or raise teacher.ready_timeout_s"
                    )
                if deadline.elapsed_s >= log_at:
                    log_at += self._timing.log_every_s
                    logger.info(
                        "waiting for the teacher: %.0f s, %.0f s more at most; %s",
                        deadline.elapsed_s,
                        deadline.left_s,
                        self._describe(),
                    )

    def info(self, address: str | None = None, *, timeout_s: float = 10.0) -> ServerInfo:
        """Ask one replica, the first by default, how it is, whatever its state.

        Raises:
            TeacherUnavailable: no answer in time.
            TeacherMismatch: as wait_until_ready.
        """
        with self._exclusively(timeout_s) as deadline:
            by_address = {replica.address: replica for replica in self._replicas}
            if address is not None and address not in by_address:
                raise ConfigError(f"{address!r} is not among the teacher's addresses: {', '.join(by_address)}")
            replica = by_address[address] if address is not None else self._replicas[0]
            before = replica.generation
            replica.ask_again()
            while replica.generation == before or replica.info is None:
                if deadline.passed:
                    raise TeacherUnavailable(f"no answer to info in {timeout_s:.1f} s: {replica.describe()}")
                self._turn(deadline)
            return replica.info

    def score(
        self,
        rows: Sequence[np.ndarray],
        starts: Sequence[int] | np.ndarray,
        *,
        topk: int = 0,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        return_row_errors: bool = False,
    ) -> Scores:
        """Score a batch: log p(row[i] | row[:i]) for every i >= start of every row.

        Args:
            rows: integer ids [L_i], prompt and response; equal prompts are found and kept together.
            starts: first scored position of each row, 1 <= start <= L_i. A row whose start is L_i has no value to get.
            topk: also the K most probable ids at each position, and their log-probs.
            temperature: the teacher's logits are divided by it.
            timeout_s: for the whole call, through retries, restarts and waiting for another thread.
            return_row_errors: give rows that the teacher cannot score as None, listed in `row_errors`.

        Returns:
            Values that passed every check. The arrays are read-only views of the replies.

        Raises:
            RowsFailed: rows without a value, unless return_row_errors; all of them are in its `row_errors`.
            TeacherUnavailable: not everything was answered in time.
            TeacherMismatch: another model or tokenizer answered than the pinned one.
            BadReply: a request got replies that fail a check, several times.
            RequestRefused: the teacher says that the request cannot be answered.
            ValueError: rows or starts that are not what is said above; the message names the row.
        """
        arrays, start_list = _check_batch(rows, starts, topk, temperature)
        with self._exclusively(timeout_s) as deadline:
            call = self._prepare(arrays, start_list, topk, temperature, deadline)
            self._finish(call)
            self._sum_up(call)
            if call.row_errors and not return_row_errors:
                raise RowsFailed(call.row_errors, len(arrays))
            return Scores(
                logprobs=call.logprobs,
                topk_ids=call.topk_ids if topk else None,
                topk_logprobs=call.topk_logprobs if topk else None,
                row_errors=call.row_errors,
                stats=call.stats,
            )

    def prefetch(
        self,
        rows: Sequence[np.ndarray],
        starts: Sequence[int] | np.ndarray,
        *,
        topk: int = 0,
        temperature: float = 1.0,
        timeout_s: float = 2.0,
        keep_s: float = 600.0,
    ) -> int:
        """Ask the teacher to score rows when nobody waits, so that a `score` of the same rows later costs nothing.

        A prompt's rows go to one replica, and a later `score` prefers that one. Best effort: a teacher that cannot be
        reached or has no room is no error, and rows that were not prefetched are scored when they are asked for.

        Args:
            rows, starts, topk, temperature: as in the `score` to come; another value of any is another question.
            timeout_s: how long to wait for teachers to say that they will try, which they do at once.
            keep_s: how long they may still begin with it.

        Returns:
            How many rows the teachers took.

        Raises:
            TeacherMismatch: another model or tokenizer answered than the pinned one.
            ValueError: as score.
        """
        arrays, start_list = _check_batch(rows, starts, topk, temperature)
        try:
            with self._exclusively(timeout_s) as deadline:
                return self._prefetch(self._new_call(arrays, start_list, topk, temperature, deadline), keep_s)
        except TeacherUnavailable as e:
            logger.info("nothing was prefetched: %s", e)
            return 0

    def sleep(self, *, timeout_s: float = 600.0) -> None:
        """Let every replica answer what it holds and then free its accelerator's memory; wait until that is done.

        Until `wake`, no replica scores: requests of all clients are told to come back later.

        Raises:
            TeacherUnavailable: not all asleep in time; names each and its state.
            RequestRefused: a backend that cannot sleep.
            TeacherMismatch: as wait_until_ready.
        """
        self._order(SleepRequest, "sleeping", timeout_s)

    def wake(self, timeout_s: float = 600.0) -> None:
        """Bring every replica's model back, and wait until all can score; one that is awake stays so.

        Raises:
            TeacherUnavailable, TeacherMismatch: as wait_until_ready.
        """
        self._order(WakeRequest, "ready", timeout_s)

    def close(self) -> None:
        """Close every connection at once; a call under way in another thread ends with an error."""
        self._closing = True
        if os.getpid() != self._pid:
            return  # a forked child: the sockets are the parent's
        if not self._lock.acquire(timeout=5.0):
            raise OPDError("a call under way in another thread does not end; the client stays open")
        try:
            for replica in self._replicas:
                replica.close()
            self._context.destroy(linger=0)
        finally:
            self._lock.release()

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a TeacherClient cannot be sent to another process; make one there from the addresses")

    # ------------------------------------------------------------------------------------------------ one call

    @contextlib.contextmanager
    def _exclusively(self, timeout_s: float) -> Iterator[Deadline]:
        """One call at a time, in the process that made the client, with one deadline."""
        deadline = Deadline(timeout_s)
        if os.getpid() != self._pid:
            # sends on the parent's sockets seem to work and are never answered
            raise OPDError(
                f"this TeacherClient belongs to process {self._pid} and was forked into {os.getpid()}; make one here"
            )
        if not self._lock.acquire(timeout=deadline.left_s):
            raise TeacherUnavailable(f"another thread has been using this client for {timeout_s:.1f} s")
        try:
            if self._closing:
                raise OPDError("this TeacherClient is closed")
            for replica in self._replicas:
                replica.begin()
            yield deadline
        except OPDError:
            raise
        except BaseException:
            # Ctrl-C may have come between two frames of a message: the rest of it must not meet the next one
            for replica in self._replicas:
                replica.reset()
            raise
        finally:
            for replica in self._replicas:
                replica.forget()
            self._lock.release()

    def _new_call(
        self, rows: list[np.ndarray], starts: list[int], topk: int, temperature: float, deadline: Deadline
    ) -> _Call:
        lengths = [len(row) for row in rows]
        stats = Stats(rows=len(rows), tokens=sum(lengths), scored=sum(lengths) - sum(starts))
        prompts = prompt_digests(rows, starts)
        return _Call(rows, starts, lengths, prompts, number(prompts), topk, temperature, deadline, stats)

    def _prepare(
        self, rows: list[np.ndarray], starts: list[int], topk: int, temperature: float, deadline: Deadline
    ) -> _Call:
        call = self._new_call(rows, starts, topk, temperature, deadline)
        lengths = call.lengths
        wanted = [row for row, start in enumerate(starts) if start < lengths[row]]
        # a row without response needs no teacher: it has exactly 0 values
        empty, empty_topk = np.zeros(0, np.float32), np.zeros((0, topk), np.float32)
        needs = set(wanted)
        call.logprobs = [None if row in needs else empty for row in range(len(rows))]
        if topk:
            call.topk_logprobs = [None if row in needs else empty_topk for row in range(len(rows))]
            call.topk_ids = [None if row in needs else empty_topk.astype(np.int32) for row in range(len(rows))]
        tokens = sum(lengths[row] for row in wanted)
        share = -(-tokens // len(self._replicas))  # so that a small batch is still spread over all replicas
        known = [replica.info.limits for replica in self._replicas if replica.info is not None]
        caps = Caps(max(1, min(self._max_tokens, share)), common_limits(known), topk)
        by_home: dict[str, list[int]] = {}
        for row in wanted:
            by_home.setdefault(self._homes.find(call.prompts[row]) or "", []).append(row)
        for home, mine in by_home.items():
            call.cut(mine, caps, home)
        return call

    def _prefetch(self, call: _Call, keep_s: float) -> int:
        """Send every row to its prompt's home once; returns how many were taken."""
        deadline = call.deadline
        unheard_until_s = min(0.5, deadline.timeout_s / 4)
        while not deadline.passed:
            self._turn(deadline)
            unheard = deadline.elapsed_s < unheard_until_s and any(not each.generation for each in self._replicas)
            if any(replica.up for replica in self._replicas) and not unheard:
                break
        up = {replica.address: replica for replica in self._replicas if replica.up}
        prompts: dict[bytes, int] = {}
        rows = [row for row, start in enumerate(call.starts) if start < call.lengths[row]]
        for row in rows:
            prompts[call.prompts[row]] = prompts.get(call.prompts[row], 0) + call.lengths[row]
        if not up or not rows:
            return 0
        homes = self._homes.choose(prompts, list(up))
        for address, replica in up.items():
            assert replica.info is not None
            caps = Caps(self._max_tokens, common_limits([replica.info.limits]), call.topk)
            call.cut([row for row in rows if homes[call.prompts[row]] == address], caps, address)
        taken = 0
        while (call.waiting or any(replica.inflight for replica in self._replicas)) and not deadline.passed:
            now = time.monotonic()
            for chunk in list(call.waiting):
                replica = up[chunk.prefer]
                if not replica.up:
                    call.waiting.remove(chunk)
                elif len(replica.inflight) < self._depth:
                    call.waiting.remove(chunk)
                    self._send(call, chunk, replica, now, prefetch_s=keep_s)
            for replica, attempt, reply, _ in self._turn(deadline):
                if reply.status != "ok":
                    logger.info("prefetch, teacher %s: %s [%s]", replica.address, clip(reply.message), clip(reply.code))
                    continue
                taken += len(attempt.chunk.rows)
                for row in attempt.chunk.rows:
                    self._homes.remember(call.prompts[row], replica.address)
        return taken

    def _order(self, order: type[SleepRequest] | type[WakeRequest], state: State, timeout_s: float) -> None:
        """Send an order to every replica, and wait until all are in the state that it leads to."""
        with self._exclusively(timeout_s) as deadline:
            for replica in self._replicas:
                replica.order, replica.order_refused = order, ("", "")
                replica.ask_again()
            try:
                while True:
                    self._turn(deadline)
                    for replica in self._replicas:
                        _refuse_stranger(replica)
                        code, message = replica.order_refused
                        if code:
                            raise RequestRefused(code, f"{replica.address}: {message}")
                    done = [
                        replica.order is None and replica.info is not None and replica.info.state == state
                        for replica in self._replicas
                    ]
                    if all(done):
                        return
                    if deadline.passed:
                        raise TeacherUnavailable(f"not all {state} after {timeout_s:.1f} s: {self._describe()}")
            finally:
                for replica in self._replicas:
                    replica.order = None

    def _finish(self, call: _Call) -> None:
        """Send, receive and send again until no request is left."""
        total = len(call.waiting)
        log_at = self._timing.log_every_s
        while call.waiting or any(replica.inflight or replica.lost for replica in self._replicas):
            if call.deadline.passed:
                raise self._too_late(call, total)
            for replica in self._replicas:
                if not replica.was_up:
                    _refuse_stranger(replica)  # one that was a teacher before may be one again
                for attempt in replica.lost:
                    self._again(call, attempt.chunk, replica, pause=False)
                replica.lost.clear()
            self._dispatch(call)
            for answer in self._turn(call.deadline, wake_at=self._wake_at(call)):
                self._settle(call, answer)
            if call.deadline.elapsed_s >= log_at and not call.deadline.passed:
                log_at += self._timing.log_every_s
                logger.info(
                    "teacher: %d of %d requests not answered after %.0f s; waiting %.0f s more at most; %s",
                    self._unanswered(call),
                    total,
                    call.deadline.elapsed_s,
                    call.deadline.left_s,
                    self._describe(),
                )

    def _unanswered(self, call: _Call) -> int:
        return len(call.waiting) + sum(len(replica.inflight) + len(replica.lost) for replica in self._replicas)

    def _wake_at(self, call: _Call) -> float:
        """When a request that waits may be sent. Room on a replica comes with a message, which wakes us anyhow."""
        now = time.monotonic()
        times = [chunk.not_before for chunk in call.waiting]
        times += [replica.usable_at for replica in self._replicas if replica.up] if times else []
        return min((t for t in times if t > now), default=now + _MAX_POLL_S)

    def _turn(self, deadline: Deadline, *, wake_at: float | None = None) -> list[Answer]:
        """Let every replica do what is due, wait for a message, a timer or the deadline, and take in what came."""
        if self._closing:
            raise OPDError("this TeacherClient was closed by another thread")
        now = time.monotonic()
        times = [replica.turn(now) for replica in self._replicas]
        if wake_at is not None:
            times.append(wake_at)
        wait_s = min(min(times) - now, deadline.left_s, _MAX_POLL_S)
        if any(replica.lost for replica in self._replicas):
            wait_s = 0.0
        poller = zmq.Poller()
        for replica in self._replicas:
            for each in replica.sockets:
                poller.register(each, zmq.POLLIN)
        poller.poll(max(0, int(wait_s * 1000) + 1) if wait_s > 0 else 0)
        return [answer for replica in self._replicas for answer in replica.receive()]

    # ------------------------------------------------------------------------------------------------ sending

    def _dispatch(self, call: _Call) -> None:
        """Send what is due to whoever has room."""
        now = time.monotonic()
        for chunk in list(call.waiting):
            if chunk.not_before > now:
                continue
            replica = self._choose(call, chunk, now)
            if replica is None or replica.info is None:
                continue
            model = self._model(replica)
            if call.topk > model.max_topk:
                raise RequestRefused(
                    "topk", f"topk={call.topk} was asked for; the teacher at {replica.address} gives {model.max_topk}"
                )
            if call.temperature != 1.0 and not model.temperature:
                message = f"the teacher at {replica.address} scores at temperature 1 only, not at {call.temperature}"
                raise RequestRefused("temperature", message)
            caps = Caps(self._max_tokens, common_limits([replica.info.limits]), call.topk)
            call.waiting.remove(chunk)
            if caps.fits(len(chunk.rows), chunk.tokens, chunk.scored):
                self._send(call, chunk, replica, now)
            else:
                call.cut(chunk.rows, caps, chunk.prefer)  # it was cut before this replica had told its limits
                return

    def _choose(self, call: _Call, chunk: Chunk, now: float) -> Replica | None:
        """The replica with room that owes the fewest tokens; the one with the rest of the prompt, if it was cut."""
        up = [replica for replica in self._replicas if replica.up]
        home = call.homes.get(chunk.family) if chunk.family is not None else None
        home = next((replica for replica in up if replica.address == chunk.prefer), home)
        if home in up and home is not None and home.address != chunk.avoid:
            up = [home]
        elif len(up) > 1:
            up = [replica for replica in up if replica.address != chunk.avoid]
        free = [replica for replica in up if replica.usable_at <= now and len(replica.inflight) < self._depth]
        return min(free, key=lambda replica: replica.outstanding_tokens, default=None)

    def _send(
        self, call: _Call, chunk: Chunk, replica: Replica, now: float, *, prefetch_s: float | None = None
    ) -> None:
        question = call.question(chunk)
        budget_s = call.deadline.attempt_s() if prefetch_s is None else prefetch_s
        request_id = new_id()
        body = encode_request(
            (ScoreRequest if prefetch_s is None else PrefetchRequest)(
                id=request_id,
                client=self._name,
                budget_ms=max(1, int(1000 * budget_s)),
                lengths=_bin(question.lengths, np.int32),
                starts=_bin(question.starts, np.int32),
                ids=_bin(question.ids, np.int32),
                topk=call.topk,
                temperature=float(call.temperature),
                expect=self._pinned,
            )
        )
        attempt = Attempt(
            chunk=chunk,
            question=question,
            digest=digest(question.lengths, question.starts, question.ids),
            topk=call.topk,
            budget_s=budget_s,
            sent_at=now,
            ends_at=now + budget_s + min(0.5, 0.1 * budget_s),  # the teacher's own `expired` should come first
            boot=replica.boot,
        )
        if not replica.send_score(request_id, body, attempt):
            call.waiting.insert(0, chunk)
            return
        call.stats.requests += 1
        if chunk.family is not None:
            call.homes[chunk.family] = replica

    def _again(self, call: _Call, chunk: Chunk, replica: Replica, *, pause: bool) -> None:
        """Queue a request that got no values, elsewhere if possible."""
        if chunk.bad_replies > _MAX_BAD_REPLIES:
            raise BadReply(
                f"{chunk.bad_replies} replies in a row to one request were wrong, the last from {replica.describe()}"
            )
        chunk.failures += 1
        chunk.avoid = replica.address
        chunk.not_before = time.monotonic() + (self._backoff.pause_s(chunk.failures) if pause else 0.0)
        call.waiting.insert(0, chunk)
        call.stats.retries += 1

    # ------------------------------------------------------------------------------------------------ answers

    def _settle(self, call: _Call, answer: Answer) -> None:
        """Take the values of a reply, or decide what its refusal means."""
        replica, chunk, reply = answer.replica, answer.attempt.chunk, answer.reply
        if reply.status == "ok":
            self._take(call, answer)
            return
        what = f"{replica.address}: {clip(reply.message) or reply.status}"
        after_s = min(reply.retry_after_ms / 1000, _MAX_RETRY_AFTER_S)
        if reply.status == "busy" or (reply.status == "error" and reply.retryable):
            logger.info("teacher %s, %s [%s]; again in %.1f s or elsewhere", reply.status, what, reply.code, after_s)
            if reply.code in _NOT_UP:
                replica.ask_again()
            replica.spare(after_s, f"{reply.status}: {clip(reply.message)} [{clip(reply.code)}]")
            self._again(call, chunk, replica, pause=True)
        elif reply.status == "draining":
            logger.info("teacher draining, %s", what)
            replica.ask_again()
            self._again(call, chunk, replica, pause=True)
        elif reply.status == "expired":
            self._again(call, chunk, replica, pause=True)
        elif reply.code in _MISMATCH_CODES:
            raise TeacherMismatch(f"{what} [{clip(reply.code)}]")
        else:
            raise RequestRefused(clip(reply.code), what)

    def _take(self, call: _Call, answer: Answer) -> None:
        replica, attempt, reply, raw = answer
        assert self._pinned is not None, "a replica was up before anything was pinned"
        try:
            values = check_reply(
                reply,
                raw,
                attempt.question,
                digest=attempt.digest,
                expect=self._pinned,
                vocab_size=self._model(replica).vocab_size,
                topk=call.topk,
                names=attempt.chunk.rows,
            )
        except TeacherMismatch as e:
            raise TeacherMismatch(f"{replica.address}: {e} (by {self._pinned_by})") from None
        except BadReply as e:
            attempt.chunk.bad_replies += 1
            if attempt.chunk.bad_replies > _MAX_BAD_REPLIES:
                raise BadReply(f"{replica.address}, {attempt.chunk.bad_replies} times in a row: {e}") from None
            replica.fail(f"a reply that failed a check: {e}")
            self._again(call, attempt.chunk, replica, pause=False)
            return
        replica.worked()
        call.store(attempt.chunk, values)
        call.stats.queue_ms = max(call.stats.queue_ms, reply.queue_ms)
        call.stats.score_ms += reply.score_ms
        call.stats.cached += reply.cached_rows

    def _accept(self, replica: Replica, model: ModelInfo) -> None:
        """Pin the first model that is heard of; every other one has to be the same."""
        found = Expect(model=model.model, tokenizer=model.tokenizer)
        if self._pinned is None:
            self._pinned, self._pinned_by = found, replica.address
        elif found != self._pinned:
            raise TeacherMismatch(
                f"the teacher at {replica.address} has model {found.model!r}, tokenizer {found.tokenizer!r} "
                f"({model.name!r}); pinned are model {self._pinned.model!r}, tokenizer {self._pinned.tokenizer!r} "
                f"from {self._pinned_by}: all replicas, and a teacher that restarts, must serve the same model"
            )

    def _model(self, replica: Replica) -> ModelInfo:
        assert replica.info is not None and replica.info.model is not None, "a replica is up without a model"
        return replica.info.model

    # ------------------------------------------------------------------------------------------------ for people

    def _sum_up(self, call: _Call) -> None:
        stats = call.stats
        stats.seconds = call.deadline.elapsed_s
        for counts in (replica.counts for replica in self._replicas):
            stats.late_replies += counts.late_replies
            stats.faults += counts.faults
            stats.boot_changes += counts.boot_changes
            stats.sent_bytes += counts.sent_bytes
            stats.received_bytes += counts.received_bytes
        call.row_errors.sort(key=lambda error: error.row)

    def _too_late(self, call: _Call, total: int) -> TeacherUnavailable:
        return TeacherUnavailable(
            f"teacher did not answer in {call.deadline.timeout_s:.1f} s ({call.stats.rows} rows, {call.stats.tokens} "
            f"tokens; {self._unanswered(call)} of {total} requests open, {call.stats.retries} retries): "
            f"{self._describe()}; raise teacher.timeout_s or lower teacher.max_tokens_per_request"
        )

    def _describe(self) -> str:
        return "; ".join(replica.describe() for replica in self._replicas)


def _parse(addresses: Sequence[str] | str) -> list[str]:
    parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    found = [part.strip() for part in parts if part.strip()]
    if not found:
        raise ConfigError("no teacher address was given; write tcp://host:port")
    for address in found:
        if not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"teacher address {address!r} has no scheme; write tcp://{address}")
    if len(set(found)) != len(found):
        raise ConfigError(f"a teacher address is there twice: {', '.join(found)}")
    return found


def _refuse_stranger(replica: Replica) -> None:
    if replica.refused:
        raise ConfigError(f"teacher address {replica.address}: {replica.refused}; is it the right port?")


def _check_batch(
    rows: Sequence[np.ndarray], starts: Any, topk: int, temperature: float
) -> tuple[list[np.ndarray], list[int]]:
    """Rows as contiguous int32, without a copy where they are that already."""
    if topk < 0 or not 0 < temperature <= 1000:
        raise ValueError(f"topk={topk} must be >= 0 and temperature={temperature} within (0, 1000]")
    start_array = np.asarray(starts)
    if len(rows) != len(start_array) or (len(rows) and start_array.dtype.kind not in "iu"):
        raise ValueError(f"{len(rows)} rows and {len(start_array)} starts of type {start_array.dtype}")
    arrays = []
    start_list = start_array.tolist()
    for index, (row, start) in enumerate(zip(rows, start_list, strict=True)):
        ids = np.asarray(row)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"row {index} must be a 1-d array of integers, not {ids.dtype} {list(ids.shape)}")
        if not 1 <= start <= len(ids):
            raise ValueError(f"row {index} starts at {start}, outside [1, {len(ids)}]")
        if ids.dtype != np.int32:
            if int(ids.max()) > _MAX_ID or int(ids.min()) < -_MAX_ID:
                raise ValueError(f"row {index} has an id that does not fit 32 bits")
            ids = ids.astype(np.int32)
        arrays.append(np.ascontiguousarray(ids))
    return arrays, start_list
