"""The transformers backend, writing down what it was asked: `--backend recording_scorer --model FOLDER`.

FOLDER/asked.jsonl gets one line for each row: {"ids": [...], "start": n, "candidates": [[...], ...] or null}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from opd.errors import RowError
from opd.scoring import hf
from opd.scoring.scorer import LoadOptions, Row, RowScores, Scorer


class RecordingScorer:
    def __init__(self, scorer: Scorer, path: Path):
        self.scorer, self.path = scorer, path
        self.info = scorer.info

    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores | RowError]:
        with self.path.open("a") as f:
            for row in rows:
                candidates = None if row.candidates is None else row.candidates.tolist()
                f.write(json.dumps({"ids": row.ids.tolist(), "start": row.start, "candidates": candidates}) + "\n")
        return self.scorer.score(rows, topk=topk, temperature=temperature)


def load(options: LoadOptions) -> RecordingScorer:
    return RecordingScorer(hf.load(options), Path(options.model) / "asked.jsonl")
