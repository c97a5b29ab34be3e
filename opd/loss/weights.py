"""How much each token's teacher term counts: nothing in rows without a teacher, less along the response if asked for.

A weight multiplies the teacher's term of a token after everything else, whichever loss it is. The mean stays over all
tokens that the loss counts, as verl forms it: a weight of 0 takes a token's signal away and gives no other token more.

Shapes: B rows, R response columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_weights(counts_BR: np.ndarray, neutral_rows: Sequence[int], *, discount: float = 1.0) -> np.ndarray:
    """discount**t for the t-th token that counts, from 0 on; 0 for all other tokens and in neutral rows.

    A neutral row's `ref_log_prob` is its `old_log_probs`, which the student leaves with the first mini-batch of a step:
    without the weight, the later ones would pull it back.

    Args:
        counts_BR: bool; tokens that the loss counts.
        neutral_rows: indices of the rows without a teacher value.
        discount: within (0, 1].

    Returns:
        float32 [B, R].
    """
    number_BR = np.cumsum(counts_BR, axis=1) - 1
    weights_BR = np.where(counts_BR, float(discount) ** np.maximum(number_BR, 0), 0.0).astype(np.float32)
    weights_BR[list(neutral_rows)] = 0.0
    return weights_BR
