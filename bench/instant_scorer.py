"""A scorer that costs next to nothing, so that a bench sees the transport alone: `--backend instant_scorer`.

Its values lie in a table made at load; the first scored id of a row says where in the table the row's values begin.
So they can be checked, row by row, and no row has the values of another.

Sampled ids come from [MAX_TOPK, VOCAB), the top-k from below MAX_TOPK, so that the two never contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd.scoring.scorer import LoadOptions, Row, RowScores
from opd.wire import ModelInfo

VOCAB, MAX_TOPK, MAX_LENGTH = 151_936, 256, 8192
OFFSETS = 1024


class InstantScorer:
    def __init__(self, topk: int):
        self.info = ModelInfo(
            name="instant",
            model="instant",
            tokenizer="",
            vocab_size=VOCAB,
            max_length=MAX_LENGTH,
            max_topk=topk,
            eos_ids=[],
            dtype="float32",
            backend="instant_scorer",
            temperature=False,
        )
        rng = np.random.default_rng(0)
        size = OFFSETS + MAX_LENGTH
        self.logprobs = rng.uniform(-18, -12, size).astype(np.float32)
        order = rng.permuted(np.tile(np.arange(MAX_TOPK, dtype=np.int32), (size if topk else 0, 1)), axis=1)
        self.topk_ids = np.ascontiguousarray(order[:, :topk])
        self.topk_logprobs = -np.sort(-rng.uniform(-11, -6, (len(order), topk)).astype(np.float32), axis=1)

    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores]:
        results = []
        for ids, start, _ in rows:
            begin = int(ids[start]) % OFFSETS if start < len(ids) else 0
            end = begin + len(ids) - start
            if topk:
                top = self.topk_ids[begin:end, :topk], self.topk_logprobs[begin:end, :topk]
                results.append(RowScores(self.logprobs[begin:end], *top))
            else:
                results.append(RowScores(self.logprobs[begin:end]))
        return results


def load(options: LoadOptions) -> InstantScorer:
    """`--max-topk` is the width of the table: 0 for sampled-only."""
    return InstantScorer(min(options.max_topk, MAX_TOPK))
