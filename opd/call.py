"""One batch on its way through the client: what was asked, what is still to be sent, and the values that came.

TeacherClient moves the messages; nothing here opens a socket or waits. `check_batch` is the only way in for a caller's
arrays, and a row that `store` brought nothing for stays None.

Shapes: B = rows, L_i = ids of row i, N_i = its scored positions, K = topk, C = candidates per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.checks import Values
from opd.chunks import Caps, Chunk, number, plan, prompt_digests
from opd.deadline import Deadline
from opd.errors import RowError
from opd.replica import Replica
from opd.wire import Limits, Question

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
    score_ms: float = 0.0  # the teachers' time on these rows, whenever it was: a kept row's is what it cost then
    cached: int = 0  # rows whose values a teacher had already


@dataclass(frozen=True)
class Scores:
    """The teacher's answer to one batch, in the order of its rows."""

    logprobs: list[np.ndarray | None]  # float32 [N_i] each; None for the rows in row_errors
    topk_ids: list[np.ndarray | None] | None  # int32 [N_i, K] each, most probable first; None when topk was 0
    topk_logprobs: list[np.ndarray | None] | None  # float32 [N_i, K] each
    candidate_logprobs: list[np.ndarray | None] | None  # float32 [N_i, C] each; None when there were no candidates
    row_errors: list[RowError]
    stats: Stats


@dataclass(frozen=True)
class Batch:
    """What a caller asks for, checked and as the wire wants it."""

    rows: list[np.ndarray]  # int32 [L_i]
    starts: list[int]
    topk: int
    temperature: float
    candidates: list[np.ndarray] | None  # int32 [N_i, C]
    num_candidates: int  # C, 0 without any

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]


@dataclass
class Call:
    """A batch while it is being scored."""

    batch: Batch
    deadline: Deadline
    lengths: list[int] = field(init=False)
    prompts: list[bytes] = field(init=False)  # digest of each row's prompt
    groups: list[int] = field(init=False)  # the same as numbers
    stats: Stats = field(init=False)
    waiting: list[Chunk] = field(default_factory=list)
    homes: dict[int, Replica] = field(default_factory=dict)  # of the prompts that were cut
    row_errors: list[RowError] = field(default_factory=list)
    values: list[Values | None] = field(init=False)  # of each row

    def __post_init__(self) -> None:
        rows, starts = self.batch.rows, self.batch.starts
        self.lengths = self.batch.lengths
        self.prompts = prompt_digests(rows, starts)
        self.groups = number(self.prompts)
        tokens = sum(self.lengths)
        self.stats = Stats(rows=len(rows), tokens=tokens, scored=tokens - sum(starts))
        # a row without response needs no teacher: it has exactly 0 values
        nothing = _no_values(self.batch)
        self.values = [None if start < length else nothing for start, length in zip(starts, self.lengths, strict=True)]

    @property
    def needed(self) -> list[int]:
        """Rows that have a value to get."""
        return [row for row, start in enumerate(self.batch.starts) if start < self.lengths[row]]

    def caps(self, max_tokens: int, limits: Limits) -> Caps:
        return Caps(max_tokens, limits, self.batch.topk, self.batch.num_candidates)

    def cut(self, wanted: Sequence[int], caps: Caps, prefer: str = "") -> None:
        """Queue these rows as requests; those that no request can hold have their error now."""
        chunks, too_big = plan(wanted, self.lengths, self.batch.starts, self.groups, caps)
        for chunk in chunks:
            chunk.prefer = prefer
        self.waiting.extend(chunks)
        for row in too_big:
            what = f"row {row} has {self.lengths[row]} ids"
            if self.batch.num_candidates:
                what += f" and {self.batch.num_candidates} candidates at each scored position"
            message = f"{what}: alone it exceeds what the teacher takes in one request"
            self.row_errors.append(RowError(row, "limit", message))

    def question(self, chunk: Chunk) -> Question:
        candidates = self.batch.candidates
        return Question(
            np.array([self.lengths[row] for row in chunk.rows], dtype=np.int32),
            np.array([self.batch.starts[row] for row in chunk.rows], dtype=np.int32),
            np.concatenate([self.batch.rows[row] for row in chunk.rows]),
            np.concatenate([candidates[row] for row in chunk.rows]) if candidates is not None else None,
        )

    def store(self, chunk: Chunk, values: Values) -> None:
        """Give each row a view of its part of the reply."""
        failed = {error.row for error in values.row_errors}
        end = 0
        for row in chunk.rows:
            begin, end = end, end + self.lengths[row] - self.batch.starts[row]
            if row not in failed:
                self.values[row] = values.part(slice(begin, end))
        self.row_errors.extend(values.row_errors)

    def scores(self) -> Scores:
        """What the caller gets, once nothing is missing."""

        def column(name: str) -> list[np.ndarray | None]:
            return [None if values is None else getattr(values, name) for values in self.values]

        return Scores(
            logprobs=column("logprobs"),
            topk_ids=column("topk_ids") if self.batch.topk else None,
            topk_logprobs=column("topk_logprobs") if self.batch.topk else None,
            candidate_logprobs=column("candidate_logprobs") if self.batch.candidates is not None else None,
            row_errors=self.row_errors,
            stats=self.stats,
        )


def _no_values(batch: Batch) -> Values:
    topk = np.zeros((0, batch.topk), np.float32)
    return Values(
        np.zeros(0, np.float32),
        topk.astype(np.int32) if batch.topk else None,
        topk if batch.topk else None,
        np.zeros((0, batch.num_candidates), np.float32) if batch.candidates is not None else None,
        [],
    )


def check_batch(
    rows: Sequence[np.ndarray],
    starts: Any,
    topk: int,
    temperature: float,
    candidates: Sequence[np.ndarray] | None,
) -> Batch:
    """Rows and candidates as contiguous int32, without a copy where they are that already.

    Raises:
        ValueError: what TeacherClient.score says.
    """
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
        arrays.append(_int32(ids, f"row {index} has an id"))
    batch = Batch(arrays, start_list, topk, temperature, None, 0)
    return batch if candidates is None else _with_candidates(batch, candidates)


def _with_candidates(batch: Batch, candidates: Sequence[np.ndarray]) -> Batch:
    if len(candidates) != len(batch.rows):
        raise ValueError(f"{len(batch.rows)} rows and {len(candidates)} arrays of candidates")
    arrays: list[np.ndarray] = []
    for index, (row, start, some) in enumerate(zip(batch.rows, batch.starts, candidates, strict=True)):
        ids = np.asarray(some)
        width = arrays[0].shape[1] if arrays else max(ids.shape[-1:], default=0)
        wanted = (len(row) - start, width)
        if ids.shape != wanted or not width or ids.dtype.kind not in "iu":
            raise ValueError(
                f"the candidates of row {index} must be integers [{wanted[0]}, {width or 'C'}], as many for each of "
                f"its scored positions as in every other row, not {ids.dtype} {list(ids.shape)}"
            )
        arrays.append(_int32(ids, f"the candidates of row {index} have an id"))
    width = arrays[0].shape[1] if arrays else 0
    return Batch(batch.rows, batch.starts, batch.topk, batch.temperature, arrays, width)


def _int32(ids: np.ndarray, what: str) -> np.ndarray:
    if ids.dtype != np.int32:
        if ids.size and (int(ids.max()) > _MAX_ID or int(ids.min()) < -_MAX_ID):
            raise ValueError(f"{what} that does not fit 32 bits")
        ids = ids.astype(np.int32)
    return np.ascontiguousarray(ids)
