"""verl's actor worker, handing the teacher's metrics through to the logger.

The metrics of a step live in a local variable of verl's training loop. What the actor worker returns under `metrics`
joins them, and what the trainer puts into a batch's meta information reaches the worker: that is the way taken here.
In the log their names start with `actor/opd/`, since verl puts `actor/` before everything that comes this way.
"""

from __future__ import annotations

from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

METRICS_KEY = "opd_metrics"


class OPDWorker(ActorRolloutRefWorker):
    """Give this to the trainer as `Role.ActorRollout`: an actor and its rollout, and no reference model."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        metrics = tu.pop(data, key=METRICS_KEY, default={})
        output = super().update_actor(data)
        if output is not None:
            tu.get(output, "metrics").update(metrics)
        return output
