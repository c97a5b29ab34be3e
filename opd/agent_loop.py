"""verl's agent loop workers, which run the rollout, with one addition: what is finished is sent to the teacher.

`_agent_loop_postprocess` is where a worker of either trainer gets the ids of a finished response, before they are
padded (V0) or stored in TransferQueue (V1, opd/agent_loop_v1.py). Neither changes them afterwards, so they are the very
ids that the trainer will ask the teacher about. With them come the columns of the data, among them those that say which
teacher, and which prompt for it, the row has. Chosen by verl's `rollout.agent.agent_loop_manager_class` when
`teacher.overlap` is on (opd/config.py manager_class).

Not covered: REMAX's greedy baselines, which are prefetched although nobody asks about them later.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker

from opd.config import teacher_loss
from opd.overlap import PrefetchThread
from opd.teachers import teachers_of


def prefetch_thread_of(config: Any) -> PrefetchThread:
    """Asks what the trainer of this configuration will ask (opd/task_runner.py shake_hands)."""
    return PrefetchThread(
        # with a tokenizer of its own: verl's is at work in other threads, and Rust's refuse two at once
        teachers_of(config),
        topk=teacher_loss(config).settings.topk,
        temperature=float(config.actor_rollout_ref.rollout.temperature),
    )


class OverlapWorker(AgentLoopWorker):
    """Runs the agent loops of one chunk of a batch, and sends each finished row to the teacher."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefetch_thread = prefetch_thread_of(self.config)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        if not validate:  # nobody asks the teacher about a validation
            for each in output if isinstance(output, list) else [output]:
                self.prefetch_thread.add(each.prompt_ids, each.response_ids, kwargs)
        return await super()._agent_loop_postprocess(output, validate, **kwargs)


class OverlapManager(AgentLoopManager):
    """For the V0 trainer. verl's manager asks for its worker class in this attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(OverlapWorker)
        super().__init__(*args, **kwargs)
