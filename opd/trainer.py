"""On-policy distillation on verl's PPO trainer: one overridden method brings the teacher in.

The student samples responses; a teacher says how probable it finds each of the very tokens that the student chose. verl
keeps a frozen reference policy for the same purpose, and already trains `policy loss + kl_loss_coef * KL(student ||
reference)`. So the teacher's log-probs go where the reference's would be, as `ref_log_prob`. With the default
`teacher.loss` nothing else changes: rollout, reward, advantage, the loss and its coefficient are verl's own. What other
losses need goes along, and opd/loss/in_verl.py uses it in the worker. A second override keeps the columns of the data
that say who teaches a row.

Shapes: B rows, P prompt columns, R response columns, S = P + R.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from opd.jagged import to_id_lists
from opd.loss.settings import TOPK_IDS
from opd.loss.student_topk import NUM_IDS, NUM_KNOWN
from opd.reference import TeacherReference
from opd.teacher_prompt import RAW_PROMPT
from opd.worker import METRICS_KEY


class OPDTrainer(RayPPOTrainer):
    """RayPPOTrainer whose reference policy is a teacher in another process.

    Set `teacher` before `fit()`, and `ref_in_actor = True` before `init_workers()`: verl then loads no reference model.
    """

    teacher: TeacherReference

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        data = batch.batch
        values = self.teacher.values(
            input_ids_BS=data["input_ids"].numpy(),
            attention_mask_BS=data["attention_mask"].numpy(),
            response_mask_BR=data["response_mask"].numpy(),
            old_log_probs_BR=data["old_log_probs"].numpy(),
            step=self.global_steps,
            data_columns={n: batch.non_tensor_batch[n] for n in self._columns(batch)},
            student_ids=self._student_ids(batch),
        )
        columns: dict[str, Any] = {name: torch.from_numpy(column) for name, column in values.columns.items()}
        return DataProto.from_single_dict(columns, meta_info={METRICS_KEY: values.metrics})

    def _student_ids(self, batch: DataProto) -> list[np.ndarray] | None:
        """int32 [R_b, K] of each row, the student's own most probable ids; None where nobody asks for them."""
        num_ids = self.teacher.num_student_ids
        if not num_ids:
            return None
        data = left_right_2_no_padding(batch.to_tensordict())  # as verl's own _compute_ref_log_prob
        tu.assign_non_tensor(data, **{NUM_IDS: num_ids, NUM_KNOWN: self.teacher.num_known_ids})
        output = self.actor_rollout_wg.compute_student_topk(data)
        return to_id_lists(output[TOPK_IDS], range(len(batch)), num_ids=num_ids)

    def _columns(self, batch: DataProto) -> list[str]:
        return [name for name in self.teacher.data_columns if name in batch.non_tensor_batch]

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """verl's, which moves all columns of the data but its own four to the rollout, from where not all come back."""
        # the rollout gives raw_prompt back itself
        kept = {n: batch.non_tensor_batch[n] for n in self._columns(batch) if n != RAW_PROMPT}
        generated = super()._get_gen_batch(batch)
        batch.non_tensor_batch.update(kept)
        return generated
