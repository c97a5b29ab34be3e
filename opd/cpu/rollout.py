"""verl's two halves of a rollout: the replica (in the trainer's process) and its weight sync (in the actor worker).

`CpuReplica` starts one GenerationServer per replica; `CpuRollout` finds it by name and sends it the new weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from .server import GenerationServer, eos_ids_of


def server_name(replica_rank: int) -> str:
    """Name of a replica's Ray actor; a Ray job sees only its own names."""
    return f"opd_cpu_rollout_{replica_rank}"


class CpuReplica(RolloutReplica):
    """One generation actor; it keeps its weights and has nothing to release, so the memory calls do nothing."""

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(
                f"a CPU replica is one process, but the configuration asks for {self.world_size} "
                "(tensor x data x pipeline parallel size); set all three to 1"
            )
        untyped: Any = self.model_config  # a DictConfig, whatever verl's annotation says
        model_config: HFModelConfig = omega_conf_to_dataclass(untyped)
        server_class: Any = ray.remote(GenerationServer)
        self._server_address = server_name(self.replica_rank)
        self._server_handle = server_class.options(
            name=self._server_address, num_cpus=1, max_concurrency=self.max_concurrency
        ).remote(
            config=self.config,
            hf_config=model_config.hf_config,
            eos_ids=eos_ids_of(model_config),
            trust_remote_code=model_config.trust_remote_code,
        )
        self.servers = [self._server_handle]
        await self._server_handle.ready.remote()

    async def sleep(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    async def clear_kv_cache(self) -> None:
        pass

    async def release_kv_cache(self) -> None:
        pass

    async def resume_kv_cache(self) -> None:
        pass

    async def start_profile(self, **kwargs: Any) -> None:
        pass

    async def stop_profile(self) -> None:
        pass


class CpuRollout(BaseRollout):
    """Lives in the actor worker; its only job is to hand over weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        # A replica is one process, so rank and replica are the same number.
        self.replica_rank = replica_rank if replica_rank >= 0 else int(os.environ["RANK"])
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(
                f"the CPU rollout loads full tensors, not {wire_format!r}; use checkpoint_engine.backend=naive"
            )
        if peft_config is not None:
            raise ValueError("the CPU rollout does not load LoRA adapters; set model.lora.merge=True or lora_rank=0")
        server = ray.get_actor(server_name(self.replica_rank))
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        for arrays, is_last in _buckets(weights, bucket_bytes):
            await server.load_weights.remote(arrays, global_steps=global_steps, is_last=is_last)


def _buckets(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[tuple[dict[str, np.ndarray], bool]]:
    """Named float32 arrays in pieces of about `bucket_bytes`, each with the flag "this is the last"."""
    arrays: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in weights:
        if size >= bucket_bytes:
            yield arrays, False
            arrays, size = {}, 0
        # As numpy: Ray moves those without pickling the bytes.
        arrays[name] = tensor.detach().to("cpu", torch.float32).numpy()
        size += arrays[name].nbytes
    yield arrays, True
