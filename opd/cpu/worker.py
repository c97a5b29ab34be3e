"""verl's training worker with a process group that a CPU can have."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
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
