"""The agent loop workers of verl's V1 trainers, with the same addition as opd/agent_loop.py."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ

from opd.agent_loop import OverlapWorker

# verl made an actor of its worker, which Python cannot inherit; this is the class that Ray made the actor of
Worker: Any = AgentLoopWorkerTQ.__ray_actor_class__  # type: ignore[attr-defined]  # Ray adds it


class OverlapWorkerTQ(OverlapWorker, Worker):
    """Runs agent loops, which may have several outputs each, and sends each finished row to the teacher."""


class OverlapManagerTQ(AgentLoopManagerTQ):
    """For the V1 trainers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(OverlapWorkerTQ)  # in verl's place; none has been started yet
