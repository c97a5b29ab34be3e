"""One call on its way: its requests go out, come back or are sent again, until every row has its values or an error.

Made for one call, with the client's lock held. It cuts the batch into requests, keeps a few under way on every replica,
sends elsewhere what a replica lost, and lets no value through that did not pass opd/checks.py.

Not covered: hedging. A request is never under way twice.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from opd.call import Batch, Call
from opd.checks import check_reply
from opd.chunks import Chunk, common_limits
from opd.errors import BadReply, RequestRefused, TeacherMismatch, TeacherUnavailable
from opd.homes import home_of
from opd.replica import Answer, Attempt, Replica
from opd.replicas import MAX_POLL_S, Replicas, refuse_stranger
from opd.wire import ModelInfo, PrefetchRequest, ScoreRequest, clip, digest, encode_request, new_id
from opd.wire import to_bin as _bin

logger = logging.getLogger(__name__)

_MAX_BAD_REPLIES = 2  # of one request, each on a new connection or another replica; one more is raised
_MISMATCH_CODES = ("model_mismatch", "version")
_NOT_UP = ("loading", "restarting", "sleeping")  # codes of a teacher that scores for nobody
_MAX_RETRY_AFTER_S = 60.0


class Delivery:
    """See the module.

    Args:
        max_tokens: ids in one request.
        depth: requests under way on one replica.
    """

    def __init__(self, call: Call, replicas: Replicas, *, client_name: str, max_tokens: int, depth: int):
        self.call = call
        self.replicas = replicas
        self._name = client_name
        self._max_tokens = max_tokens
        self._depth = depth

    def score(self, *, by_home: bool) -> None:
        """Get every row of the call its values or an error.

        Args:
            by_home: ask for each row where a prefetch sends it.

        Raises:
            TeacherUnavailable, TeacherMismatch, BadReply, RequestRefused: as TeacherClient.score.
        """
        self._cut(by_home=by_home)
        self._finish()
        self._sum_up()

    def prefetch(self, keep_s: float) -> int:
        """Send every row to its prompt's home once; returns how many were taken."""
        deadline = self.call.deadline
        unheard_until_s = min(0.5, deadline.timeout_s / 4)
        while not deadline.passed:
            unheard = deadline.elapsed_s < unheard_until_s and any(not each.generation for each in self.replicas)
            if self.replicas.up and not unheard:
                break  # before any turn, which waits for a message: nobody may owe one
            self.replicas.turn(deadline)
        up = {replica.address: replica for replica in self.replicas.up}
        rows = self.call.needed
        if not up or not rows:
            return 0
        homes = {row: home_of(self.call.prompts[row], list(up)) for row in rows}
        for address, replica in up.items():
            assert replica.info is not None
            caps = self.call.caps(self._max_tokens, common_limits([replica.info.limits]))
            self.call.cut([row for row in rows if homes[row] == address], caps, address)
        taken = 0
        while (self.call.waiting or any(replica.inflight for replica in self.replicas)) and not deadline.passed:
            now = time.monotonic()
            for chunk in list(self.call.waiting):
                replica = up[chunk.prefer]
                if not replica.up:
                    self.call.waiting.remove(chunk)
                elif len(replica.inflight) < self._depth:
                    self.call.waiting.remove(chunk)
                    self._send(chunk, replica, now, prefetch_s=keep_s)
            for replica, attempt, reply, _ in self.replicas.turn(deadline):
                if reply.status != "ok":
                    logger.info("prefetch, teacher %s: %s [%s]", replica.address, clip(reply.message), clip(reply.code))
                    continue
                taken += len(attempt.chunk.rows)
            for replica in self.replicas:
                replica.lost.clear()  # not sent again, and `turn` does not wait while there are any
        return taken

    def _cut(self, *, by_home: bool) -> None:
        """Queue the whole batch as requests, each preferring the home of its rows if that is asked for."""
        wanted = self.call.needed
        tokens = sum(self.call.lengths[row] for row in wanted)
        share = -(-tokens // len(self.replicas))  # so that a small batch is still spread over all replicas
        known = [replica.info.limits for replica in self.replicas if replica.info is not None]
        caps = self.call.caps(max(1, min(self._max_tokens, share)), common_limits(known))
        up = [replica.address for replica in self.replicas.up]
        if not by_home or not up:
            self.call.cut(wanted, caps)
            return
        rows_at: dict[str, list[int]] = {}
        for row in wanted:
            rows_at.setdefault(home_of(self.call.prompts[row], up), []).append(row)
        for home, mine in rows_at.items():
            self.call.cut(mine, caps, home)

    def _finish(self) -> None:
        """Send, receive and send again until no request is left."""
        total = len(self.call.waiting)
        log_at = self.replicas.timing.log_every_s
        while self.call.waiting or any(replica.inflight or replica.lost for replica in self.replicas):
            if self.call.deadline.passed:
                raise self._too_late(total)
            for replica in self.replicas:
                if not replica.was_up:
                    refuse_stranger(replica)  # one that was a teacher before may be one again
                for attempt in replica.lost:
                    self._again(attempt.chunk, replica, pause=False)
                replica.lost.clear()
            self._dispatch()
            for answer in self.replicas.turn(self.call.deadline, wake_at=self._wake_at()):
                self._settle(answer)
            if self.call.deadline.elapsed_s >= log_at and not self.call.deadline.passed:
                log_at += self.replicas.timing.log_every_s
                logger.info(
                    "teacher: %d of %d requests not answered after %.0f s; waiting %.0f s more at most; %s",
                    self._unanswered(),
                    total,
                    self.call.deadline.elapsed_s,
                    self.call.deadline.left_s,
                    self.replicas.describe(),
                )

    def _unanswered(self) -> int:
        return len(self.call.waiting) + sum(len(replica.inflight) + len(replica.lost) for replica in self.replicas)

    def _wake_at(self) -> float:
        """When a request that waits may be sent. Room on a replica comes with a message, which wakes us anyhow."""
        now = time.monotonic()
        times = [chunk.not_before for chunk in self.call.waiting]
        times += [replica.usable_at for replica in self.replicas.up] if times else []
        return min((t for t in times if t > now), default=now + MAX_POLL_S)

    def _dispatch(self) -> None:
        """Send what is due to whoever has room."""
        now, was_cut = time.monotonic(), False
        for chunk in list(self.call.waiting):
            if chunk.not_before > now:
                continue
            replica = self._choose(chunk, now)
            if replica is None or replica.info is None:
                continue
            _refuse_beyond(self.call.batch, replica.model, replica.address)
            caps = self.call.caps(self._max_tokens, common_limits([replica.info.limits]))
            self.call.waiting.remove(chunk)
            if caps.fits(*chunk.size):
                self._send(chunk, replica, now)
            else:
                self.call.cut(chunk.rows, caps, chunk.prefer)  # it was cut before this replica had told its limits
                was_cut = True
        if was_cut:
            self._dispatch()

    def _choose(self, chunk: Chunk, now: float) -> Replica | None:
        """The replica with room that owes the fewest tokens; the one with the rest of the prompt, if it was cut."""
        up = self.replicas.up
        home = self.call.homes.get(chunk.family) if chunk.family is not None else None
        home = next((replica for replica in up if replica.address == chunk.prefer), home)
        if home in up and home is not None and home.address != chunk.avoid:
            up = [home]
        elif len(up) > 1:
            up = [replica for replica in up if replica.address != chunk.avoid]
        free = [replica for replica in up if replica.usable_at <= now and len(replica.inflight) < self._depth]
        return min(free, key=lambda replica: replica.outstanding_tokens, default=None)

    def _send(self, chunk: Chunk, replica: Replica, now: float, *, prefetch_s: float | None = None) -> None:
        batch, question = self.call.batch, self.call.question(chunk)
        budget_s = self.call.deadline.attempt_s() if prefetch_s is None else prefetch_s
        request_id = new_id()
        body = encode_request(
            (ScoreRequest if prefetch_s is None else PrefetchRequest)(
                id=request_id,
                client=self._name,
                budget_ms=max(1, int(1000 * budget_s)),
                lengths=_bin(question.lengths, np.int32),
                starts=_bin(question.starts, np.int32),
                ids=_bin(question.ids, np.int32),
                topk=batch.topk,
                temperature=float(batch.temperature),
                expect=self.replicas.pinned,
                num_candidates=batch.num_candidates,
                candidates=_bin(question.candidates, np.int32) if question.candidates is not None else memoryview(b""),
            )
        )
        attempt = Attempt(
            chunk=chunk,
            question=question,
            digest=digest(*question.arrays()),
            topk=batch.topk,
            budget_s=budget_s,
            sent_at=now,
            ends_at=now + budget_s + min(0.5, 0.1 * budget_s),  # the teacher's own `expired` should come first
            boot=replica.boot,
        )
        if not replica.send_score(request_id, body, attempt):
            self.call.waiting.insert(0, chunk)
            return
        self.call.stats.requests += 1
        if chunk.family is not None:
            self.call.homes[chunk.family] = replica

    def _again(self, chunk: Chunk, replica: Replica, *, pause: bool) -> None:
        """Queue a request that got no values, elsewhere if possible."""
        if chunk.bad_replies > _MAX_BAD_REPLIES:
            raise BadReply(
                f"{chunk.bad_replies} replies in a row to one request were wrong, the last from {replica.describe()}"
            )
        chunk.failures += 1
        chunk.avoid = replica.address
        chunk.not_before = time.monotonic() + (self.replicas.backoff.pause_s(chunk.failures) if pause else 0.0)
        self.call.waiting.insert(0, chunk)
        self.call.stats.retries += 1

    # ------------------------------------------------------------------------------------------------ answers

    def _settle(self, answer: Answer) -> None:
        """Take the values of a reply, or decide what its refusal means."""
        replica, chunk, reply = answer.replica, answer.attempt.chunk, answer.reply
        if reply.status == "ok":
            self._take(answer)
            return
        what = f"{replica.address}: {clip(reply.message) or reply.status}"
        after_s = min(reply.retry_after_ms / 1000, _MAX_RETRY_AFTER_S)
        if reply.status == "busy" or (reply.status == "error" and reply.retryable):
            logger.info("teacher %s, %s [%s]; again in %.1f s or elsewhere", reply.status, what, reply.code, after_s)
            if reply.code in _NOT_UP:
                replica.ask_again()
            replica.spare(after_s, f"{reply.status}: {clip(reply.message)} [{clip(reply.code)}]")
            self._again(chunk, replica, pause=True)
        elif reply.status == "draining":
            logger.info("teacher draining, %s", what)
            replica.ask_again()
            self._again(chunk, replica, pause=True)
        elif reply.status == "expired":
            self._again(chunk, replica, pause=True)
        elif reply.code in _MISMATCH_CODES:
            raise TeacherMismatch(f"{what} [{clip(reply.code)}]")
        else:
            raise RequestRefused(clip(reply.code), what)

    def _take(self, answer: Answer) -> None:
        replica, attempt, reply, raw = answer
        assert self.replicas.pinned is not None, "a replica was up before anything was pinned"
        try:
            values = check_reply(
                reply,
                raw,
                attempt.question,
                digest=attempt.digest,
                expect=self.replicas.pinned,
                vocab_size=replica.model.vocab_size,
                topk=self.call.batch.topk,
                names=attempt.chunk.rows,
            )
        except TeacherMismatch as e:
            raise TeacherMismatch(f"{replica.address}: {e} (by {self.replicas.pinned_by})") from None
        except BadReply as e:
            attempt.chunk.bad_replies += 1
            if attempt.chunk.bad_replies > _MAX_BAD_REPLIES:
                raise BadReply(f"{replica.address}, {attempt.chunk.bad_replies} times in a row: {e}") from None
            replica.fail(f"a reply that failed a check: {e}")
            self._again(attempt.chunk, replica, pause=False)
            return
        replica.worked()
        self.call.store(attempt.chunk, values)
        stats = self.call.stats
        stats.queue_ms = max(stats.queue_ms, reply.queue_ms)
        stats.score_ms += reply.score_ms
        stats.cached += reply.cached_rows

    def _sum_up(self) -> None:
        stats = self.call.stats
        stats.seconds = self.call.deadline.elapsed_s
        for counts in (replica.counts for replica in self.replicas):
            stats.late_replies += counts.late_replies
            stats.faults += counts.faults
            stats.boot_changes += counts.boot_changes
            stats.sent_bytes += counts.sent_bytes
            stats.received_bytes += counts.received_bytes
        self.call.row_errors.sort(key=lambda error: error.row)

    def _too_late(self, total: int) -> TeacherUnavailable:
        stats = self.call.stats
        return TeacherUnavailable(
            f"teacher did not answer in {self.call.deadline.timeout_s:.1f} s ({stats.rows} rows, {stats.tokens} "
            f"tokens; {self._unanswered()} of {total} requests open, {stats.retries} retries): "
            f"{self.replicas.describe()}; raise teacher.timeout_s or lower teacher.max_tokens_per_request"
        )


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
