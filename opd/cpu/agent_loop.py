"""verl's agent loop manager (V0 trainer), less the overhead that dominates a step when the model is tiny.

Chosen by `rollout.agent.agent_loop_manager_class`. Per row, verl builds the loop through Hydra (5 ms of a core), asks
a load balancer for a server, calls it, tells the balancer, and calls a reward worker: with 512 rows that is most of a
step. Here

* a loop that was registered in code is built from its class;
* with one replica, the rows that wait go to the server in one call;
* with `reward.num_workers=0`, rewards are computed in this process, by verl's own reward worker.

The loops, the reward manager and all that happens to their results stay verl's. A loop that comes from a config file,
a traced run, several replicas or reward workers take verl's own way.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Awaitable
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopManager,
    AgentLoopWorker,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)
from verl.experimental.reward_loop import RewardLoopWorker
from verl.workers.rollout.replica import TokenOutput

from opd.agent_loop import OverlapWorker

from .collect import Collector
from .rollout import server_name

_MAX_ROWS_PER_CALL = 4096


class _Once(logging.Filter):
    """Lets every message through once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


class _OneServerClient:
    """What an agent loop needs of verl's LLMServerClient, for the one server there is."""

    def __init__(self) -> None:
        self._server: Any = None
        self._collect: Collector[dict[str, Any], TokenOutput] = Collector(self._send, max_items=_MAX_ROWS_PER_CALL)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        # What verl's client keeps to itself unless the backend is vLLM or SGLang.
        kwargs.pop("priority", None)
        kwargs.pop("mm_processor_output", None)
        kwargs = {name: value for name, value in kwargs.items() if value}
        request = {"request_id": request_id, "prompt_ids": prompt_ids, "sampling_params": sampling_params, **kwargs}
        output = await self._collect(request)
        step = output.extra_fields["global_steps"]
        output.extra_fields.update(min_global_steps=step, max_global_steps=step)
        return output

    async def _send(self, requests: list[dict[str, Any]]) -> list[TokenOutput]:
        if self._server is None:
            self._server = ray.get_actor(server_name(0))
        return await self._server.generate_many.remote(requests)


class _RewardHere:
    """A reward worker that looks like a Ray actor's handle and runs in this process."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._worker: RewardLoopWorker | None = None
        self.compute_score = self

    def remote(self, data: Any) -> Awaitable[dict[str, Any]]:
        if self._worker is None:  # not earlier: it keeps the event loop that runs when it is built
            self._worker = RewardLoopWorker(self._config)
        return self._worker.compute_score(data)


class CpuAgentLoopWorker(AgentLoopWorker):
    """Runs the agent loops of one chunk of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # For a model type without a builder of its own, verl says so once per row.
        logging.getLogger("verl.utils.tokenizer.continuous_token_wiring").addFilter(_Once())
        super().__init__(*args, **kwargs)
        self._is_traced = bool(self.rollout_config.trace.get("backend"))
        if self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node == 1 and not self._is_traced:
            self.llm_client: Any = _OneServerClient()
        if self.reward_loop_worker_handles == []:
            here: Any = _RewardHere(self.config)
            self.reward_loop_worker_handles = [here]

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **kwargs: Any
    ) -> Any:
        entry = _agent_loop_registry.get(agent_name, {})
        if set(entry) != {"_target_"} or self._is_traced:
            return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, **kwargs)
        module, name = entry["_target_"].rsplit(".", 1)
        loop = getattr(importlib.import_module(module), name)(
            trainer_config=DictConfigWrap(config=self.config),
            server_manager=self.llm_client,
            tokenizer=self.tokenizer,
            processor=self.processor,
            hf_model_type=self.hf_model_type,
            dataset_cls=self.dataset_cls,
            data_config=DictConfigWrap(self.config.data),
            tools=ToolListWrap(self.tools),
        )
        kwargs.pop("trace", None)
        output = await loop.run(sampling_params, **kwargs)
        return await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)


class CpuAgentLoopManager(AgentLoopManager):
    """verl's manager; it asks for its worker class in this attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(CpuAgentLoopWorker)
        super().__init__(*args, **kwargs)


class CpuOverlapWorker(OverlapWorker, CpuAgentLoopWorker):
    """The same, and what is finished is sent to the teacher."""


class CpuOverlapManager(AgentLoopManager):
    """Takes the place of CpuAgentLoopManager when teacher.overlap is on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(CpuOverlapWorker)
        super().__init__(*args, **kwargs)
