"""Which rows are scored next, and which requests are let in: a data structure without sockets, threads or a clock.

The front offers jobs, asks for batches and tells when a job is over. A batch has one (topk, temperature, candidates per
position), fits the token budget and is shared by all clients that wait; the client that had the fewest tokens so far
comes first.

Not covered: priorities; a client's own requests are served in their order.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from opd.serving.job import Job, Piece

MIN_RETRY_MS, MAX_RETRY_MS, DEFAULT_RETRY_MS = 20, 30_000, 1_000


class Refusal(NamedTuple):
    """Why a job was not let in, and when to try again."""

    code: str
    message: str
    retry_after_ms: int


@dataclass(frozen=True)
class Batch:
    """What one call of the scorer gets: rows of one or several jobs."""

    seq: int
    topk: int
    temperature: float
    num_candidates: int
    pieces: list[Piece]
    alone: bool = False  # one row, because it may have killed a worker

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def num_rows(self) -> int:
        return sum(piece.hi - piece.lo for piece in self.pieces)


@dataclass
class _Lane:
    """The waiting jobs of one client."""

    served: int  # tokens, on the queue's clock
    jobs: deque[Job] = field(default_factory=deque)


class Queue:
    """Jobs that were let in and are not over yet."""

    def __init__(self, *, max_tokens: int, max_reply_bytes: int, max_jobs: int = 8192):
        self.max_tokens = max_tokens  # held at once, by all clients; one client gets half
        self.max_reply_bytes = max_reply_bytes
        self.max_jobs = max_jobs
        self.tokens = 0  # held: waiting or being scored
        self.reply_bytes = 0
        self._client_tokens: Counter[str] = Counter()
        self._client_bytes: Counter[str] = Counter()
        self._lanes: dict[str, _Lane] = {}
        self._solo: deque[Piece] = deque()  # rows that were with a worker when it died: each goes alone
        self._open: dict[int, Job] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, number of the job)
        self._waiting = 0  # tokens not handed out yet
        self._count = 0
        self._clock = 0  # tokens served to the client that comes first
        self._speed = 0.0  # tokens per second, 0 until measured

    def offer(
        self, job: Job, now: float, *, unsent: int = 0, client_unsent: int = 0, hold: bool = False
    ) -> Refusal | None:
        """Let a job in, or say why not.

        Args:
            job: any size; when nothing else is held it is always let in.
            now: monotonic seconds.
            unsent: reply bytes that peers have not taken yet, all clients; they occupy memory like queued replies.
            client_unsent: the same for this client.
            hold: none of its rows is handed out before `release`.
        """
        refusal = self._refuse(job, now, unsent, client_unsent)
        if refusal is not None:
            return refusal
        job.held_tokens = job.tokens
        self.tokens += job.held_tokens
        self.reply_bytes += job.reply_bytes
        self._client_tokens[job.client] += job.held_tokens
        self._client_bytes[job.client] += job.reply_bytes
        self._count += 1
        job.number = self._count
        self._open[job.number] = job
        heapq.heappush(self._deadlines, (job.deadline, job.number))
        if not hold:
            self.release(job)
        return None

    def release(self, job: Job) -> None:
        """From now on the rows of a job are handed out; it may have fewer than when it was offered."""
        if not job.exhausted:
            job.in_line = True
            self._waiting += job.tokens_left
            self._lanes.setdefault(job.client, _Lane(self._clock)).jobs.append(job)

    def _refuse(self, job: Job, now: float, unsent: int, client_unsent: int) -> Refusal | None:
        if len(self._open) >= self.max_jobs:
            return self._busy("queue_full", f"{len(self._open)} requests are waiting", 0)
        if self.tokens and self.tokens + job.tokens > self.max_tokens:
            message = f"{self.tokens} tokens are waiting, {job.tokens} more would be above {self.max_tokens}"
            return self._busy("queue_full", message, self.tokens + job.tokens - self.max_tokens)
        mine = self._client_tokens[job.client]
        if mine and mine + job.tokens > self.max_tokens // 2:
            message = f"{mine} tokens of this client are waiting; one client may have {self.max_tokens // 2}"
            return self._busy("client_full", message, mine + job.tokens - self.max_tokens // 2)
        refusal = self.refuse_reply(job, unsent=unsent, client_unsent=client_unsent)
        if refusal is not None:
            return refusal
        wait_s = (self.tokens + job.tokens) / self._speed if self._speed else 0.0
        if self.tokens and now + wait_s > job.deadline:  # with nothing held it goes in, else a bad guess would stay
            message = f"the answer would take about {wait_s:.1f} s, the budget is {job.deadline - now:.1f} s"
            return self._busy("too_slow", message, self.tokens)
        return None

    def refuse_reply(self, job: Job, *, unsent: int, client_unsent: int) -> Refusal | None:
        """Why there is no memory for this job's reply, which holds for one whose values are all known, too."""
        held_bytes, client_bytes = self.reply_bytes + unsent, self._client_bytes[job.client] + client_unsent
        if held_bytes and held_bytes + job.reply_bytes > self.max_reply_bytes:
            message = f"replies of {held_bytes} bytes are pending, {job.reply_bytes} more would be too many"
            return self._busy("reply_memory", message, 0)
        if client_bytes and client_bytes + job.reply_bytes > self.max_reply_bytes // 2:
            message = f"replies of {client_bytes} bytes are pending for this client; it may have half of the memory"
            return self._busy("reply_memory", message, 0)
        return None

    def _busy(self, code: str, message: str, excess_tokens: int) -> Refusal:
        wait_ms = int(1000 * excess_tokens / self._speed) if self._speed and excess_tokens else DEFAULT_RETRY_MS
        return Refusal(code, message, min(max(wait_ms, MIN_RETRY_MS), MAX_RETRY_MS))

    def next_batch(self, budget: int, *, full_only: bool = False) -> Batch | None:
        """The rows to score next, in at most `budget` tokens (a single longer row goes alone).

        Args:
            full_only: only if there is work for a whole batch: what waits a little may be joined by more.
        """
        while self._solo:
            suspect = self._solo.popleft()
            if suspect.job.open:
                return self._batch(suspect.job, [suspect], alone=True)
        if full_only and self._waiting < budget:
            return None
        order = [(lane.served, number, client) for number, (client, lane) in enumerate(self._lanes.items())]
        heapq.heapify(order)
        pieces: dict[int, Piece] = {}
        leader: Job | None = None
        room = budget
        while order and room > 0:
            _, number, client = heapq.heappop(order)
            lane = self._lanes[client]
            job = lane.jobs[0]
            if leader is None:
                leader, self._clock = job, lane.served
            if job.group != leader.group:
                continue
            piece = job.take(room, budget // max(len(self._lanes), 1), first=not pieces)
            if piece is None:
                continue
            room -= piece.tokens
            self._waiting -= piece.tokens
            lane.served += piece.tokens
            before = pieces.get(id(job))
            pieces[id(job)] = piece if before is None else Piece(job, before.lo, piece.hi)
            if job.exhausted:
                lane.jobs.popleft().in_line = False
            if lane.jobs:
                heapq.heappush(order, (lane.served, number, client))
            else:
                del self._lanes[client]
        return self._batch(leader, list(pieces.values())) if leader is not None else None

    def _batch(self, leader: Job, pieces: list[Piece], *, alone: bool = False) -> Batch:
        self._count += 1
        return Batch(self._count, *leader.group, pieces, alone)

    @property
    def num_jobs(self) -> int:
        return len(self._open)

    @property
    def isolating(self) -> bool:
        """Whether rows are being tried one by one, because one of them may have killed a worker."""
        return bool(self._solo)

    def retry_alone(self, piece: Piece) -> None:
        """Queue each row of a piece again, as a batch of its own and before everything else."""
        self._solo.extend(Piece(piece.job, row, row + 1) for row in range(piece.lo, piece.hi))

    def expired(self, now: float) -> list[Job]:
        """Open jobs whose deadline has passed; the caller answers and closes them."""
        late = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._open):
            job = self._open.get(heapq.heappop(self._deadlines)[1])
            if job is not None:
                late.append(job)
        return late

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def open_jobs(self) -> list[Job]:
        return list(self._open.values())

    def close(self, job: Job) -> None:
        """A job is over, answered or not: what it held is free."""
        del self._open[job.number]
        job.open = False
        self.tokens -= job.held_tokens
        self.reply_bytes -= job.reply_bytes
        for held, amount in ((self._client_tokens, job.held_tokens), (self._client_bytes, job.reply_bytes)):
            held[job.client] -= amount
            if not held[job.client]:
                del held[job.client]
        if job.in_line:  # it expired while it waited
            job.in_line = False
            self._waiting -= job.tokens_left
            self._lanes[job.client].jobs.remove(job)
            if not self._lanes[job.client].jobs:
                del self._lanes[job.client]
        if len(self._deadlines) > 2 * len(self._open) + 64:  # answered long before their deadlines
            self._deadlines = [(job.deadline, number) for number, job in self._open.items()]
            heapq.heapify(self._deadlines)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn the speed of the scorer, as a moving average weighted to the last few batches."""
        speed = tokens / max(seconds, 1e-6)
        self._speed = speed if not self._speed else 0.8 * self._speed + 0.2 * speed
