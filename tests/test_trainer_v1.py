"""verl's V1 trainers with a teacher: chosen by one flag, hooked where verl calls, and without a reference model."""

import inspect

import pytest
from conftest import ROOT
from test_config import composed

import opd.cpu  # noqa: F401  before verl
from opd.config_checks import check, check_verl
from opd.errors import ConfigError
from opd.main_opd import compose

MODES = ("sync", "colocate_async", "separate_async")


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_composes_and_passes_verls_validation(mode):
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    config = composed(trainer=mode, cpu=mode != "separate_async")
    check(config)
    OmegaConf.resolve(config)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    assert config.trainer.use_v1 is True
    assert config.trainer.v1.trainer_mode == mode  # verl looks its settings up under this name


def test_an_override_that_contradicts_the_flag_is_refused():
    for override in ("trainer.use_v1=True", "trainer.v1.trainer_mode=colocate_async"):
        trainer = "v0" if "use_v1" in override else "sync"
        with pytest.raises(ConfigError, match=f"--trainer is {trainer}, but .* leave both keys to --trainer"):
            composed(override, trainer=trainer)


def test_separate_async_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match="separate_async needs a GPU"):
        compose(ROOT / "recipe" / "digits", [], cpu=True, trainer="separate_async")


def test_a_verl_whose_v1_loop_would_not_call_the_override_is_refused(monkeypatch):
    from verl.trainer.ppo.v1 import PPOTrainer

    check_verl(v1=True)
    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "_compute_ref_log_prob", lambda self, batch: batch)  # V0's signature
        with pytest.raises(ConfigError, match=r"PPOTrainer._compute_ref_log_prob\(self, batch, metrics\)"):
            check_verl(v1=True)
    monkeypatch.setattr(PPOTrainer, "_step_once", lambda self: None)
    with pytest.raises(ConfigError, match="train without a teacher"):
        check_verl(v1=True)


# The hooks


def trainer_class(mode: str) -> type:
    from verl.trainer.ppo.v1 import get_trainer_cls

    from opd.trainer_v1 import PREFIX

    return get_trainer_cls(PREFIX + mode)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_verls_own_trainer_with_our_override_in_front(mode):
    from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls

    from opd.trainer_v1 import OPDTrainerV1

    ours, stock = trainer_class(mode), get_trainer_cls(mode)
    assert issubclass(ours, stock)
    assert ours._compute_ref_log_prob is OPDTrainerV1._compute_ref_log_prob
    # nothing between it and the loop that calls it
    assert stock._compute_ref_log_prob is PPOTrainer._compute_ref_log_prob
    assert ours._step_once is PPOTrainer._step_once
    overridden = {n for n in vars(OPDTrainerV1) if hasattr(PPOTrainer, n) and not n.startswith("__")} - {"_abc_impl"}
    assert overridden == {"_compute_ref_log_prob", "_init_resource_pool_mgr"}


@pytest.mark.parametrize("mode, overrides", [(mode, ()) for mode in MODES] + [("separate_async", ("hybrid=false",))])
def test_no_mode_has_a_role_for_a_reference_model(mode, overrides):
    """verl's own roles, from the same configuration, have one."""
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1 import get_trainer_cls

    hybrid = [o.replace("hybrid", "actor_rollout_ref.hybrid_engine") for o in overrides]
    config = composed(*hybrid, trainer=mode, cpu=False)

    def set_up(cls: type):
        trainer = cls.__new__(cls)
        trainer.config = config
        trainer._enable_hybrid_replicas = not overrides
        trainer._init_resource_pool_mgr()
        trainer.ref_in_actor = False  # as verl does next, when the student is no LoRA adapter
        return trainer

    stock, ours = set_up(get_trainer_cls(mode)), set_up(trainer_class(mode))
    assert {Role.ActorRolloutRef, Role.RefPolicy} & set(stock.role_worker_mapping)
    actor = Role.Actor if overrides else Role.ActorRollout
    assert set(ours.role_worker_mapping) == {actor}
    assert "ref" not in str(actor)  # the worker builds a reference model when its role's name has "ref"
    assert ours.resource_pool_manager.mapping.keys() == {actor, Role.RewardModel}
    assert ours.ref_in_actor


def test_the_worker_of_separate_async_has_both_parents_methods():
    """Several updates per weight sync need verl's copies of the weights; metrics and losses need our update."""
    from verl.experimental.separation.engine_workers import DetachActorWorker

    from opd.trainer_v1 import OPDTrainerSeparateAsync
    from opd.worker import OPDWorker

    worker = OPDTrainerSeparateAsync.worker
    assert worker.update_actor is OPDWorker.update_actor
    assert worker.save_model_to_cpu is DetachActorWorker.save_model_to_cpu
    assert worker.__init__ in (OPDWorker.__init__, DetachActorWorker.__init__)


def test_our_runner_takes_the_steps_of_verls():
    """TaskRunnerV1.run and init_agent_loop_manager; if this fails, read them again and change opd/task_runner.py."""
    from verl.trainer import main_ppo

    source = inspect.getsource(main_ppo)
    for step in (
        "config.transfer_queue.enable = True",
        "tq.init(config.transfer_queue)",
        "self.trainer = trainer_cls(config=config)",
        "self.trainer.init()",
        "agent_loop_manager_cls = AgentLoopManagerTQ",
        "llm_client=self.trainer.get_llm_client()",
        "teacher_client=self.trainer.get_teacher_client()",
        "reward_loop_worker_handles=self.trainer.get_reward_handles()",
        "self.trainer.fit(self.agent_loop_manager)",
        "tracking.finish(exit_code=0 if succeeded else 1)",
        "tq.close()",
    ):
        assert step in source, f"verl's V1 task runner no longer has {step!r}"
