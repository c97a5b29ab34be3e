"""What a request asks: the arrays of a `score` or `prefetch`, and whether they belong together and fit the model.

The client makes a Question and sends it (opd/wire.py is how); the server unpacks the same one and checks it.

Shapes: n = rows, S = all ids of all rows, N = all scored positions = sum(lengths - starts), C = candidates per
position. A row whose start is out of range has no scored positions, and so no candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from opd.errors import RowError, WireError
from opd.wire import Limits, ModelInfo, PrefetchRequest, ScoreRequest, clip, from_bin, reply_bytes


class Question(Struct, frozen=True):
    """The arrays of a request after the checks that need no model."""

    lengths: np.ndarray  # int32 [n]
    starts: np.ndarray  # int32 [n]
    ids: np.ndarray  # int32 [S]
    candidates: np.ndarray | None = None  # int32 [N, C]; None when C is 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """What digest() takes."""
        return self.lengths, self.starts, self.ids, self.candidates

    @property
    def num_candidates(self) -> int:
        """C"""
        return 0 if self.candidates is None else int(self.candidates.shape[1])

    def counts(self) -> np.ndarray:
        """Scored positions of each row, int64 [n]; 0 where `starts` is out of range."""
        counts = self.lengths.astype(np.int64) - self.starts
        counts[(self.starts < 1) | (counts < 0)] = 0
        return counts

    def rows(self) -> list[np.ndarray]:
        """The ids of each row, as views."""
        ends = ends_of(self.lengths).tolist()
        return [self.ids[begin:end] for begin, end in itertools.pairwise(ends)]


def ends_of(lengths: np.ndarray) -> np.ndarray:
    """Where each row ends in an array that has all rows one behind the other, and before them 0: int64 [n + 1]."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def pick(array: np.ndarray, ends: Sequence[int] | np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Some rows of such an array, one behind the other; a view where they are neighbours."""
    if not len(rows):
        return array[:0]
    first, last = rows[0], rows[-1]
    if list(rows) == list(range(first, last + 1)):
        return array[ends[first] : ends[last + 1]]
    return np.concatenate([array[ends[row] : ends[row + 1]] for row in rows])


def unpack(request: ScoreRequest | PrefetchRequest, limits: Limits) -> Question:
    """View the arrays of a request and check that they belong together.

    Raises:
        WireError: code schema (arrays that do not fit each other), empty_batch or limit.
    """
    lengths = from_bin(request.lengths, np.int32, "lengths")
    starts = from_bin(request.starts, np.int32, "starts")
    ids = from_bin(request.ids, np.int32, "ids")
    if len(lengths) == 0:
        raise WireError("empty_batch", "the request has no rows")
    if len(lengths) > limits.max_rows:
        raise WireError("limit", f"{len(lengths)} rows in one request; this server takes {limits.max_rows}")
    if len(starts) != len(lengths):
        raise WireError("schema", f"{len(lengths)} lengths but {len(starts)} starts")
    if lengths.min() < 0 or int(lengths.sum(dtype=np.int64)) != len(ids):
        raise WireError("schema", f"lengths add up to {lengths.sum(dtype=np.int64)} but there are {len(ids)} ids")
    question = Question(lengths, starts, ids)
    scored, width = int(question.counts().sum()), request.num_candidates
    nbytes = reply_bytes(scored, request.topk, width)
    if nbytes > limits.max_reply_bytes:
        raise WireError(
            "limit", f"the reply would have {nbytes} bytes; this server sends {limits.max_reply_bytes} at most"
        )
    candidates = from_bin(request.candidates, np.int32, "candidates")
    if len(candidates) != scored * width:
        message = f"{len(candidates)} candidates, where {scored} scored positions of {width} have {scored * width}"
        raise WireError("schema", message)
    return Question(lengths, starts, ids, candidates.reshape(scored, width)) if width else question


def check_model(request: ScoreRequest | PrefetchRequest, model: ModelInfo) -> None:
    """What a request asks of the model as a whole.

    Raises:
        WireError: code model_mismatch, limit, candidates_unsupported or temperature.
    """
    if request.expect is not None:
        for name in ("model", "tokenizer"):
            want, have = getattr(request.expect, name), getattr(model, name)
            if want != have:
                message = f"the client expects the {name} {clip(want)!r}, this teacher has {have!r}"
                raise WireError("model_mismatch", message)
    if request.topk > model.max_topk:
        raise WireError("limit", f"topk {request.topk} is above this teacher's {model.max_topk}")
    if request.num_candidates and not model.max_candidates:
        message = f"this teacher's backend {model.backend} scores sampled ids and its own top-k, no candidates; use hf"
        raise WireError("candidates_unsupported", message)
    if request.num_candidates > model.max_candidates:
        message = f"{request.num_candidates} candidates per position; this teacher takes {model.max_candidates}"
        raise WireError("limit", message)
    if request.temperature != 1.0 and not model.temperature:
        message = f"this teacher's backend {model.backend} scores at temperature 1 only, not {request.temperature:g}"
        raise WireError("temperature", message)


def check_rows(question: Question, model: ModelInfo) -> list[RowError]:
    """Rows that this model cannot score, each with its reason; the others of the batch are fine."""
    in_range = (question.lengths <= model.max_length) & (question.starts >= 1) & (question.starts <= question.lengths)
    if in_range.all() and not any(_beyond(ids, model.vocab_size) for ids in (question.ids, question.candidates)):
        return []
    bad: dict[int, RowError] = {}
    for row in np.flatnonzero(question.lengths == 0).tolist():
        bad[row] = RowError(row, "empty_row", f"row {row} has no ids")
    for row in np.flatnonzero(question.lengths > model.max_length).tolist():
        message = f"row {row} has {question.lengths[row]} ids; this teacher takes {model.max_length}"
        bad[row] = RowError(row, "too_long", message)
    for row in np.flatnonzero((question.starts < 1) | (question.starts > question.lengths)).tolist():
        message = f"row {row} starts at {question.starts[row]}, outside [1, {question.lengths[row]}]"
        bad.setdefault(row, RowError(row, "bad_start", message))
    wrong = np.flatnonzero((question.ids < 0) | (question.ids >= model.vocab_size))
    if len(wrong):
        ends = np.cumsum(question.lengths, dtype=np.int64)
        for index in wrong[np.unique(np.searchsorted(ends, wrong, side="right"), return_index=True)[1]]:
            row = int(np.searchsorted(ends, index, side="right"))
            position = int(index - (ends[row] - question.lengths[row]))
            message = (
                f"row {row} has id {question.ids[index]} at position {position}; "
                f"this teacher's vocabulary has {model.vocab_size} ids"
            )
            bad.setdefault(row, RowError(row, "token_range", message))
    for error in _wrong_candidates(question, model.vocab_size):
        bad.setdefault(error.row, error)
    return [bad[row] for row in sorted(bad)]


def _wrong_candidates(question: Question, vocab_size: int) -> Iterator[RowError]:
    """An error for each row with a candidate outside the vocabulary, which names the first one."""
    candidates = question.candidates
    if candidates is None or not _beyond(candidates, vocab_size):
        return
    counts = question.counts()
    ends = np.cumsum(counts)
    wrong = np.flatnonzero(((candidates < 0) | (candidates >= vocab_size)).any(axis=1))
    rows, first = np.unique(np.searchsorted(ends, wrong, side="right"), return_index=True)
    for row, index in zip(rows.tolist(), wrong[first].tolist(), strict=True):
        ids = candidates[index]
        position = int(question.starts[row] + index - (ends[row] - counts[row]))
        message = (
            f"row {row} has candidate {ids[(ids < 0) | (ids >= vocab_size)][0]} at position {position}; "
            f"this teacher's vocabulary has {vocab_size} ids"
        )
        yield RowError(row, "token_range", message)


def _beyond(ids: np.ndarray | None, vocab_size: int) -> bool:
    """Whether any id is outside [0, vocab_size); in one pass, since there may be millions."""
    # a negative id is a large one here
    return ids is not None and bool(ids.size) and int(ids.view(np.uint32).max()) >= vocab_size
