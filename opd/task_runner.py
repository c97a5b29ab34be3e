"""The Ray actor that builds a trainer and runs it, for verl's V0 and V1 trainers, and the handshake before either.

verl's own task runners build verl's trainers by name, so each gets a sibling here: the same steps, with our trainer,
our worker and a teacher.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from opd.coefficient_record import open_record
from opd.config import manager_class, teacher_loss
from opd.data_files import read_columns
from opd.routing import Router
from opd.teacher_prompt import RAW_PROMPT, TeacherPrompt
from opd.teacher_record import keep_teachers
from opd.teachers import teachers_of

if TYPE_CHECKING:  # verl is slow to import, and opd.cpu has to come first
    from opd.handshake import Student
    from opd.reference import TeacherReference

logger = logging.getLogger(__name__)


def make_task_runner(config: DictConfig, *, cpu: bool) -> Any:
    """The actor class for the trainer that `trainer.use_v1` and `trainer.v1.trainer_mode` choose."""
    return _make_v1(cpu=cpu) if config.trainer.use_v1 else _make_v0(cpu=cpu)


def shake_hands(config: DictConfig) -> TeacherReference:
    """Wait for the teacher, check it against the student, and return it as the trainers use it."""
    from opd.handshake import check_teacher, read_student
    from opd.reference import TeacherReference

    rollout = config.actor_rollout_ref.rollout
    student = read_student(
        config.actor_rollout_ref.model.path,
        max_length=config.data.max_prompt_length + config.data.max_response_length,
        temperature=float(rollout.temperature),
    )
    settings = config.teacher
    teachers = teachers_of(config, tokenizer=student.tokenizer)
    try:
        models = teachers.wait_until_ready(settings.ready_timeout_s)
        shortest = min(model.max_length for model in models.values())
        student = _with_teachers_prompts(config, student, teachers.prompts, shortest)
        for name, model in models.items():
            check_teacher(model, student, teachers.clients[name].vocabulary)
        if isinstance(teachers.client, Router):
            columns = read_columns(config.data, [settings.route_by])
            if columns is not None:
                teachers.client.check_values(columns[settings.route_by], "data.train_files")
        return TeacherReference(
            teachers.client,
            settings,
            temperature=student.temperature,
            loss=teacher_loss(config),
            prompts=teachers.prompts,
        )
    except BaseException:
        teachers.close()
        raise


def _with_teachers_prompts(
    config: DictConfig, student: Student, prompts: TeacherPrompt | None, max_length: int
) -> Student:
    """The student with the longest row that the teacher will get, where its prompts are others and are known."""
    if prompts is None:
        return student
    data = config.data
    names = {name: data.prompt_key if name == RAW_PROMPT else name for name in prompts.columns}
    columns = read_columns(data, list(names.values()))
    if columns is None:
        return student
    longest = prompts.longest(
        {name: columns[column] for name, column in names.items()},
        limit=max_length - data.max_response_length,
        max_student=data.max_prompt_length,
    )
    logger.info("the longest prompt for the teacher has %d ids", longest)
    return student._replace(max_length=longest + data.max_response_length)


def _start(config: DictConfig) -> TeacherReference:
    """What both runners do first, in their own process."""
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import validate_config

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    OmegaConf.resolve(config)
    manager = manager_class(config)
    if manager is not None:
        OmegaConf.update(config, "actor_rollout_ref.rollout.agent.agent_loop_manager_class", manager, force_add=True)
    teacher = shake_hands(config)
    keep_teachers(config.trainer, teacher.models)  # again: it is this handshake's teacher that trains
    teacher.record = open_record(config.trainer, teacher.loss.coefficient)
    validate_config(config=config, use_reference_policy=False, use_critic=need_critic(config))
    return teacher


def _make_v0(*, cpu: bool) -> Any:
    import ray
    from verl.trainer.main_ppo_v0 import BaseTaskRunner

    class OPDTaskRunner(BaseTaskRunner):
        """verl's V0 task runner with our trainer, our worker, and no reference model."""

        def add_actor_rollout_worker(self, config: DictConfig) -> tuple[Any, Any]:
            # verl would map Role.ActorRolloutRef here, since use_kl_loss is on: a second copy of the student
            from verl.single_controller.ray import RayWorkerGroup
            from verl.trainer.ppo.ray_trainer import Role

            from opd.worker import OPDWorker

            worker: type[OPDWorker] = OPDWorker
            if cpu:
                from opd.cpu.worker import CpuWorker

                worker = CpuWorker
            self.role_worker_mapping[Role.ActorRollout] = ray.remote(worker)
            self.mapping[Role.ActorRollout] = "global_pool"
            return worker, RayWorkerGroup

        def run(self, config: DictConfig) -> None:
            from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler, need_critic
            from verl.utils.config import omega_conf_to_dataclass
            from verl.utils.dataset.rl_dataset import collate_fn

            from opd.trainer import OPDTrainer

            teacher = _start(config)
            _, worker_group = self.add_actor_rollout_worker(config)
            if need_critic(config):
                self.add_critic_worker(config)
            self.add_reward_model_resource_pool(config)

            model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
            data = config.data

            def dataset(split: str) -> Any:
                return create_rl_dataset(
                    data[f"{split}_files"],
                    data,
                    model.tokenizer,
                    model.processor,
                    is_train=split == "train",
                    max_samples=data.get(f"{split}_max_samples", -1),
                )

            train = dataset("train")
            trainer = OPDTrainer(
                config=config,
                tokenizer=model.tokenizer,
                processor=model.processor,
                role_worker_mapping=self.role_worker_mapping,
                resource_pool_manager=self.init_resource_pool_mgr(config),
                ray_worker_group_cls=worker_group,
                train_dataset=train,
                val_dataset=dataset("val"),
                collate_fn=collate_fn,
                train_sampler=create_rl_sampler(data, train),
            )
            trainer.teacher = teacher
            trainer.ref_in_actor = True  # before init_workers: no reference model is loaded
            trainer.init_workers()
            trainer.fit()

    return ray.remote(OPDTaskRunner)


def _make_v1(*, cpu: bool) -> Any:
    import ray

    class OPDTaskRunnerV1:
        """The steps of verl's TaskRunnerV1; a sibling, since that one is a Ray actor, which Python cannot inherit."""

        def run(self, config: DictConfig) -> None:
            import transfer_queue as tq
            from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls
            from verl.utils.import_utils import load_class_from_fqn

            from opd.trainer_v1 import PREFIX  # registers our trainers

            teacher = _start(config)
            config.transfer_queue.enable = True
            trainer: Any = None
            succeeded = False
            tq.init(config.transfer_queue)
            try:
                trainer = get_trainer_cls(PREFIX + config.trainer.v1.trainer_mode)(config=config)
                trainer.teacher = teacher
                if cpu:
                    from opd.cpu.worker import CpuWorker

                    trainer.worker = CpuWorker
                trainer.init()
                name = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
                manager_class: Any = load_class_from_fqn(name, "AgentLoopManager") if name else AgentLoopManagerTQ
                manager = manager_class.create(
                    config=config,
                    llm_client=trainer.get_llm_client(),
                    teacher_client=trainer.get_teacher_client(),
                    reward_loop_worker_handles=trainer.get_reward_handles(),
                )
                trainer.fit(manager)
                succeeded = True
            finally:
                tracking = getattr(trainer, "logger", None)
                if tracking is not None:
                    tracking.finish(exit_code=0 if succeeded else 1)
                tq.close()

    return ray.remote(OPDTaskRunnerV1)
