"""Hidden states -> log-probs of given ids, without ever holding [rows, vocabulary].

The output head is applied to tiles of the vocabulary, and a running maximum and sum keep the log-sum-exp in float32.
The target's logit is a float32 dot product of its own and stays out of that sum, so that
    lp = t - logaddexp(rest, t) = logsigmoid(t - rest),    rest = logsumexp over all other ids,
is <= 0 without clipping and keeps its digits when the target has nearly all the mass. That also makes bfloat16 worth
having: rounding to 8 bits hurts the sum of many terms little, but would hurt one logit of 20 by 0.06.

Shapes: N = rows, H = hidden size, V = vocabulary, K = topk, C = candidates per row.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F

# Elements of one [rows, tile] block. On a CPU it and the tile of the head must stay in the cache between the matmul,
# the maximum and the exponential; on a GPU it must be large enough to fill the device.
BLOCK_ROWS = {"cpu": 512, "cuda": 4096}
BLOCK_VOCAB = {"cpu": 1024, "cuda": 8192}


class Head(NamedTuple):
    """The output layer: logits = softcap(scale * (hidden @ weight.T + bias))."""

    weight: torch.Tensor  # [V, H]
    bias: torch.Tensor | None  # [V]
    scale: float = 1.0
    softcap: float | None = None  # c * tanh(logits / c)

    def finish(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        """Float32 products, in place, to the logits that the softmax sees."""
        if self.softcap is not None:
            logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / temperature)
        elif self.scale != temperature:
            logits.mul_(self.scale / temperature)
        return logits


class HeadScores(NamedTuple):
    """Values of N rows; anything that is not finite in there is the model's doing."""

    logprobs: torch.Tensor  # float32 [N]
    topk_ids: torch.Tensor | None = None  # int64 [N, K]
    topk_logprobs: torch.Tensor | None = None  # float32 [N, K]
    candidate_logprobs: torch.Tensor | None = None  # float32 [N, C]


def head_logprobs(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    topk: int = 0,
    candidates: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> HeadScores:
    """Log-probs of `targets` and `candidates`, and the most probable ids, under the head's softmax.

    Args:
        head: the output layer.
        hidden: [N, H], in the head's dtype.
        targets: int64 [N].
        topk: how many ids to return per row.
        candidates: int64 [N, C].
        temperature: divides the logits after the softcap.

    Returns:
        HeadScores; a top-k entry or a candidate that is the target has the target's very value.
    """
    size = BLOCK_ROWS[hidden.device.type]
    blocks = []
    for begin in range(0, len(hidden), size):
        mine = slice(begin, begin + size)
        some = candidates[mine] if candidates is not None else None
        blocks.append(_block(head, hidden[mine], targets[mine], topk, some, temperature))
    columns = [[values for values in column if values is not None] for column in zip(*blocks, strict=True)]
    _, *others = (torch.cat(column) if column else None for column in columns)
    return HeadScores(torch.cat(columns[0]), *others)


def _block(
    head: Head,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    topk: int,
    candidates: torch.Tensor | None,
    temperature: float,
) -> HeadScores:
    num_rows, vocab = len(hidden), len(head.weight)
    target_logit = (hidden.float() * head.weight[targets].float()).sum(dim=1)
    if head.bias is not None:
        target_logit += head.bias[targets].float()
    target_logit = head.finish(target_logit, temperature)
    # The lowest finite number, not -inf: a tile whose only id is the target must not give inf - inf.
    peak = hidden.new_full((num_rows,), torch.finfo(torch.float32).min, dtype=torch.float32)
    total = torch.zeros_like(peak)
    best: torch.Tensor | None = None
    best_ids: torch.Tensor | None = None
    step = BLOCK_VOCAB[hidden.device.type]
    rows_of_tile = _by_tile(targets, vocab, step)
    if candidates is not None:
        asked = candidates.reshape(-1)
        asked_of_tile = _by_tile(asked, vocab, step)
        asked_logits = torch.empty_like(asked, dtype=torch.float32)
    for index, begin in enumerate(range(0, vocab, step)):
        logits = head.finish(_products(head, hidden, begin, begin + step), temperature)
        mine = rows_of_tile[index]
        column = targets[mine] - begin
        if candidates is not None:
            some = asked_of_tile[index]
            asked_logits[some] = logits[some // candidates.shape[1], asked[some] - begin]
        if topk:
            logits[mine, column] = target_logit[mine]
            best, best_ids = _merge(best, best_ids, logits, begin, topk)
        logits[mine, column] = -torch.inf
        new_peak = torch.maximum(peak, logits.amax(dim=1))
        total *= (peak - new_peak).exp_()
        total += logits.sub_(new_peak[:, None]).exp_().sum(dim=1)
        peak = new_peak
    rest = peak + total.log()
    logprobs = F.logsigmoid(target_logit - rest)
    whole = torch.logaddexp(rest, target_logit)[:, None]

    def finished(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        # Both sides round: a most probable id near 1 may end a few 1e-7 above 0.
        return torch.where(ids == targets[:, None], logprobs[:, None], (logits - whole).clamp_(max=0.0))

    return HeadScores(
        logprobs,
        best_ids,
        finished(best, best_ids) if best is not None and best_ids is not None else None,
        finished(asked_logits.view_as(candidates), candidates) if candidates is not None else None,
    )


def _by_tile(ids: torch.Tensor, vocab: int, step: int) -> list[torch.Tensor]:
    """For each tile of the vocabulary the indices of the ids that are in it."""
    order = torch.argsort(ids)
    bounds = torch.searchsorted(ids[order], torch.arange(0, vocab + step, step, device=ids.device)).tolist()
    return [order[begin:end] for begin, end in itertools.pairwise(bounds)]


def _products(head: Head, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """hidden @ weight[begin:end].T + bias, float32 [N, end - begin]."""
    weight = head.weight[begin:end].T
    if hidden.dtype == torch.float32 or hidden.device.type != "cuda":
        logits = (hidden @ weight).float()
    else:
        logits = torch.mm(hidden, weight, out_dtype=torch.float32)  # no such kernel on CPUs
    return logits if head.bias is None else logits.add_(head.bias[begin:end].float())


def _merge(
    best: torch.Tensor | None, best_ids: torch.Tensor | None, logits: torch.Tensor, begin: int, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `topk` of those so far and of a tile whose first id is `begin`."""
    values, ids = logits.topk(min(topk, logits.shape[1]), dim=1)
    ids += begin
    if best is None or best_ids is None:
        return values, ids
    values, ids = torch.cat([best, values], dim=1), torch.cat([best_ids, ids], dim=1)
    values, where = values.topk(min(topk, values.shape[1]), dim=1)
    return values, ids.gather(1, where)
