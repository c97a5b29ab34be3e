"""Train a student by on-policy distillation: `python -m opd.main_opd --recipe recipe/digits [key=value ...]`.

Composes the recipe's configuration on top of verl's, shakes hands with the teacher, and runs OPDTrainer on Ray. The
teacher must be running (`python -m opd.teacher_server`); `run_opd.sh` starts one and then calls this.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from opd.config import TeacherConfig, addresses, check, check_verl
from opd.errors import ConfigError, OPDError

REPO = Path(__file__).resolve().parent.parent
logger = logging.getLogger("opd")


def compose(recipe: Path, overrides: list[str], *, cpu: bool) -> DictConfig:
    """Compose `recipe/config.yaml` on verl's own configuration.

    Later wins: verl's defaults, the recipe, what a CPU needs (opd/cpu/settings.py), the overrides.

    Raises:
        ConfigError: an unknown key or a value of the wrong type.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    if cpu:
        # not before it is known: importing anything of opd.cpu turns verl to the CPU
        from opd.cpu.settings import OVERRIDES, OVERRIDES_V0

        overrides = [*OVERRIDES, *OVERRIDES_V0, *overrides]
    ConfigStore.instance().store(group="teacher", name="base", node=TeacherConfig)
    try:
        with initialize_config_dir(str(recipe.resolve()), version_base=None):
            return hydra_compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(f"configuration of {recipe}: {_root_message(e)}")


def _root_message(e: BaseException) -> str:
    while e.__cause__ is not None:
        e = e.__cause__
    return " ".join(line.strip() for line in str(e).splitlines() if line.strip())


def make_task_runner(*, cpu: bool) -> Any:
    """The Ray actor that builds the trainer and runs it."""
    import ray
    from verl.trainer.main_ppo_v0 import BaseTaskRunner

    class OPDTaskRunner(BaseTaskRunner):
        """verl's task runner with our trainer, our worker, and no reference model."""

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
            from verl.utils.config import omega_conf_to_dataclass, validate_config
            from verl.utils.dataset.rl_dataset import collate_fn

            from opd.trainer import OPDTrainer

            logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
            OmegaConf.resolve(config)
            teacher = shake_hands(config)
            _, worker_group = self.add_actor_rollout_worker(config)
            if need_critic(config):
                self.add_critic_worker(config)
            self.add_reward_model_resource_pool(config)
            validate_config(config=config, use_reference_policy=False, use_critic=need_critic(config))

            model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
            data = config.data
            train = create_rl_dataset(
                data.train_files,
                data,
                model.tokenizer,
                model.processor,
                is_train=True,
                max_samples=data.get("train_max_samples", -1),
            )
            val = create_rl_dataset(
                data.val_files,
                data,
                model.tokenizer,
                model.processor,
                is_train=False,
                max_samples=data.get("val_max_samples", -1),
            )
            trainer = OPDTrainer(
                config=config,
                tokenizer=model.tokenizer,
                processor=model.processor,
                role_worker_mapping=self.role_worker_mapping,
                resource_pool_manager=self.init_resource_pool_mgr(config),
                ray_worker_group_cls=worker_group,
                train_dataset=train,
                val_dataset=val,
                collate_fn=collate_fn,
                train_sampler=create_rl_sampler(data, train),
            )
            trainer.teacher = teacher
            trainer.ref_in_actor = True  # before init_workers: no reference model is loaded
            trainer.init_workers()
            trainer.fit()

    return ray.remote(OPDTaskRunner)


def shake_hands(config: DictConfig) -> Any:
    """Wait for the teacher, check it against the student, and return it as a TeacherReference."""
    from opd.client import TeacherClient
    from opd.handshake import check_teacher, read_student
    from opd.reference import TeacherReference

    rollout = config.actor_rollout_ref.rollout
    student = read_student(
        config.actor_rollout_ref.model.path,
        max_length=config.data.max_prompt_length + config.data.max_response_length,
        temperature=float(rollout.temperature),
    )
    client = TeacherClient(addresses(config.teacher), max_tokens_per_request=config.teacher.max_tokens_per_request)
    check_teacher(client.wait_until_ready(config.teacher.ready_timeout_s), student)
    return TeacherReference(client, config.teacher, temperature=student.temperature)


def run(config: DictConfig, *, cpu: bool) -> None:
    """Run the training to its end, in a Ray cluster that this call starts and stops unless one is configured."""
    import ray
    from verl.trainer.main_ppo import run_ppo

    # Every Ray process imports this package, wherever it starts.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    try:
        run_ppo(config, task_runner_class=make_task_runner(cpu=cpu))
    except ray.exceptions.RayTaskError as e:
        cause = e.cause
        if isinstance(cause, OPDError):
            raise cause from None
        raise
    finally:
        ray.shutdown()


def fresh_metrics(run_dir: Path) -> Path:
    """RUN_DIR/metrics.jsonl, with that of an earlier part of the run moved aside: verl would overwrite it."""
    path = run_dir / "metrics.jsonl"
    if path.exists():
        number = 1 + len(list(run_dir.glob("metrics.*.jsonl")))
        path.rename(run_dir / f"metrics.{number}.jsonl")
    return path


def has_accelerator() -> bool:
    import torch

    return torch.cuda.is_available()


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m opd.main_opd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, required=True, help="folder with a config.yaml, such as recipe/digits")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes a GPU if there is one"
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="where config.yaml, metrics.jsonl and checkpoints/ go",
    )
    parser.add_argument("--print-config", action="store_true", help="print the composed configuration, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides of verl's configuration")
    args = parser.parse_args(argv)
    if args.run_dir is None and not args.print_config:
        parser.error("--run-dir is needed to train")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    # Both end the run through `finally`, so that Ray's processes are stopped. SIGINT too has to be set: a shell starts
    # background processes with it ignored. Once Ray runs, it answers SIGTERM itself, by aborting.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        if not (args.recipe / "config.yaml").is_file():
            raise ConfigError(f"no recipe in {str(args.recipe)!r}: it has no config.yaml; try recipe/digits")
        cpu = args.device == "cpu" or (args.device == "auto" and not has_accelerator())
        if cpu:
            import opd.cpu  # noqa: F401  registers the platform, before verl is imported
        run_dir = [] if args.run_dir is None else [f"trainer.default_local_dir={args.run_dir.resolve()}/checkpoints"]
        config = compose(args.recipe, [*run_dir, *args.overrides], cpu=cpu)
        check(config)
        if args.print_config:
            print(OmegaConf.to_yaml(config))
            return 0
        check_verl()
        args.run_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, args.run_dir / "config.yaml", resolve=True)
        # verl's "file" logger; the Ray processes of a local cluster inherit it
        os.environ["VERL_FILE_LOGGER_PATH"] = str(fresh_metrics(args.run_dir.resolve()))
        shake_hands(config).client.close()  # before Ray starts: what is wrong with the teacher is said in seconds
        run(config, cpu=cpu)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OPDError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
