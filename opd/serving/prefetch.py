"""Rows that are scored when nobody waits: their values go to the cache, where a later request finds them.

A prefetch costs those who wait at most one batch: one is with the worker at a time, only when no request is, and what
waits here is counted apart from the queue. Nobody is owed anything, so what is late or unlucky is forgotten.

Not covered: fairness between clients beyond half of the room for each; the oldest prefetch goes first.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable

from opd.serving.job import Job, Piece
from opd.serving.queue import DEFAULT_RETRY_MS, Batch, Refusal

SHARE = 4  # rows to prefetch may hold this part of the tokens that requests may hold
MAX_JOBS = 512
MAX_UNLUCKY = 65_536


class Prefetcher:
    """Jobs without a reply. Their `open` is False from the start: no value is ever put into one."""

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens // SHARE
        self.tokens = 0  # ids that wait,
        self._client_tokens: Counter[str] = Counter()  # by client,
        self._candidates = 0  # and candidate ids of the jobs that wait
        self._jobs: deque[Job] = deque()
        self._next_expiry = math.inf  # no job that waits has an earlier deadline
        self._count = 0
        self._keys: set[bytes] = set()  # of the rows that are with the worker
        self._unlucky: dict[bytes, None] = {}  # rows that were with a worker when it died: never tried again here

    def offer(self, job: Job, now: float) -> Refusal | None:
        """Let a job in, or say why not."""
        job.open = False
        if self._next_expiry <= now:
            self._keep([waiting for waiting in self._jobs if waiting.deadline > now])
        if len(self._jobs) >= MAX_JOBS or self.tokens + job.tokens > self.max_tokens:
            message = f"{self.tokens} tokens wait to be prefetched, {job.tokens} more would be above {self.max_tokens}"
            return Refusal("prefetch_full", message, DEFAULT_RETRY_MS)
        candidates, mine = self._candidates + _num_candidates(job), self._client_tokens[job.client]
        if candidates > SHARE * self.max_tokens:
            message = f"{candidates} candidate ids would wait with the rows to prefetch, {SHARE * self.max_tokens} may"
            return Refusal("prefetch_full", message, DEFAULT_RETRY_MS)
        if mine + job.tokens > self.max_tokens // 2:
            message = f"{mine} tokens of this client wait to be prefetched; one client may have {self.max_tokens // 2}"
            return Refusal("prefetch_full", message, DEFAULT_RETRY_MS)
        self._append(job)
        return None

    def _keep(self, jobs: Iterable[Job]) -> None:
        """Forget what waits besides these."""
        self._jobs.clear()
        self.tokens = self._candidates = 0
        self._client_tokens.clear()
        self._next_expiry = math.inf
        for job in jobs:
            self._append(job)

    def _append(self, job: Job) -> None:
        self._jobs.append(job)
        self._hold(job, job.tokens_left)
        self._candidates += _num_candidates(job)
        self._next_expiry = min(self._next_expiry, job.deadline)

    def _hold(self, job: Job, tokens: int) -> None:
        """Count tokens that wait; fewer than 0 are no longer there."""
        self.tokens += tokens
        self._client_tokens[job.client] += tokens
        if not self._client_tokens[job.client]:
            del self._client_tokens[job.client]

    def next_batch(self, budget: int, now: float, skip: Callable[[Job, int], bool]) -> Batch | None:
        """What to score next, in at most `budget` tokens; `over` must be called before the next one.

        Args:
            skip: whether a row (its index in scoring order) need not or must not be scored.
        """
        pieces: list[Piece] = []
        room = budget
        while self._jobs and room > 0:
            job = self._jobs[0]
            if job.exhausted or job.deadline <= now:
                self._jobs.popleft()
                self._hold(job, -job.tokens_left)
                self._candidates -= _num_candidates(job)
                continue
            if pieces and job.group != pieces[0].job.group:
                break
            piece = job.take(room, budget, first=not pieces)
            if piece is None:
                break
            self._hold(job, -piece.tokens)
            for part in piece.without([row for row in range(piece.lo, piece.hi) if self._knows(job, row, skip)]):
                pieces.append(part)
                room -= part.tokens
        if not pieces:
            return None
        self._count += 1
        return Batch(-self._count, *pieces[0].job.group, pieces)  # negative: the queue counts upwards

    def _knows(self, job: Job, row: int, skip: Callable[[Job, int], bool]) -> bool:
        """Whether a row is left out; one that is not is with the worker from here on."""
        key = job.key(row)
        if key in self._keys or key in self._unlucky or skip(job, row):
            return True
        self._keys.add(key)
        return False

    def is_computing(self, job: Job) -> bool:
        """Whether the worker has rows of this job already."""
        return bool(self._keys) and any(job.key(row) in self._keys for row in range(len(job.lengths)))

    def over(self, *, lost: bool = False) -> None:
        """The batch came back, or the worker was lost with it."""
        if lost:
            self._unlucky.update(dict.fromkeys(self._keys))
            while len(self._unlucky) > MAX_UNLUCKY:
                del self._unlucky[next(iter(self._unlucky))]
        self._keys.clear()

    def clear(self) -> None:
        """Forget what waits."""
        self._keep([])


def _num_candidates(job: Job) -> int:
    return 0 if job.candidates is None else job.candidates.size
