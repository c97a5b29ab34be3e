"""verl's V1 trainers for real: Ray, TransferQueue, verl, a teacher process, two steps on the digits recipe.

One run takes most of a minute, nearly all of it Ray and verl starting; so each run serves several claims.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import CHILD_ENV, ROOT, ServerProcess

DIGITS = ROOT / "recipe" / "digits"
PROMPTS, RESPONSES = 6, 4  # in a step: 24 rows
MINI_BATCH = 8  # prompts: verl fills the 24 rows up to 32


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict:
    """A student and a teacher that were barely trained: enough to differ."""
    out = tmp_path_factory.mktemp("digits") / "prepared"
    command = [sys.executable, str(DIGITS / "prepare.py"), "--out", str(out)]
    subprocess.run([*command, "--teacher-steps", "20", "--student-steps", "5"], check=True, env=CHILD_ENV, timeout=300)
    return json.loads((out / "prepared.json").read_text())


@pytest.fixture(scope="module")
def teacher(prepared, tmp_path_factory):
    log = tmp_path_factory.mktemp("teacher") / "teacher.log"
    # without a cache: each row is asked about as often as it comes
    server = ServerProcess(log, "--backend", "recording_scorer", "--model", prepared["teacher"], "--cache-mb", "0")
    yield server.wait_ready()
    server.end()


class Run:
    """Two steps of a trainer, to the end."""

    def __init__(self, trainer: str, prepared: dict, address: str, run_dir: Path, *overrides: str):
        asked = Path(prepared["teacher"]) / "asked.jsonl"
        asked.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "opd.main_opd", "--recipe", str(DIGITS), "--device", "cpu", "--trainer", trainer),
            *("--run-dir", str(run_dir)),
            f"data.train_files={prepared['train']}",
            f"data.val_files={prepared['val']}",
            f"data.train_batch_size={PROMPTS}",
            "data.val_max_samples=8",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
            f"actor_rollout_ref.rollout.n={RESPONSES}",
            f"actor_rollout_ref.model.path={prepared['student']}",
            f"reward.custom_reward_function.path={DIGITS / 'reward.py'}",
            f"teacher.address={address}",
            "trainer.total_training_steps=2",
            "trainer.val_before_train=False",
            *overrides,
        ]
        done = subprocess.run(command, env=CHILD_ENV, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        records = [json.loads(line)["data"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        self.steps = [data for data in records if "training/global_step" in data]
        self.asked = [json.loads(line) for line in asked.read_text().splitlines()]
        self.run_dir = run_dir


@pytest.fixture(scope="module")
def sync(prepared, teacher, tmp_path_factory) -> Run:
    return Run("sync", prepared, teacher, tmp_path_factory.mktemp("run") / "sync")


def direct(model_folder: str, rows: list[dict]) -> np.ndarray:
    """Log-probs of all response tokens under a model, by transformers alone, one row at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder).float().eval()
    values = []
    with torch.inference_mode():
        for row in rows:
            ids = torch.tensor(row["ids"])
            logprobs = model(ids[None]).logits[0, row["start"] - 1 : -1].log_softmax(-1)
            values.append(logprobs.gather(-1, ids[row["start"] :, None]).squeeze(-1))
    return torch.cat(values).double().numpy()


def test_sync_logs_the_teachers_metrics_at_each_step_and_fills_are_not_scored(sync):
    assert [data["training/global_step"] for data in sync.steps] == [1, 2]
    assert len(sync.asked) == 2 * PROMPTS * RESPONSES  # and not 2 * 32
    for data in sync.steps:
        assert data["actor/opd/reverse_kl_k1"] > 0.05
        assert data["actor/opd/teacher_logprob"] < 0
        assert data["actor/opd/scored_tokens_per_s"] > 0
        assert data["actor/opd/neutral_rows"] == 0
        assert data["actor/kl_loss"] > 0


def test_the_loss_of_sync_sees_the_values_of_a_direct_score(sync, prepared):
    """At the first step the student is the one that was prepared: both sides can be computed again from the ids."""
    rows, first = sync.asked[: PROMPTS * RESPONSES], sync.steps[0]
    teacher, student = direct(prepared["teacher"], rows), direct(prepared["student"], rows)
    assert first["actor/opd/teacher_logprob"] == pytest.approx(teacher.mean(), abs=1e-4)
    assert first["actor/opd/student_logprob"] == pytest.approx(student.mean(), abs=1e-4)
    x = teacher - student
    k3 = np.expm1(x) - x
    assert k3.max() < 10  # verl clamps there
    # verl's number, from the ref_log_prob that it took out of TransferQueue; values shifted by one give another
    assert first["actor/kl_loss"] == pytest.approx(k3.mean(), rel=1e-3)


def test_colocate_async_trains_on_the_teachers_top_k(prepared, teacher, tmp_path):
    """On a CPU nothing is interrupted when training starts: the rollout goes on, and what it sends is used later."""
    overrides = ("teacher.loss=jsd_topk", "teacher.topk=8")
    run = Run("colocate_async", prepared, teacher, tmp_path / "colocate_async", *overrides)
    assert len(run.asked) == 2 * PROMPTS * RESPONSES
    assert len(run.steps) == 2
    for data in run.steps:
        assert data["actor/opd/reverse_kl_k1"] > 0.05
        assert 0 < data["actor/opd/topk_loss"] < 0.7  # ln 2 at most
        assert 0.4 < data["actor/opd/teacher_mass"] <= 1.0001  # 8 of 19 tokens
        assert 0 < data["actor/opd/student_mass"] <= 1.0001
        assert 0 < data["actor/opd/topk_overlap"] <= 1
        assert data["actor/grad_norm"] > 0
        assert "actor/kl_loss" not in data


def test_sync_leaves_what_run_opd_sh_goes_on_with(sync):
    checkpoints = sync.run_dir / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (checkpoints / "global_step_2" / "actor" / "huggingface" / "model.safetensors").is_file()
