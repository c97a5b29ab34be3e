"""Reward of the digits recipe: 1 when the response is exactly the answer, else 0.

verl calls `compute_score` for each response, with special tokens already removed, and logs the mean of every key in
validation: `val-core/digits/acc/mean@1` is the greedy accuracy. The reward needs all six digits; `digits_right` is a
gentler measure that is only reported.
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response; the keys are the same for every response, which verl relies on."""
    # EDIT: the rule. `score` trains; `acc` is what is reported as accuracy.
    right = float(solution_str == ground_truth)
    hits = sum(said == wanted for said, wanted in zip(solution_str, ground_truth, strict=False))
    return {"score": right, "acc": right, "digits_right": hits / max(len(solution_str), len(ground_truth), 1)}
