"""vLLM's scheduler, with prefix-cache hits that end before the first scored position.

vLLM computes no log-probs for positions that it takes from the prefix cache; on some paths their places hold whatever
was in memory before (0.0 has been seen: "the teacher is certain"). Stock vLLM therefore reads no cache at all for such
requests. Here a request that says where its scored positions start may read the cache up to there: row start - 1 is the
first whose hidden state is needed, so at most start - 1 tokens may come from the cache.

Handed to vLLM as `scheduler_cls`, an argument meant for this whose interface is not promised to stay:
vllm_engine.check_names looks for what is used, and the reader of the values checks num_cached_tokens all the same.
Read in 0.24, 0.32 and 0.33; run with 0.32 on a CPU.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from opd.scoring.vllm_engine import START


class _Capped:
    """Mixed into a scheduler of vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager: Any = self.kv_cache_manager  # type: ignore[attr-defined]
        coordinator = manager.coordinator
        get_computed_blocks, find_hit = manager.get_computed_blocks, coordinator.find_longest_cache_hit
        cap: int | None = None  # of the request that is looked up; there is one scheduling thread

        def capped_hit(block_hashes: Any, max_cache_hit_length: int, *more: Any, **named: Any) -> Any:
            length = max_cache_hit_length if cap is None else min(max_cache_hit_length, cap)
            return find_hit(block_hashes, length, *more, **named)

        def capped_blocks(request: Any, *more: Any, **named: Any) -> Any:
            nonlocal cap
            start = (getattr(request.sampling_params, "extra_args", None) or {}).get(START)
            cap = None if start is None else start - 1
            try:
                return get_computed_blocks(request, *more, **named)
            finally:
                cap = None

        manager.get_computed_blocks = capped_blocks
        coordinator.find_longest_cache_hit = capped_hit


class _CappedAsyncScheduler(_Capped, AsyncScheduler):
    pass


class _CappedSyncScheduler(_Capped, Scheduler):
    pass


def capped_scheduler(vllm_config: Any, **named: Any) -> Scheduler:
    """The kind of scheduler that vLLM would take itself: it schedules ahead on a GPU, and not on a CPU."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (_CappedAsyncScheduler if ahead else _CappedSyncScheduler)(vllm_config=vllm_config, **named)
