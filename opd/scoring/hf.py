"""Scores rows with a transformers model, on a CPU or a GPU.

plan.py decides which rows share a forward and which share a prompt, this file runs the model's body, and head.py turns
the hidden states of scored positions, and of no others, into log-probs.

At load the scorer is held against the model: its head against the model's own logits (hf_load.py refuses one that
differs), and shared prompts against separate rows. Where prompts cannot be shared exactly, they are not.

Not covered: several GPUs for one model, quantized checkpoints, encoder-decoder models.

Shapes: B = rows of a forward, G = prompts of a forward, P = ids in a prompt, L = ids in a row,
N = scored positions of a row, H = hidden size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from opd.errors import RowError
from opd.fingerprint import model_fingerprint, vocabulary_bytes, vocabulary_fingerprint
from opd.scoring.head import BLOCK_ROWS, Head, head_logprobs
from opd.scoring.hf_load import eos_ids, find_device, find_head, load_model, max_length, probe_ids
from opd.scoring.plan import Plan, Shared, make_plan
from opd.scoring.prompt_cache import PromptCache
from opd.scoring.scorer import MAX_CANDIDATES, LoadOptions, Row, RowScores
from opd.wire import ModelInfo, clip

log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Most tokens in one forward on a CPU, of 256, 512, 1024 and 2048 the fastest (by 3 to 13 %) for a model 512 wide: more
# do not make a matmul faster there, and the activations leave the cache.
CPU_TOKENS = 512
# What starting a forward costs, in tokens; see plan.py. CPU: measured with 42M parameters, where sharing began to win
# at 56 to 64 saved tokens for responses of 8 to 448. GPU: an estimate, 30 ms of launches at 30,000 tokens/s.
CALL_TOKENS = {"cpu": 64, "cuda": 1024}
MAX_PROBED_WINDOW = 1032  # the probe reaches beyond a sliding window up to here; a larger one takes too long to load
# Relative difference of hidden states that rounding alone explains; a cache that forgets differs by 0.1 and more.
SHARE_TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1}


class HFScorer:
    """A transformers model behind the Scorer protocol."""

    def __init__(self, body: Any, config: Any, head: Head, info: ModelInfo, max_tokens: int):
        self.info = info
        self.vocabulary = b""  # see Scorer
        self.share = True  # whether prompts may be computed once for all rows that start with them
        self._body = body  # ids [B, L] -> last_hidden_state [B, L, H]
        self._config = config
        self._head = head
        self._device = head.weight.device
        self._max_tokens = min(max_tokens, CPU_TOKENS) if self._device.type == "cpu" else max_tokens
        # On a CPU nothing would be gained by moving the weights: the process is ended and loads them again.
        self.can_sleep = self._device.type == "cuda"

    def sleep(self) -> None:
        """Move the weights to the CPU's memory, and give the GPU's back (all but the CUDA context)."""
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move them back: copies are exact, so scores are what they were."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        self._body.to(device)
        for tensor in (self._head.weight, self._head.bias):  # not always part of the body
            if tensor is not None:
                tensor.data = tensor.data.to(device)

    @torch.inference_mode()
    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores | RowError]:
        """See Scorer.score."""
        plan = make_plan(
            rows, max_tokens=self._max_tokens, call_tokens=CALL_TOKENS[self._device.type], share=self.share
        )
        results: dict[int, RowScores | RowError] = {}
        waiting: list[tuple[int, torch.Tensor]] = []
        waiting_rows = 0
        for part in self._hidden(plan, rows, results):
            waiting += part
            waiting_rows += sum(len(hidden) for _, hidden in part)
            # The head reads all of its weights for each call: few calls with many rows.
            if waiting_rows >= BLOCK_ROWS[self._device.type]:
                self._score_hidden(waiting, rows, topk, temperature, results)
                waiting, waiting_rows = [], 0
        self._score_hidden(waiting, rows, topk, temperature, results)
        out: list[RowScores | RowError] = []
        for index, original in enumerate(plan.same_as):
            result = results.get(original) or _nothing(rows[index], topk)
            out.append(result._replace(row=index) if isinstance(result, RowError) else result)
        return out

    def hidden(self, rows: Sequence[Row], *, share: bool) -> list[torch.Tensor]:
        """The hidden states [N, H] behind each row's values; for the probe at load."""
        plan = make_plan(rows, max_tokens=self._max_tokens, call_tokens=0, share=share)
        states = dict(pair for part in self._hidden(plan, rows, {}) for pair in part)
        return [states[index] for index in plan.same_as]

    def _hidden(
        self, plan: Plan, rows: Sequence[Row], results: dict[int, Any]
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """The hidden states that predict the scored ids: row and [N, H], some rows at a time."""
        for part in plan.shared:
            yield from self._shared(part, rows, results)
        for batch in plan.plain:
            yield from self._halving(batch, lambda some: self._plain(some, rows), rows, results)

    def _plain(self, batch: list[int], rows: Sequence[Row]) -> list[tuple[int, torch.Tensor]]:
        ids = self._padded([rows[index].ids[:-1] for index in batch])
        hidden = self._body(input_ids=ids, use_cache=False).last_hidden_state
        return [(i, hidden[b, rows[i].start - 1 : len(rows[i].ids) - 1]) for b, i in enumerate(batch)]

    def _shared(
        self, part: Shared, rows: Sequence[Row], results: dict[int, Any]
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        failed: dict[int, RowError] = {}  # prompts; apart from `results`, where the same index is a row
        for prompts, last, cache in self._halving(part.prompts, lambda some: self._prompts(some, rows), rows, failed):
            which = {prompt: g for g, prompt in enumerate(prompts)}
            run = partial(self._responses, part=part, which=which, last=last, cache=cache, rows=rows)
            for batch in part.batches:
                yield from self._halving([i for i in batch if part.prompt_of[i] in which], run, rows, results)
        for index, prompt in part.prompt_of.items():
            if prompt in failed:
                results[index] = failed[prompt]._replace(row=index)

    def _prompts(self, prompts: list[int], rows: Sequence[Row]) -> tuple[list[int], torch.Tensor, Cache]:
        """The last hidden state [G, H] of each prompt and their keys and values."""
        cache = DynamicCache(config=self._config)
        ids = self._padded([rows[index].ids[: rows[index].start] for index in prompts])
        hidden = self._body(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
        return prompts, hidden[:, -1].clone(), cache  # a copy, so that the rest of `hidden` can go

    def _responses(
        self,
        batch: list[int],
        *,
        part: Shared,
        which: dict[int, int],
        last: torch.Tensor,
        cache: Cache,
        rows: Sequence[Row],
    ) -> list[tuple[int, torch.Tensor]]:
        """Run ids[start:L-1] of each row behind its prompt, whose last state predicts the first scored id."""
        inputs = [rows[index].ids[rows[index].start : -1] for index in batch]
        groups = [which[part.prompt_of[index]] for index in batch]
        first = [last[g : g + 1] for g in groups]
        if not any(map(len, inputs)):
            return list(zip(batch, first, strict=True))
        prompt = PromptCache(cache, torch.tensor(groups, device=self._device))
        hidden = self._body(input_ids=self._padded(inputs), past_key_values=prompt, use_cache=True).last_hidden_state
        return [(index, torch.cat([first[b], hidden[b, : len(inputs[b])]])) for b, index in enumerate(batch)]

    def _score_hidden(
        self,
        waiting: list[tuple[int, torch.Tensor]],
        rows: Sequence[Row],
        topk: int,
        temperature: float,
        results: dict[int, Any],
    ) -> None:
        by_row = dict(waiting)

        def head(some: list[int]) -> None:
            hidden = torch.cat([by_row[index] for index in some]).to(self._head.weight.dtype)
            targets = np.concatenate([rows[index].ids[rows[index].start :] for index in some]).astype(np.int64)
            candidates = [ids for index in some if (ids := rows[index].candidates) is not None]
            scores = head_logprobs(
                self._head,
                hidden,
                torch.from_numpy(targets).to(self._device),
                topk=topk,
                candidates=torch.from_numpy(np.concatenate(candidates)).to(self._device).long() if candidates else None,
                temperature=temperature,
            )
            if scores.topk_ids is not None:
                scores = scores._replace(topk_ids=scores.topk_ids.to(torch.int32))
            logprobs = scores.logprobs.cpu().numpy()
            others = [None if values is None else values.cpu().numpy() for values in scores[1:]]
            end = 0
            for index in some:
                begin, end = end, end + len(by_row[index])
                mine = (None if array is None else array[begin:end] for array in others)
                results[index] = _checked(index, rows[index].start, RowScores(logprobs[begin:end], *mine))

        for _ in self._halving(list(by_row), head, rows, results):
            pass

    def _padded(self, rows: list[np.ndarray]) -> torch.Tensor:
        """[B, L], padded behind the ids, where a causal model's real positions do not see it: no mask is needed."""
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for b, row in enumerate(rows):
            ids[b, : len(row)] = row
        return torch.from_numpy(ids).to(self._device)

    def _halving(
        self,
        items: list[int],
        run: Callable[[list[int]], _Result],
        rows: Sequence[Row],
        results: dict[int, Any],
    ) -> Iterator[_Result]:
        """run(items); when memory does not suffice, run both halves, and so on; one item alone becomes a RowError."""
        stack = [items] if items else []
        while stack:
            part = stack.pop()
            result = None
            try:
                result = run(part)
                done = True
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as e:
                if not _is_out_of_memory(e):
                    raise
                done = False
            if done:
                yield result  # type: ignore[misc]
                continue
            # Here and not under `except`: the exception's frames hold the tensors that have to go.
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            if len(part) > 1:
                log.warning("out of memory with %d rows in a forward: halved; lower --max-tokens", len(part))
                stack += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                message = f"a row of {len(rows[part[0]].ids)} ids does not fit into the memory of {self._device} alone"
                results[part[0]] = RowError(part[0], "oom", message)


def _nothing(row: Row, topk: int) -> RowScores:
    """What a row without a scored position gets."""
    top = np.zeros((0, topk), np.float32)
    return RowScores(
        np.zeros(0, np.float32),
        top.astype(np.int32) if topk else None,
        top if topk else None,
        row.candidates.astype(np.float32) if row.candidates is not None else None,
    )


def _checked(index: int, start: int, scores: RowScores) -> RowScores | RowError:
    bad = ~np.isfinite(scores.logprobs)
    for values in (scores.topk_logprobs, scores.candidate_logprobs):
        if values is not None:
            bad |= ~np.isfinite(values).all(axis=1)
    if bad.any():
        message = f"{bad.sum()} of {len(bad)} values are not finite, the first at position {start + int(bad.argmax())}"
        return RowError(index, "non_finite", message)
    return scores


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return "DefaultCPUAllocator" in str(error) or "not enough memory" in str(error)


def load(options: LoadOptions) -> HFScorer:
    """Load a model folder and hold the scorer against the model itself.

    Raises:
        ConfigError: as load_model and find_head.
    """
    device = find_device(options.device)
    model, tokenizer = load_model(options)
    model.to(device).eval()
    config = model.config.get_text_config()
    dtype = str(model.dtype).removeprefix("torch.")
    head, difference = find_head(model, config)
    vocabulary = vocabulary_bytes(tokenizer) if tokenizer is not None else b""
    info = ModelInfo(
        name=options.model[-512:],
        model=model_fingerprint(options.model if os.path.isdir(options.model) else model, dtype),
        tokenizer=vocabulary_fingerprint(vocabulary) if vocabulary else "",
        vocab_size=len(head.weight),
        max_length=max_length(options, config, tokenizer),
        max_topk=min(options.max_topk, len(head.weight)),
        eos_ids=eos_ids(model, config),
        dtype=dtype,
        backend="hf",
        temperature=True,
        max_candidates=MAX_CANDIDATES,
    )
    scorer = HFScorer(model.base_model, config, head, info, options.max_tokens)
    scorer.vocabulary = vocabulary
    scorer.share = _can_share(scorer, config)
    log.info("%s: %s on %s, head within %.1e of the model's own", info.name, dtype, device, difference)
    return scorer


@torch.inference_mode()
def _can_share(scorer: HFScorer, config: Any) -> bool:
    """Whether prompts computed once give the hidden states that separate rows have."""
    window = getattr(config, "sliding_window", None) or 0
    room = min(MAX_PROBED_WINDOW, scorer.info.max_length - 18)
    prompt_length = window + 8 if window + 8 <= room else min(40, room)
    if prompt_length < 1:
        return False
    prompts = [probe_ids(scorer.info.vocab_size, prompt_length, seed) for seed in (0, 1)]
    rows = [
        Row(np.concatenate([prompts[seed % 2], probe_ids(scorer.info.vocab_size, length, seed + 2)]), prompt_length)
        for seed, length in enumerate([17, 5, 9, 17])
    ]
    tolerance = SHARE_TOLERANCE[scorer.info.dtype]
    try:
        shared = scorer.hidden(rows, share=True)
        alone = [scorer.hidden([row], share=False)[0] for row in rows]
        difference = max(
            float(((a - b).float().norm(dim=1) / b.float().norm(dim=1)).max())
            for a, b in zip(shared, alone, strict=True)
        )
    except Exception as e:  # caches come in many kinds, and each fails in its own way; separate rows need none
        log.warning("prompts are not shared: %s: %s", type(e).__name__, clip(str(e)))
        return False
    if difference <= tolerance:
        return True
    log.warning("prompts are not shared: hidden states differ by %.1e (limit %.0e)", difference, tolerance)
    return False
