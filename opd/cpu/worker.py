"""verl's training worker with a process group that a CPU can have."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from tensordict import NonTensorStack, TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.distributed import initialize_global_process_group_ray

from opd.worker import OPDWorker


class CpuWorker(OPDWorker):
    """Give this to the trainer as `Role.ActorRollout`."""

    def __init__(self, config: DictConfig, role: str, **kwargs: Any) -> None:
        if "ref" in role:
            raise ValueError(
                f"role {role!r}: verl keeps a reference model in pinned memory, which needs an accelerator; "
                "map Role.ActorRollout to this worker and set trainer.ref_in_actor = True before init_workers()"
            )
        super().__init__(config, role, **kwargs)
        # verl would build the backend "cpu:gloo,cpu:gloo", which torch refuses; it keeps a group that exists already.
        initialize_global_process_group_ray(backend="cpu:gloo")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        return super().compute_log_prob(without_row_objects(data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_student_topk(self, data: TensorDict) -> TensorDict | None:
        return super().compute_student_topk(without_row_objects(data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        return super().update_actor(without_row_objects(data))


def without_row_objects(data: TensorDict) -> TensorDict:
    """A batch without its columns of Python objects (prompts as text, rewards' inputs, ...): a text model reads none.

    tensordict rebuilds each object for each micro-batch, which took half of this worker's time on rows of 14 tokens.
    """
    return data.exclude(*(name for name, value in data.items() if isinstance(value, NonTensorStack)))
