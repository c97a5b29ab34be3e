"""verl's actor worker, with the teacher's loss, handing the teacher's metrics through to the logger.

Which loss, with which coefficient, comes with each step's batch: the worker has no `teacher` block of its own.

The metrics of a step live in a local variable of verl's training loop. What the actor worker returns under `metrics`
joins them, and what the trainer puts into a batch's meta information reaches the worker: that is the way taken here.
In the log their names start with `actor/opd/`, since verl puts `actor/` before everything that comes this way.
"""

from __future__ import annotations

from functools import cached_property

from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import ActorConfig
from verl.workers.engine_workers import ActorRolloutRefWorker

from opd.loss import in_verl, student_topk

METRICS_KEY = "opd_metrics"


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
