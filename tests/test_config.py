"""Both recipes compose and pass verl's own validation; what would leave the teacher without effect is refused."""

from pathlib import Path

import pytest
from conftest import ROOT

import opd.cpu  # noqa: F401  before verl
from opd.config import addresses, routes, teacher_loss, teachers
from opd.config_checks import check, check_verl
from opd.errors import ConfigError
from opd.loss.settings import LossSettings
from opd.main_opd import compose

PATHS = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=student",
    "reward.custom_reward_function.path=reward.py",
    "teacher.address=tcp://127.0.0.1:1",
]


def composed(*overrides: str, recipe: str = "digits", cpu: bool = True, trainer: str = "v0"):
    return compose(ROOT / "recipe" / recipe, [*PATHS, *overrides], cpu=cpu, trainer=trainer)


@pytest.mark.parametrize("trainer", ["v0", "sync"])
@pytest.mark.parametrize("recipe, cpu", [("digits", True), ("digits", False), ("gsm8k", False)])
def test_a_recipe_composes_and_passes_verls_validation(recipe, cpu, trainer):
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    config = composed(recipe=recipe, cpu=cpu, trainer=trainer)
    check(config)
    OmegaConf.resolve(config)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    assert config.actor_rollout_ref.actor.kl_loss_coef == 1.0
    assert config.actor_rollout_ref.actor.kl_loss_type == "k3+"
    assert config.actor_rollout_ref.rollout.name == ("cpu" if cpu else "vllm")
    assert config.algorithm.adv_estimator == "grpo"


def test_replicas_are_separated_by_commas():
    config = composed('teacher.address="tcp://a:1, tcp://b:2"')
    assert addresses(config.teacher) == ["tcp://a:1", "tcp://b:2"]


@pytest.mark.parametrize(
    "override, says",
    [
        ("teacher.timeout=3", "'timeout' not in 'TeacherConfig'"),
        ("teacher.timeout_s=soon", "'soon'"),
        ("actor_rollout_ref.actor.kl_los_coef=3", "kl_los_coef"),
    ],
)
def test_an_unknown_key_or_a_wrong_type_is_named_while_composing(override, says):
    with pytest.raises(ConfigError, match=says):
        composed(override)


@pytest.mark.parametrize(
    "override, says",
    [
        ("actor_rollout_ref.actor.use_kl_loss=false", "never be asked"),
        ("actor_rollout_ref.actor.kl_loss_type=k1", r"k3\+"),
        ("actor_rollout_ref.actor.kl_loss_type=kl", r"k3\+"),
        ("actor_rollout_ref.actor.kl_loss_type=full", "full is unknown"),
        ("actor_rollout_ref.actor.kl_loss_coef=-0.1", "away from its teacher"),
        ("teacher.on_row_error=zero", "raise or neutral"),
        ("teacher.max_neutral_fraction=nan", "max_neutral_fraction=nan is a share"),
        ("teacher.max_neutral_fraction=5", "use 0 to 1"),
        ("teacher.max_neutral_fraction=-0.1", "use 0 to 1"),
        ("teacher.token_discount=0", r"token_discount=0.0 must be within \(0, 1\]"),
        ("teacher.token_discount=1.01", r"must be within \(0, 1\]"),
        ("teacher.token_discount=nan", r"must be within \(0, 1\]"),
        ("teacher.clamp=0", "clamp=0.0 must be a positive number of nats"),
        ("teacher.clamp=inf", "null switches it off"),
        ("teacher.address=','", "teacher.address is empty"),
        ("teacher.timeout_s=0", "timeout_s=0.0 must be positive"),
        ("teacher.timeout_s=inf", "timeout_s=inf must be positive and finite"),
        ("teacher.ready_timeout_s=nan", "ready_timeout_s=nan must be positive"),
    ],
)
def test_what_would_leave_the_teacher_without_effect_is_refused(override, says):
    with pytest.raises(ConfigError, match=says):
        check(composed(override))


@pytest.mark.parametrize("override, warns", [("top_p=0.9", True), ("top_k=20", True), ("top_p=1.0", False)])
def test_a_rollout_from_a_part_of_the_distribution_is_warned_about(caplog, override, warns):
    check(composed(f"actor_rollout_ref.rollout.{override}"))
    assert ("from a part of its distribution" in caplog.text) is warns


def test_the_installed_verl_calls_the_override():
    check_verl()


def test_a_verl_that_would_not_call_it_is_refused(monkeypatch):
    """As verl 0.6.1: the method is missing, and `fit` computes the reference log-probs inline."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    monkeypatch.delattr(RayPPOTrainer, "_compute_ref_log_prob")
    with pytest.raises(ConfigError, match="train without a teacher"):
        check_verl()


def test_a_folder_without_a_configuration_is_no_recipe(capsys, tmp_path: Path):
    from opd.main_opd import main

    assert main(["--recipe", str(tmp_path), "--print-config"]) == 1
    assert "has no config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["teacher.loss=kl"], "teacher.loss=kl is unknown; use one of sampled, policy_gradient"),
        (["algorithm.use_kl_in_reward=true"], "count the teacher twice"),
        (["teacher.loss=policy_gradient", "algorithm.use_kl_in_reward=true"], "count the teacher twice"),
        (["distillation.enabled=true"], "verl's own teacher beside this one"),
        (["teacher.loss=jsd_topk", "teacher.topk=0"], "topk=0 must be positive"),
        (["teacher.loss=jsd_topk", "teacher.jsd_beta=1"], "use forward_kl_topk or reverse_kl_topk"),
        (["teacher.loss=reverse_kl_topk", "teacher.tail=false"], "out of the top-k"),
        (["teacher.loss=jsd_topk", "actor_rollout_ref.actor.strategy=megatron"], "fsdp or fsdp2, not megatron"),
        (["teacher.loss=jsd_topk", "actor_rollout_ref.model.use_fused_kernels=true"], "no logits"),
        (
            ["teacher.clamp=5", "teacher.loss=jsd_topk"],
            r"clamp=5.0 with teacher.loss=jsd_topk: .* loss=pol",
        ),
        (["teacher.clamp=5", "actor_rollout_ref.actor.kl_loss_type=k3"], r"with kl_loss_type=k3: .* KL_TYPE=k3\+"),
        (["teacher.coef_schedule=step"], "coef_schedule=step is unknown"),
        (["teacher.coef_schedule=linear", "trainer.total_training_steps=null"], "set teacher.coef_steps"),
        (["teacher.coef_schedule=cosine", "teacher.coef_end=-1"], "away from its teacher"),
        (["teacher.coef_schedule=adaptive"], "target_kl=None nats per token: both must be above 0"),
        (["algorithm.adv_estimator=opd", "actor_rollout_ref.actor.kl_loss_coef=0"], "nothing would train"),
        (["teacher.target_kl=0.1"], "target_kl=0.1 has no effect with teacher.coef_schedule=constant: .*=adaptive"),
        (["teacher.coef_end=0.1"], "coef_end=0.1 has no effect with teacher.coef_schedule=constant: .*=linear or"),
        (["teacher.coef_schedule=adaptive", "teacher.target_kl=1", "teacher.coef_steps=9"], "coef_steps=9 has no eff"),
        (["teacher.jsd_beta=0.1", "teacher.loss=reverse_kl_topk"], "no effect with teacher.loss=reverse_kl_topk"),
    ],
)
def test_losses_that_make_no_sense_are_refused_with_the_reason(overrides, says):
    with pytest.raises(ConfigError, match=says):
        check(composed(*overrides))


@pytest.mark.parametrize(
    "overrides, expected, schedule",
    [
        ([], LossSettings(), [1.0, 1.0]),
        (["teacher.loss=policy_gradient", "algorithm.adv_estimator=opd"], LossSettings("policy_gradient"), [1.0, 1.0]),
        (
            ["teacher.loss=forward_kl_topk", "teacher.tail=false"],
            LossSettings("forward_kl_topk", topk=32, tail=False),
            [1],
        ),
        (["teacher.loss=jsd_topk", "teacher.jsd_beta=0.1"], LossSettings("jsd_topk", topk=32, beta=0.1), [1.0]),
        (
            ["teacher.loss=jsd_topk", "actor_rollout_ref.actor.kl_loss_type=k1"],
            LossSettings("jsd_topk", topk=32),
            [1.0],
        ),
        (["teacher.clamp=5"], LossSettings(clamp=5.0), [1.0]),
        (["teacher.clamp=5", "teacher.loss=policy_gradient"], LossSettings("policy_gradient", clamp=5.0), [1.0]),
        (["teacher.coef_schedule=linear", "trainer.total_training_steps=3"], LossSettings(), [1.0, 0.5, 0.0, 0.0]),
        (
            ["teacher.coef_schedule=linear", "teacher.coef_steps=2", "teacher.coef_end=2"],
            LossSettings(),
            [1.0, 2.0, 2.0],
        ),
    ],
)
def test_losses_come_out_of_the_configuration(overrides, expected, schedule):
    config = composed(*overrides)
    check(config)
    loss = teacher_loss(config)
    assert loss.settings == expected
    assert [loss.at(step).coef for step in range(1, len(schedule) + 1)] == schedule


def routed(*overrides: str):
    """Two teachers."""
    teachers = ["+teacher.teachers.math=tcp://a:1", "+teacher.teachers.code='tcp://b:1,tcp://c:1'"]
    return composed(*teachers, "+teacher.routes.gsm8k=math", *overrides)


def test_several_teachers_have_names_addresses_and_routes():
    config = routed("+teacher.routes.mbpp=code", "+teacher.routes.both={math: 0.75, code: 0.25}")
    check(config)
    assert teachers(config.teacher) == {"math": ["tcp://a:1"], "code": ["tcp://b:1", "tcp://c:1"]}
    assert routes(config.teacher)["both"] == {"math": 0.75, "code": 0.25}
    # the teacher at teacher.address takes part only when a route names it
    config = routed("+teacher.routes.mbpp=code", "+teacher.routes.other=default")
    check(config)
    assert teachers(config.teacher)["default"] == ["tcp://127.0.0.1:1"]
    assert teachers(composed().teacher) == {"default": ["tcp://127.0.0.1:1"]}


@pytest.mark.parametrize(
    "overrides, says",
    [
        ([], "no row would go to code"),
        (["+teacher.routes.mbpp=coder"], "'coder'.*out of code, default, math"),
        (["+teacher.routes.mbpp=code", "+teacher.teachers.default=tcp://d:1"], "is the name of the teacher at"),
        (["+teacher.routes.mbpp=code", "+teacher.teachers.empty=''"], r"teacher\.teachers\.empty is empty"),
    ],
)
def test_teachers_and_routes_that_do_not_belong_together_are_refused(overrides, says):
    with pytest.raises(ConfigError, match=says):
        check(routed(*overrides))


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["teacher.loss=jsd_topk"], "teacher.loss=jsd_topk"),
        (["actor_rollout_ref.actor.kl_loss_type=k3"], "kl_loss_type=k3"),
        (["actor_rollout_ref.actor.kl_loss_type=abs"], "kl_loss_type=abs"),
        (["teacher.loss=policy_gradient"], None),
        (["actor_rollout_ref.actor.kl_loss_type=k2"], None),
        (["teacher.clamp=3"], "teacher.clamp=3.0"),
    ],
)
def test_several_teachers_for_one_row_need_a_loss_whose_gradient_is_linear(overrides, says):
    check(routed("+teacher.routes.mbpp=code", *overrides))  # a teacher for each row goes with every loss
    averaged = routed("+teacher.routes.both={math: 0.75, code: 0.25}", *overrides)
    if says is None:
        check(averaged)
        return
    with pytest.raises(ConfigError, match=f"'both'.* several teachers, and with {says} "):
        check(averaged)
