"""Whole training runs on the digits recipe, as tests start them: barely trained models, few rows, one process tree."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from conftest import CHILD_ENV, ROOT, ServerProcess

DIGITS = ROOT / "recipe" / "digits"


def prepare(folder: Path) -> dict:
    """A student and a teacher with just enough training to differ, and the data; what prepared.json says."""
    command = [sys.executable, str(DIGITS / "prepare.py"), "--out", str(folder)]
    subprocess.run([*command, "--teacher-steps", "40", "--student-steps", "10"], check=True, env=CHILD_ENV, timeout=300)
    return json.loads((folder / "prepared.json").read_text())


def with_columns(parquet: str, to: Path, change: Callable[[int, dict], dict]) -> str:
    """A copy of the data in which `change` has added to every row, or replaced, what it returns; its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(parquet).to_pylist()
    pq.write_table(pa.Table.from_pylist([row | change(index, row) for index, row in enumerate(rows)]), to)
    return str(to)


def slow_reward(folder: Path) -> str:
    """An override: the recipe's reward, but slow, so that the teacher has the rows before the trainer asks."""
    slow = """

_compute_score = compute_score


def compute_score(*args, **kwargs):
    import time

    time.sleep(0.25)
    return _compute_score(*args, **kwargs)
"""
    path = folder / "slow_reward.py"
    path.write_text((DIGITS / "reward.py").read_text() + slow)
    return f"reward.custom_reward_function.path={path}"


def command(prepared: dict, run_dir: Path, *overrides: str, trainer: str = "v0") -> list[str]:
    """Two steps of 8 prompts x 4 responses, unless overrides say otherwise; they have to name the teacher."""
    return [
        *(sys.executable, "-m", "opd.main_opd", "--recipe", str(DIGITS), "--device", "cpu", "--trainer", trainer),
        *("--run-dir", str(run_dir)),
        f"data.train_files={prepared['train']}",
        f"data.val_files={prepared['val']}",
        "data.train_batch_size=8",
        "data.val_max_samples=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        f"actor_rollout_ref.model.path={prepared['student']}",
        f"reward.custom_reward_function.path={DIGITS / 'reward.py'}",
        "trainer.total_training_steps=2",
        *overrides,
    ]


def steps_of(run_dir: Path) -> list[dict]:
    """The metrics of each training step so far."""
    records = [json.loads(line)["data"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [data for data in records if "training/global_step" in data]


def train(prepared: dict, run_dir: Path, *overrides: str, trainer: str = "v0") -> list[dict]:
    """Run to the end; the metrics of each training step."""
    done = subprocess.run(
        command(prepared, run_dir, *overrides, trainer=trainer),
        env=CHILD_ENV,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return steps_of(run_dir)


class Recorder(ServerProcess):
    """A teacher that writes down what it is asked (recording_scorer.py), in its model's folder."""

    def __init__(self, model: str | Path, log: Path, *args: str):
        self.file = Path(model) / "asked.jsonl"
        super().__init__(log, "--backend", "recording_scorer", "--model", str(model), *args)

    def wait_ready(self) -> str:
        address = super().wait_ready()
        self.asked()  # what a server asks itself at its start
        return address

    def asked(self) -> list[dict]:
        """What it was asked since the last call."""
        lines = self.file.read_text().splitlines()
        self.file.unlink()
        return [json.loads(line) for line in lines]
