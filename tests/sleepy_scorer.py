"""A backend that sleeps without ending its process, for tests: `--backend sleepy_scorer --model WAY`.

WAY is `well`, `changed` (another model wakes up), `stuck` (raises when it is to sleep) or `elsewhere` (cannot sleep).
A value is -(id + position / 1000), and one more after a wake that went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from plain_scorer import plain_info, plain_values

from opd.errors import RowError
from opd.scoring.scorer import LoadOptions, Row, RowScores
from opd.wire import ModelInfo


class SleepyScorer:
    can_sleep = True

    def __init__(self, info: ModelInfo):
        self.info = info
        self.asleep = False
        self.shift = 0.0
        self.no_sleep = "its memory is elsewhere" if info.name == "elsewhere" else ""

    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores | RowError]:
        assert not self.asleep
        return [RowScores(plain_values(row) - self.shift) for row in rows]

    def sleep(self) -> None:
        if self.info.name == "stuck":
            raise RuntimeError("no")
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False
        self.shift = float(self.info.name == "changed")


def load(options: LoadOptions) -> SleepyScorer:
    return SleepyScorer(plain_info(backend="sleepy", name=options.model))
