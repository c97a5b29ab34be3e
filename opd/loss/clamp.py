"""A limit for what one sampled token can do to the student: |teacher - student log-prob| is clipped before it is used.

A token that the teacher finds impossible may differ by 20 nats, where the mean is a tenth of one: it would decide a
step alone. Only for losses whose gradient is that difference itself (k2, k3+, k1+, policy_gradient); the others are
refused (opd/config_checks.py).
"""

from __future__ import annotations

import torch


def clamp_teacher(log_prob: torch.Tensor, teacher_log_prob: torch.Tensor, limit: float) -> torch.Tensor:
    """The teacher's log-probs, moved to within `limit` nats of the student's.

    Of the student's at this very update, not of `old_log_probs`: in a step of several mini-batches the student moves
    away from those, and the gradient -x of a linear estimator would pass the limit again. What is clipped is x =
    teacher - student; the gradient is then -clip(x), and the value that of the estimator at clip(x).

    Args:
        log_prob: the student's, with or without a gradient; none flows through here.
        teacher_log_prob: of the same tokens, same shape.
        limit: nats, > 0.
    """
    student = log_prob.detach()
    return student + (teacher_log_prob - student).clamp(-limit, limit)
