"""What the backends that misbehave on demand have in common: a model without weights, and its values."""

from __future__ import annotations

import numpy as np

from opd.scoring.scorer import Row
from opd.wire import ModelInfo


def plain_info(*, backend: str, name: str, model: str = "a") -> ModelInfo:
    """A model of 100 tokens without a tokenizer."""
    return ModelInfo(
        name=name,
        model=model,
        tokenizer="",
        vocab_size=100,
        max_length=64,
        max_topk=0,
        eos_ids=[],
        dtype="float32",
        backend=backend,
        temperature=False,
    )


def plain_values(row: Row) -> np.ndarray:
    """float32; -(id + position / 1000) for each scored token."""
    return -(row.ids + np.arange(len(row.ids)) / 1000)[row.start :].astype(np.float32)
