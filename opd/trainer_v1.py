"""On-policy distillation on verl's V1 trainers: the same override as in opd/trainer.py, for all three of them.

V1 keeps a batch in TransferQueue and passes its keys around. `_compute_ref_log_prob` fetches the rows behind the keys,
asks the teacher as V0 does, and puts `ref_log_prob`, with the loss's columns, where verl's own would be.

Registered as `opd_sync`, `opd_colocate_async` and `opd_separate_async`. In the configuration `trainer.v1.trainer_mode`
keeps verl's name without `opd_`, since verl finds the settings and the replay buffer of a trainer by that name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)
from verl.workers.engine_workers import ActorRolloutRefWorker

from opd.jagged import FIELDS, to_columns, to_id_lists, to_lists, to_padded
from opd.loss.settings import TOPK_IDS
from opd.loss.student_topk import NUM_IDS, NUM_KNOWN
from opd.reference import TeacherReference
from opd.worker import OPDWorker

PREFIX = "opd_"  # of the names in verl's registry


class OPDTrainerV1(PPOTrainer):
    """What the three trainers share. Set `teacher` before `fit()`.

    Beside the override, two things keep verl from loading a reference model, which V0 is told by
    `role_worker_mapping` and `ref_in_actor` from outside; V1 decides both by itself while it sets up.
    """

    teacher: TeacherReference
    worker: type[ActorRolloutRefWorker] = OPDWorker  # another one has to be set before `init()`

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        names, num_ids = self.teacher.data_columns, self.teacher.num_student_ids
        fields = [*FIELDS, *names]
        if num_ids:
            self._ask_the_student(batch)
            fields.append(TOPK_IDS)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        values = self.teacher.values(
            **to_padded(data, rows),
            step=self.global_steps,
            data_columns=to_lists(data, names, rows),
            student_ids=to_id_lists(data[TOPK_IDS], rows, num_ids=num_ids) if num_ids else None,
        )
        columns = TensorDict(to_columns(values.columns, data["old_log_probs"], rows), batch_size=len(batch))
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=columns)
        # V0's names, which verl's worker group prefixes: a plot of one trainer's run reads the other's
        metrics.update({f"actor/{name}": value for name, value in values.metrics.items()})
        return batch

    def _ask_the_student(self, batch: KVBatchMeta) -> None:
        """Has its own most probable ids put into TransferQueue, as TOPK_IDS."""
        extra_info = {
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            NUM_IDS: self.teacher.num_student_ids,
            NUM_KNOWN: self.teacher.num_known_ids,
        }
        # of its own: what is written into a batch's extra_info goes along with the calls after this one
        self.actor_rollout_wg.compute_student_topk(replace(batch, extra_info=extra_info))

    def _init_resource_pool_mgr(self) -> None:
        """verl's roles, less that of a reference model, which `use_kl_loss` asks for: a second copy of the student."""
        super()._init_resource_pool_mgr()
        for role in (Role.ActorRolloutRef, Role.RefPolicy):
            self.role_worker_mapping.pop(role, None)
            self.mapping.pop(role, None)
        actor = Role.Actor if Role.Actor in self.role_worker_mapping else Role.ActorRollout
        self.role_worker_mapping[actor] = ray.remote(self.worker)
        self.mapping[actor] = "global_pool"

    @property
    def ref_in_actor(self) -> bool:
        """True: with `hybrid_engine=false` verl would otherwise ask for the reference's own workers."""
        return True

    @ref_in_actor.setter
    def ref_in_actor(self, has_lora: bool) -> None:
        """verl sets it while it sets up, to whether the student is a LoRA adapter; that makes no difference here."""


@register_trainer(PREFIX + "sync")
class OPDTrainerSync(OPDTrainerV1, PPOTrainerSync):
    """Generation and training take turns on the same devices."""


@register_trainer(PREFIX + "colocate_async")
class OPDTrainerColocateAsync(OPDTrainerV1, PPOTrainerColocateAsync):
    """On the same devices; responses that are not finished when training starts go on afterwards, with new weights."""


class OPDDetachWorker(OPDWorker, DetachActorWorker):
    """Our worker with the copies of the weights that several updates between two weight syncs need."""


@register_trainer(PREFIX + "separate_async")
class OPDTrainerSeparateAsync(OPDTrainerV1, PPOTrainerSeparateAsync):
    """Generation on devices of its own, at the same time as training."""

    worker = OPDDetachWorker
