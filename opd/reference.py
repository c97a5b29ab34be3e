"""The teacher in the place of verl's reference policy: a padded batch in, `ref_log_prob` and metrics out.

Both trainers call this; it knows neither verl nor torch.

Shapes: B rows, P prompt columns, R response columns, S = P + R, K top-k.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from opd import kl, routing
from opd.align import to_padded, to_rows, topk_to_padded
from opd.client import Scores, TeacherClient
from opd.coefficient_record import CoefficientRecord, Line
from opd.errors import ConfigError, TeacherError
from opd.loss.schedule import Coefficient
from opd.loss.settings import LOSS, SAMPLED, TOPK_IDS, TOPK_LOGPROBS, WEIGHTS, LossSettings, TeacherLoss
from opd.loss.weights import token_weights
from opd.routing import Router
from opd.teacher_prompt import TeacherPrompt
from opd.teachers import Teachers

logger = logging.getLogger(__name__)

K3_DEAD_ALARM = 0.05  # share of tokens without a gradient from which on k3 is complained about


class TeacherValues(NamedTuple):
    """What a step's batch gets from the teacher."""

    # ref_log_prob [B, R], the loss [B, LOSS_WIDTH]; where needed weights [B, R], and the top-k's ids and log-probs
    # [B, R, K]
    columns: dict[str, np.ndarray]
    metrics: dict[str, float]


class TeacherReference:
    """Asks the teacher about a batch and puts its values where verl keeps the reference policy's.

    Args:
        client: of the teacher, or of several (opd/routing.py); has passed `wait_until_ready`.
        config: the `teacher` block of the configuration.
        temperature: of the rollout; the teacher's logits are divided by it, as the student's are.
        loss: what the values are for (opd/config.py teacher_loss); verl's KL loss at a coefficient of 1 by default.
        prompts: makes the prompts that the teacher sees in place of the student's.
        record: keeps an adaptive coefficient for a resumed run; may be set until the first step.

    Raises:
        ConfigError: a larger top-k than this teacher gives, or more ids of the student's choice than it takes.
    """

    def __init__(
        self,
        client: TeacherClient | Router,
        config: Any,
        *,
        temperature: float = 1.0,
        loss: TeacherLoss | None = None,
        prompts: TeacherPrompt | None = None,
        record: CoefficientRecord | None = None,
    ):
        self.teachers = Teachers(client, prompts)
        self.config = config
        self.temperature = temperature
        self.loss = loss or TeacherLoss(LossSettings(), Coefficient("constant", 1.0), kl_type="k3+")
        self.record = record
        self.first = True
        self.complained = False
        self.models = self.teachers.wait_until_ready(config.ready_timeout_s)
        self.vocab_size = max(model.vocab_size for model in self.models.values())
        # an id that one of the teachers does not know has no value there
        self.num_known_ids = min(model.vocab_size for model in self.models.values())
        for model in self.models.values():
            if self.num_student_ids > model.max_candidates:
                raise ConfigError(
                    f"teacher.topk_from=student with teacher.topk={self.num_student_ids}, but the teacher "
                    f"{model.name!r} (backend {model.backend}) scores {model.max_candidates} ids of the student's "
                    "choice at most; lower teacher.topk, start the teacher with --backend hf, or use "
                    "teacher.topk_from=teacher"
                )
            if self.topk > model.max_topk:
                raise ConfigError(
                    f"teacher.topk={self.topk}, but the teacher {model.name!r} gives {model.max_topk} at "
                    "most; lower it, or start the teacher with a larger --max-topk"
                )

    @property
    def topk(self) -> int:
        """How many of its own most probable ids the teacher is asked for at each position."""
        return 0 if self.config.topk_from == "student" else self.loss.settings.topk

    @property
    def num_student_ids(self) -> int:
        """How many of the student's own `values` needs at each position; 0 unless teacher.topk_from is student."""
        return self.loss.settings.topk if self.config.topk_from == "student" else 0

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Columns of the data that `values` needs beside the batch's tensors; none with one teacher and no prompts."""
        return self.teachers.data_columns

    def values(
        self,
        *,
        input_ids_BS: Any,
        attention_mask_BS: Any,
        response_mask_BR: Any,
        old_log_probs_BR: Any,
        step: int,
        data_columns: Mapping[str, Sequence[Any]] | None = None,
        student_ids: Sequence[np.ndarray] | None = None,
    ) -> TeacherValues:
        """Score a batch.

        Args:
            input_ids_BS, attention_mask_BS: prompt left-padded, response right-padded.
            response_mask_BR: 1 on the tokens that the student sampled and that the loss counts.
            old_log_probs_BR: the student's own, what padding and neutralised rows are filled with.
            step: verl's global step, counted from 1.
            data_columns: those that self.data_columns names, a value for each row.
            student_ids: where num_student_ids is not 0: int32 [n, K] for each row with n response tokens, the ids that
                a top-k loss is formed on.

        Raises:
            TeacherError: a column that is missing, or a row that no teacher or no prompt belongs to; no value for a row
                under on_row_error=raise, too many such rows under neutral, no teacher within timeout_s, or a teacher
                that says the same about every token.
        """
        start_s = time.monotonic()
        old_BR = np.asarray(old_log_probs_BR, dtype=np.float32)
        counts_BR = np.asarray(response_mask_BR) == 1
        batch = to_rows(input_ids_BS, attention_mask_BS, prompt_width=np.shape(input_ids_BS)[1] - old_BR.shape[1])
        neutral_allowed = self.config.on_row_error == "neutral"
        if (student_ids is not None) != bool(self.num_student_ids):
            raise ValueError(
                f"teacher.topk_from={self.config.topk_from}, but the trainer gave "
                f"{'no ids' if student_ids is None else 'ids'} of the student's choice"
            )
        scores, parts = self.teachers.score(
            batch,
            data_columns or {},
            topk=self.topk,
            candidates=student_ids,
            temperature=self.temperature,
            timeout_s=self.config.timeout_s,
            return_row_errors=neutral_allowed,
            prefetched=self.config.overlap,
        )
        self._refuse_too_many(scores.row_errors, len(batch.rows))
        ref_BR = to_padded(scores.logprobs, batch.response_lengths, fill_BR=old_BR, allow_missing=neutral_allowed)
        neutral_rows = [error.row for error in scores.row_errors]
        weights = self._weights(counts_BR, neutral_rows)
        counts_BR = counts_BR.copy()
        counts_BR[neutral_rows] = False  # a KL of 0 by construction is no measurement
        by_teacher = routing.metrics(parts, old_BR, counts_BR)
        kl.refuse_collapsed(ref_BR[counts_BR], old_BR[counts_BR], self.vocab_size)
        seconds = time.monotonic() - start_s
        num_tokens = int(batch.response_lengths.sum())
        metrics = kl.estimates(old_BR[counts_BR], ref_BR[counts_BR]) | {
            "opd/teacher_seconds": seconds,  # that the step waited for; what was computed before it is not in it
            "opd/teacher_seconds_spent": scores.stats.score_ms / 1000,  # by all replicas together, whenever it was
            "opd/cached_rows": float(scores.stats.cached),
            "opd/scored_tokens_per_s": num_tokens / seconds,
            "opd/retries": float(scores.stats.retries),
            "opd/neutral_rows": float(len(neutral_rows)),
        }
        metrics |= by_teacher
        if self.loss.settings.clamp < math.inf and counts_BR.any():
            beyond_T = np.abs(ref_BR[counts_BR] - old_BR[counts_BR]) > self.loss.settings.clamp
            metrics["opd/clamped_fraction"] = float(beyond_T.mean())
        settings = self._settings(step)
        columns = {"ref_log_prob": ref_BR, LOSS: settings.to_column(len(batch.rows))} | weights
        columns |= self._topk_columns(scores, student_ids, batch.response_lengths, counts_BR, metrics)
        self._observe(step, settings.coef, metrics.get("opd/reverse_kl_k1"))
        self._complain_about_k3(metrics.get("opd/k3_dead_fraction", 0.0))
        logger.info(
            "teacher scored %d rows, %d tokens in %.2f s (%d retries, %d neutral rows), reverse KL %.4f",
            len(batch.rows),
            num_tokens,
            seconds,
            scores.stats.retries,
            len(neutral_rows),
            metrics.get("opd/reverse_kl_k1", float("nan")),
        )
        return TeacherValues(columns, metrics)

    def _settings(self, step: int) -> LossSettings:
        if self.first and self.record is not None:
            self.record.take_up(self.loss.coefficient, step)
        self.first = False
        return self.loss.at(step)

    def _observe(self, step: int, coef: float, kl: float | None) -> None:
        if kl is not None:
            self.loss.coefficient.observe(kl)
        if self.record is not None:
            self.record.write(Line(step, coef, kl, self.loss.coefficient.at(step + 1)))

    def _weights(self, counts_BR: np.ndarray, neutral_rows: list[int]) -> dict[str, np.ndarray]:
        """Decided by the configuration, not by the batch: all steps of a run then take the same way to the gradient."""
        # a neutral row has no gradient under the other losses: no top-k, and an advantage of 0
        may_be_neutral = self.config.on_row_error == "neutral" and self.loss.settings.name == SAMPLED
        if not may_be_neutral and self.config.token_discount == 1.0:
            return {}
        return {WEIGHTS: token_weights(counts_BR, neutral_rows, discount=self.config.token_discount)}

    def _topk_columns(
        self,
        scores: Scores,
        student_ids: Sequence[np.ndarray] | None,
        response_lengths: np.ndarray,
        counts_BR: np.ndarray,
        metrics: dict[str, float],
    ) -> dict[str, np.ndarray]:
        ids: Sequence[np.ndarray | None] | None = scores.topk_ids
        logprobs = scores.topk_logprobs
        if student_ids is not None:
            ids, logprobs = student_ids, scores.candidate_logprobs
        if ids is None or logprobs is None:
            return {}
        ids_BRK, logprobs_BRK = topk_to_padded(
            ids,
            logprobs,
            response_lengths,
            width=counts_BR.shape[1],
            topk=self.loss.settings.topk,
        )
        if counts_BR.any():
            metrics["opd/teacher_mass"] = float(np.exp(logprobs_BRK[counts_BR]).sum(-1).mean())
        return {TOPK_IDS: ids_BRK, TOPK_LOGPROBS: logprobs_BRK}

    def _complain_about_k3(self, dead_fraction: float) -> None:
        """Once in a run."""
        loss = self.loss
        if self.complained or loss.settings.name != SAMPLED or loss.kl_type not in ("k3", "low_var_kl"):
            return
        if dead_fraction > K3_DEAD_ALARM:
            self.complained = True
            logger.warning(
                "%.0f %% of the tokens have no gradient under kl_loss_type=%s: they are the ones on which student and "
                "teacher differ most (opd/k3_dead_fraction). KL_TYPE=k3+ has the same value and the gradient of the KL",
                100 * dead_fraction,
                loss.kl_type,
            )

    def _refuse_too_many(self, row_errors: list, num_rows: int) -> None:
        limit = self.config.max_neutral_fraction
        if len(row_errors) > limit * num_rows:
            first = row_errors[0]
            raise TeacherError(
                f"{len(row_errors)} of {num_rows} rows have no teacher value, more than "
                f"teacher.max_neutral_fraction={limit} allows; "
                f"the first is row {first.row}: {first.message} [{first.code}]"
            )
