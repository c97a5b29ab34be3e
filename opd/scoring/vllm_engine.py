"""Starting vLLM as a teacher: its environment variables, its arguments, and the names in it that have to exist.

Nothing here imports torch or vllm before `set_environment` has run, since both read their variables when they load.

The engine runs inside the worker process. That way it starts in 4 s instead of 13 s on a CPU and takes 1.6 GB less, and
above all there is one process to watch: whatever ends the engine ends the worker, which the supervisor starts again.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

from opd.errors import ConfigError
from opd.scoring.scorer import DTYPES, LoadOptions
from opd.wire import clip

log = logging.getLogger(__name__)

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # see the module
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about what was chosen here on purpose
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB, for a CPU only; vLLM's own default takes a share of all memory
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin for work all but stop an engine whose cores others use too
}
CPU_BLOCK_SIZE = 32  # tokens; prompts are shared in whole blocks, and a CPU's attention takes multiples of 32 only
CPU_BATCHED_TOKENS = 4096
GPU_BATCHED_TOKENS = 8192
START = "opd_start"  # in SamplingParams.extra_args: the first scored position


def set_environment() -> None:
    """Set what the user has not set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def import_vllm() -> Any:
    """The vllm package.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        import vllm
        from vllm import LLM, SamplingParams  # noqa: F401  (loaded lazily: this shows that they can be)
    except Exception as e:  # a wrong build fails while loading its libraries, in many ways
        raise ConfigError(
            f"vLLM cannot be imported here: {type(e).__name__}: {clip(str(e))}; set up its environment with "
            f"tools/setup_vllm_venv.sh and start the server with .venv-vllm/bin/python"
        ) from e
    return vllm


def start_engine(options: LoadOptions, max_length: int) -> Any:
    """A `vllm.LLM` that scores rows of up to `max_length` ids.

    Raises:
        ConfigError: vLLM lacks something that is needed, or refuses the model or a setting.
    """
    vllm = import_vllm()
    check_names(vllm)
    arguments = engine_arguments(options, max_length, cpu=is_cpu(options.device))
    try:
        return vllm.LLM(**arguments)
    except Exception as e:  # vLLM has no common base for what can be wrong with a model or a setting
        raise ConfigError(
            f"vLLM {vllm.__version__} cannot load {options.model!r}: {type(e).__name__}: {clip(str(e))[:200]}; where "
            f"memory is short, lower --max-len, or change --gpu-memory-utilization or, on a CPU, VLLM_CPU_KVCACHE_SPACE"
        ) from e


def is_cpu(device: str) -> bool:
    """Whether this build of vLLM runs on the CPU; checks that `device` asks for what it can do."""
    from vllm.platforms import current_platform

    cpu = bool(current_platform.is_cpu())
    if device not in ("auto", "cpu" if cpu else "cuda"):
        raise ConfigError(
            f"device {device!r}: this build of vLLM runs on {'the CPU' if cpu else current_platform.device_name} only; "
            f"use auto, and choose a GPU with CUDA_VISIBLE_DEVICES"
        )
    return cpu


def engine_arguments(options: LoadOptions, max_length: int, *, cpu: bool) -> dict[str, Any]:
    """The keyword arguments of `vllm.LLM`."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": max_length + 1,  # a request has to generate one token
        "max_logprobs": max(options.max_topk, 1),
        "max_num_batched_tokens": min(options.max_tokens, CPU_BATCHED_TOKENS if cpu else GPU_BATCHED_TOKENS),
        "enable_prefix_caching": True,
        "scheduler_cls": "opd.scoring.vllm_scheduler.capped_scheduler",
        "worker_extension_cls": "opd.scoring.vllm_rows.ResponseRows",
        "logprobs_mode": "raw_logprobs",
        "skip_tokenizer_init": True,  # ids in, numbers out
        "load_format": "safetensors",  # .bin files are pickles
        "trust_remote_code": False,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "disable_log_stats": True,
        "seed": 0,
    }
    if cpu:
        return arguments | {
            "block_size": CPU_BLOCK_SIZE,
            "enforce_eager": True,
        }  # compiling takes 45 s and gains nothing
    arguments["tensor_parallel_size"] = options.tensor_parallel_size
    arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    return arguments


def check_names(vllm: Any) -> None:
    """Look for everything of vLLM's that this backend touches, before a large model is loaded.

    Raises:
        ConfigError: a name is missing, so that this version of vLLM is not known to give the right values.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    fields = set(getattr(vllm.SamplingParams, "__struct_fields__", ()))
    missing = [
        f"SamplingParams.{name}"
        for name in ("prompt_logprobs", "flat_logprobs", "skip_reading_prefix_cache", "extra_args", "detokenize")
        if name not in fields
    ]
    try:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: F401
    except ImportError:
        missing.append("v1.core.sched.async_scheduler.AsyncScheduler")
    source = inspect.getsource(KVCacheManager)
    missing += [f"KVCacheManager.{name}" for name in ("get_computed_blocks",) if not hasattr(KVCacheManager, name)]
    missing += [
        f"{name} in KVCacheManager" for name in ("self.coordinator.find_longest_cache_hit(",) if name not in source
    ]
    if "num_cached_tokens" not in inspect.signature(vllm.RequestOutput.__init__).parameters:
        missing.append("RequestOutput.num_cached_tokens")
    if missing:
        raise ConfigError(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}; this backend knows 0.24 to 0.33. Install one of "
            f"them, or use --backend http with a server of that version"
        )
