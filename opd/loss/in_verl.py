"""The teacher's losses inside verl's: through its advantage-estimator registry, its policy losses and set_loss_fn.

    adv_estimator=opd    registered here: no advantage from the task's reward, the teacher is all that trains
    sampled              verl's own ppo_loss with use_kl_loss, at this step's coefficient; with weights or a clamp
                         ppo_loss without it, and the same estimate, aggregated in the same way, added here
    policy_gradient      the teacher's advantage is added to the task's, just before verl's own ppo_loss sees it
    *_topk               verl's own ppo_loss, plus the divergence that its engine calls back here for, with logits

Why no estimator of our own adds the teacher's advantage: verl hands estimators the rewards, the mask and the group, but
neither `old_log_probs` nor `ref_log_prob` (tests/test_verl_contract.py); and its V1 trainers know about several outputs
of one agent loop only for the estimator named `grpo`. Added later, it goes with every estimator and every policy loss.

Metrics of the top-k losses, at each update: `opd/student_mass`, the student's probability of the K tokens; and
`opd/topk_overlap`, the share of them in the student's own top-k. With the teacher's tokens that is how far both agree;
with the student's (student_topk.py) it is 1 until the student moves, and says how much of the support is still its own.

Shapes: B rows, R response columns, K top-k, L rows of logits: all tokens of a micro-batch, or one rank's part of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty, register_adv_est
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from opd.errors import TeacherError
from opd.loss.clamp import clamp_teacher
from opd.loss.distribution import topk_loss
from opd.loss.policy_gradient import reverse_kl_advantage
from opd.loss.settings import (
    LOSS,
    LOSS_WIDTH,
    POLICY_GRADIENT,
    SAMPLED,
    TOPK_IDS,
    TOPK_LOGPROBS,
    WEIGHTS,
    LossSettings,
)

_SUMS = {"opd/student_mass": "opd_student_mass", "opd/topk_overlap": "opd_overlap"}  # metric: output of the processor
_NUM_SCORED = "opd/num_scored"


@register_adv_est("opd")
def no_task_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pure distillation: the task's reward is logged, and trains nothing."""
    zeros_BR = torch.zeros_like(token_level_rewards, dtype=torch.float32)
    return zeros_BR, zeros_BR.clone()


def prepare(actor: Any, config: ActorConfig, data: TensorDict) -> dict[str, float]:
    """Make the actor's next update use the loss that came with its batch.

    Args:
        actor: verl's TrainingWorker.
        config: of the actor, as the user wrote it.
        data: the whole batch of the step on this rank; changed in place.

    Returns:
        Metrics of this step.

    Raises:
        TeacherError: the batch lacks a column: the trainer did not hand on what the teacher said.
    """
    if LOSS not in data:
        raise TeacherError(f"the batch has no {LOSS}: its trainer does not hand on what opd/reference.py gives it")
    settings = LossSettings.from_row(_flat(data.pop(LOSS)).reshape(-1, LOSS_WIDTH)[0].tolist())
    if settings.name == SAMPLED and WEIGHTS not in data and settings.clamp == math.inf:
        actor.set_loss_fn(partial(ppo_loss, config=replace(config, kl_loss_coef=settings.coef)))
        return {}
    # use_kl_loss only asked verl for the teacher's values: on top of another loss, its KL would count them twice
    config = replace(config, use_kl_loss=False)
    if settings.name == SAMPLED:
        actor.set_loss_fn(partial(weighted_kl_loss, config=config, settings=settings))
        return {}
    metrics = {"opd/coef": settings.coef}
    if settings.name == POLICY_GRADIENT:
        actor.set_loss_fn(partial(ppo_loss, config=config))
        return metrics | add_teacher_advantage(data, settings.coef, clamp=settings.clamp)
    missing = [name for name in (TOPK_IDS, TOPK_LOGPROBS) if name not in data]
    if missing:
        raise TeacherError(f"teacher.loss={settings.name}, but the batch has no {' and no '.join(missing)}")
    tu.assign_non_tensor(data, distillation_use_topk=True)  # verl's engine then hands the logits to the loss
    actor.set_loss_fn(partial(topk_ppo_loss, config=config, settings=settings))
    return metrics


def add_teacher_advantage(data: TensorDict, coef: float, *, clamp: float = math.inf) -> dict[str, float]:
    """Add the teacher's advantage to the task's, in place, for a padded batch as for a nested one."""
    task, old, teacher = (_flat(data[name]) for name in ("advantages", "old_log_probs", "ref_log_prob"))
    counts = _flat(data["response_mask"]).bool()
    added = reverse_kl_advantage(old, teacher, coef, clamp=clamp)
    if WEIGHTS in data:
        added = added * _flat(data[WEIGHTS])
    total, like = task + added, data["advantages"]
    data["advantages"] = torch.nested.nested_tensor_from_jagged(total, like.offsets()) if like.is_nested else total
    if not counts.any():
        return {}
    return {
        "opd/task_advantage_abs": float(task[counts].abs().mean()),
        "opd/teacher_advantage_abs": float(added[counts].abs().mean()),
    }


def weighted_kl_loss(
    config: ActorConfig,
    settings: LossSettings,
    model_output: dict,
    data: TensorDict,
    dp_group: Any = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ppo_loss with its KL term, each token's estimate clamped and weighted; the same metrics' names.

    Args:
        config: with use_kl_loss off.
    """
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    log_prob_BR = no_padding_2_padding(model_output["log_probs"], data)
    teacher_BR = _padded(data["ref_log_prob"], 0.0)
    if settings.clamp < math.inf:
        teacher_BR = clamp_teacher(log_prob_BR, teacher_BR, settings.clamp)
    # verl's hint says FloatTensor, which no function of torch returns
    kl_BR = kl_penalty(log_prob_BR, teacher_BR, config.kl_loss_type)  # type: ignore[arg-type]
    kl = _mean(kl_BR, config, data)
    metrics["kl_loss"] = Metric(value=kl, aggregation=AggregationType.SUM)
    metrics["kl_coef"] = settings.coef
    return loss + settings.coef * kl, metrics


def topk_ppo_loss(
    config: ActorConfig,
    settings: LossSettings,
    model_output: dict | None = None,
    data: TensorDict | None = None,
    dp_group: Any = None,
    student_logits: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """verl calls it twice for a micro-batch: with logits, for values of each token, then for the loss."""
    assert data is not None
    if student_logits is not None:
        return _on_logits(settings, student_logits.squeeze(0), data)
    assert model_output is not None
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    distillation = _mean(no_padding_2_padding(model_output["opd_loss"], data), config, data)
    metrics["opd/topk_loss"] = Metric(value=distillation, aggregation=AggregationType.SUM)
    for metric, output in {**_SUMS, _NUM_SCORED: "opd_scored"}.items():
        metrics[metric] = Metric(value=_flat(model_output[output]).sum(), aggregation=AggregationType.SUM)
    return loss + settings.coef * distillation, metrics


def _mean(values_BR: torch.Tensor, config: ActorConfig, data: TensorDict) -> torch.Tensor:
    """Of each token's teacher term, weighted if the batch has weights, as verl's loss_agg_mode says."""
    if WEIGHTS in data:
        values_BR = values_BR * _padded(data[WEIGHTS], 0.0)
    mask_BR = _padded(data["response_mask"], 0).bool()
    # ppo_loss has just put this mini-batch's numbers of rows and tokens there
    return agg_loss(values_BR, mask_BR, config.loss_agg_mode, **config.global_batch_info)


def finish_metrics(metrics: dict[str, Any]) -> None:
    """Turn the sums over tokens that topk_ppo_loss counted into means, in place; no tokens give no number."""
    if _NUM_SCORED not in metrics:
        return
    num_scored = _total(metrics.pop(_NUM_SCORED))
    for name in _SUMS:
        total = _total(metrics.pop(name))
        if num_scored > 0:
            metrics[name] = total / num_scored


def response_positions(data: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the logits of each response token are: its row among all tokens of the micro-batch, one before its own.

    Returns:
        int64 [B, R], and bool [B, R]: which of them are tokens of the response at all.
    """
    ends_B = data["input_ids"].offsets()[1:]
    responses = data["responses"]
    if responses.is_nested:
        lengths_B = responses.offsets().diff()
    else:
        prompt_width = data["attention_mask"].shape[1] - responses.shape[1]
        lengths_B = data["attention_mask"][:, prompt_width:].sum(1)
    width = _padded(data["response_mask"], 0).shape[1]
    columns_R = torch.arange(width, device=ends_B.device)
    return (ends_B - lengths_B - 1)[:, None] + columns_R, columns_R < lengths_B[:, None]


def local_positions(data: TensorDict, num_logits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """response_positions among this rank's logits: with Ulysses it has those of one part of the tokens."""
    positions_BR, real_BR = response_positions(data)
    if get_ulysses_sequence_parallel_world_size() > 1:
        positions_BR = positions_BR - get_ulysses_sequence_parallel_rank() * num_logits
        real_BR = real_BR & (positions_BR >= 0) & (positions_BR < num_logits)
    return positions_BR, real_BR


def _on_logits(settings: LossSettings, logits_LV: torch.Tensor, data: TensorDict) -> dict[str, torch.Tensor]:
    """What verl's engine asks of a logits processor: values [1, L]."""
    # [B, R, K], or in V1 jagged rows of [R * K]
    ids_BRK, logprobs_BRK = (
        _padded(data[name], absent).unflatten(1, (-1, settings.topk)) if data[name].is_nested else data[name]
        for name, absent in ((TOPK_IDS, -1), (TOPK_LOGPROBS, float("nan")))
    )
    num_logits = len(logits_LV)
    positions_BR, real_BR = local_positions(data, num_logits)
    scored_BR = real_BR & (ids_BRK[..., 0] >= 0) & _padded(data["response_mask"], 0).bool()
    positions_N = positions_BR[scored_BR]
    assert settings.divergence is not None
    values = topk_loss(
        logits_LV,
        positions_N,
        ids_BRK[scored_BR],
        logprobs_BRK[scored_BR],
        divergence=settings.divergence,
        beta=settings.beta,
        tail=settings.tail,
    )

    def spread(values_N: torch.Tensor) -> torch.Tensor:
        zeros_L = torch.zeros(num_logits, dtype=values_N.dtype, device=values_N.device)
        return zeros_L.index_put((positions_N,), values_N).unsqueeze(0)

    return {
        "opd_loss": spread(values.loss_N),
        "opd_student_mass": spread(values.student_mass_N),
        "opd_overlap": spread(values.overlap_N),
        "opd_scored": spread(torch.ones_like(values.loss_N)),
    }


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.values() if tensor.is_nested else tensor


def _padded(tensor: torch.Tensor, padding: float) -> torch.Tensor:
    return tensor.to_padded_tensor(padding) if tensor.is_nested else tensor


def _total(value: Any) -> float:
    """Of one value for each mini-batch."""
    values = value if isinstance(value, list) else [value]
    return float(sum(v.aggregate() if isinstance(v, Metric) else v for v in values))
