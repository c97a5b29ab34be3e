"""The trainer's side of the wire: a batch of token ids in, the teacher's log-probs out, or a typed error.

One call of `score` cuts the batch into requests, keeps a few under way on every replica, sends again what a replica
lost, checks every reply, and puts the values back into the caller's order. The caller sees one deadline. No value
leaves this module that did not pass opd/checks.py, and a row without a value is None, never a number.

Nothing runs between calls: no thread, no timer. A client belongs to the process that made it; its calls may come from
several threads and then follow one another.

Shapes: B = rows, N_i = scored positions of row i, K = topk, C = candidates per position.

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
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import zmq

from opd.call import Batch, Call, Scores, check_batch
from opd.call import Stats as Stats
from opd.checks import check_reply
from opd.chunks import Chunk, common_limits
from opd.deadline import Backoff, Deadline
from opd.errors import (
    BadReply,
    ConfigError,
    OPDError,
    RequestRefused,
    RowsFailed,
    TeacherMismatch,
    TeacherUnavailable,
)
from opd.fingerprint import vocabulary_fingerprint
from opd.homes import home_of
from opd.replica import Answer, Attempt, Order, Replica, Timing
from opd.wire import (
    Expect,
    ModelInfo,
    PrefetchRequest,
    ScoreRequest,
    ServerInfo,
    SleepRequest,
    State,
    VocabRequest,
    WakeRequest,
    clip,
    digest,
    encode_request,
    new_id,
)
from opd.wire import to_bin as _bin

logger = logging.getLogger(__name__)

_MAX_BAD_REPLIES = 2  # of one request, each on a new connection or another replica; one more is raised
_MISMATCH_CODES = ("model_mismatch", "version")
_NOT_UP = ("loading", "restarting", "sleeping")  # codes of a teacher that scores for nobody
_MAX_RETRY_AFTER_S = 60.0
_MAX_POLL_S = 0.25  # how soon a close() from another thread is noticed


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
        self._context = zmq.Context()
        self._replicas: list[Replica] = []
        # A context that is collected waits for ever for sockets that are open. So whoever forgets close() is let go,
        # for which nothing below may refer back to this client: hence the weak method.
        weakref.finalize(self, _let_go, self._context, self._replicas, self._pid).atexit = False
        accept = weakref.WeakMethod(self._accept)
        try:
            for address in _parse(addresses):
                replica = Replica(
                    self._context,
                    address,
                    client_name=self._name,
                    timing=self._timing,
                    backoff=self._backoff,
                    accept=lambda replica, model: accept()(replica, model),  # type: ignore[misc]
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
        candidates: Sequence[np.ndarray] | None = None,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        return_row_errors: bool = False,
        prefetched: bool = False,
    ) -> Scores:
        """Score a batch: log p(row[i] | row[:i]) for every i >= start of every row.

        Args:
            rows: integer ids [L_i], prompt and response; equal prompts are found and kept together.
            starts: first scored position of each row, 1 <= start <= L_i. A row whose start is L_i has no value to get.
            topk: also the K most probable ids at each position, and their log-probs.
            candidates: integer ids [N_i, C] for each row, the same C for all: also the log-probs of exactly these. An
                id may come twice at one position, and has its value twice then.
            temperature: the teacher's logits are divided by it.
            timeout_s: for the whole call, through retries, restarts and waiting for another thread.
            return_row_errors: give rows that the teacher cannot score as None, listed in `row_errors`.
            prefetched: ask for each row where a `prefetch`, of any process, sends it, unless that replica is down;
                otherwise a row goes to the replica that has the least to do.

        Returns:
            Values that passed every check. The arrays are read-only views of the replies.

        Raises:
            RowsFailed: rows without a value, unless return_row_errors; all of them are in its `row_errors`.
            TeacherUnavailable: not everything was answered in time.
            TeacherMismatch: another model or tokenizer answered than the pinned one.
            BadReply: a request got replies that fail a check, several times.
            RequestRefused: the teacher says that the request cannot be answered, or cannot give such a top-k,
                candidates or temperature.
            ValueError: rows, starts or candidates that are not what is said above; the message names the row.
        """
        batch = check_batch(rows, starts, topk, temperature, candidates)
        with self._exclusively(timeout_s) as deadline:
            call = Call(batch, deadline)
            self._cut(call, by_home=prefetched)
            self._finish(call)
            self._sum_up(call)
            if call.row_errors and not return_row_errors:
                raise RowsFailed(call.row_errors, batch.num_rows)
            return call.scores()

    def prefetch(
        self,
        rows: Sequence[np.ndarray],
        starts: Sequence[int] | np.ndarray,
        *,
        topk: int = 0,
        candidates: Sequence[np.ndarray] | None = None,
        temperature: float = 1.0,
        timeout_s: float = 2.0,
        keep_s: float = 600.0,
    ) -> int:
        """Ask the teacher to score rows when nobody waits, so that a `score` of the same rows later costs nothing.

        A prompt's rows go to one replica, where a `score` with `prefetched=True` asks for them, also in another
        process. Best effort: a teacher that cannot be reached or has no room is no error, and rows that were not
        prefetched are scored when they are asked for.

        Args:
            rows, starts, topk, candidates, temperature: as in the `score` to come; another value of any is another
                question.
            timeout_s: how long to wait for teachers to say that they will try, which they do at once.
            keep_s: how long they may still begin with it.

        Returns:
            How many rows the teachers took.

        Raises:
            TeacherMismatch: another model or tokenizer answered than the pinned one.
            ValueError: as score.
        """
        batch = check_batch(rows, starts, topk, temperature, candidates)
        try:
            with self._exclusively(timeout_s) as deadline:
                return self._prefetch(Call(batch, deadline), keep_s)
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

    def vocabulary(self, timeout_s: float = 60.0) -> bytes:
        """Which token each id is: what the pinned tokenizer fingerprint is a hash of (opd/fingerprint.py).

        Raises:
            TeacherUnavailable: not all replicas answered in time.
            RequestRefused: a teacher that does not know.
            TeacherMismatch: as wait_until_ready, or an answer that is not what was pinned.
        """
        self._order(VocabRequest, "ready", timeout_s)
        assert self._pinned is not None
        vocabulary = self._replicas[0].vocabulary
        found = vocabulary_fingerprint(vocabulary)
        if found != self._pinned.tokenizer:
            raise TeacherMismatch(
                f"the vocabulary of {self._replicas[0].address} has the fingerprint {found}, "
                f"pinned is {self._pinned.tokenizer!r}"
            )
        return vocabulary

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

    def _cut(self, call: Call, *, by_home: bool) -> None:
        """Queue the whole batch as requests, each preferring the home of its rows if that is asked for."""
        wanted = call.needed
        tokens = sum(call.lengths[row] for row in wanted)
        share = -(-tokens // len(self._replicas))  # so that a small batch is still spread over all replicas
        known = [replica.info.limits for replica in self._replicas if replica.info is not None]
        caps = call.caps(max(1, min(self._max_tokens, share)), common_limits(known))
        up = [replica.address for replica in self._replicas if replica.up]
        if not by_home or not up:
            call.cut(wanted, caps)
            return
        rows_at: dict[str, list[int]] = {}
        for row in wanted:
            rows_at.setdefault(home_of(call.prompts[row], up), []).append(row)
        for home, mine in rows_at.items():
            call.cut(mine, caps, home)

    def _prefetch(self, call: Call, keep_s: float) -> int:
        """Send every row to its prompt's home once; returns how many were taken."""
        deadline = call.deadline
        unheard_until_s = min(0.5, deadline.timeout_s / 4)
        while not deadline.passed:
            self._turn(deadline)
            unheard = deadline.elapsed_s < unheard_until_s and any(not each.generation for each in self._replicas)
            if any(replica.up for replica in self._replicas) and not unheard:
                break
        up = {replica.address: replica for replica in self._replicas if replica.up}
        rows = call.needed
        if not up or not rows:
            return 0
        homes = {row: home_of(call.prompts[row], list(up)) for row in rows}
        for address, replica in up.items():
            assert replica.info is not None
            caps = call.caps(self._max_tokens, common_limits([replica.info.limits]))
            call.cut([row for row in rows if homes[row] == address], caps, address)
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
            for replica in self._replicas:
                replica.lost.clear()  # not sent again, and `_turn` does not wait while there are any
        return taken

    def _order(self, order: Order, state: State, timeout_s: float) -> None:
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

    def _finish(self, call: Call) -> None:
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

    def _unanswered(self, call: Call) -> int:
        return len(call.waiting) + sum(len(replica.inflight) + len(replica.lost) for replica in self._replicas)

    def _wake_at(self, call: Call) -> float:
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

    def _dispatch(self, call: Call) -> None:
        """Send what is due to whoever has room."""
        now, was_cut = time.monotonic(), False
        for chunk in list(call.waiting):
            if chunk.not_before > now:
                continue
            replica = self._choose(call, chunk, now)
            if replica is None or replica.info is None:
                continue
            _refuse_beyond(call.batch, self._model(replica), replica.address)
            caps = call.caps(self._max_tokens, common_limits([replica.info.limits]))
            call.waiting.remove(chunk)
            if caps.fits(*chunk.size):
                self._send(call, chunk, replica, now)
            else:
                call.cut(chunk.rows, caps, chunk.prefer)  # it was cut before this replica had told its limits
                was_cut = True
        if was_cut:
            self._dispatch(call)

    def _choose(self, call: Call, chunk: Chunk, now: float) -> Replica | None:
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

    def _send(self, call: Call, chunk: Chunk, replica: Replica, now: float, *, prefetch_s: float | None = None) -> None:
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
                topk=call.batch.topk,
                temperature=float(call.batch.temperature),
                expect=self._pinned,
                num_candidates=call.batch.num_candidates,
                candidates=_bin(question.candidates, np.int32) if question.candidates is not None else memoryview(b""),
            )
        )
        attempt = Attempt(
            chunk=chunk,
            question=question,
            digest=digest(*question.arrays()),
            topk=call.batch.topk,
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

    def _again(self, call: Call, chunk: Chunk, replica: Replica, *, pause: bool) -> None:
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

    def _settle(self, call: Call, answer: Answer) -> None:
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

    def _take(self, call: Call, answer: Answer) -> None:
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
                topk=call.batch.topk,
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

    def _sum_up(self, call: Call) -> None:
        stats = call.stats
        stats.seconds = call.deadline.elapsed_s
        for counts in (replica.counts for replica in self._replicas):
            stats.late_replies += counts.late_replies
            stats.faults += counts.faults
            stats.boot_changes += counts.boot_changes
            stats.sent_bytes += counts.sent_bytes
            stats.received_bytes += counts.received_bytes
        call.row_errors.sort(key=lambda error: error.row)

    def _too_late(self, call: Call, total: int) -> TeacherUnavailable:
        return TeacherUnavailable(
            f"teacher did not answer in {call.deadline.timeout_s:.1f} s ({call.stats.rows} rows, {call.stats.tokens} "
            f"tokens; {self._unanswered(call)} of {total} requests open, {call.stats.retries} retries): "
            f"{self._describe()}; raise teacher.timeout_s or lower teacher.max_tokens_per_request"
        )

    def _describe(self) -> str:
        return "; ".join(replica.describe() for replica in self._replicas)


def _let_go(context: zmq.Context, replicas: list[Replica], pid: int) -> None:
    """Close what a client left open, in the process that opened it."""
    if os.getpid() == pid:
        for replica in replicas:
            replica.close()
        context.destroy(linger=0)


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


def _refuse_beyond(batch: Batch, model: ModelInfo, address: str) -> None:
    """Whether a teacher can give what is asked of each position; the server would refuse the same."""
    if batch.topk > model.max_topk:
        message = f"topk={batch.topk} was asked for; the teacher at {address} gives {model.max_topk}"
        raise RequestRefused("topk", message)
    if batch.num_candidates and not model.max_candidates:
        message = f"the teacher at {address} scores no candidates, with its backend {clip(model.backend)}; hf does"
        raise RequestRefused("candidates_unsupported", message)
    if batch.num_candidates > model.max_candidates:
        message = f"{batch.num_candidates} candidates for each position; the teacher at {address} takes "
        raise RequestRefused("candidates", f"{message}{model.max_candidates}")
    if batch.temperature != 1.0 and not model.temperature:
        message = f"the teacher at {address} scores at temperature 1 only, not at {batch.temperature}"
        raise RequestRefused("temperature", message)
