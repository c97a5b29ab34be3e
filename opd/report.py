"""The end of a run: a small table and, last, one JSON object. Called by run_opd.sh; writes RUN_DIR/result.json."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from opd.loss.settings import SAMPLED


def result(args: argparse.Namespace) -> dict[str, Any]:
    """Join the evaluation with what the run was; null where something was not measured."""
    before, after = json.loads((args.run_dir / "evaluation.json").read_text())
    config = OmegaConf.load(args.run_dir / "config.yaml")
    actor, loss = config.actor_rollout_ref.actor, config.teacher.loss
    return {
        "recipe": args.recipe,
        "kl_coef": actor.kl_loss_coef,
        "kl_type": actor.kl_loss_type if loss == SAMPLED else loss,  # other losses have no estimator
        "steps": args.steps,
        "accuracy_before": round(before["accuracy"], 4),
        "accuracy_after": round(after["accuracy"], 4),
        "teacher_accuracy": args.teacher_accuracy and round(args.teacher_accuracy, 4),
        "kl_before": before["kl"] and round(before["kl"], 4),
        "kl_after": after["kl"] and round(after["kl"], 4),
        "seconds": args.seconds,
        "checkpoint": str(args.checkpoint),
        "run_dir": str(args.run_dir),
    }


def table(r: dict[str, Any]) -> str:
    def cell(value: float | None) -> str:
        return f"{'-' if value is None else format(value, '.4f'):>9}"

    return "\n".join(
        [
            f"{'':<34}{'before':>9}{'after':>9}{'teacher':>9}",
            "accuracy (greedy, held-out)       "
            + cell(r["accuracy_before"])
            + cell(r["accuracy_after"])
            + cell(r["teacher_accuracy"]),
            "KL(student || teacher), nats/token" + cell(r["kl_before"]) + cell(r["kl_after"]),
            f"{r['steps']} steps, kl_coef {r['kl_coef']} ({r['kl_type']}), {r['seconds']:.0f} s",
        ]
    )


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m opd.report", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--teacher-accuracy", type=json.loads, required=True, help="a number, or null")
    parser.add_argument("--seconds", type=float, required=True)
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args(sys.argv[1:])
    r = result(args)
    (args.run_dir / "result.json").write_text(json.dumps(r) + "\n")
    print(table(r))
    print(json.dumps(r))
    return 0


if __name__ == "__main__":
    sys.exit(main())
