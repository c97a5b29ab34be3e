"""What a composed configuration must not say, since the teacher would have no effect then, or a wrong one.

Looked at before anything starts, so that a mistake costs seconds. Each refusal names the key, its value and what to
use instead.
"""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any

from omegaconf import DictConfig

from opd.config import TeacherConfig, manager_class, routes, teacher_loss, teachers
from opd.errors import ConfigError
from opd.loss.schedule import SCHEDULES
from opd.loss.settings import DIVERGENCES, LOSSES, POLICY_GRADIENT, SAMPLED
from opd.routing import DEFAULT, check_names

logger = logging.getLogger(__name__)

# verl's names for the estimators whose gradient depends on the teacher; opd/kl.py says what each does
LINEAR_KL_TYPES = ("k3+", "low_var_kl+", "k2", "mse", "k1+", "kl+")  # gradient -x, x = teacher - student
KL_TYPES = ("k3+", "low_var_kl+", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs")


def check(config: DictConfig) -> None:
    """Refuse a configuration under which the teacher's values would not reach the loss, or would not matter there.

    Raises:
        ConfigError: names the key, its value and the one to use.
    """
    actor = config.actor_rollout_ref.actor
    teacher = config.teacher
    if not actor.use_kl_loss:
        raise ConfigError(
            "actor_rollout_ref.actor.use_kl_loss is false: the teacher would never be asked. "
            "Set it to true; for a GRPO baseline that still reports the KL set KL_COEF=0"
        )
    kl_type = actor.kl_loss_type
    samples = teacher.loss == SAMPLED  # the other losses take verl's KL term out
    if samples and kl_type in ("kl", "k1"):
        raise ConfigError(
            f"kl_loss_type={kl_type} cannot be used as a loss: its gradient does not depend on the teacher at all, it "
            "only lowers the student's own log-probs. Use KL_TYPE=k3+ (value of k3, gradient of the reverse KL)"
        )
    if samples and kl_type not in KL_TYPES:
        raise ConfigError(f"kl_loss_type={kl_type} is unknown; use one of {', '.join(KL_TYPES)} (k3+ is the default)")
    if not actor.kl_loss_coef >= 0:
        raise ConfigError(f"kl_loss_coef={actor.kl_loss_coef} would push the student away from its teacher; use >= 0")
    _check_loss(config)
    _warn_about_truncated_sampling(config.actor_rollout_ref.rollout)
    manager_class(config)
    if teacher.on_row_error not in ("raise", "neutral"):
        raise ConfigError(f"teacher.on_row_error={teacher.on_row_error} is unknown; use raise or neutral")
    if not 0 <= teacher.max_neutral_fraction <= 1:
        raise ConfigError(
            f"teacher.max_neutral_fraction={teacher.max_neutral_fraction} is a share of a batch's rows: use 0 to 1"
        )
    _check_teachers(config)
    for key in ("timeout_s", "ready_timeout_s", "max_tokens_per_request"):
        if not 0 < teacher[key] < math.inf:
            raise ConfigError(f"teacher.{key}={teacher[key]} must be positive and finite")


def _warn_about_truncated_sampling(rollout: DictConfig) -> None:
    if rollout.top_p < 1 or rollout.top_k > 0:
        logger.warning(
            "rollout.top_p=%s, top_k=%s: the student samples from a part of its distribution only, and its KL and "
            "log-probs are of the whole; use top_p=1 and top_k=-1 (0 for the hf rollout)",
            rollout.top_p,
            rollout.top_k,
        )


def _check_teachers(config: DictConfig) -> None:
    teacher = config.teacher
    for name, where in teachers(teacher).items():
        if not where:
            key = "address" if name == DEFAULT else f"teachers.{name}"
            raise ConfigError(f"teacher.{key} is empty; give tcp://host:port, comma-separated for replicas")
    if not teacher.teachers:
        if teacher.routes:
            raise ConfigError("teacher.routes is set and teacher.teachers is not: give the teachers' addresses there")
        return
    check_names(teacher.teachers)
    if DEFAULT in teacher.teachers:
        raise ConfigError(f"teacher.teachers.{DEFAULT} is the name of the teacher at teacher.address; use another one")
    found = routes(teacher)
    idle = sorted(set(teacher.teachers) - {name for route in found.values() for name in route})
    if idle:
        raise ConfigError(f"no row would go to {', '.join(idle)} of teacher.teachers: teacher.routes does not name it")
    averaged = [value for value, route in found.items() if len(route) > 1]
    if averaged and teacher.clamp is not None:
        raise ConfigError(
            f"teacher.routes[{averaged[0]!r}] has several teachers, and with teacher.clamp={teacher.clamp} it is "
            "their mean that is clipped, not each of them: leave teacher.clamp out, or use one teacher for each row"
        )
    if averaged and not _is_linear(config):
        how = _words(config)
        raise ConfigError(
            f"teacher.routes[{averaged[0]!r}] has several teachers, and with {how} the loss towards the mean of their "
            "log-probs is not the weighted sum of the losses towards each: use k3+, k2 or k1+ with loss=sampled, "
            f"loss={POLICY_GRADIENT}, or one teacher for each row"
        )


def _check_loss(config: DictConfig) -> None:
    teacher = config.teacher
    if teacher.loss not in LOSSES:
        raise ConfigError(f"teacher.loss={teacher.loss} is unknown; use one of {', '.join(LOSSES)}")
    if config.algorithm.use_kl_in_reward:
        raise ConfigError(
            "algorithm.use_kl_in_reward=true would count the teacher twice: once as teacher.loss says, and once as a "
            "reward, summed over the response and normalised away. Set it to false; for a KL that works like a reward "
            f"use teacher.loss={POLICY_GRADIENT}"
        )
    if config.get("distillation") is not None and config.distillation.enabled:
        raise ConfigError("distillation.enabled=true starts verl's own teacher beside this one; set it to false")
    if teacher.topk_from not in ("teacher", "student"):
        raise ConfigError(f"teacher.topk_from={teacher.topk_from} is unknown; use teacher or student")
    if teacher.loss in DIVERGENCES:
        _check_topk(config)
    elif teacher.topk_from == "student":
        raise ConfigError(
            f"teacher.topk_from=student with teacher.loss={teacher.loss}, which has no top-k; use one of "
            f"{', '.join(DIVERGENCES)}, or leave teacher.topk_from out"
        )
    _check_idle(teacher)
    if not 0 < teacher.token_discount <= 1:
        raise ConfigError(f"teacher.token_discount={teacher.token_discount} must be within (0, 1]; 1 weighs all alike")
    if teacher.clamp is not None:
        _check_clamp(config)
    coefficient = teacher_loss(config).coefficient
    if config.algorithm.adv_estimator == "opd" and coefficient.start == coefficient.at(2**40) == 0:
        raise ConfigError(
            "adv_estimator=opd takes the task's reward out, and kl_loss_coef=0 the teacher: nothing would train. "
            "Use adv_estimator=grpo for the baseline"
        )


def _check_idle(teacher: Any) -> None:
    """Refuse numbers of a schedule or a loss that was not chosen: the run would not be what its settings say."""
    default, kind = TeacherConfig(), teacher.coef_schedule
    users = {
        "coef_end": (kind in ("linear", "cosine"), "coef_schedule=linear or cosine", f"coef_schedule={kind}"),
        "coef_steps": (kind in ("linear", "cosine"), "coef_schedule=linear or cosine", f"coef_schedule={kind}"),
        "target_kl": (kind == "adaptive", "coef_schedule=adaptive", f"coef_schedule={kind}"),
        "jsd_beta": (teacher.loss == "jsd_topk", "loss=jsd_topk", f"loss={teacher.loss}"),
    }
    for key, (is_used, user, chosen) in users.items():
        # an unknown schedule is named elsewhere
        if not is_used and teacher[key] != getattr(default, key) and kind in SCHEDULES:
            raise ConfigError(
                f"teacher.{key}={teacher[key]} has no effect with teacher.{chosen}: use teacher.{user}, or leave it out"
            )


def _is_linear(config: DictConfig) -> bool:
    """Whether the gradient of a token is the teacher's minus the student's log-prob itself."""
    loss, kl_type = config.teacher.loss, config.actor_rollout_ref.actor.kl_loss_type
    return loss == POLICY_GRADIENT or (loss == SAMPLED and kl_type in LINEAR_KL_TYPES)


def _words(config: DictConfig) -> str:
    """What to call the loss in a message."""
    loss = config.teacher.loss
    return f"kl_loss_type={config.actor_rollout_ref.actor.kl_loss_type}" if loss == SAMPLED else f"teacher.loss={loss}"


def _check_clamp(config: DictConfig) -> None:
    clamp = config.teacher.clamp
    if not 0 < clamp < math.inf:
        raise ConfigError(f"teacher.clamp={clamp} must be a positive number of nats; null switches it off")
    if not _is_linear(config):
        raise ConfigError(
            f"teacher.clamp={clamp} with {_words(config)}: only a gradient that is the difference of the log-probs "
            f"itself can be clipped so. Use KL_TYPE=k3+, k2 or k1+ with loss={SAMPLED}, or loss={POLICY_GRADIENT}; or "
            "leave teacher.clamp out"
        )


def _check_topk(config: DictConfig) -> None:
    actor, teacher = config.actor_rollout_ref.actor, config.teacher
    if not teacher.topk >= 1:
        raise ConfigError(f"teacher.topk={teacher.topk} must be positive with teacher.loss={teacher.loss}")
    if not 0 < teacher.jsd_beta < 1:
        raise ConfigError(
            f"teacher.jsd_beta={teacher.jsd_beta} must be within (0, 1); at the ends the divergence is 0: "
            "use forward_kl_topk or reverse_kl_topk"
        )
    if teacher.topk_from == "student" and teacher.overlap:
        raise ConfigError(
            "teacher.overlap=true with teacher.topk_from=student: while responses are being generated nobody knows yet "
            "which ids the teacher will be asked for, so what is sent ahead would be another question. Set "
            "teacher.overlap=false"
        )
    if teacher.loss == "reverse_kl_topk" and not teacher.tail:
        raise ConfigError(
            "teacher.tail=false with reverse_kl_topk: the sum over the top-k alone is smallest where the student has "
            "moved most of its mass out of the top-k. Use tail=true, or another loss"
        )
    if teacher.loss == "forward_kl_topk" and teacher.topk_from == "student" and not teacher.tail:
        raise ConfigError(
            "teacher.tail=false with forward_kl_topk and teacher.topk_from=student: where the student is surer of its "
            "own top-k than the teacher, the sum is negative, counts as 0 and has no gradient. Use tail=true, or "
            "topk_from=teacher"
        )
    if actor.strategy not in ("fsdp", "fsdp2"):
        raise ConfigError(
            f"teacher.loss={teacher.loss} needs the whole logits: actor.strategy fsdp or fsdp2, not "
            f"{actor.strategy}; sampled and policy_gradient go with every strategy"
        )
    if actor.use_fused_kernels or config.actor_rollout_ref.model.get("use_fused_kernels", False):
        raise ConfigError(f"use_fused_kernels leaves no logits for teacher.loss={teacher.loss}; set it to false")


def check_verl(*, v1: bool = False) -> None:
    """Stop on a verl whose training loop would not call our override: the run would go on without a teacher.

    Args:
        v1: look at the V1 trainers' loop, not at V0's.

    Raises:
        ConfigError: on verl <= 0.6.1, which has the reference log-probs inline in `fit`, and on unknown later ones.
    """
    import verl

    trainer: type
    if v1:
        from verl.trainer.ppo.v1 import PPOTrainer

        trainer, loop, arguments = PPOTrainer, "_step_once", ["self", "batch", "metrics"]
    else:
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        trainer, loop, arguments = RayPPOTrainer, "fit", ["self", "batch"]
    hook = getattr(trainer, "_compute_ref_log_prob", None)
    calls_it = "self._compute_ref_log_prob(" in inspect.getsource(getattr(trainer, loop, trainer))
    if hook is None or not calls_it or list(inspect.signature(hook).parameters) != arguments:
        raise ConfigError(
            f"verl {verl.__version__} does not call {trainer.__name__}._compute_ref_log_prob({', '.join(arguments)}), "
            "which is where the teacher's values enter: it would train without a teacher and say nothing. "
            "Install the version in requirements.txt"
        )
