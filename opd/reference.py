"""The teacher in the place of verl's reference policy: a padded batch in, `ref_log_prob` and metrics out.

Both trainers call this; it knows neither verl nor torch.

Shapes: B rows, P prompt columns, R response columns, S = P + R.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from opd import kl
from opd.align import to_padded, to_rows
from opd.client import TeacherClient
from opd.errors import TeacherError

logger = logging.getLogger(__name__)


class TeacherReference:
    """Asks the teacher about a batch and puts its values where verl keeps the reference policy's.

    Args:
        client: has passed `wait_until_ready`.
        config: the `teacher` block of the configuration.
        temperature: of the rollout; the teacher's logits are divided by it, as the student's are.
    """

    def __init__(self, client: TeacherClient, config: Any, *, temperature: float = 1.0):
        self.client = client
        self.config = config
        self.temperature = temperature
        self.vocab_size = client.wait_until_ready(config.ready_timeout_s).vocab_size

    def ref_log_prob(
        self,
        *,
        input_ids_BS: Any,
        attention_mask_BS: Any,
        response_mask_BR: Any,
        old_log_probs_BR: Any,
    ) -> tuple[np.ndarray, dict[str, float]]:
        """Score a batch.

        Args:
            input_ids_BS, attention_mask_BS: prompt left-padded, response right-padded.
            response_mask_BR: 1 on the tokens that the student sampled and that the loss counts.
            old_log_probs_BR: the student's own, what padding and neutralised rows are filled with.

        Returns:
            float32 [B, R], and the metrics of this batch.

        Raises:
            TeacherError: no value for a row under on_row_error=raise, too many such rows under neutral, no teacher
                within timeout_s, or a teacher that says the same about every token.
        """
        start_s = time.monotonic()
        old_BR = np.asarray(old_log_probs_BR, dtype=np.float32)
        counts_BR = np.asarray(response_mask_BR) == 1
        batch = to_rows(input_ids_BS, attention_mask_BS, prompt_width=np.shape(input_ids_BS)[1] - old_BR.shape[1])
        neutral_allowed = self.config.on_row_error == "neutral"
        scores = self.client.score(
            batch.rows,
            batch.starts,
            temperature=self.temperature,
            timeout_s=self.config.timeout_s,
            return_row_errors=neutral_allowed,
        )
        self._refuse_too_many(scores.row_errors, len(batch.rows))
        ref_BR = to_padded(scores.logprobs, batch.response_lengths, fill_BR=old_BR, allow_missing=neutral_allowed)
        neutral_rows = [error.row for error in scores.row_errors]
        counts_BR = counts_BR.copy()
        counts_BR[neutral_rows] = False  # a KL of 0 by construction is no measurement
        kl.refuse_collapsed(ref_BR[counts_BR], self.vocab_size)
        seconds = time.monotonic() - start_s
        num_tokens = int(batch.response_lengths.sum())
        metrics = kl.estimates(old_BR[counts_BR], ref_BR[counts_BR]) | {
            "opd/teacher_seconds": seconds,
            "opd/scored_tokens_per_s": num_tokens / seconds,
            "opd/retries": float(scores.stats.retries),
            "opd/neutral_rows": float(len(neutral_rows)),
        }
        logger.info(
            "teacher scored %d rows, %d tokens in %.2f s (%d retries, %d neutral rows), reverse KL %.4f",
            len(batch.rows),
            num_tokens,
            seconds,
            scores.stats.retries,
            len(neutral_rows),
            metrics.get("opd/reverse_kl_k1", float("nan")),
        )
        return ref_BR, metrics

    def _refuse_too_many(self, row_errors: list, num_rows: int) -> None:
        limit = self.config.max_neutral_fraction
        if len(row_errors) > limit * num_rows:
            first = row_errors[0]
            raise TeacherError(
                f"{len(row_errors)} of {num_rows} rows have no teacher value, more than "
                f"teacher.max_neutral_fraction={limit} allows; "
                f"the first is row {first.row}: {first.message} [{first.code}]"
            )
