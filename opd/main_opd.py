"""Train a student by on-policy distillation: `python -m opd.main_opd --recipe recipe/digits [key=value ...]`.

Composes the recipe's configuration on top of verl's, shakes hands with the teacher, and runs the trainer on Ray. The
teacher must be running (`python -m opd.teacher_server`); `run_opd.sh` starts one and then calls this.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from opd.config import TeacherConfig
from opd.config_checks import check, check_verl
from opd.errors import ConfigError, OPDError
from opd.task_runner import make_task_runner, shake_hands
from opd.teacher_record import keep_teachers

REPO = Path(__file__).resolve().parent.parent
# v0 is verl's older trainer; the others are the modes of its V1 trainer
TRAINERS = ("v0", "sync", "colocate_async", "separate_async")
MODE = "trainer.v1.trainer_mode"
logger = logging.getLogger("opd")


def compose(recipe: Path, overrides: list[str], *, cpu: bool, trainer: str = "v0") -> DictConfig:
    """Compose `recipe/config.yaml` on verl's own configuration.

    Later wins: verl's defaults, the recipe, what a CPU needs (opd/cpu/settings.py), the trainer, the overrides.

    Raises:
        ConfigError: an unknown key or a value of the wrong type; a trainer that cannot run on a CPU, or that the
            overrides contradict.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException

    chosen = ["trainer.use_v1=False"] if trainer == "v0" else ["trainer.use_v1=True", f"{MODE}={trainer}"]
    overrides = [*chosen, *overrides]
    if cpu:
        if trainer == "separate_async":
            raise ConfigError(
                "the trainer separate_async needs a GPU: its rollout has devices of its own, which get their weights "
                "over NCCL or RDMA; on a CPU use sync, colocate_async or v0"
            )
        # not before it is known: importing anything of opd.cpu turns verl to the CPU
        from opd.cpu.settings import OVERRIDES, OVERRIDES_V0, OVERRIDES_V1

        # teacher and trainer share the cores there, and scoring in small batches takes more of them than it hides
        cpu_overrides = [*OVERRIDES, *(OVERRIDES_V0 if trainer == "v0" else OVERRIDES_V1), "teacher.overlap=False"]
        overrides = [*cpu_overrides, *overrides]
    ConfigStore.instance().store(group="teacher", name="base", node=TeacherConfig)
    try:
        with initialize_config_dir(str(recipe.resolve()), version_base=None):
            config = hydra_compose("config", overrides)
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(f"configuration of {recipe}: {_root_message(e)}")
    composed = config.trainer.v1.trainer_mode if config.trainer.use_v1 else "v0"
    if composed != trainer:
        raise ConfigError(
            f"--trainer is {trainer}, but trainer.use_v1={config.trainer.use_v1} and {MODE}="
            f"{config.trainer.v1.trainer_mode} choose {composed}; leave both keys to --trainer"
        )
    return config


def _root_message(e: BaseException) -> str:
    while e.__cause__ is not None:
        e = e.__cause__
    return " ".join(line.strip() for line in str(e).splitlines() if line.strip())


def run(config: DictConfig, *, cpu: bool) -> None:
    """Run the training to its end, in a Ray cluster that this call starts and stops unless one is configured."""
    import ray
    from verl.trainer.main_ppo import run_ppo

    # Every Ray process imports this package, wherever it starts.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    try:
        run_ppo(config, task_runner_class=make_task_runner(config, cpu=cpu))
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
        "--trainer",
        choices=TRAINERS,
        default="v0",
        help="which of verl's trainers: v0, or a mode of its V1 trainer [v0]",
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
        run_dir = [] if args.run_dir is None else [f"trainer.default_local_dir='{args.run_dir.resolve()}/checkpoints'"]
        config = compose(args.recipe, [*run_dir, *args.overrides], cpu=cpu, trainer=args.trainer)
        check(config)
        if args.print_config:
            print(OmegaConf.to_yaml(config))
            return 0
        check_verl(v1=config.trainer.use_v1)
        args.run_dir.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, args.run_dir / "config.yaml", resolve=True)
        # verl's "file" logger; the Ray processes of a local cluster inherit it
        os.environ["VERL_FILE_LOGGER_PATH"] = str(fresh_metrics(args.run_dir.resolve()))
        teacher = shake_hands(config)  # before Ray starts: what is wrong with the teacher is said in seconds
        teacher.teachers.close()
        keep_teachers(config.trainer, teacher.models)
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
