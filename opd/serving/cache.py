"""Values that were computed once, kept for whoever asks for the same rows again: a retry, or a prefetch made good.

A row is found by everything that decides its values (row_key), so a hit is what was computed, bit for bit. What the
worker sent for some rows of one job is kept as it came, without a copy; it is forgotten as a whole, and what was not
used for the longest time goes first. Rows with an error are not kept. It lives in the front, outlives the worker (which
may only come back with the same model), and dies with the server.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from opd.errors import RowError

if TYPE_CHECKING:
    from opd.serving.job import Piece, Values

_SEED = int.from_bytes(os.urandom(8), "little")  # keys mean something here alone: no client can aim at another's
ROW_BYTES = 256  # what finding a row costs besides its values


def row_key(
    model: str, topk: int, temperature: float, start: int, ids: np.ndarray, candidates: np.ndarray | None = None
) -> bytes:
    """Name of a row's values: two rows have the same one only if a teacher owes them the same values.

    Args:
        model: fingerprint of weights, config and dtype.
        ids: int32 [L], the whole row.
        candidates: int32 [N, C], if there are any.
    """
    h = xxhash.xxh3_128(f"{model} {topk} {temperature!r} {start} {len(ids)}\n".encode(), seed=_SEED)
    h.update(ids.data)
    if candidates is not None:
        h.update(candidates.data)
    return h.digest()


class Kept(NamedTuple):
    """What is known of a row."""

    values: Values  # views that must not be written to
    score_ms: float  # what they cost


class _Block:
    """The values of one piece, and the rows that are found in it."""

    def __init__(self, keys: list[bytes], ends: np.ndarray, costs_ms: np.ndarray, values: Values, nbytes: int):
        self.keys = keys
        self.ends = ends  # int64 [rows + 1]: where each row's values end
        self.costs_ms = costs_ms  # float64 [rows]
        self.values = values
        self.nbytes = nbytes


class ResultCache:
    """Least recently used first, within `max_bytes`; 0 keeps nothing."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.hits = 0  # rows of answered requests that were found here,
        self.misses = 0  # and that were not; the front counts both
        self._rows: dict[bytes, tuple[_Block, int]] = {}
        self._blocks: OrderedDict[_Block, None] = OrderedDict()

    def __len__(self) -> int:
        """Rows that can be found."""
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def get(self, key: bytes) -> Kept | None:
        if key not in self._rows:
            return None
        block, index = self._rows[key]
        self._blocks.move_to_end(block)
        values = block.values.part(slice(block.ends[index], block.ends[index + 1]))
        return Kept(values, float(block.costs_ms[index]))

    def put(self, piece: Piece, values: Values, errors: Sequence[RowError], score_ms: float) -> None:
        """Keep what was computed for a piece in `score_ms`; one that is too large for the cache is not kept.

        Args:
            errors: count rows from the start of the piece.
        """
        nbytes = sum(array.nbytes for array in values if array is not None) + ROW_BYTES * (piece.hi - piece.lo)
        if nbytes > self.max_bytes:
            return
        ends = piece.job.value_ends[piece.lo : piece.hi + 1] - piece.job.value_ends[piece.lo]
        keys = [piece.job.key(row) for row in range(piece.lo, piece.hi)]
        block = _Block(keys, ends, piece.lengths * (score_ms / piece.tokens), values, nbytes)
        failed = {error.row for error in errors}
        self._rows.update((key, (block, index)) for index, key in enumerate(block.keys) if index not in failed)
        self._blocks[block] = None
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes:
            self._forget()

    def _forget(self) -> None:
        block, _ = self._blocks.popitem(last=False)
        self.nbytes -= block.nbytes
        for key in block.keys:
            if key in self._rows and self._rows[key][0] is block:  # else a later piece brought the same row again
                del self._rows[key]
