"""The `teacher` block of the configuration, and what is made of it.

The block is typed: an unknown key or a value of the wrong type fails while Hydra composes. Everything else is verl's
own configuration under verl's own names. What is refused although it composes is in opd/config_checks.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from opd.errors import ConfigError
from opd.loss.schedule import SCHEDULES, Coefficient
from opd.loss.settings import DIVERGENCES, SAMPLED, LossSettings, TeacherLoss
from opd.routing import DEFAULT, Route, read_routes


@dataclass  # not frozen: OmegaConf makes a frozen one read-only while it composes, for the recipe's own values too
class TeacherConfig:
    """How the trainer reaches its teacher, and what it does when the teacher fails."""

    # comma-separated, one per replica: tcp://host:port
    address: str = MISSING
    # several teachers: a name for each, and its addresses; `address` is then the one called "default", and may be left
    # out when no route names it
    teachers: dict[str, str] = field(default_factory=dict)
    # the column of the data that says which teacher a row goes to
    route_by: str = "data_source"
    # for every value of that column a teacher's name, or {name: weight}, the weights adding up to 1
    routes: dict[str, Any] = field(default_factory=dict)
    # for the teacher alone, before the conversation; the student never sees it
    system_prompt: str | None = None
    # a column of the data with messages that the teacher sees in place of the prompt
    prompt_column: str | None = None
    # file of a chat template for the teacher alone
    chat_template: str | None = None
    # seconds to wait for a loading teacher before training starts
    ready_timeout_s: float = 600.0
    # seconds that one step may wait for its scores, through retries and restarts of the teacher; then the run ends
    timeout_s: float = 600.0
    # send each response to the teacher as soon as it is finished, while others are being generated. A teacher with a
    # device of its own only gains by it; one that shares the trainer's slows the rollout, so on a CPU it is off
    overlap: bool = True
    # tokens in one request: smaller ones spread better over replicas, larger ones share more prompts
    max_tokens_per_request: int = 65_536
    # a row that the teacher cannot score: "raise" ends the run; "neutral" gives it no teacher gradient and counts it
    on_row_error: str = "raise"
    # with "neutral": the run ends all the same when a larger share of a batch has no teacher value
    max_neutral_fraction: float = 0.05
    # how the teacher's values become gradient: sampled (verl's KL loss, estimated as kl_loss_type says),
    # policy_gradient, forward_kl_topk, reverse_kl_topk, jsd_topk; the weight of each is actor.kl_loss_coef
    loss: str = SAMPLED
    # *_topk: tokens at each position
    topk: int = 32
    # *_topk: whose most probable tokens those are, "teacher" or "student": the student's cost one more forward of it in
    # each step, and a teacher that scores given ids (--backend hf). The reverse KL is an expectation under the student
    topk_from: str = "teacher"
    # *_topk: what is left of both distributions is one more bucket; forward_kl_topk without it is verl's
    tail: bool = True
    # jsd_topk: within (0, 1); towards 0 like the forward KL, towards 1 like the reverse
    jsd_beta: float = 0.5
    # nats; sampled with k3+, k2 or k1+, and policy_gradient: |teacher - student log-prob| of a sampled token is clipped
    # to it before it becomes loss or advantage, so that no token decides a step alone
    clamp: float | None = None
    # within (0, 1]: the t-th response token that counts, from 0 on, has the weight token_discount**t in the teacher's
    # loss; what a teacher thinks of a long wrong continuation is worth less
    token_discount: float = 1.0
    # of the weight over the steps, starting at actor.kl_loss_coef: constant, linear, cosine, adaptive
    coef_schedule: str = "constant"
    # linear, cosine: the weight at the last of coef_steps steps; those are trainer.total_training_steps by default
    coef_end: float = 0.0
    coef_steps: int | None = None
    # adaptive: nats per token; the weight grows by up to 2 % a step while the KL is above it, and shrinks below
    target_kl: float | None = None


def teacher_loss(config: DictConfig) -> TeacherLoss:
    """The loss that a composed configuration asks for.

    Raises:
        ConfigError: a schedule that does not exist or lacks a number; names the key.
    """
    actor, teacher = config.actor_rollout_ref.actor, config.teacher
    kind, steps = teacher.coef_schedule, teacher.coef_steps
    if kind not in SCHEDULES:
        raise ConfigError(f"teacher.coef_schedule={kind} is unknown; use one of {', '.join(SCHEDULES)}")
    if kind in ("linear", "cosine"):
        steps = config.trainer.total_training_steps if steps is None else steps
        if steps is None or steps < 1:
            raise ConfigError(f"teacher.coef_schedule={kind} has no length; set teacher.coef_steps, not {steps}")
        if not teacher.coef_end >= 0:
            raise ConfigError(f"teacher.coef_end={teacher.coef_end} would push the student away from its teacher")
    if kind == "adaptive" and not (teacher.target_kl is not None and teacher.target_kl > 0 and actor.kl_loss_coef > 0):
        raise ConfigError(
            f"teacher.coef_schedule=adaptive multiplies kl_loss_coef={actor.kl_loss_coef} until the KL is "
            f"teacher.target_kl={teacher.target_kl} nats per token: both must be above 0"
        )
    coefficient = Coefficient(
        kind, float(actor.kl_loss_coef), end=teacher.coef_end, steps=steps, target_kl=teacher.target_kl
    )
    settings = LossSettings(
        name=teacher.loss,
        coef=coefficient.start,
        topk=teacher.topk if teacher.loss in DIVERGENCES else 0,
        beta=teacher.jsd_beta,
        tail=teacher.tail,
        clamp=math.inf if teacher.clamp is None else teacher.clamp,
    )
    return TeacherLoss(settings, coefficient, actor.kl_loss_type)


# what runs the rollout: verl's manager, or a CPU's, and the one that also sends finished rows to the teacher
OVERLAP_V0 = {
    None: "opd.agent_loop.OverlapManager",
    "opd.cpu.agent_loop.CpuAgentLoopManager": "opd.cpu.agent_loop.CpuOverlapManager",
}
OVERLAP_V1 = {None: "opd.agent_loop_v1.OverlapManagerTQ"}


def manager_class(config: DictConfig) -> str | None:
    """The agent loop manager that a composed configuration asks for; None: verl's own.

    Raises:
        ConfigError: teacher.overlap with a manager that does not know of it.
    """
    name = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    ours = OVERLAP_V1 if config.trainer.use_v1 else OVERLAP_V0
    if not config.teacher.overlap or name in ours.values():
        return name
    if name not in ours:
        raise ConfigError(
            f"teacher.overlap=true, but agent_loop_manager_class={name} does not send finished rows to the teacher; "
            "set teacher.overlap=false, or make its worker a subclass of opd.agent_loop.OverlapWorker as "
            f"{ours[None]} does"
        )
    return ours[name]


def addresses(teacher: Any) -> list[str]:
    """The addresses at `teacher.address` of a composed `teacher` block."""
    return [] if OmegaConf.is_missing(teacher, "address") else _split(teacher.address)


def teachers(teacher: Any) -> dict[str, list[str]]:
    """The addresses of every teacher that rows may go to, by its name."""
    named = {name: _split(where) for name, where in teacher.teachers.items()}
    # addresses of the default one only where it is asked for: run_opd.sh always gives one
    if not named or any(DEFAULT in route for route in routes(teacher).values()):
        named[DEFAULT] = addresses(teacher)
    return named


def routes(teacher: Any) -> dict[str, Route]:
    """The weights of each value's teachers.

    Raises:
        ConfigError: as opd/routing.py read_routes.
    """
    plain: Any = OmegaConf.to_container(OmegaConf.create(teacher.routes), resolve=True)
    return read_routes(plain, [*teacher.teachers, DEFAULT])


def _split(where: str) -> list[str]:
    return [a.strip() for a in where.split(",") if a.strip()]
