"""One score request inside the server: its rows in the order of scoring, and its answer as that comes in.

The front makes a Job from a request, the queue cuts Pieces off it, the worker scores them, the front puts the values
back and, when no row is missing, sends answer(). A row is never answered with a value that `put` did not bring.

Shapes: r = rows of the job in scoring order (without those that need no model), N = scored positions, K = topk,
C = candidates per position.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from opd.errors import RowError
from opd.question import Question, ends_of, pick
from opd.serving.cache import Kept, row_key
from opd.wire import digest, reply_bytes


class Piece(NamedTuple):
    """Rows [lo, hi) of a job, in its scoring order: always neighbours, so that every array of it is a view."""

    job: Job
    lo: int
    hi: int

    @property
    def lengths(self) -> np.ndarray:
        return self.job.lengths[self.lo : self.hi]

    @property
    def starts(self) -> np.ndarray:
        return self.job.starts[self.lo : self.hi]

    @property
    def ids(self) -> np.ndarray:
        return self.job.ids[self.job.ends[self.lo] : self.job.ends[self.hi]]

    @property
    def candidates(self) -> np.ndarray | None:
        """int32 [N, C]"""
        candidates = self.job.candidates
        return None if candidates is None else candidates[self.job.value_ends[self.lo] : self.job.value_ends[self.hi]]

    @property
    def tokens(self) -> int:
        return int(self.job.ends[self.hi] - self.job.ends[self.lo])

    @property
    def num_values(self) -> int:
        return int(self.job.value_ends[self.hi] - self.job.value_ends[self.lo])

    def without(self, rows: list[int]) -> list[Piece]:
        """What is left when these rows, in ascending order, are taken out."""
        bounds = [self.lo - 1, *rows, self.hi]
        return [Piece(self.job, a + 1, b) for a, b in itertools.pairwise(bounds) if a + 1 < b]

    def digest(self) -> bytes:
        """Name of what the worker is given for this piece: it sends the same of what it really scored."""
        if self.job.is_as_asked and self.hi - self.lo == len(self.job.lengths):  # the usual case
            return self.job.digest()
        return digest(self.lengths, self.starts, self.ids, self.candidates)


class Values(NamedTuple):
    """What was computed for some rows, one after the other. Rows with an error hold NaN (and -1 for top-k ids)."""

    logprobs: np.ndarray  # float32 [N]
    topk_ids: np.ndarray | None  # int32 [N, K]
    topk_logprobs: np.ndarray | None  # float32 [N, K]
    candidate_logprobs: np.ndarray | None = None  # float32 [N, C]

    def part(self, where: slice) -> Values:
        """Some positions, as views."""
        _, *others = (array if array is None else array[where] for array in self)
        return Values(self.logprobs[where], *others)


def concatenate(parts: Sequence[Values]) -> Values:
    """One after the other; at least one, all with the same topk and candidates or none."""
    columns = [[array for array in column if array is not None] for column in zip(*parts, strict=True)]
    _, *others = (np.concatenate(column) if column else None for column in columns)
    return Values(np.concatenate(columns[0]), *others)


def blank_values(num_values: int, topk: int, num_candidates: int = 0) -> Values:
    """Values that say "none": NaN, and -1 where an id would be."""

    def missing(*shape: int) -> np.ndarray:
        return np.full((num_values, *shape), np.nan, dtype=np.float32)

    return Values(
        missing(),
        np.full((num_values, topk), -1, dtype=np.int32) if topk else None,
        missing(topk) if topk else None,
        missing(num_candidates) if num_candidates else None,
    )


def read_values(piece: Piece, frames: Sequence[Any], index: int) -> Values | None:
    """The worker's arrays for the piece with this index in its batch, as views; None if their sizes are wrong."""
    count, topk, width = piece.num_values, piece.job.topk, piece.job.question.num_candidates
    shapes = [(count,), (count, topk), (count, topk), (count, width)]
    there = [True, topk > 0, topk > 0, width > 0]
    mine = iter(frames[index * sum(there) : (index + 1) * sum(there)])
    arrays: list[np.ndarray | None] = []
    for shape, asked, dtype in zip(shapes, there, (np.float32, np.int32, np.float32, np.float32), strict=True):
        frame = next(mine, None) if asked else None
        if asked and (frame is None or frame.buffer.nbytes != 4 * math.prod(shape)):
            return None
        arrays.append(np.frombuffer(frame.buffer, dtype=dtype).reshape(shape) if frame is not None else None)
    logprobs, *others = arrays
    assert logprobs is not None
    return Values(logprobs, *others)


class Job:
    """A score request that was let in."""

    def __init__(
        self,
        question: Question,
        *,
        request_id: bytes,
        envelope: list[bytes],
        client: str,
        topk: int,
        temperature: float,
        arrived: float,
        deadline: float,
        bad_rows: list[RowError],
        model: str = "",
    ):
        self.request_id = request_id
        self.envelope = envelope
        self.client = client
        self.group = (topk, temperature, question.num_candidates)  # rows of one batch share these
        self.topk = topk
        self.model = model  # fingerprint
        self.arrived = arrived  # time.monotonic(), as is deadline
        self.deadline = deadline
        self.dispatched: float | None = None
        self.score_ms = 0.0  # its share of the worker's time, that of known rows included
        self.number = 0  # the queue's name for it, the tokens it counts for it,
        self.held_tokens = 0
        self.in_line = False  # and whether it still has rows to hand out
        self.open = True  # until its one reply was sent
        self.question = question
        self.errors = {error.row: error for error in bad_rows}

        counts = question.counts()
        scored = counts > 0  # a row whose start is its length has no position to score: answered without the model
        scored[list(self.errors)] = False
        self._rows: np.ndarray | None = None  # request row of each row in scoring order; None: the same
        self._group_ends: np.ndarray | None = None  # where rows with one prompt end, once the job had to be cut
        self._select(None if scored.all() else np.flatnonzero(scored))
        # what it occupies until it is answered; candidates twice, since their ids are held with the request
        self.reply_bytes = reply_bytes(int(counts.sum()), topk, 2 * question.num_candidates)
        self.cursor = 0  # rows before it were handed out
        self.missing = len(self.lengths)  # rows without an answer
        self._digest = b""
        self._values: Values | None = None
        self._known: dict[int, Values] = {}  # by row of the request: found in the cache
        self._keys: dict[int, bytes] = {}  # by row of the request

    def _select(self, rows: np.ndarray | None) -> None:
        """Bring the arrays into scoring order: `rows` of the request, or all of them as they are."""
        q = self.question
        self._rows = rows
        if rows is None:
            self.lengths, self.starts, self.ids, self.candidates = q.arrays()
        else:
            self.lengths, self.starts = q.lengths[rows], q.starts[rows]
            self.ids = pick(q.ids, ends_of(q.lengths), rows.tolist())
            self.candidates = None if q.candidates is None else pick(q.candidates, ends_of(q.counts()), rows.tolist())
        self.ends = ends_of(self.lengths)
        self.value_ends = ends_of(self.lengths.astype(np.int64) - self.starts)

    @property
    def is_as_asked(self) -> bool:
        """Whether the rows to score are those of the request, in its order."""
        return self._rows is None

    def digest(self) -> bytes:
        """Name of the question, which its answer has to give; computed once."""
        self._digest = self._digest or digest(*self.question.arrays())
        return self._digest

    @property
    def tokens(self) -> int:
        """Ids that the model has to read for this job."""
        return int(self.ends[-1])

    @property
    def tokens_left(self) -> int:
        return int(self.ends[-1] - self.ends[self.cursor])

    @property
    def exhausted(self) -> bool:
        """Whether every row was handed out."""
        return self.cursor == len(self.lengths)

    def row_ids(self, index: int) -> np.ndarray:
        return self.ids[self.ends[index] : self.ends[index + 1]]

    def row_digest(self, index: int) -> bytes:
        """Name of a row by its content, for the list of rows that killed a worker."""
        h = hashlib.blake2b(digest_size=16)
        h.update(int(self.starts[index]).to_bytes(8, "little"))
        h.update(self.row_ids(index).data)
        return h.digest()

    def key(self, index: int) -> bytes:
        """Name of a row's values, see row_key."""
        row = self._request_row(index)
        if row not in self._keys:
            topk, temperature, _ = self.group
            start, candidates = int(self.starts[index]), Piece(self, index, index + 1).candidates
            self._keys[row] = row_key(self.model, topk, temperature, start, self.row_ids(index), candidates)
        return self._keys[row]

    def recall(self, find: Callable[[bytes], Kept | None]) -> None:
        """Take the values of rows that `find` knows by their keys: what is left has to be scored."""
        assert self.cursor == 0, "a job was cut before its known rows were taken out"
        left = []
        for index in range(len(self.lengths)):
            kept = find(self.key(index))
            row = self._request_row(index)
            if kept is None:
                left.append(row)
            else:
                self._known[row] = kept.values
                self.score_ms += kept.score_ms
        if len(left) < len(self.lengths):
            self._select(np.array(left, dtype=np.int64))
        self.missing = len(left)

    @property
    def num_known(self) -> int:
        """Rows whose values were found in the cache."""
        return len(self._known)

    def take(self, room: int, share: int, *, first: bool) -> Piece | None:
        """Hand out the next rows: all that are left, or as many as fit without parting rows that share a prompt.

        Args:
            room: tokens that the batch has left.
            share: tokens that this job's client should have of it, if its rows allow it.
            first: the batch is empty, so at least one row must go, however long it is.
        """
        if self.tokens_left <= min(room, share):
            return self._hand_out(len(self.lengths))
        if self._group_ends is None:
            self._put_prompts_together()
        hi = self._fit(min(room, share))
        if hi == self.cursor:
            hi = self._fit(room, at_most_one_group=True)
        if hi == self.cursor and first:
            hi = max(self.cursor + 1, self._rows_within(room))
        return self._hand_out(hi) if hi > self.cursor else None

    def _hand_out(self, hi: int) -> Piece:
        piece = Piece(self, self.cursor, hi)
        self.cursor = hi
        return piece

    def _rows_within(self, room: int) -> int:
        return int(np.searchsorted(self.ends, self.ends[self.cursor] + room, side="right")) - 1

    def _fit(self, room: int, *, at_most_one_group: bool = False) -> int:
        """The last end of a prompt group within `room` tokens, or the cursor."""
        assert self._group_ends is not None
        hi = self._rows_within(room)
        ends = self._group_ends[(self._group_ends > self.cursor) & (self._group_ends <= hi)]
        if len(ends) == 0:
            return self.cursor
        return int(ends[0] if at_most_one_group else ends[-1])

    def _put_prompts_together(self) -> None:
        """Order the rows so that those with the same prompt are neighbours; a scorer can then compute it once."""
        assert self.cursor == 0, "a job's order changed after a part of it was handed out"
        groups: dict[tuple[int, int], list[int]] = {}
        for row, start in enumerate(self.starts.tolist()):
            prompt = self.row_ids(row)[:start]
            groups.setdefault((start, zlib.crc32(prompt.data)), []).append(row)
        self._group_ends = np.cumsum([len(rows) for rows in groups.values()])
        order = np.array([row for rows in groups.values() for row in rows])
        if not np.array_equal(order, np.arange(len(order))):
            self._select(order if self._rows is None else self._rows[order])

    def put(self, piece: Piece, values: Values, errors: list[RowError]) -> None:
        """Take in the worker's values for a piece; `errors` count rows from the start of the piece."""
        for error in errors:
            row = self._request_row(piece.lo + error.row)
            self.errors[row] = RowError(row, error.code, error.message)
        self.missing -= piece.hi - piece.lo
        if piece.hi - piece.lo == len(self.lengths):
            self._values = values  # the usual case: all in one piece, no copy
            return
        if self._values is None:
            self._values = self._blank(int(self.value_ends[-1]))
        where = slice(self.value_ends[piece.lo], self.value_ends[piece.hi])
        for mine, new in zip(self._values, values, strict=True):
            if mine is not None and new is not None:
                mine[where] = new

    def fail_row(self, index: int, code: str, message: str) -> None:
        """Give up on one row; `index` counts in scoring order."""
        row = self._request_row(index)
        self.errors[row] = RowError(row, code, f"row {row} {message}")
        self.missing -= 1

    def _request_row(self, index: int) -> int:
        return index if self._rows is None else int(self._rows[index])

    def answer(self) -> tuple[Values, list[RowError]]:
        """The values in the order of the request, once no row is missing."""
        assert self.missing == 0, "a job was answered before all of its rows were"
        errors = [self.errors[row] for row in sorted(self.errors)]
        values = self._values if self._values is not None else self._blank(int(self.value_ends[-1]))
        if self._rows is None:
            return values, errors
        parts = dict(self._known)
        for index, row in enumerate(self._rows.tolist()):
            where = slice(self.value_ends[index], self.value_ends[index + 1])
            parts[row] = values.part(where)
        nothing = [(row, count) for row, count in enumerate(self.question.counts().tolist()) if row not in parts]
        parts |= {row: self._blank(count) for row, count in nothing}
        return concatenate([parts[row] for row in range(len(parts))]), errors

    def _blank(self, num_values: int) -> Values:
        return blank_values(num_values, self.topk, self.question.num_candidates)
