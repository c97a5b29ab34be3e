"""verl's agent loop manager (V0 trainer) with workers that build their loops without Hydra.

verl calls `hydra.utils.instantiate` once per row, which costs about 5 ms of a core: with a tiny model and 512 rows that
is most of a step. A loop registered in code needs no more than its class. Chosen by
`rollout.agent.agent_loop_manager_class`; only this one line of a step differs, and a loop that comes from a config
file, or a traced run, takes verl's own way.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopManager,
    AgentLoopWorker,
    DictConfigWrap,
    ToolListWrap,
    _agent_loop_registry,
)


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


class CpuAgentLoopWorker(AgentLoopWorker):
    """Runs the agent loops of one chunk of a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # For a model type without a builder of its own, verl says so once per row.
        logging.getLogger("verl.utils.tokenizer.continuous_token_wiring").addFilter(_Once())
        super().__init__(*args, **kwargs)

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **kwargs: Any
    ) -> Any:
        entry = _agent_loop_registry.get(agent_name, {})
        if set(entry) != {"_target_"} or self.rollout_config.trace.get("backend"):
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
