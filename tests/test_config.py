"""Both recipes compose and pass verl's own validation; what would leave the teacher without effect is refused."""

from pathlib import Path

import pytest
from conftest import ROOT

import opd.cpu  # noqa: F401  before verl
from opd.config import addresses, check, check_verl
from opd.errors import ConfigError
from opd.main_opd import compose

PATHS = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "actor_rollout_ref.model.path=student",
    "reward.custom_reward_function.path=reward.py",
    "teacher.address=tcp://127.0.0.1:1",
]


def composed(*overrides: str, recipe: str = "digits", cpu: bool = True):
    return compose(ROOT / "recipe" / recipe, [*PATHS, *overrides], cpu=cpu)


@pytest.mark.parametrize("recipe, cpu", [("digits", True), ("digits", False), ("gsm8k", False)])
def test_a_recipe_composes_and_passes_verls_validation(recipe, cpu):
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    config = composed(recipe=recipe, cpu=cpu)
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
        ("teacher.address=','", "teacher.address is empty"),
        ("teacher.timeout_s=0", "timeout_s=0.0 must be positive"),
    ],
)
def test_what_would_leave_the_teacher_without_effect_is_refused(override, says):
    with pytest.raises(ConfigError, match=says):
        check(composed(override))


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
