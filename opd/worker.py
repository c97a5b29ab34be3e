"""verl's actor worker, with the teacher's loss, handing the teacher's metrics through to the logger.

Which loss, with which coefficient, comes with each step's batch: the worker has no `teacher` block of its own.

The metrics of a step live in a local variable of verl's training loop. What the actor worker returns under `metrics`
joins them, and what the trainer puts into a batch's meta information reaches the worker: that is the way taken here.
In the log their names start with `actor/opd/`, since verl puts `actor/` before everything that comes this way.

A checkpoint of a LoRA student is made one that others can load, too.
"""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

from opd.errors import ConfigError
from opd.lora import merge_folder, scales_of
from opd.loss import in_verl, student_topk

METRICS_KEY = "opd_metrics"
logger = logging.getLogger(__name__)


class OPDWorker(ActorRolloutRefWorker):
    """Give this to the trainer as `Role.ActorRollout`: an actor and its rollout, and no reference model."""

    @cached_property
    def actor_config(self) -> ActorConfig:
        return omega_conf_to_dataclass(self.config.actor)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_student_topk(self, data: TensorDict) -> TensorDict | None:
        """The student's own most probable ids; see opd/loss/student_topk.py."""
        output = student_topk.infer_topk(self.actor, data)
        return None if output is None else output.cpu()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        metrics = dict(tu.pop(data, key=METRICS_KEY, default={}))
        metrics |= in_verl.prepare(self.actor, self.actor_config, data)
        output = super().update_actor(data)
        if output is not None:
            in_verl.finish_metrics(tu.get(output, "metrics"))
            tu.get(output, "metrics").update(metrics)
        return output

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[attr-defined]  # verl adds its members later
    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """verl's; of a LoRA student, actor/huggingface is then made a model that can be loaded (opd/lora.py)."""
        super().save_checkpoint(local_path, *args, **kwargs)
        module: Any = getattr(self.actor.engine, "module", None) if self.actor is not None else None
        scales = scales_of(module) if self.rank == 0 and isinstance(module, torch.nn.Module) else {}
        if scales:
            folder = Path(local_path) / "huggingface"
            try:
                merge_folder(folder, scales)
            except ConfigError as e:  # the run itself does not need the folder
                logger.warning("%s holds no model that can be loaded: %s; merge it with peft", folder, e)
