"""Sampled-token estimates of the reverse KL, for the metrics.

x = teacher - student log-prob of the token that the student sampled. With tokens drawn from the student,
E[-x] = E[exp(x) - 1 - x] = KL(student || teacher): k1 and k3 of http://joschu.net/blog/kl-approx.html.

Shapes: T = the response tokens that count (response_mask 1), of all rows.
"""

from __future__ import annotations

import numpy as np

from opd.errors import TeacherError

# verl clamps the value of k3 to 10, and x to 20: outside [K3_LOW, K3_HIGH] its k3 has no gradient at all
K3_LOW, K3_HIGH = -11.0, 2.61
CERTAIN = -1e-4  # nats; a teacher above it says that nothing else is possible
AGREES = -0.1  # nats; mean of a student that says nearly the same


def estimates(student_T: np.ndarray, teacher_T: np.ndarray) -> dict[str, float]:
    """Means over the tokens, in nats; {} without a token, since a mean of nothing is no number."""
    if len(student_T) == 0:
        return {}
    x_T = teacher_T.astype(np.float64) - student_T
    k3_T = np.expm1(np.minimum(x_T, 20.0)) - x_T
    return {
        "opd/reverse_kl_k1": float(-x_T.mean()),
        "opd/reverse_kl_k3": float(k3_T.mean()),
        "opd/teacher_logprob": float(teacher_T.mean()),
        "opd/student_logprob": float(student_T.mean()),
        "opd/k3_dead_fraction": float(((x_T < K3_LOW) | (x_T > K3_HIGH)).mean()),
    }


def refuse_collapsed(teacher_T: np.ndarray, student_T: np.ndarray, vocab_size: int) -> None:
    """Stop when the teacher says the same thing about every token: it is broken, and it would train all the same.

    A teacher that is certain of every token is no alarm where the student is nearly so too: a text that both know by
    heart. It is one where the student is not: its samples would then hit what a certain teacher expects every time,
    though it found other tokens likely as well. Zeros that stand for missing values look like that.

    Raises:
        TeacherError: 64 tokens or more, and all have the same value, or that of a uniform distribution up to 0.01:
            logits that ought to be equal may differ by rounding.
    """
    if len(teacher_T) < 64:
        return
    low, high = float(teacher_T.min()), float(teacher_T.max())
    uniform = -float(np.log(vocab_size))
    is_uniform = uniform - 0.01 < low <= high < uniform + 0.01
    if low > CERTAIN and float(student_T.mean()) > AGREES:
        return
    if high - low < 1e-6 or is_uniform:
        what = "of a uniform distribution" if is_uniform else "for every token"
        raise TeacherError(
            f"the teacher gave the value {low:.6f} {what} to all {len(teacher_T)} tokens of a batch; "
            "a model that works does not do that: check the teacher's weights and its log"
        )
