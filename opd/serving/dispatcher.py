"""Batches: what the worker gets, what becomes of its answers, and of the rows that it had when it was lost.

The front puts jobs in and is told of each one that is complete. A row is computed at most once at a time for those who
prefetch and those who wait: a request that asks for rows which the worker has as a prefetch is held until that batch is
back, which costs it nothing, since the worker could not have begun with it sooner.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import zmq

from opd.errors import RowError
from opd.serving.cache import ResultCache
from opd.serving.counts import Counts
from opd.serving.job import Job, read_values
from opd.serving.prefetch import Prefetcher
from opd.serving.queue import Batch, Queue, Refusal
from opd.serving.supervisor import Supervisor
from opd.serving.suspects import Suspects

logger = logging.getLogger(__name__)


class Dispatcher:
    """See the module. `on_complete` is called with each open job of which no row is missing any more."""

    def __init__(
        self,
        queue: Queue,
        supervisor: Supervisor,
        counts: Counts,
        *,
        batch_tokens: int,
        cache_bytes: int,
        on_complete: Callable[[Job], None],
    ):
        self.cache = ResultCache(cache_bytes)
        self.prefetcher = Prefetcher(queue.max_tokens)
        self._queue, self._supervisor, self._counts = queue, supervisor, counts
        self._batch_tokens = batch_tokens
        self._on_complete = on_complete
        self._suspects = Suspects()
        self._flying: dict[int, tuple[Batch, list[bytes]]] = {}  # by seq: what the worker has, its pieces' digests
        self._held: list[Job] = []  # until the prefetch that is with the worker is back

    @property
    def idle(self) -> bool:
        """Whether the worker has nothing and nobody waits."""
        return not self._flying and not self._queue.num_jobs

    def admit(self, job: Job, now: float, *, unsent: int, client_unsent: int) -> Refusal | None:
        """Take a job in, or say why not; one whose rows are all known is complete when this returns."""
        self._recall(job)
        if not job.missing:
            return self._queue.refuse_reply(job, unsent=unsent, client_unsent=client_unsent)
        hold = self.prefetcher.is_computing(job)
        refusal = self._queue.offer(job, now, unsent=unsent, client_unsent=client_unsent, hold=hold)
        if refusal is None and hold:
            self._held.append(job)
        return refusal

    def _recall(self, job: Job) -> None:
        if len(self.cache):
            job.recall(self.cache.get)

    def dispatch(self, now: float) -> None:
        """Keep the worker busy: a second batch waits in its link when there is a full one, else more may join it."""
        while self._supervisor.state == "ready" and len(self._flying) < (1 if self._kills_in_doubt() else 2):
            batch = self._queue.next_batch(self._batch_tokens, full_only=bool(self._flying))
            if batch is None:
                break
            parts, batch = batch.pieces, self._suspects.without_poison(batch, now)
            for piece in parts:
                self._tell_if_complete(piece.job)
            if batch.pieces:
                self._hand_over(batch, now)
        if self._supervisor.state == "ready" and not self._flying:
            batch = self.prefetcher.next_batch(self._batch_tokens, now, self._need_not_prefetch)
            if batch is not None:
                self._hand_over(batch, now)

    def _hand_over(self, batch: Batch, now: float) -> None:
        for piece in batch.pieces:
            if piece.job.dispatched is None:
                piece.job.dispatched = now
        self._supervisor.send(batch, now)
        # after sending, so that the worker does not wait for the digests
        self._flying[batch.seq] = (batch, [piece.digest() for piece in batch.pieces])
        for piece in batch.pieces:
            if piece.job.open:
                piece.job.digest()
            if self.cache.max_bytes:
                for row in range(piece.lo, piece.hi):
                    piece.job.key(row)

    def _need_not_prefetch(self, job: Job, row: int) -> bool:
        return job.key(row) in self.cache or self._suspects.suspects(job.row_digest(row))

    def _kills_in_doubt(self) -> bool:
        """While rows are tried alone nothing else may be with the worker, else the blame would be shared."""
        return self._queue.isolating or any(batch.alone for batch, _ in self._flying.values())

    def on_scores(self, scores: Any, frames: list[zmq.Frame], now: float) -> None:
        """Give a batch's values to its jobs, after checking that they belong to what was asked."""
        if scores.seq not in self._flying:
            self._supervisor.lose("it answered a batch that it was not given", now)
            return
        batch, digests = self._flying[scores.seq]
        parts = [read_values(piece, frames, index) for index, piece in enumerate(batch.pieces)]
        if scores.digests != digests or None in parts:
            self._supervisor.lose("it answered for other ids than it was given", now)
            return
        del self._flying[scores.seq]
        errors: dict[int, list[RowError]] = defaultdict(list)
        for number, row, code, message in scores.errors:
            errors[number].append(RowError(row, code, message))
        if scores.seconds:
            self._queue.observe(batch.tokens, scores.seconds)
            self._counts.batch(batch.num_rows, batch.tokens, scores.seconds)
        for number, (piece, values) in enumerate(zip(batch.pieces, parts, strict=True)):
            assert values is not None
            self._suspects.acquit(piece)
            share_ms = 1000 * scores.seconds * piece.tokens / batch.tokens
            if piece.job.open:
                piece.job.score_ms += share_ms
                piece.job.put(piece, values, errors[number])
                self._tell_if_complete(piece.job)
            self.cache.put(piece, values, errors[number], share_ms)  # after the reply, which nobody should wait for
        if batch.seq < 0:
            self._prefetch_is_over(lost=False)
        logger.info(
            "batch %d: %d rows of %d requests, %d tokens, %.1f ms; %d tokens queued",
            *(batch.seq, batch.num_rows, len(batch.pieces), batch.tokens, scores.seconds * 1000, self._queue.tokens),
        )

    def isolate(self, reason: str, now: float) -> None:
        """The worker was lost: every row that was with it is suspect, and goes alone to the next one."""
        alone = sum(batch.num_rows for batch, _ in self._flying.values()) == 1
        pieces = [piece for batch, _ in self._flying.values() for piece in batch.pieces if piece.job.open]
        self._flying = {}
        self._counts.worker_restarts += 1
        self._suspects.blame(pieces, reason, now, alone=alone)
        for piece in pieces:
            self._queue.retry_alone(piece)
        self._prefetch_is_over(lost=True)

    def _prefetch_is_over(self, *, lost: bool) -> None:
        self.prefetcher.over(lost=lost)
        held, self._held = self._held, []
        for job in held:
            if job.open:
                self._recall(job)
                self._queue.release(job)
                self._tell_if_complete(job)

    def _tell_if_complete(self, job: Job) -> None:
        if not job.missing:
            self._on_complete(job)
