"""Divergences between teacher and student on K tokens at each position, and their gradient.

p = the teacher's probabilities of K tokens, its own most probable ones or the student's, q = the student's of the same:

    forward_kl   sum p log(p/q)                                  covers everything that the teacher may say
    reverse_kl   sum q log(q/p)                                  seeks what the teacher finds likely
    jsd          beta KL(p || m) + (1-beta) KL(q || m),  m = beta p + (1-beta) q,   in between

With `tail`, what p and q have left is one more bucket, and both add up to 1: no divergence is negative. Without it the
sums are over the K tokens alone, as in verl's `forward_kl_topk`; reverse_kl then has its minimum at q = p/e, which
moves the student's mass out of the top-k, so opd/config_checks.py refuses that pair.

The gradient is computed with the value, chunk by chunk in float32, and kept once, in the type of the logits: the
log-softmax of a chunk lives as long as the chunk. Nothing is read from the logits in the backward pass, where verl's
log-prob kernel may already have written its own gradient over them.

Sources: forward and reverse KL, JSD(beta): Agarwal et al. 2023, https://arxiv.org/abs/2306.13649, section 2.

Shapes: L rows of logits, N <= L positions with a teacher value, V vocabulary, K top-k, M = K, or K + 1 with the tail.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

CHUNK_ELEMENTS = 2**26  # float32 numbers in one temporary of a chunk: 256 MB
# a logit of -inf (a mask) is taken for one so far below the largest: exp(-1000) is 0 in float32, and 0 * inf is NaN
LOGIT_SPAN = 1000.0
TAIL_FLOOR = 1e-6  # float32 log-probs cannot say that less is left


class TopkLoss(NamedTuple):
    """One value for each position."""

    loss_N: torch.Tensor  # nats; the only one with a gradient
    student_mass_N: torch.Tensor  # probability that the student gives to the K tokens
    overlap_N: torch.Tensor  # share of them that is in the student's own top-k


def topk_loss(
    logits_LV: torch.Tensor,
    positions_N: torch.Tensor,
    topk_ids_NK: torch.Tensor,
    topk_logprobs_NK: torch.Tensor,
    *,
    divergence: str,
    beta: float = 0.5,
    tail: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TopkLoss:
    """The divergence at each position that has a teacher value.

    Args:
        logits_LV: the student's, any float type; -inf is an impossible token. Where the teacher finds it likely, the
            forward KL is infinite and comes out as about 1000 times its probability.
        positions_N: the row of logits that each teacher value belongs to; each row at most once.
        topk_ids_NK: distinct ids below V.
        topk_logprobs_NK: the teacher's log-probs of these ids, finite.
        divergence: forward_kl, reverse_kl or jsd.
        beta: of jsd, within (0, 1); near 0 it is forward, near 1 reverse KL, scaled.
        tail: the remaining mass is one more bucket.

    Raises:
        ValueError: an id that the student's vocabulary does not have.
    """
    if len(topk_ids_NK) and int(topk_ids_NK.max()) >= logits_LV.shape[1]:
        raise ValueError(
            f"the teacher's top-k has the id {int(topk_ids_NK.max())}, but the student's head has {logits_LV.shape[1]} "
            "rows; use a smaller teacher.topk, or a teacher whose head has no more rows"
        )
    settings = (divergence, beta, tail, chunk_elements)
    return TopkLoss(*_TopkLoss.apply(logits_LV, positions_N, topk_ids_NK.long(), topk_logprobs_NK.float(), settings))


def divergence_of(student_NM: torch.Tensor, teacher_NM: torch.Tensor, divergence: str, beta: float) -> torch.Tensor:
    """Of two sets of log-probs over the same buckets; [N]."""
    q, p = student_NM.exp(), teacher_NM.exp()
    if divergence == "forward_kl":
        return (p * (teacher_NM - student_NM)).sum(-1)
    if divergence == "reverse_kl":
        return (q * (student_NM - teacher_NM)).sum(-1)
    if divergence != "jsd":
        raise ValueError(f"divergence {divergence!r} is not one of forward_kl, reverse_kl, jsd")
    middle_NM = torch.logaddexp(teacher_NM + math.log(beta), student_NM + math.log1p(-beta))
    return (beta * p * (teacher_NM - middle_NM) + (1 - beta) * q * (student_NM - middle_NM)).sum(-1)


def student_buckets(logits_NV: torch.Tensor, ids_NK: torch.Tensor, *, tail: bool) -> torch.Tensor:
    """The student's log-probs of the ids, and with `tail` of all the other ids together; [N, M]."""
    log_z_N1 = logits_NV.logsumexp(-1, keepdim=True)
    top_NK = logits_NV.gather(-1, ids_NK) - log_z_N1
    if not tail:
        return top_NK
    # summed over the others, not 1 - mass: a confident student's rest is far below what float32 resolves beside 1
    rest_N1 = logits_NV.scatter(-1, ids_NK, -math.inf).logsumexp(-1, keepdim=True) - log_z_N1
    return torch.cat([top_NK, rest_N1], dim=-1)


def teacher_buckets(logprobs_NK: torch.Tensor, *, tail: bool) -> torch.Tensor:
    """The teacher's log-probs, and with `tail` that of what they leave; [N, M]."""
    if not tail:
        return logprobs_NK
    rest_N1 = 1.0 - logprobs_NK.double().exp().sum(-1, keepdim=True)
    return torch.cat([logprobs_NK, rest_N1.clamp_min(TAIL_FLOOR).log().float()], dim=-1)


def _chunk(
    logits: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, divergence: str, beta: float, tail: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and student mass of a chunk of positions, float32 logits; differentiable."""
    tail = tail and ids.shape[1] < logits.shape[1]  # the whole vocabulary leaves nothing
    student = student_buckets(logits, ids, tail=tail)
    loss = divergence_of(student, teacher_buckets(logprobs, tail=tail), divergence, beta)
    if divergence == "forward_kl" and not tail:
        loss = loss.clamp_min(0.0)  # as verl: partial sums can be negative where the student has more mass than p
    return loss, student[:, : ids.shape[1]].detach().exp().sum(-1)


class _TopkLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_LV: torch.Tensor,
        positions_N: torch.Tensor,
        ids_NK: torch.Tensor,
        logprobs_NK: torch.Tensor,
        settings: tuple[str, float, bool, int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        divergence, beta, tail, chunk_elements = settings
        wants_gradient = ctx.needs_input_grad[0]
        grad_LV = torch.zeros_like(logits_LV) if wants_gradient else None
        loss_N, mass_N, overlap_N = (logits_LV.new_zeros(len(positions_N), dtype=torch.float32) for _ in range(3))
        topk = ids_NK.shape[1]
        step = max(1, chunk_elements // max(logits_LV.shape[1], topk * topk))
        for begin in range(0, len(positions_N), step):
            here = slice(begin, begin + step)
            logits, ids = logits_LV[positions_N[here]].float(), ids_NK[here]
            logits.clamp_(min=logits.amax(-1, keepdim=True) - LOGIT_SPAN)  # indexing has made a copy
            with torch.enable_grad():
                logits.requires_grad_(wants_gradient)
                loss, mass = _chunk(logits, ids, logprobs_NK[here], divergence, beta, tail)
                if grad_LV is not None:
                    grad = torch.autograd.grad(loss.sum(), logits)[0]
            if grad_LV is not None:
                grad_LV[positions_N[here]] = grad.to(grad_LV.dtype)
            own = logits.detach().topk(topk, dim=-1).indices
            loss_N[here], mass_N[here] = loss.detach(), mass
            overlap_N[here] = (ids[:, :, None] == own[:, None, :]).any(-1).float().mean(-1)
        ctx.grad_LV = grad_LV
        ctx.save_for_backward(positions_N)
        ctx.mark_non_differentiable(mass_N, overlap_N)
        return loss_N, mass_N, overlap_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss_N: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None, None, None]:
        grad_LV, ctx.grad_LV = ctx.grad_LV, None
        if grad_LV is None:
            raise RuntimeError("the gradient of a top-k loss was already used: it is kept for one backward pass")
        scale_L = grad_loss_N.new_zeros(len(grad_LV))
        scale_L[ctx.saved_tensors[0]] = grad_loss_N
        return grad_LV.mul_(scale_L[:, None]), None, None, None, None
