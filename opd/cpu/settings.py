"""The environment variables and Hydra overrides that turn a verl 0.9 run into a CPU run: the only place they live.

`opd.cpu` sets ENV on import; the main entry puts OVERRIDES before the user's own overrides, so a user's value wins.
This module imports nothing, so it can be read before verl is.
"""

from __future__ import annotations

ROLLOUT_NAME = "cpu"  # actor_rollout_ref.rollout.name

ENV: dict[str, str] = {
    "VERL_PLATFORM": "cpu",
    # verl imports these modules at the end of `import verl`, hence in every Ray process.
    "VERL_USE_EXTERNAL_MODULES": "opd.cpu",
    # verl registers its FSDP engine for "cuda" and "npu" only; the code itself is device-agnostic.
    "VERL_ENGINE_DEVICE": "cuda",
    # Without it, Ray warns in every process that it clears CUDA_VISIBLE_DEVICES. (Do not set that one to "": Ray then
    # refuses to start with the logical GPU below.)
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # OpenMP threads that wait by spinning take the core from the process that they wait for.
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_USAGE_STATS_ENABLED": "0",
    # On busy cores Ray gives up on its own node after 30 s and on a process, which imports verl first, after 60 s.
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_worker_register_timeout_seconds": "300",
    # Ray runs its processes at niceness 15 by default: any teacher on the same cores would starve the trainer.
    "RAY_worker_niceness": "0",
}

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

OVERRIDES: list[str] = [
    "trainer.device=cpu",
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    # Logical resources. verl asks for one GPU and three CPUs per worker, and waits for ever where Ray has fewer.
    "+ray_kwargs.ray_init.num_gpus=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.include_dashboard=False",
    # A Ray cluster that was started elsewhere does not inherit this process's environment.
    *(f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}='{value}'" for name, value in ENV.items()),
    # DataLoader workers die noisily at the end of the run.
    "data.dataloader_num_workers=0",
    # Without flash attention, packing costs a mask of all tokens of a micro-batch squared.
    f"{_MODEL}.use_remove_padding=False",
    f"+{_MODEL}.override_config.attn_implementation=sdpa",
    f"{_MODEL}.enable_gradient_checkpointing=False",
    # FSDP1 asserts an accelerator.
    f"{_ACTOR}.strategy=fsdp2",
    # Not fsdp_config.dtype: the FSDP engine ignores it, and computes in bfloat16 unless mixed_precision says otherwise.
    f"+{_ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    f"{_ACTOR}.use_torch_compile=False",
    f"{_ACTOR}.fsdp_config.use_torch_compile=False",
    # With one rank there is nothing to reshard, and gathering again for the backward pass is a copy.
    f"{_ACTOR}.fsdp_config.reshard_after_forward=False",
    # Micro-batches by tokens: every one costs a fixed price per layer, so few large ones.
    f"{_ACTOR}.use_dynamic_bsz=True",
    f"{_ROLLOUT}.name={ROLLOUT_NAME}",
    f"{_ROLLOUT}.dtype=float32",
    f"{_ROLLOUT}.tensor_model_parallel_size=1",
    f"{_ROLLOUT}.free_cache_engine=False",
    # Request ids become "det-<row>", the stable identity from which each row's random numbers are derived.
    f"{_ROLLOUT}.full_determinism=True",
    f"{_ROLLOUT}.max_num_seqs=1024",
    # One process each: they wait more than they work, and every one costs start-up time and a core.
    f"{_ROLLOUT}.agent.num_workers=1",
    "reward.num_workers=1",
]

# For trainer.use_v1=True only.
OVERRIDES_V1: list[str] = [
    # Each one is a Ray process that imports torch; verl's default is 8.
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]

# For trainer.use_v1=False only: the V1 trainers have an agent loop manager of their own.
OVERRIDES_V0: list[str] = [
    f"+{_ROLLOUT}.agent.agent_loop_manager_class=opd.cpu.agent_loop.CpuAgentLoopManager",
    # That manager's workers compute rewards themselves.
    "reward.num_workers=0",
]
