"""The Ray actor that generates: verl's agent loops send it one request per row, it runs what is waiting as one batch.

The actor starts without weights and refuses to generate until verl's weight sync has filled every parameter, so the
first validation already measures the student that is trained.

Random numbers. With `rollout.full_determinism=True` verl names a request "det-<row>", its row in the batch handed to
the agent loops. The seed of a request is then (rollout.seed, step of the weights, row, how often this row asked since
those weights arrived), and the same run samples the same tokens again, in whatever order and company the requests come.
Two things move the last number: a turn of a dialogue, and a sampled (not a greedy) validation before a training step.
Other request ids are random; their place in the order of arrival stands in for the row, which is only as
reproducible as that order. verl's V1 agent loops name every row "det-0", so there it is the order that counts, too.
"""

from __future__ import annotations

import asyncio
import collections
import re
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from .collect import Collector
from .generate import Completion, Request, generate

_ROW_OF_REQUEST = re.compile(r"det-(\d+)")
_KNOWN_PARAMS = {"temperature", "top_p", "top_k", "repetition_penalty", "logprobs", "max_tokens", "max_new_tokens"}


def eos_ids_of(model_config: HFModelConfig) -> set[int]:
    """Every id that ends a response: the generation config's if it has any, else the model's or the tokenizer's."""
    for source in (model_config.generation_config, model_config.hf_config, model_config.tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return set(eos) if isinstance(eos, list | tuple) else {eos}
    raise ValueError(f"no eos_token_id in the generation config, config or tokenizer of {model_config.path}")


class GenerationServer:
    """Runs as an async Ray actor; a plain class here, so that a test needs no cluster."""

    def __init__(
        self, config: RolloutConfig, hf_config: PretrainedConfig, eos_ids: set[int], trust_remote_code: bool = False
    ) -> None:
        self.config = config
        self.eos_ids = set() if config.ignore_eos else eos_ids
        self.max_model_len = config.max_model_len or config.prompt_length + config.response_length
        self.model = AutoModelForCausalLM.from_config(
            hf_config, trust_remote_code=trust_remote_code, torch_dtype=torch.float32
        ).eval()
        # Tied parameters appear here once, under the name that owns them.
        self._missing = {name for name, _ in self.model.named_parameters()}
        self._state = self.model.state_dict()
        self._global_steps: int | None = None
        self._asked: collections.Counter[int] = collections.Counter()
        self._arrived = 0
        self._complete: Collector[Request, Completion] = Collector(self._run, max_items=config.max_num_seqs)
        # Weights never change under a running batch.
        self._model_lock = asyncio.Lock()

    async def ready(self) -> bool:
        """Answered once the model is built."""
        return True

    async def load_weights(self, arrays: dict[str, np.ndarray], global_steps: int | None, is_last: bool) -> None:
        """Copy one bucket of named float arrays into the model; the last bucket makes the new step current."""
        async with self._model_lock:
            for name, array in arrays.items():
                if name not in self._state:
                    raise KeyError(f"the trainer sent {name!r}, which {type(self.model).__name__} does not have")
                np.copyto(self._state[name].numpy(), array)  # raises where the shapes differ
                self._missing.discard(name)
            if not is_last:
                return
            if self._missing:
                raise RuntimeError(
                    f"the weight sync of step {global_steps} left {len(self._missing)} parameters unset, "
                    f"the first is {min(self._missing)!r}"
                )
            self._global_steps = 0 if global_steps is None else global_steps
            self._asked.clear()
            self._arrived = 0

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **unsupported: Any,
    ) -> TokenOutput:
        """One response; verl's agent loops call this once per row and turn."""
        extra = {"image_data": image_data, "video_data": video_data, **unsupported}
        if given := sorted(name for name, value in extra.items() if value is not None):
            raise ValueError(f"the CPU rollout takes token ids only, but the request has {', '.join(given)}")
        if self._global_steps is None:
            raise RuntimeError("asked to generate before the first weight sync; call update_weights() first")
        request = self._request(list(prompt_ids), sampling_params, request_id)
        completion = await self._complete(request)
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )

    async def generate_many(self, requests: list[dict[str, Any]]) -> list[TokenOutput]:
        """`generate` for many rows in one call; the first error is everybody's."""
        return await asyncio.gather(*[self.generate(**request) for request in requests])

    def _request(self, prompt_ids: list[int], params: dict[str, Any], request_id: str) -> Request:
        if unknown := sorted(set(params) - _KNOWN_PARAMS):
            raise ValueError(f"sampling parameters {unknown} are not supported; known: {sorted(_KNOWN_PARAMS)}")
        if params.get("repetition_penalty", 1.0) != 1.0:
            raise ValueError(f"repetition_penalty={params['repetition_penalty']} is not supported; set it to 1.0")
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room to generate in {self.max_model_len} tokens; "
                "raise data.max_prompt_length or rollout.max_model_len"
            )
        asked = params.get("max_tokens", params.get("max_new_tokens", self.config.response_length))
        temperature = float(params.get("temperature", 1.0))
        return Request(
            prompt_ids=prompt_ids,
            max_tokens=min(asked, room),
            temperature=temperature,
            top_p=float(params.get("top_p", 1.0)),
            top_k=int(params.get("top_k", -1)),
            seed=(0,) if temperature == 0 else self._seed(request_id),
        )

    def _seed(self, request_id: str) -> tuple[int, ...]:
        match = _ROW_OF_REQUEST.fullmatch(request_id)
        row = int(match.group(1)) if match else self._arrived
        self._arrived += 1
        asked_before = self._asked[row]
        self._asked[row] += 1
        assert self._global_steps is not None
        return (self.config.seed, self._global_steps, row, asked_before)

    async def _run(self, requests: list[Request]) -> list[Completion]:
        async with self._model_lock:
            # In a thread: the event loop goes on accepting the requests of the next batch.
            return await asyncio.to_thread(generate, self.model, requests, self.eos_ids)
