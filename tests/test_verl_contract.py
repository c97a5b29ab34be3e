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


# V1 trainers (opd/trainer_v1.py; its own hooks are in tests/test_trainer_v1.py)


def test_v1_stores_what_the_override_reads_and_writes():
    """Jagged rows of `responses`' length under these names, and a tag on the rows that fill a batch up."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.trainer.ppo import padding_utils
    from verl.trainer.ppo.v1 import PPOTrainer
    from verl.workers.utils.losses import ppo_loss

    stored = inspect.getsource(AgentLoopOutput.as_dict)
    for name in ("prompts", "responses", "response_mask"):
        assert f'output["{name}"] = torch.tensor(' in stored, f"an agent loop's output no longer has {name}"
    old = inspect.getsource(PPOTrainer._compute_old_log_prob)
    assert 'data["old_log_probs"] = response_from_nested(data.pop("log_probs"), data["response_mask"])' in old
    own = inspect.getsource(PPOTrainer._compute_ref_log_prob)
    assert 'data["ref_log_prob"] = response_from_nested(data.pop("log_probs"), data["response_mask"])' in own
    assert "is_padding=True" in inspect.getsource(padding_utils.construct_minimal_padding_template)
    assert 'tag.get("is_padding", False)' in inspect.getsource(PPOTrainer._compute_metrics)
    assert 'data["ref_log_prob"]' in inspect.getsource(ppo_loss)


def test_v1_keeps_a_trainers_settings_under_verls_name_of_its_mode():
    """So the configuration has to say `sync`, not `opd_sync`: another name gets other settings and another buffer."""
    from verl.trainer.ppo.v1 import PPOTrainer

    assert "trainer.v1.get(self.trainer_mode, {})" in inspect.getsource(PPOTrainer.__init__)
    assert 'self.trainer_mode == "sync"' in inspect.getsource(PPOTrainer._build_replay_buffer)


# Columns of the data set (several teachers, prompts for the teacher: opd/routing.py, opd/teacher_prompt.py)


def test_v0_keeps_the_columns_that_the_teacher_needs_beside_the_batch():
    """verl moves a column that is none of its four to the rollout, which may keep it; raw_prompt comes back."""
    import numpy as np
    from verl import DataProto
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from opd.trainer import OPDTrainer

    def batch() -> DataProto:
        names = ("raw_prompt", "domain", "unused", "data_source")
        return DataProto.from_single_dict(
            {"dummy": torch.zeros(2, 1), **{name: np.array([name, "b"], dtype=object) for name in names}}
        )

    class Teacher:
        data_columns = ("domain", "data_source", "raw_prompt", "absent")

    trainer: OPDTrainer = OPDTrainer.__new__(OPDTrainer)
    trainer.teacher = Teacher()
    stock, ours = batch(), batch()
    RayPPOTrainer._get_gen_batch(trainer, stock)
    assert set(stock.non_tensor_batch) == {"data_source"}
    generated = trainer._get_gen_batch(ours)
    assert set(ours.non_tensor_batch) == {"data_source", "domain"}
    assert set(generated.non_tensor_batch) == {"raw_prompt", "domain", "unused", "data_source"}
    back = DataProto.from_single_dict({"responses": torch.zeros(4, 1)}, meta_info={})
    back.non_tensor_batch = generated.repeat(2, interleave=True).non_tensor_batch  # with all columns, as verl may do
    assert ours.repeat(2, interleave=True).union(back).non_tensor_batch["domain"].tolist() == ["domain"] * 2 + ["b"] * 2
    source = inspect.getsource(AgentLoopWorker)
    assert 'output.extra_fields["raw_prompt"] = kwargs["raw_prompt"]' in source


def test_v1_stores_the_columns_of_the_data_set_beside_each_output():
    from verl.trainer.ppo.v1 import AgentLoopWorkerTQ

    source = inspect.getsource(AgentLoopWorkerTQ.__ray_actor_class__._agent_loop_postprocess)
    assert "field.update(kwargs)" in source and "fields.append(field)" in source


# Losses (opd/loss/in_verl.py)


def test_advantage_estimators_get_no_log_probs():
    """Why the teacher's advantage is not an estimator's. If this fails, it may become one: read compute_advantage."""
    from verl.trainer.ppo.ray_trainer import compute_advantage

    source = inspect.getsource(compute_advantage)
    handed = set(re.findall(r'adv_kwargs\["(\w+)"\]', source)) | set(re.findall(r'^ +"(\w+)": ', source, re.MULTILINE))
    assert {"token_level_rewards", "response_mask", "config", "index"} <= handed
    assert "ref_log_prob" not in source
    assert "core_algos.get_adv_estimator_fn(adv_estimator)" in source


def test_v1_knows_several_outputs_of_a_loop_only_for_the_estimator_grpo_and_delegates_the_others():
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    source = inspect.getsource(compute_advantage_for_multi_trajectories)
    assert "if adv_estimator != core_algos.AdvantageEstimator.GRPO:\n        return compute_advantage(" in source


def test_columns_of_the_batch_reach_the_worker_and_its_meta_information_only_in_v0():
    """V0 sends the whole batch; V1 fetches all fields that TransferQueue has, by keys that forget their extra_info."""
    import transfer_queue as tq
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1 import PPOTrainer

    assert "batch_td = batch.to_tensordict()" in inspect.getsource(RayPPOTrainer._update_actor)
    assert "return batch" in inspect.getsource(PPOTrainer._compute_advantage)
    assert "batch = tq.kv_batch_put(" in inspect.getsource(PPOTrainer._compute_advantage)
    assert "extra_info" not in _parameters(tq.kv_batch_put)


def test_the_actors_loss_can_be_set_and_reads_these_names():
    """ppo_loss takes its KL term, coefficient and policy loss from its config, and everything else from the batch."""
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    assert _parameters(TrainingWorker.set_loss_fn) == ["self", "loss_fn"]
    assert "loss_function=self.loss_fn" in inspect.getsource(TrainingWorker.train_batch)
    _assert_takes(ppo_loss, "config", "model_output", "data", "dp_group")
    source = inspect.getsource(ppo_loss)
    for words in (
        "if config.use_kl_loss:",
        "* config.kl_loss_coef",
        'data["advantages"]',
        "get_policy_loss_fn(loss_mode)",
    ):
        assert words in source, f"verl's ppo_loss no longer has {words!r}"


def test_the_kl_term_of_ppo_loss_is_the_one_that_weights_and_the_clamp_are_put_into():
    """opd.loss.in_verl.weighted_kl_loss adds it as verl would; this is the code that it repeats the order of."""
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
    from verl.workers.utils.losses import ppo_loss

    assert _parameters(kl_penalty) == ["logprob", "ref_logprob", "kl_penalty"]
    source = " ".join(inspect.getsource(ppo_loss).split())
    for words in (
        "kld = kl_penalty(logprob=log_prob, ref_logprob=ref_log_prob, kl_penalty=config.kl_loss_type)",
        "loss_mat=kld, loss_mask=response_mask, loss_agg_mode=config.loss_agg_mode, **config.global_batch_info",
        'metrics["kl_loss"] = Metric(value=kl_loss, aggregation=metric_aggregation)',
        'metrics["kl_coef"] = config.kl_loss_coef',
    ):
        assert words in source, f"verl's ppo_loss no longer has {words!r}"
    put = set(re.findall(r'config\.global_batch_info\["(\w+)"\]', source))
    assert put == {"dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"}
    _assert_takes(agg_loss, "loss_mat", "loss_mask", "loss_agg_mode", *put)


def test_the_fsdp_engine_hands_its_logits_to_the_loss_when_the_batch_says_so():
    """As values [1, tokens] that come back in model_output: without remove_padding, and twice with it."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    source = inspect.getsource(FSDPEngineWithLMHead.prepare_model_outputs)
    assert 'key="distillation_use_topk", default=False' in source
    call = "outputs = logits_processor_func(student_logits=logits_rmpad.unsqueeze(0), data=micro_batch)"
    assert source.count(call) == 2
    assert source.count("model_output[k] = torch.nested.nested_tensor_from_jagged(v, cu_seqlens)") == 2


def test_a_forward_hands_its_logits_over_only_with_a_loss_and_can_do_without_log_probs():
    """What opd.loss.student_topk asks of the engine. compute_log_prob gives no loss: its forward cannot be used."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.v1 import PPOTrainer
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine_workers import TrainingWorker

    infer = inspect.getsource(TrainingWorker.infer_batch)
    assert "loss_function = self.loss_fn if compute_loss else None" in infer
    assert 'key="no_lora_adapter", default=False' in infer  # the student is asked with its adapter
    outputs = inspect.getsource(FSDPEngineWithLMHead.prepare_model_outputs)
    assert 'key="distillation_only", default=False' in outputs
    assert outputs.count("assert v.shape == (logits_rmpad.shape[0],)") == 2  # so one number per token and name
    assert "compute_loss=False" in inspect.getsource(RayPPOTrainer._compute_old_log_prob)
    assert '"compute_loss": False' in inspect.getsource(PPOTrainer._compute_old_log_prob)


def test_our_forward_is_dispatched_as_verls_log_probs_are():
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from opd.worker import OPDWorker

    verls = getattr(ActorRolloutRefWorker.compute_log_prob, MAGIC_ATTR)
    for cls in (OPDWorker, worker.CpuWorker):
        ours = getattr(cls.compute_student_topk, MAGIC_ATTR)
        assert ours.keys() == verls.keys() and ours["blocking"] == verls["blocking"]
        for step in ("dispatch_fn", "collect_fn"):
            mine, theirs = ours["dispatch_mode"][step], verls["dispatch_mode"][step]
            assert (mine.func, mine.args) == (theirs.func, theirs.args)


def test_what_a_worker_method_returns_is_put_into_transferqueue_in_place_of_what_was_there():
    """V1: TOPK_IDS comes from the worker first and from the trainer then, as verl's own entropy does."""
    from verl.trainer.ppo.v1 import PPOTrainer
    from verl.utils import transferqueue_utils

    put = inspect.getsource(transferqueue_utils._async_update_meta_with_output)
    assert "tq_client.async_put(data=output.select(*fields), metadata=meta)" in put
    old = inspect.getsource(PPOTrainer._compute_old_log_prob)
    assert 'data["entropy"] = response_from_nested(data.pop("entropy"), data["response_mask"])' in old
    assert 'fields=data.select("old_log_probs", "entropy")' in old


def test_values_of_a_response_token_are_taken_from_the_position_before_it():
    """no_padding_2_padding's shift by one, which opd.loss.in_verl.response_positions has to share."""
    from tensordict import TensorDict
    from verl.workers.utils.padding import no_padding_2_padding

    from opd.loss.in_verl import response_positions

    attention = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])  # prompts of 2 and 3, responses of 2 and 3
    data = TensorDict(
        {
            "prompts": torch.zeros(2, 3, dtype=torch.long),
            "responses": torch.zeros(2, 3, dtype=torch.long),
            "response_mask": attention[:, 3:],
            "attention_mask": attention,
            "input_ids": torch.nested.nested_tensor_from_jagged(torch.arange(10), torch.tensor([0, 4, 10])),
        },
        2,
    )
    positions, real = response_positions(data)
    assert positions[real].tolist() == [1, 2, 6, 7, 8]
    verls = no_padding_2_padding(torch.arange(10.0), data)
    assert verls[real].tolist() == positions[real].tolist()


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
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*settings.OVERRIDES, *settings.OVERRIDES_V1])
    assert config.transfer_queue.backend.SimpleStorage.num_data_storage_units == 1


def test_the_environment_is_set_on_import():
    """Importing opd.cpu is all that a driver has to do."""
    import os

    assert set(settings.ENV) <= set(os.environ)


# Checkpoints


def test_a_worker_saves_in_one_call_and_a_lora_student_under_pefts_names():
    """opd/lora.py: if this fails, see whether verl merges adapters by itself now."""
    from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.workers.engine_workers import ActorRolloutRefWorker

    from opd.worker import OPDWorker

    verls, ours = ActorRolloutRefWorker.save_checkpoint, OPDWorker.save_checkpoint
    assert _parameters(verls)[:2] == ["self", "local_path"]
    for method in (verls, ours):
        assert getattr(method, MAGIC_ATTR)["dispatch_mode"] == Dispatch.ONE_TO_ALL
    source = inspect.getsource(FSDPCheckpointManager.save_checkpoint)
    assert 'hf_local_path = os.path.join(local_path, "huggingface")' in source
    assert "save_model.save_pretrained(hf_local_path, state_dict=state_dict)" in source
    assert "merge" not in source
