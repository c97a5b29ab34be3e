"""What a teacher server counts about itself: plain numbers, for `info`, for /metrics and for the last line of the log.

The front's only thread adds to them, at most a few times for each request and batch and never for each row that went
well. Other threads may read: everything is replaced or copied in one step, and a reader at worst misses the newest
request. Nothing here knows of sockets or of Prometheus, so it costs the same whether anybody looks or not.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

from opd import wire

MAX_CODES = 64  # different error codes; a scorer of one's own may invent them, and each is a time series somewhere
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)


class Histogram:
    """How many values fell below each bound (`value <= bound`), and their sum."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class Counts:
    """All counters of one server since its start."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.replies: Counter[str] = Counter()  # by status; answers to info and ping are not among them
        self.errors: Counter[str] = Counter()  # by code, of whole requests: busy, draining and expired ones too
        self.row_errors: Counter[str] = Counter()  # by code, of single rows in answers that were ok otherwise
        self.worker_restarts = 0
        self.queue_s = Histogram(SECONDS)  # per request that was scored: from its arrival to the worker
        self.request_s = Histogram(SECONDS)  # the same: from its arrival to its reply
        self.score_s = Histogram(SECONDS)  # per batch: the worker's time
        self.batch_rows = Histogram(ROWS)
        self.batch_tokens = Histogram(TOKENS)  # ids of prompts and responses, as the model reads them

    def batch(self, rows: int, tokens: int, seconds: float) -> None:
        """A batch was scored."""
        self.batch_rows.observe(rows)
        self.batch_tokens.observe(tokens)
        self.score_s.observe(seconds)

    def scored(self, queue_s: float, request_s: float) -> None:
        """A request was answered with values that the worker computed."""
        self.queue_s.observe(queue_s)
        self.request_s.observe(request_s)

    def reply(self, reply: wire.Reply) -> None:
        """A reply was handed to the socket."""
        if reply.info is not None:
            return
        self.replies[reply.status] += 1
        if reply.code:
            _count(self.errors, [reply.code])
        if reply.row_errors:
            _count(self.row_errors, [code for _, code, _ in reply.row_errors])

    def counters(
        self,
        *,
        queued_requests: int,
        undeliverable: int,
        dropped: int,
        cache_hits: int | None = None,
        cache_misses: int | None = None,
    ) -> wire.Counters:
        """The same as one message, with what is counted elsewhere."""
        return wire.Counters(
            uptime_s=time.monotonic() - self.started,
            replies=dict(self.replies),
            errors=dict(self.errors),
            row_errors=dict(self.row_errors),
            batches=self.batch_rows.count,
            rows=int(self.batch_rows.sum),
            tokens=int(self.batch_tokens.sum),
            score_s=self.score_s.sum,
            scored_requests=self.queue_s.count,
            queue_s=self.queue_s.sum,
            request_s=self.request_s.sum,
            queued_requests=queued_requests,
            worker_restarts=self.worker_restarts,
            undeliverable=undeliverable,
            dropped=dropped,
            cache_hits=cache_hits,
            cache_misses=cache_misses,
        )


def _count(counter: Counter[str], codes: Iterable[str]) -> None:
    for code, number in Counter(map(wire.clip, codes)).items():
        counter[code if code in counter or len(counter) < MAX_CODES else "other"] += number
