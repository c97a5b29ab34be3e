"""The `teacher` block of the configuration, and what is refused before anything starts.

The block is typed: an unknown key or a value of the wrong type fails while Hydra composes. Everything else is
verl's own configuration under verl's own names; `check` looks only at what would make the teacher silently do nothing.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, DictConfig

from opd.errors import ConfigError


@dataclass  # not frozen: OmegaConf makes a frozen one read-only while it composes, for the recipe's own values too
class TeacherConfig:
    """How the trainer reaches its teacher, and what it does when the teacher fails."""

    # comma-separated, one per replica: tcp://host:port
    address: str = MISSING
    # seconds to wait for a loading teacher before training starts
    ready_timeout_s: float = 600.0
    # seconds that one step may wait for its scores, through retries and restarts of the teacher; then the run ends
    timeout_s: float = 600.0
    # tokens in one request: smaller ones spread better over replicas, larger ones share more prompts
    max_tokens_per_request: int = 65_536
    # a row that the teacher cannot score: "raise" ends the run; "neutral" gives it a KL of 0 and counts it
    on_row_error: str = "raise"
    # with "neutral": the run ends all the same when a larger share of a batch has no teacher value
    max_neutral_fraction: float = 0.05


# verl's names for the estimators whose gradient depends on the teacher; opd/kl.py says what each does
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
    if kl_type in ("kl", "k1"):
        raise ConfigError(
            f"kl_loss_type={kl_type} cannot be used as a loss: its gradient does not depend on the teacher at all, it "
            "only lowers the student's own log-probs. Use KL_TYPE=k3+ (value of k3, gradient of the reverse KL)"
        )
    if kl_type not in KL_TYPES:
        raise ConfigError(f"kl_loss_type={kl_type} is unknown; use one of {', '.join(KL_TYPES)} (k3+ is the default)")
    if not actor.kl_loss_coef >= 0:
        raise ConfigError(f"kl_loss_coef={actor.kl_loss_coef} would push the student away from its teacher; use >= 0")
    if teacher.on_row_error not in ("raise", "neutral"):
        raise ConfigError(f"teacher.on_row_error={teacher.on_row_error} is unknown; use raise or neutral")
    if not addresses(teacher):
        raise ConfigError("teacher.address is empty; give tcp://host:port, comma-separated for replicas")
    for key in ("timeout_s", "ready_timeout_s", "max_tokens_per_request"):
        if not teacher[key] > 0:
            raise ConfigError(f"teacher.{key}={teacher[key]} must be positive")


def addresses(teacher: Any) -> list[str]:
    """The addresses of a composed `teacher` block."""
    return [a.strip() for a in teacher.address.split(",") if a.strip()]


def check_verl() -> None:
    """Stop on a verl whose training loop would not call our override: the run would go on without a teacher.

    Raises:
        ConfigError: on verl <= 0.6.1, which has the reference log-probs inline in `fit`, and on unknown later ones.
    """
    import verl
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    if not hasattr(RayPPOTrainer, "_compute_ref_log_prob") or "self._compute_ref_log_prob(" not in inspect.getsource(
        RayPPOTrainer.fit
    ):
        raise ConfigError(
            f"verl {verl.__version__} does not call RayPPOTrainer._compute_ref_log_prob, which is where the teacher's "
            "values enter: it would train without a teacher and say nothing. Install the version in requirements.txt"
        )
