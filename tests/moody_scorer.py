"""A backend that misbehaves on demand, for tests: `--backend moody_scorer`.

`--model FILE` names a JSON file that is read at every start of the worker: {"fingerprint": "a", "die": 0, "fail": ""}.
Ids from 90 on are triggers. Every other value is -(id + position / 1000).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from plain_scorer import plain_info, plain_values

from opd.errors import RowError
from opd.scoring.scorer import LoadOptions, Row, RowScores
from opd.wire import ModelInfo

BREAK_ID = 90  # raises, and so does every call after it, as after a device-side assert
OVERWRITE_ID = 91  # changes the ids that it was given
SHAPE_ID = 92  # returns one value too few
SEGFAULT_ID = 93
SHORT_LIST_ID = 94  # the call returns no results at all


class MoodyScorer:
    def __init__(self, info: ModelInfo):
        self.info = info
        self._broken = False

    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores | RowError]:
        ids = {int(token) for row in rows for token in row.ids}
        if BREAK_ID in ids or self._broken:
            self._broken = True
            raise RuntimeError("CUDA error: device-side assert triggered")
        if SEGFAULT_ID in ids:
            import ctypes

            ctypes.string_at(0)
        if SHORT_LIST_ID in ids:
            return []
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> RowScores:
        values = plain_values(row)
        if OVERWRITE_ID in row.ids:
            row.ids[:] = 1
        return RowScores(values[1:] if SHAPE_ID in row.ids else values)


def load(options: LoadOptions) -> MoodyScorer:
    mood = json.loads(Path(options.model).read_text())
    if mood.get("die"):
        os._exit(mood["die"])
    if mood.get("fail"):
        raise RuntimeError(mood["fail"])
    return MoodyScorer(plain_info(backend="moody", name="moody", model=mood.get("fingerprint", "a")))
