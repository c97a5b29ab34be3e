"""Rows that were with a worker when it died: each is tried alone, and one that kills again is not tried any more."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

from opd.serving.job import Piece
from opd.serving.queue import Batch

logger = logging.getLogger(__name__)

KILLS_BEFORE_POISON = 2
MAX_SUSPECTS = 65_536


class Suspects:
    """How many workers died with which row, by the row's content."""

    def __init__(self) -> None:
        self._kills: dict[bytes, int] = {}
        self._poison = False  # whether any of them reached the limit

    def blame(self, pieces: Iterable[Piece], reason: str) -> None:
        """A worker was lost while it had these rows."""
        # a set: rows with the same ids are one suspect, and this was one death
        for digest in {piece.job.row_digest(row) for piece in pieces for row in range(piece.lo, piece.hi)}:
            self._kills[digest] = self._kills.pop(digest, 0) + 1
            if self._kills[digest] >= KILLS_BEFORE_POISON:
                self._poison = True
                logger.error(
                    "a row stopped the worker %d times (%s) and is refused from now on", KILLS_BEFORE_POISON, reason
                )
        while len(self._kills) > MAX_SUSPECTS:
            del self._kills[next(iter(self._kills))]

    def acquit(self, piece: Piece) -> None:
        """These rows were scored, and the worker lives."""
        if self._kills:
            for row in range(piece.lo, piece.hi):
                self._kills.pop(piece.job.row_digest(row), None)

    def suspects(self, digest: bytes) -> bool:
        """Whether a worker died with this row, and none has scored it since."""
        return digest in self._kills

    def without_poison(self, batch: Batch) -> Batch:
        """The batch without the rows that are known to kill, each of which has its error now."""
        if not self._poison:
            return batch
        pieces: list[Piece] = []
        for piece in batch.pieces:
            bad = [row for row in range(piece.lo, piece.hi) if self._is_poison(piece.job.row_digest(row))]
            for row in bad:
                message = f"stopped the worker {KILLS_BEFORE_POISON} times and is not tried again"
                piece.job.fail_row(row, "poison", message)
            pieces += piece.without(bad)
        return dataclasses.replace(batch, pieces=pieces)

    def _is_poison(self, digest: bytes) -> bool:
        return self._kills.get(digest, 0) >= KILLS_BEFORE_POISON
