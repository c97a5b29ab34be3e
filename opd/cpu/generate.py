"""The decode loop: many requests, each with its own sampling parameters, as one batch with a key-value cache.

A request's tokens do not depend on the company it is batched with: all of its random numbers come from a generator
seeded with `Request.seed`, and every row is masked to itself. (Matrix products of another shape may differ in the last
bit of a float32, so a draw that falls exactly between two tokens can still go the other way.)

Shapes: B rows, U distinct prompts, P padded prompt length, A rows still running, V vocabulary.

Not covered: repetition penalties, beam search, sliding-window caches, images.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Request:
    """One row to complete."""

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 or 0 = all tokens
    seed: tuple[int, ...] = (0,)  # non-negative

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt_ids is empty; the model needs at least one token to continue")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} for a prompt of {len(self.prompt_ids)} tokens; at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}; 0 is greedy, above 0 samples")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is not in (0, 1]")
        if self.top_k < -1:
            raise ValueError(f"top_k={self.top_k}; -1 keeps all tokens")

    def uniforms(self) -> np.ndarray:
        """One random number in [0, 1) per token that may be drawn."""
        if self.temperature == 0:
            return np.zeros(self.max_tokens, dtype=np.float32)
        return np.random.default_rng(self.seed).random(self.max_tokens, dtype=np.float32)


@dataclass
class Completion:
    """The tokens after the prompt; the last one is an EOS if `stopped`."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # log_softmax(logits / temperature), before top-p and top-k
    stopped: bool = False


def _nucleus(scaled_AV: torch.Tensor, top_k_A: torch.Tensor, top_p_A: torch.Tensor) -> torch.Tensor:
    """Logits with everything outside the top k, and then outside the nucleus of mass p, at minus infinity."""
    sorted_AV, order_AV = scaled_AV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scaled_AV.shape[-1])
    sorted_AV = sorted_AV.masked_fill(rank_V >= top_k_A[:, None], -torch.inf)
    probs_AV = sorted_AV.softmax(dim=-1)
    mass_before_AV = probs_AV.cumsum(dim=-1) - probs_AV
    # The first token always stays, so a row is never empty.
    sorted_AV = sorted_AV.masked_fill((mass_before_AV >= top_p_A[:, None]) & (rank_V > 0), -torch.inf)
    return torch.empty_like(sorted_AV).scatter_(-1, order_AV, sorted_AV)


def _draw(scaled_AV: torch.Tensor, uniform_A: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: one given random number per row decides its token."""
    cdf_AV = scaled_AV.softmax(dim=-1).cumsum(dim=-1)
    drawn_A = torch.searchsorted(cdf_AV, uniform_A[:, None] * cdf_AV[:, -1:], right=True).squeeze(-1)
    # Rounding can put the number on the upper edge, past the last token that has any probability.
    drawn_A = drawn_A.clamp_(max=scaled_AV.shape[-1] - 1)
    impossible_A = scaled_AV.gather(-1, drawn_A[:, None]).squeeze(-1) == -torch.inf
    return torch.where(impossible_A, scaled_AV.argmax(dim=-1), drawn_A)


class _Sampler:
    """The per-row sampling parameters of a batch as tensors, narrowed as rows finish."""

    def __init__(self, requests: Sequence[Request], vocab_size: int):
        self.temperature_A = torch.tensor([r.temperature for r in requests], dtype=torch.float32)
        self.top_p_A = torch.tensor([r.top_p for r in requests], dtype=torch.float32)
        self.top_k_A = torch.tensor([r.top_k if r.top_k > 0 else vocab_size for r in requests])
        self.max_tokens_A = torch.tensor([r.max_tokens for r in requests])
        self.uniforms_AT = torch.zeros(len(requests), int(self.max_tokens_A.max()))
        for row, request in enumerate(requests):
            self.uniforms_AT[row, : request.max_tokens] = torch.from_numpy(request.uniforms())

    def keep(self, rows: torch.Tensor) -> None:
        for name in ("temperature_A", "top_p_A", "top_k_A", "max_tokens_A", "uniforms_AT"):
            setattr(self, name, getattr(self, name)[rows])

    def __call__(self, logits_AV: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probs."""
        greedy_A = self.temperature_A == 0
        # A greedy row's log-prob is the model's own, as at temperature 1.
        scaled_AV = logits_AV.float() / torch.where(greedy_A, 1.0, self.temperature_A)[:, None]
        token_A = scaled_AV.argmax(dim=-1)
        if not greedy_A.all():
            kept_AV = scaled_AV
            if (self.top_p_A < 1).any() or (self.top_k_A < scaled_AV.shape[-1]).any():
                kept_AV = _nucleus(scaled_AV, self.top_k_A, self.top_p_A)
            token_A = torch.where(greedy_A, token_A, _draw(kept_AV, self.uniforms_AT[:, step]))
        return token_A, scaled_AV.log_softmax(dim=-1).gather(-1, token_A[:, None]).squeeze(-1)


def _prefill(model: PreTrainedModel, requests: Sequence[Request]):
    """Run every distinct prompt once, then copy its cache to all the rows that continue it."""
    unique: dict[tuple[int, ...], int] = {}
    row_to_unique_B = torch.tensor([unique.setdefault(tuple(r.prompt_ids), len(unique)) for r in requests])
    width = max(map(len, unique))
    ids_UP = torch.zeros(len(unique), width, dtype=torch.long)
    mask_UP = torch.zeros(len(unique), width, dtype=torch.long)
    for prompt, row in unique.items():
        ids_UP[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_UP[row, width - len(prompt) :] = 1
    position_UP = (mask_UP.cumsum(dim=-1) - 1).clamp_(min=0)
    out = model(input_ids=ids_UP, attention_mask=mask_UP, position_ids=position_UP, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    if len(unique) < len(requests):
        cache.batch_select_indices(row_to_unique_B)
    return out.logits[row_to_unique_B, -1], cache, mask_UP[row_to_unique_B]


@torch.inference_mode()
def generate(model: PreTrainedModel, requests: Sequence[Request], eos_ids: Collection[int]) -> list[Completion]:
    """Complete every request; a row ends with its first EOS (which is kept) or after its own `max_tokens`.

    Args:
        model: a causal language model in eval mode, on the CPU.
        requests: any number of rows; their parameters may differ.
        eos_ids: all the token ids that end a row; empty = only `max_tokens` does.

    Returns:
        One completion per request, in order.
    """
    if not requests:
        return []
    completions = [Completion() for _ in requests]
    logits_AV, cache, mask_AS = _prefill(model, requests)
    sampler = _Sampler(requests, logits_AV.shape[-1])
    eos = torch.tensor(sorted(eos_ids), dtype=torch.long)
    running = list(range(len(requests)))
    position_A = mask_AS.sum(dim=-1)
    step = 0
    while True:
        token_A, log_prob_A = sampler(logits_AV, step)
        is_eos_A = torch.isin(token_A, eos)
        for row, token, log_prob, stopped in zip(
            running, token_A.tolist(), log_prob_A.tolist(), is_eos_A.tolist(), strict=True
        ):
            completion = completions[row]
            completion.token_ids.append(token)
            completion.log_probs.append(log_prob)
            completion.stopped = stopped
        step += 1
        finished_A = is_eos_A | (sampler.max_tokens_A <= step)
        if finished_A.all():
            return completions
        if finished_A.any():
            # Selecting copies the cache, but so does every step that appends to it: finished rows never cost more.
            keep = (~finished_A).nonzero().squeeze(-1)
            running = [running[i] for i in keep.tolist()]
            token_A, mask_AS, position_A = token_A[keep], mask_AS[keep], position_A[keep]
            sampler.keep(keep)
            cache.batch_select_indices(keep)
        mask_AS = torch.cat([mask_AS, torch.ones_like(token_A)[:, None]], dim=-1)
        out = model(
            input_ids=token_A[:, None],
            attention_mask=mask_AS,
            position_ids=position_A[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits_AV, cache = out.logits[:, -1], out.past_key_values
        position_A = position_A + 1
