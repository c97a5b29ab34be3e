"""Hidden states -> log-probs of given ids, without ever holding [rows, vocabulary].

The output head is applied to tiles of the vocabulary, and a running maximum and sum keep the log-sum-exp in float32.
The target's logit is a float32 dot product of its own and stays out of that sum, so that
    lp = t - logaddexp(rest, t) = logsigmoid(t - rest),    rest = logsumexp over all other ids,
is <= 0 without clipping and keeps its digits when the target has nearly all the mass. That also makes bfloat16 worth
having: rounding to 8 bits hurts the sum of many terms little, but would hurt one logit of 20 by 0.06.

Shapes: N = rows, H = hidden size, V = vocabulary, K = topk.
"""

from __future__ import annotations

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


def head_logprobs(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, *, topk: int = 0, temperature: float = 1.0
) -> HeadScores:
    """Log-probs of `targets`, and the most probable ids, under the head's softmax.

    Args:
        head: the output layer.
        hidden: [N, H], in the head's dtype.
        targets: int64 [N].
        topk: how many ids to return per row.
        temperature: divides the logits after the softcap.

    Returns:
        HeadScores; a top-k entry that is the target has the target's very value.
    """
    size = BLOCK_ROWS[hidden.device.type]
    parts = zip(hidden.split(size), targets.split(size), strict=True)
    blocks = [_block(head, h, t, topk, temperature) for h, t in parts]
    if topk == 0:
        return HeadScores(torch.cat([block.logprobs for block in blocks]))
    return HeadScores(*(torch.cat(values) for values in zip(*blocks, strict=True)))


def _block(head: Head, hidden: torch.Tensor, targets: torch.Tensor, topk: int, temperature: float) -> HeadScores:
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
    order = torch.argsort(targets)  # rows by target: those of one tile are a slice of it
    bounds = torch.searchsorted(targets[order], torch.arange(0, vocab + step, step, device=targets.device)).tolist()
    for index, begin in enumerate(range(0, vocab, step)):
        logits = head.finish(_products(head, hidden, begin, begin + step), temperature)
        mine = order[bounds[index] : bounds[index + 1]]
        column = targets[mine] - begin
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
    if best is None or best_ids is None:
        return HeadScores(logprobs)
    # Both sides round: a most probable id near 1 may end a few 1e-7 above 0.
    topk_logprobs = (best - torch.logaddexp(rest, target_logit)[:, None]).clamp_(max=0.0)
    return HeadScores(logprobs, best_ids, torch.where(best_ids == targets[:, None], logprobs[:, None], topk_logprobs))


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
