"""Rows that were with a worker when it died: each is tried alone, and one that kills again is not tried for a while."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

from opd.serving.job import Piece
from opd.serving.queue import Batch

logger = logging.getLogger(__name__)

KILLS_BEFORE_POISON = 2  # one of them of the row alone: workers also die of other things than rows
FORGET_S = 3600.0  # after the last death; then the row is tried again like any other
MAX_SUSPECTS = 65_536


class _Deaths(NamedTuple):
    """The workers that died with a row."""

    kills: int
    alone: bool  # whether one of them had nothing else
    last: float  # time.monotonic()


class Suspects:
    """Which workers died with which row, by the row's content."""

    def __init__(self) -> None:
        self._deaths: dict[bytes, _Deaths] = {}
        self._poison = False  # whether any of them reached the limit

    def blame(self, pieces: Sequence[Piece], reason: str, now: float, *, alone: bool) -> None:
        """A worker was lost while it had these rows.

        Args:
            alone: it had one row, and no other.
        """
        # a set: rows with the same ids are one suspect, and this was one death
        for digest in {piece.job.row_digest(row) for piece in pieces for row in range(piece.lo, piece.hi)}:
            before = self._deaths.pop(digest, None)
            if before is None or now - before.last > FORGET_S:
                before = _Deaths(0, False, now)
            self._deaths[digest] = _Deaths(before.kills + 1, before.alone or alone, now)
            if self._is_poison(digest, now):
                self._poison = True
                logger.error(
                    "a row stopped the worker %d times, once alone (%s), and is refused for %g s",
                    *(self._deaths[digest].kills, reason, FORGET_S),
                )
        while len(self._deaths) > MAX_SUSPECTS:
            del self._deaths[next(iter(self._deaths))]

    def acquit(self, piece: Piece) -> None:
        """These rows were scored, and the worker lives."""
        if self._deaths:
            for row in range(piece.lo, piece.hi):
                self._deaths.pop(piece.job.row_digest(row), None)

    def suspects(self, digest: bytes) -> bool:
        """Whether a worker died with this row, and none has scored it since."""
        return digest in self._deaths

    def without_poison(self, batch: Batch, now: float) -> Batch:
        """The batch without the rows that are known to kill, each of which has its error now."""
        if not self._poison:
            return batch
        pieces: list[Piece] = []
        for piece in batch.pieces:
            bad = [row for row in range(piece.lo, piece.hi) if self._is_poison(piece.job.row_digest(row), now)]
            for row in bad:
                message = f"stopped the worker {KILLS_BEFORE_POISON} times, once alone; it is not tried for an hour"
                piece.job.fail_row(row, "poison", message)
            pieces += piece.without(bad)
        return dataclasses.replace(batch, pieces=pieces)

    def _is_poison(self, digest: bytes, now: float) -> bool:
        deaths = self._deaths.get(digest)
        if deaths is None or now - deaths.last > FORGET_S:
            return False
        return deaths.alone and deaths.kills >= KILLS_BEFORE_POISON
