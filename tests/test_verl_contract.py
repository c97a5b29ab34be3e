"""Every hook of verl that opd.cpu hangs on, checked against the installed verl: an upgrade fails here, by name."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from hydra import compose, initialize_config_module

import opd.cpu
from opd.cpu import agent_loop, rollout, server, settings, worker
from opd.cpu.platform import CpuPlatform


def _parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def _assert_takes(function, *names: str) -> None:
    missing = [name for name in names if name not in _parameters(function)]
    assert not missing, f"verl changed {function.__qualname__}{inspect.signature(function)}: no parameter {missing}"


def test_verl_version_is_the_one_these_hooks_were_read_in():
    """0.9.x; for another version, read the hooks below again and then raise this."""
    import verl

    assert verl.__version__.startswith("0.9."), f"verl {verl.__version__}"


# Platform


def test_the_platform_is_registered_chosen_and_complete():
    """PlatformBase has no abstract method that we lack, and every module-level helper of verl answers `cpu`."""
    from verl.plugin.platform import PlatformRegistry, get_platform
    from verl.utils import device

    assert PlatformRegistry.get("cpu") is CpuPlatform
    assert isinstance(get_platform(), CpuPlatform)
    assert device.get_device_name() == "cpu"
    assert device.get_device_id() == torch.device("cpu")
    assert device.get_nccl_backend() == "gloo"
    assert get_platform().ray_resource_options(1) == {"num_gpus": 1}


def test_the_device_module_has_what_verl_calls():
    """The functions of torch.cuda that the training path uses, on the resident memory of the process."""
    from verl.utils.device import get_torch_device, set_expandable_segments
    from verl.utils.memory_utils import aggressive_empty_cache
    from verl.utils.profiler.performance import _get_current_mem_info

    module = get_torch_device()
    assert module.is_available() and module.device_count() == 1
    allocated = module.memory_allocated()
    assert 0 < allocated <= module.max_memory_allocated()
    free, total = module.mem_get_info()
    assert 0 < free <= total
    module.synchronize()
    aggressive_empty_cache()
    set_expandable_segments(False)
    assert len(_get_current_mem_info()) == 4


def test_verl_still_loads_external_modules_and_platforms_from_these_variables():
    """The names in settings.ENV appear where verl reads them."""
    import verl
    from verl.plugin.platform import platform_manager
    from verl.workers.engine.base import EngineRegistry

    assert "VERL_USE_EXTERNAL_MODULES" in inspect.getsource(verl)
    assert "VERL_PLATFORM" in inspect.getsource(platform_manager)
    assert "VERL_ENGINE_DEVICE" in inspect.getsource(EngineRegistry.get_engine_cls)


# Worker


def test_the_fsdp_engine_is_found_for_a_cpu():
    """VERL_ENGINE_DEVICE leads to the FSDP2 language-model engine."""
    import verl.workers.engine  # noqa: F401  (registers the engines)
    from verl.workers.engine.base import EngineRegistry

    assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__ == "FSDPEngineWithLMHead"


def test_the_fsdp_engine_takes_its_precision_from_mixed_precision():
    """If this fails, look where the FSDP engine's compute type comes from now, and set float32 there."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    source = inspect.getsource(FSDPEngine._build_fsdp_module)
    assert "self.engine_config.mixed_precision" in source and "engine_config.dtype" not in source


def test_the_worker_can_make_the_process_group_first():
    """verl's initialiser takes a backend and leaves a group that exists alone."""
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.workers.engine_workers import ActorRolloutRefWorker

    _assert_takes(initialize_global_process_group_ray, "backend")
    assert "is_initialized()" in inspect.getsource(initialize_global_process_group_ray)
    _assert_takes(ActorRolloutRefWorker.__init__, "config", "role", "distillation_config")
    with pytest.raises(ValueError, match="ref_in_actor"):
        worker.CpuWorker(config=None, role="actor_rollout_ref")


def test_the_worker_syncs_weights_through_the_rollout():
    """`naive` weight sync hands named tensors to rollout.update_weights with these keywords."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    source = inspect.getsource(ActorRolloutRefWorker.update_weights)
    for words in ("self.rollout.update_weights(", "peft_config=peft_config", "global_steps=global_steps"):
        assert words in source, f"verl's worker.update_weights no longer has {words!r}"


# Rollout


def test_the_rollout_is_in_both_registries():
    """By the name that settings.OVERRIDES selects."""
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    assert get_rollout_class(settings.ROLLOUT_NAME, "async") is rollout.CpuRollout
    assert get_rollout_replica_class(settings.ROLLOUT_NAME) is rollout.CpuReplica


def test_the_rollout_class_has_the_interface_of_its_base():
    """No abstract method is left, and the base still names the parameters that we take."""
    from verl.workers.rollout.base import BaseRollout

    assert not rollout.CpuRollout.__abstractmethods__
    _assert_takes(BaseRollout.update_weights, "weights", "wire_format")
    _assert_takes(BaseRollout.__init__, "config", "model_config", "device_mesh")


def test_the_replica_answers_everything_that_verl_asks_of_one():
    """Every coroutine of RolloutReplica that forwards to its servers is one that we define."""
    from verl.workers.rollout.replica import RolloutReplica

    assert not rollout.CpuReplica.__abstractmethods__
    _assert_takes(RolloutReplica.__init__, "replica_rank", "config", "model_config", "gpus_per_node")
    forwarding = {
        name
        for name, function in inspect.getmembers(RolloutReplica, inspect.iscoroutinefunction)
        if "for server in self.servers" in inspect.getsource(function)
    }
    unanswered = {name for name in forwarding if name not in vars(rollout.CpuReplica)}
    assert not unanswered, f"RolloutReplica forwards {sorted(unanswered)} to servers; CpuReplica has to answer them"


def test_requests_carry_what_the_server_reads():
    """The client sends these keywords; a request id names the row when full_determinism is on."""
    from verl.experimental.agent_loop import single_turn_agent_loop
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    sent = inspect.getsource(LLMServerClient.generate)
    for name in ("request_id", "prompt_ids", "sampling_params", "image_data", "video_data"):
        assert f"{name}=" in sent, f"LLMServerClient.generate no longer sends {name}"
        _assert_takes(server.GenerationServer.generate, name)
    assert 'f"det-{priority}" if' in inspect.getsource(single_turn_agent_loop)
    assert "np.arange(len(prompts)" in inspect.getsource(AgentLoopManager.generate_sequences)
    assert {"token_ids", "log_probs", "stop_reason", "extra_fields"} <= set(TokenOutput.model_fields)


def test_agent_loops_are_built_from_these_arguments():
    """CpuAgentLoopWorker builds a loop as verl's worker does, less Hydra."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopWorker, _agent_loop_registry

    arguments = ["trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config"]
    _assert_takes(AgentLoopBase.__init__, *arguments, "hf_model_type")
    _assert_takes(AgentLoopWorker._run_agent_loop, "sampling_params", "trajectory", "agent_name", "trace", "kwargs")
    _assert_takes(AgentLoopWorker._agent_loop_postprocess, "output", "validate", "kwargs")
    source = inspect.getsource(AgentLoopWorker._run_agent_loop)
    for argument in [*arguments, "hf_model_type", "tools"]:
        assert f"{argument}=" in source, f"verl no longer passes {argument} to an agent loop"
    assert set(_agent_loop_registry["single_turn_agent"]) == {"_target_"}
    manager = inspect.getsource(agent_loop.AgentLoopManager.__init__)
    assert 'hasattr(self, "agent_loop_workers_class")' in manager


def test_agent_loop_workers_keep_their_client_and_reward_workers_in_these_attributes():
    """CpuAgentLoopWorker puts its own into the same places."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.experimental.reward_loop import RewardLoopManager, RewardLoopWorker

    built = inspect.getsource(AgentLoopWorker.__init__)
    assert "self.llm_client = llm_client" in built
    assert "self.reward_loop_worker_handles = reward_loop_worker_handles" in built
    scored = inspect.getsource(AgentLoopWorker._compute_score)
    assert "random.choice(self.reward_loop_worker_handles)" in scored and ".compute_score.remote(data)" in scored
    _assert_takes(RewardLoopWorker.__init__, "config", "reward_router_address")
    _assert_takes(RewardLoopWorker.compute_score, "data")
    assert "range(num_workers)" in inspect.getsource(RewardLoopManager._init_reward_loop_workers)  # 0 is allowed


def test_our_client_answers_what_agent_loops_call():
    """The single-turn loop sends these keywords, and reads nothing of the client but `generate`."""
    from verl.experimental.agent_loop import single_turn_agent_loop, tool_agent_loop

    for module in (single_turn_agent_loop, tool_agent_loop):
        used = set(re.findall(r"server_manager\.(\w+)", inspect.getsource(module)))
        assert used == {"generate"}, f"{module.__name__} uses {sorted(used)} of its client"


# Settings


def test_the_overrides_compose_and_reach_their_places():
    """Hydra accepts every override, and the ones that fail silently when misplaced have arrived."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*settings.OVERRIDES, *settings.OVERRIDES_V0])
    from verl.utils.config import omega_conf_to_dataclass

    student = config.actor_rollout_ref
    assert omega_conf_to_dataclass(student.rollout).agent.agent_loop_manager_class.endswith("CpuAgentLoopManager")
    assert omega_conf_to_dataclass(student.rollout).full_determinism is True
    assert omega_conf_to_dataclass(student.actor).fsdp_config.mixed_precision["param_dtype"] == "fp32"
    assert dict(config.ray_kwargs.ray_init.runtime_env.env_vars) == opd.cpu.ENV


def test_the_environment_is_set_on_import():
    """Importing opd.cpu is all that a driver has to do."""
    import os

    assert set(settings.ENV) <= set(os.environ)
