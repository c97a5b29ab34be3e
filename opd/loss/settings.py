"""Which loss turns the teacher's values into gradient, and with which numbers.

The trainer knows the `teacher` block, the actor worker does not: LossSettings travel with each step's batch. As a
column of numbers, since nothing else takes the same way through verl's V0 and V1 trainers: V1 drops what a step puts
into the meta information of a batch before the worker sees it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from opd.loss.schedule import Coefficient

SAMPLED = "sampled"  # verl's KL loss on the sampled tokens, estimated as kl_loss_type says
POLICY_GRADIENT = "policy_gradient"
DIVERGENCES = {"forward_kl_topk": "forward_kl", "reverse_kl_topk": "reverse_kl", "jsd_topk": "jsd"}
LOSSES = (SAMPLED, POLICY_GRADIENT, *DIVERGENCES)

# columns of the batch on its way to the worker, beside ref_log_prob
LOSS = "opd_loss"  # float64 [B, LOSS_WIDTH], every row the same
LOSS_WIDTH = 6
TOPK_IDS, TOPK_LOGPROBS = "opd_topk_ids", "opd_topk_logprobs"  # [B, R, K]; id -1 where the teacher gave no value
WEIGHTS = "opd_weights"  # float32 [B, R]: of each token's teacher term; goes along only where one may differ from 1


@dataclass(frozen=True)
class LossSettings:
    """One step's loss."""

    name: str = SAMPLED
    coef: float = 1.0
    topk: int = 0  # tokens that the teacher is asked for at each position; 0 without a top-k loss
    beta: float = 0.5  # of the generalised JSD
    tail: bool = True  # the mass outside of the top-k is one more bucket
    clamp: float = math.inf  # nats; most of |teacher - student log-prob| of a sampled token that becomes gradient

    @property
    def divergence(self) -> str | None:
        return DIVERGENCES.get(self.name)

    def to_column(self, num_rows: int) -> np.ndarray:
        """float64 [num_rows, LOSS_WIDTH]."""
        row = (LOSSES.index(self.name), self.coef, self.topk, self.beta, self.tail, self.clamp)
        return np.tile(np.array(row, dtype=np.float64), (num_rows, 1))

    @classmethod
    def from_row(cls, row: list[float]) -> LossSettings:
        """Of one row of the column."""
        name, coef, topk, beta, tail, clamp = row
        return cls(LOSSES[int(name)], coef, int(topk), beta, bool(tail), clamp)


class TeacherLoss:
    """The loss of a run: the same at every step but for its coefficient.

    Args:
        settings: of the first step.
        coefficient: over the steps.
        kl_type: verl's kl_loss_type, for the warning about k3.
    """

    def __init__(self, settings: LossSettings, coefficient: Coefficient, kl_type: str):
        self.settings = settings
        self.coefficient = coefficient
        self.kl_type = kl_type

    def at(self, step: int) -> LossSettings:
        """The settings of a step, counted from 1 as verl does."""
        return replace(self.settings, coef=self.coefficient.at(step))
