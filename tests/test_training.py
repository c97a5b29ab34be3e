"""The whole product at its smallest: real Ray, real verl, a real teacher process, two steps on the digits recipe.

One run takes most of a minute, nearly all of it Ray and verl starting; so each run serves several claims.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import CHILD_ENV, ServerProcess, wait_until
from digits_run import Recorder, command, slow_reward, steps_of, train, with_columns
from transformers import AutoModelForCausalLM, AutoTokenizer

import opd.evaluate


@pytest.fixture(scope="module")
def teachers(prepared, tmp_path_factory):
    """Three servers: the trained teacher, the same one without a memory of other runs' rows, and the student itself."""
    folder = tmp_path_factory.mktemp("teachers")
    arguments = {
        "teacher": [prepared["teacher"]],
        "forgetful": [prepared["teacher"], "--cache-mb", "0"],
        "student": [prepared["student"]],
    }
    servers = {name: ServerProcess(folder / f"{name}.log", "--model", *given) for name, given in arguments.items()}
    yield {name: server.wait_ready() for name, server in servers.items()}
    for server in servers.values():
        server.end()


@pytest.fixture(scope="module")
def distilled(prepared, teachers, tmp_path_factory) -> tuple[list[dict], Path]:
    folder = tmp_path_factory.mktemp("run")
    overrides = [f"teacher.address={teachers['teacher']}", "teacher.overlap=true", slow_reward(folder)]
    return train(prepared, folder / "kl1", *overrides), folder / "kl1"


def test_a_run_logs_the_teachers_metrics_at_each_step(distilled):
    steps, _ = distilled
    assert len(steps) == 2
    for data in steps:
        assert data["actor/opd/reverse_kl_k1"] > 0.05  # the teacher knows something else
        assert data["actor/opd/teacher_logprob"] < 0
        assert data["actor/opd/scored_tokens_per_s"] > 0
        assert data["actor/opd/retries"] == 0
        assert data["actor/opd/neutral_rows"] == 0
        assert data["actor/opd/cached_rows"] == 32  # all were scored before the trainer asked
        assert data["actor/opd/teacher_seconds_spent"] > 0


def test_a_run_saves_the_student_as_a_hugging_face_folder_with_other_weights(distilled, prepared):
    folder = distilled[1] / "checkpoints" / "global_step_2" / "actor" / "huggingface"
    before, after = weights(prepared["student"]), weights(folder)
    assert before.keys() == after.keys()
    assert all(not before[name].equal(after[name]) for name in before)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(AutoTokenizer.from_pretrained(prepared["student"]))


@pytest.fixture(scope="module")
def baseline(prepared, teachers, tmp_path_factory) -> list[dict]:
    run_dir = tmp_path_factory.mktemp("run") / "kl0"
    address = f"teacher.address={teachers['forgetful']}"
    return train(prepared, run_dir, address, "actor_rollout_ref.actor.kl_loss_coef=0")


def test_the_coefficient_decides_whether_the_teacher_reaches_the_gradient(distilled, baseline):
    # the same start, seed and samples: the first step's KL is the same number, and reported at coefficient 0 too;
    # the baseline's rows were scored after the rollout, those of the other run while it went on
    assert baseline[0]["actor/opd/cached_rows"] == 0
    assert baseline[0]["actor/opd/reverse_kl_k1"] == pytest.approx(distilled[0][0]["actor/opd/reverse_kl_k1"], rel=1e-4)
    assert baseline[0]["actor/grad_norm"] != pytest.approx(distilled[0][0]["actor/grad_norm"], rel=1e-2)


def test_a_teacher_that_is_the_student_gives_no_kl_and_leaves_the_gradient_of_grpo(
    prepared, teachers, baseline, tmp_path
):
    address = f"teacher.address={teachers['student']}"
    own = train(prepared, tmp_path / "own", address, "trainer.total_training_steps=1")
    assert abs(own[0]["actor/opd/reverse_kl_k1"]) < 1e-4
    assert own[0]["actor/opd/reverse_kl_k3"] < 1e-4
    assert own[0]["actor/kl_loss"] < 1e-4
    # another teacher, another gradient: with this one it is the baseline's
    assert own[0]["actor/grad_norm"] == pytest.approx(baseline[0]["actor/grad_norm"], rel=1e-4, abs=1e-5)


def test_a_teacher_with_a_prompt_of_its_own_sees_that_and_the_students_responses(prepared, tmp_path):
    """Each one as soon as it is finished. And trains by its top-k: reverse KL."""
    hinted = {
        split: with_columns(prepared[split], tmp_path / f"{split}.parquet", lambda i, row: {"hint": hint(row)})
        for split in ("train", "val")
    }
    server = Recorder(prepared["teacher"], tmp_path / "teacher.log")
    try:
        overrides = [f"teacher.address={server.wait_ready()}"]
        overrides += [
            "teacher.prompt_column=hint",
            "teacher.system_prompt='99'",
            "teacher.loss=reverse_kl_topk",
            "teacher.topk=8",
            "teacher.overlap=true",
        ]
        overrides += [f"trainer.rollout_data_dir={tmp_path / 'rollouts'}", "trainer.val_before_train=False"]
        overrides.append(slow_reward(tmp_path))
        done = train(prepared | hinted, tmp_path / "run", *overrides)
        asked = server.asked()
        evaluated = evaluate(tmp_path / "run", prepared["student"])
        asked_at_last = server.asked()
    finally:
        server.end()
    assert len(done) == 2
    for data in done:
        assert data["actor/opd/reverse_kl_k1"] > 0.05
        assert data["actor/opd/cached_rows"] == 32  # all were scored before the trainer asked
        assert data["actor/opd/topk_loss"] > 0.05
        assert 0.4 < data["actor/opd/teacher_mass"] <= 1.0001  # 8 of 14 tokens
        assert data["actor/grad_norm"] > 0
    tokenizer = AutoTokenizer.from_pretrained(prepared["teacher"])
    seen = [
        (
            tokenizer.decode(row["ids"][: row["start"]]),
            tokenizer.decode(row["ids"][row["start"] :], skip_special_tokens=True),
        )
        for row in asked
    ]
    rollouts = [
        json.loads(line)
        for step in (1, 2)
        for line in (tmp_path / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    ]
    # a student's prompt is the question and a mark
    expected = [(f"99{row['input'][:-1]}{row['gts']}=", row["output"]) for row in rollouts]
    assert len(expected) == 64 and set(seen) == set(expected)
    # the KL at the end of a run is towards the same distribution
    assert evaluated["kl"] > 0.05 and evaluated["kl_prompts"] == 16
    prompts = {tokenizer.decode(row["ids"][: row["start"]]) for row in asked_at_last}
    assert len(prompts) == 16 and all(p[:2] == "99" and p[8:-1] == p[7:1:-1] for p in prompts)
    assert len(asked) == len({tuple(row["ids"]) for row in asked})  # two equal responses are one question


def weights(folder: str | Path) -> dict:
    # verl's config.json says bfloat16 of weights that are float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict()


def evaluate(run_dir: Path, student: str | Path) -> dict:
    """As run_opd.sh does at the end, on fewer prompts."""
    out = run_dir / "evaluation.json"
    arguments = ["--config", str(run_dir / "config.yaml"), "--models", str(student), "--limit", "16", "--out", str(out)]
    assert opd.evaluate.main(arguments) == 0
    return json.loads(out.read_text())[0]


def hint(row: dict) -> list[dict]:
    """The question, and the right answer behind it."""
    return [*row["prompt"], {"role": "user", "content": row["reward_model"]["ground_truth"]}]


def test_a_teacher_that_dies_in_mid_run_is_waited_for_and_the_run_goes_on(prepared, tmp_path):
    """Killed after the first step, restarted on the same port: every step has real values, and no zeros.

    It is also the run of the policy gradient, without the task's reward, at a coefficient that halves; and of a LoRA
    student, whose checkpoint is a model that can be loaded.
    """
    port = free_port()
    teacher = [sys.executable, "-m", "opd.teacher_server", "--model", prepared["teacher"]]
    teacher += ["--bind", f"tcp://127.0.0.1:{port}"]
    run_dir = tmp_path / "run"
    first = subprocess.Popen(teacher, env=CHILD_ENV, stderr=subprocess.DEVNULL)
    overrides = ["teacher.loss=policy_gradient", "algorithm.adv_estimator=opd"]
    overrides += ["teacher.coef_schedule=linear", "teacher.coef_end=0.5", "trainer.total_training_steps=4"]
    overrides += ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True"]
    trainer = subprocess.Popen(
        command(prepared, run_dir, f"teacher.address=tcp://127.0.0.1:{port}", *overrides),
        env=CHILD_ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        metrics = run_dir / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and "training/global_step" in metrics.read_text(), 300, "the first step")
        first.send_signal(signal.SIGKILL)
        first.wait(10)
        time.sleep(2)
        second = subprocess.Popen(teacher, env=CHILD_ENV, stderr=subprocess.DEVNULL)
        try:
            assert trainer.wait(300) == 0
            checkpoint = run_dir / "checkpoints" / "global_step_4" / "actor" / "huggingface"
            evaluated = evaluate(run_dir, checkpoint)
        finally:
            second.terminate()
            second.wait(20)
        done = steps_of(run_dir)
        assert len(done) == 4
        assert all(data["actor/opd/teacher_logprob"] < -0.01 for data in done)
        assert [data["actor/opd/coef"] for data in done] == pytest.approx([1, 5 / 6, 4 / 6, 0.5])
        for data in done:
            assert data["actor/opd/task_advantage_abs"] == 0
            assert data["actor/opd/teacher_advantage_abs"] > 0.05
            assert data["critic/advantages/max"] == 0  # verl's metric is of the task's
            assert data["actor/grad_norm"] > 0
            assert "actor/kl_loss" not in data
        assert evaluated["kl"] > 0.05
        base, trained = weights(prepared["student"]), weights(checkpoint)
        assert trained.keys() == base.keys()
        changed = {name for name in base if not trained[name].equal(base[name])}
        assert changed == {name for name in base if "_proj." in name}  # the layers that have adapters, and no others
        for name in changed:
            sizes = torch.linalg.svdvals(trained[name] - base[name])
            assert sizes[0] > 1e-4 and sizes[8] < 1e-3 * sizes[0]  # by a matrix of rank 8
    finally:
        for process in (first, trainer):
            process.kill()
            process.wait(10)


def test_a_teacher_that_stays_away_ends_the_run_with_one_sentence(prepared, tmp_path):
    overrides = [f"teacher.address=tcp://127.0.0.1:{free_port()}", "teacher.ready_timeout_s=2"]
    done = subprocess.run(
        command(prepared, tmp_path / "run", *overrides),
        env=CHILD_ENV,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "2.0 s" in errors[0]
    assert "Traceback" not in done.stderr


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
