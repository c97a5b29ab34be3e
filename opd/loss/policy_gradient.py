"""Policy-gradient distillation: the reverse KL to the teacher, negated, as an advantage of each token.

The student is rewarded for each token by what the teacher thinks of it more than the student itself does. No value of
a later token is added (discount 0), and nothing is normalised. Ratio and clipping are those of verl's policy loss.

Source: https://thinkingmachines.ai/blog/on-policy-distillation/
"""

from __future__ import annotations

import math

import torch


def reverse_kl_advantage(
    old_log_prob: torch.Tensor, teacher_log_prob: torch.Tensor, coef: float, *, clamp: float = math.inf
) -> torch.Tensor:
    """-coef * (student - teacher) for each sampled token.

    Added to an advantage that is already normalised: as a reward it would be summed over the response and then divided
    by the deviation within the group, which takes away both its place and its size.

    Args:
        old_log_prob: the student's log-probs of its own tokens, from before the update: no gradient, any shape.
        teacher_log_prob: the teacher's of the same tokens. Equal to old_log_prob where there is none: 0 results.
        coef: of the teacher beside the task's advantage, which GRPO scales to a deviation of 1.
        clamp: nats; the difference is clipped to it. An advantage is a constant of the step, so this is right in every
            mini-batch: what the student does meanwhile is in the ratio.
    """
    return coef * (teacher_log_prob - old_log_prob).clamp(-clamp, clamp)
