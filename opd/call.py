"""One batch on its way through the client: what was asked, what is still to be sent, and the values that came.

TeacherClient moves the messages; nothing here opens a socket or waits. `check_batch` is the only way in for a caller's
arrays, and a row that `store` brought nothing for stays None.

Shapes: B = rows, L_i = ids of row i, N_i = its scored positions, K = topk, C = candidates per position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.checks import Values
from opd.chunks import Caps, Chunk, number, plan, prompt_digests
from opd.deadline import Deadline
from opd.errors import RowError
from opd.question import Question, ends_of, pick
from opd.replica import Replica
from opd.wire import Limits

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

    ids: np.ndarray  # int32 [S], the rows one behind the other
    ends: np.ndarray  # int64 [B + 1], where each of them ends, and before them 0
    starts: np.ndarray  # int64 [B]
    topk: int
    temperature: float
    candidates: np.ndarray | None  # int32 [N, C]

    @property
    def num_rows(self) -> int:
        return len(self.starts)

    @property
    def value_ends(self) -> np.ndarray:
        """int64 [B + 1], where each row's scored positions end."""
        return ends_of(np.diff(self.ends) - self.starts)

    @property
    def num_candidates(self) -> int:
        """C, 0 without any."""
        return 0 if self.candidates is None else int(self.candidates.shape[1])


@dataclass
class Call:
    """A batch while it is being scored."""

    batch: Batch
    deadline: Deadline
    lengths: list[int] = field(init=False)
    starts: list[int] = field(init=False)
    prompts: list[bytes] = field(init=False)  # digest of each row's prompt
    groups: list[int] = field(init=False)  # the same as numbers
    needed: list[int] = field(init=False)  # rows that have a value to get
    stats: Stats = field(init=False)
    waiting: list[Chunk] = field(default_factory=list)
    homes: dict[int, Replica] = field(default_factory=dict)  # of the prompts that were cut
    row_errors: list[RowError] = field(default_factory=list)
    columns: list[list[np.ndarray | None] | None] = field(init=False)  # by the fields of Values, then by row

    def __post_init__(self) -> None:
        batch = self.batch
        self.lengths, self.starts = np.diff(batch.ends).tolist(), batch.starts.tolist()
        self.prompts = prompt_digests(batch.ids, batch.ends.tolist(), self.starts)
        self.groups = number(self.prompts)
        self.needed = [row for row, start in enumerate(self.starts) if start < self.lengths[row]]
        tokens = len(batch.ids)
        self.stats = Stats(rows=batch.num_rows, tokens=tokens, scored=tokens - sum(self.starts))
        self.columns = [None if nothing is None else [nothing] * batch.num_rows for nothing in _no_values(batch)]
        for column in self.columns:
            if column is not None:  # a row without response needs no teacher: it has exactly 0 values
                for row in self.needed:
                    column[row] = None

    def caps(self, max_tokens: int, limits: Limits) -> Caps:
        return Caps(max_tokens, limits, self.batch.topk, self.batch.num_candidates)

    def cut(self, wanted: Sequence[int], caps: Caps, prefer: str = "") -> None:
        """Queue these rows as requests; those that no request can hold have their error now."""
        chunks, too_big = plan(wanted, self.lengths, self.starts, self.groups, caps)
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
        batch, rows = self.batch, chunk.rows
        return Question(
            np.array([self.lengths[row] for row in rows], dtype=np.int32),
            np.array([self.starts[row] for row in rows], dtype=np.int32),
            pick(batch.ids, batch.ends, rows),
            None if batch.candidates is None else pick(batch.candidates, batch.value_ends, rows),
        )

    def store(self, chunk: Chunk, values: Values) -> None:
        """Give each row a view of its part of the reply."""
        failed = {error.row for error in values.row_errors}
        spans, end = [], 0
        for row in chunk.rows:
            begin, end = end, end + self.lengths[row] - self.starts[row]
            if row not in failed:
                spans.append((row, begin, end))
        for column, array in zip(self.columns, values.arrays(), strict=True):
            if column is not None and array is not None:
                for row, begin, end in spans:
                    column[row] = array[begin:end]
        self.row_errors.extend(values.row_errors)

    def scores(self) -> Scores:
        """What the caller gets, once nothing is missing."""
        logprobs, topk_ids, topk_logprobs, candidate_logprobs = self.columns
        assert logprobs is not None
        return Scores(logprobs, topk_ids, topk_logprobs, candidate_logprobs, self.row_errors, self.stats)


def _no_values(batch: Batch) -> tuple[np.ndarray | None, ...]:
    topk = np.zeros((0, batch.topk), np.float32) if batch.topk else None
    return (
        np.zeros(0, np.float32),
        None if topk is None else topk.astype(np.int32),
        topk,
        None if batch.candidates is None else np.zeros((0, batch.num_candidates), np.float32),
    )


def check_batch(
    rows: Sequence[np.ndarray],
    starts: Any,
    topk: int,
    temperature: float,
    candidates: Sequence[np.ndarray] | None,
) -> Batch:
    """Rows and candidates as int32, each in one array.

    Raises:
        ValueError: what TeacherClient.score says.
    """
    if topk < 0 or not 0 < temperature <= 1000:
        raise ValueError(f"topk={topk} must be >= 0 and temperature={temperature} within (0, 1000]")
    start_array = np.asarray(starts)
    if start_array.shape != (len(rows),) or (len(rows) and start_array.dtype.kind not in "iu"):
        what = f"starts {start_array}" if start_array.ndim != 1 else f"{len(start_array)} starts"
        raise ValueError(f"{len(rows)} rows and {what} of type {start_array.dtype}; write one start for each row")
    arrays = [np.asarray(row) for row in rows]
    for index, ids in enumerate(arrays):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"row {index} must be a 1-d array of integers, not {ids.dtype} {list(ids.shape)}")
    ends = ends_of(np.array([len(ids) for ids in arrays], dtype=np.int64))
    lengths = np.diff(ends)
    outside = np.flatnonzero((start_array < 1) | (start_array > lengths))
    if len(outside):
        index = outside[0]
        raise ValueError(f"row {index} starts at {start_array[index]}, outside [1, {lengths[index]}]")
    ids = _int32(arrays, "row {} has an id") if arrays else np.zeros(0, np.int32)
    batch = Batch(ids, ends, start_array.astype(np.int64), topk, temperature, None)
    return batch if candidates is None else _with_candidates(batch, candidates)


def _with_candidates(batch: Batch, candidates: Sequence[np.ndarray]) -> Batch:
    if len(candidates) != batch.num_rows:
        raise ValueError(f"{batch.num_rows} rows and {len(candidates)} arrays of candidates")
    arrays: list[np.ndarray] = []
    for index, (count, some) in enumerate(zip(np.diff(batch.value_ends).tolist(), candidates, strict=True)):
        ids = np.asarray(some)
        width = arrays[0].shape[1] if arrays else max(ids.shape[-1:], default=0)
        if ids.shape != (count, width) or not width or ids.dtype.kind not in "iu":
            raise ValueError(
                f"the candidates of row {index} must be integers [{count}, {width or 'C'}], as many for each of "
                f"its scored positions as in every other row, not {ids.dtype} {list(ids.shape)}"
            )
        arrays.append(ids)
    ids = _int32(arrays, "the candidates of row {} have an id") if arrays else np.zeros((0, 0), np.int32)
    return dataclasses.replace(batch, candidates=ids)


def _int32(arrays: Sequence[np.ndarray], what: str) -> np.ndarray:
    """Integer arrays one behind the other, at least one; `what` names the one that does not fit."""
    ids = np.concatenate(arrays)
    if ids.dtype != np.int32:
        if ids.size and (ids.max() > _MAX_ID or ids.min() < -_MAX_ID):
            index = next(i for i, a in enumerate(arrays) if a.size and (a.max() > _MAX_ID or a.min() < -_MAX_ID))
            raise ValueError(f"{what.format(index)} that does not fit 32 bits")
        ids = ids.astype(np.int32)
    return ids
