"""A transformers cache that is read by many forwards and written by none: the prompt's keys and values.

The stock way, batch_repeat_interleave, copies every layer for every row and then lets the forward add to the copies.
Here one layer at a time is copied, and only while its attention runs.

Shapes: G = prompts in the cache, B = rows of the forward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer


class _PromptLayer(CacheLayerMixin):
    """Keys and values of the prompts, one of them for each row of the forward, which adds its own and keeps nothing.

    So one prompt serves any number of forwards, and only one layer at a time holds a copy for each row.
    """

    def __init__(self, layer: DynamicLayer, which: torch.Tensor):
        super().__init__()
        self.is_sliding = layer.is_sliding
        self._layer = layer
        self._which = which

    def _rows(self, prompts: torch.Tensor | None) -> torch.Tensor:
        assert prompts is not None
        if len(prompts) == 1:
            return prompts.expand(len(self._which), -1, -1, -1)
        return prompts.index_select(0, self._which)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scratch = copy.copy(self._layer)
        scratch.keys, scratch.values = self._rows(self._layer.keys), self._rows(self._layer.values)
        return scratch.update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._layer.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._layer.get_seq_length()

    def get_max_cache_shape(self) -> int:
        return self._layer.get_max_cache_shape()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("a prompt's layer holds its keys from the start")


class PromptCache(Cache):
    """Read-only view of the cache of some prompts; row b of the forward goes on from prompt which[b]."""

    def __init__(self, cache: Cache, which: torch.Tensor):
        layers: list[Any] = []
        for layer in cache.layers:
            # A recurrent state is no list of keys: expanding it row by row would need its own rules.
            if not isinstance(layer, DynamicLayer) or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                raise TypeError(f"the model keeps a {type(layer).__name__}, which rows cannot share")
            layers.append(_PromptLayer(layer, which))
        super().__init__(layers=layers)
