"""`bash run_opd.sh` as a user runs it: a copied recipe from start to end, the ways it refuses, and Ctrl-C."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, wait_until

KNOBS = (
    "KL_COEF",
    "KL_TYPE",
    "RECIPE",
    "STUDENT",
    "TEACHER",
    "TEACHER_ADDR",
    "STEPS",
    "SEED",
    "RUN_DIR",
    "TEACHER_ARGS",
    "TEACHER_REPLICAS",
    "TRAINER",
)
SMALL = ["data.train_batch_size=8", "data.val_max_samples=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def environment(**knobs: object) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in KNOBS}
    return clean | {"TEACHER_PORT": free_port(), "OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in knobs.items()}


def has_text(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def run(*args: str, timeout_s: float = 60, **knobs: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "run_opd.sh", *args],
        cwd=ROOT,
        env=environment(**knobs),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def copied_recipe(tmp_path_factory):
    """What the README says: copy the folder, edit the marked lines, pass its path."""
    folder = tmp_path_factory.mktemp("user") / f"copied-{os.getpid()}"
    shutil.copytree(ROOT / "recipe" / "digits", folder, ignore=shutil.ignore_patterns("__pycache__"))
    prepare = folder / "prepare.py"
    text, edits = re.subn(r'("--(?:teacher|student)-steps", type=int, default=)\d+', r"\g<1>20", prepare.read_text())
    assert edits == 2
    prepare.write_text(text)
    yield folder
    shutil.rmtree(ROOT / "runs" / "prepared" / folder.name, ignore_errors=True)


def test_a_copied_recipe_runs_from_start_to_end(copied_recipe, tmp_path):
    done = run(
        *SMALL, timeout_s=600, RECIPE=copied_recipe, STEPS=2, RUN_DIR=tmp_path / "run", KL_COEF=0.5, KL_TYPE="k2"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1])
    keys = "recipe kl_coef kl_type steps accuracy_before accuracy_after teacher_accuracy kl_before kl_after seconds"
    assert set(result) == {*keys.split(), "checkpoint", "run_dir"}
    assert (result["recipe"], result["kl_coef"], result["kl_type"], result["steps"]) == (
        copied_recipe.name,
        0.5,
        "k2",
        2,
    )
    assert 0 <= result["accuracy_before"] <= 1 and result["kl_before"] > 0
    assert (Path(result["checkpoint"]) / "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    assert any("accuracy" in line for line in lines[:-1])
    assert re.search(r"^ +2 ", done.stderr, re.M), "one progress line for each step"
    again = run(RECIPE=copied_recipe, RUN_DIR=tmp_path / "run")
    assert again.returncode == 1 and "holds a finished run" in again.stderr


def test_ctrl_c_ends_everything_within_seconds_and_the_run_can_go_on(copied_recipe, tmp_path):
    run_dir = tmp_path / "run"
    overrides = [*SMALL, "trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=False"]
    script = subprocess.Popen(
        ["bash", "run_opd.sh", *overrides],
        cwd=ROOT,
        env=environment(RECIPE=copied_recipe, STEPS=1000, RUN_DIR=run_dir),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics = run_dir / "metrics.jsonl"
    try:
        wait_until(lambda: has_text(metrics) or script.poll() is not None, 400, "the first step")
        assert script.poll() is None
        started = psutil.Process(script.pid).children(recursive=True)
        assert len(started) > 5  # teacher, worker, trainer and Ray's processes
        os.killpg(script.pid, signal.SIGINT)  # what a terminal does
        assert script.wait(15) == 130
        _, left = psutil.wait_procs(started, timeout=10)
        assert not left, [p.cmdline() for p in left if p.is_running()]
    finally:
        if script.poll() is None:
            script.terminate()
            script.wait(30)
    done_steps = int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    again = run(*overrides, timeout_s=600, RECIPE=copied_recipe, STEPS=done_steps + 2, RUN_DIR=run_dir)
    assert again.returncode == 0, again.stderr[-3000:]
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [done_steps + 1, done_steps + 2]
    assert has_text(run_dir / "metrics.1.jsonl")


def test_a_teacher_that_dies_in_mid_run_ends_the_run_and_leaves_nothing(copied_recipe, tmp_path):
    script = subprocess.Popen(
        ["bash", "run_opd.sh", *SMALL],
        cwd=ROOT,
        env=environment(RECIPE=copied_recipe, STEPS=1000, RUN_DIR=tmp_path / "run"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(
            lambda: (metrics.exists() and metrics.stat().st_size) or script.poll() is not None, 400, "the training"
        )
        started = psutil.Process(script.pid).children(recursive=True)
        next(p for p in started if "opd.teacher_server" in p.cmdline()).kill()
        _, stderr = script.communicate(timeout=60)
        assert script.returncode == 1
        assert "the teacher died" in stderr
        _, left = psutil.wait_procs(started, timeout=10)
        assert not left, [p.cmdline() for p in left if p.is_running()]
    finally:
        if script.poll() is None:
            script.terminate()
            script.wait(30)


def test_a_dry_run_prints_the_configuration_and_the_commands(copied_recipe, tmp_path):
    knobs = {"KL_COEF": 0.25, "TRAINER": "sync", "TEACHER_REPLICAS": 2, "TEACHER_PORT": 15601}
    done = run("--dry-run", "data.train_batch_size=24", RECIPE=copied_recipe, RUN_DIR=tmp_path / "run", **knobs)
    assert done.returncode == 0, done.stderr
    assert "kl_loss_coef: 0.25" in done.stdout
    assert "train_batch_size: 24" in done.stdout
    assert "use_v1: true" in done.stdout
    assert "address: tcp://127.0.0.1:15601,tcp://127.0.0.1:15602" in done.stdout
    assert "-m opd.teacher_pool --replicas 2 --base-port 15601" in done.stdout
    assert "-m opd.main_opd --recipe" in done.stdout
    assert not (tmp_path / "run").exists()


def test_no_teacher_is_started_beside_those_that_the_configuration_names(copied_recipe, tmp_path):
    named = ["+teacher.teachers.a=tcp://127.0.0.1:1", "+teacher.routes.digits_reverse=a"]
    for knobs, started in ({}, False), ({"TEACHER": "somewhere"}, True):
        done = run("--dry-run", *named, RECIPE=copied_recipe, RUN_DIR=tmp_path / "run", **knobs)
        assert done.returncode == 0, done.stderr
        assert "a: tcp://127.0.0.1:1" in done.stdout
        assert ("opd.teacher_server" in done.stdout) is started


def test_a_word_that_is_no_setting_starts_nothing(tmp_path):
    done = run("teacher.timeout_s=60", "--dryrun", RUN_DIR=tmp_path / "run")
    assert done.returncode == 1 and "--dryrun is unknown" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "knobs, says",
    [
        ({"RECIPE": "no_such"}, "no_such has no prepare.py"),
        ({"TRAINER": "v9"}, "v9 is unknown"),
        ({"TEACHER_PORT": "http"}, "http is no port"),
        ({"TEACHER_PORT": "65535", "TEACHER_REPLICAS": "2"}, "65536"),
        ({"KL_TYPE": "k1"}, "k3+"),
        ({"KL_TYPE": "k7"}, "kl_loss_type=k7 is unknown"),
        ({"KL_COEF": "-1"}, "kl_loss_coef=-1"),
        ({"TEACHER": "/no/such/model"}, "/no/such/model"),
        ({"STUDENT": "/no/such/model"}, "STUDENT"),
    ],
)
def test_what_cannot_work_ends_it_within_a_minute_with_one_sentence(copied_recipe, tmp_path, knobs, says):
    done = run(timeout_s=90, **({"RECIPE": copied_recipe, "RUN_DIR": tmp_path / "run"} | knobs))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("run_opd.sh: ") and says in last, done.stderr


def test_a_typo_in_the_settings_does_not_wait_for_the_preparation(copied_recipe, tmp_path):
    unprepared = tmp_path / f"unprepared-{os.getpid()}"
    shutil.copytree(copied_recipe, unprepared)
    done = run("teacher.timeout=60", timeout_s=90, RECIPE=unprepared, RUN_DIR=tmp_path / "run")
    prepared = ROOT / "runs" / "prepared" / unprepared.name
    try:
        assert done.returncode == 1
        assert "the settings are refused" in done.stderr and "'timeout'" in done.stderr.splitlines()[-1]
        assert not (prepared / "prepared.json").exists()
    finally:
        shutil.rmtree(prepared, ignore_errors=True)


def test_a_taken_port_is_named_and_its_owner_is_left_alone(copied_recipe, tmp_path):
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        done = run(timeout_s=90, RECIPE=copied_recipe, RUN_DIR=tmp_path / "run", TEACHER_PORT=port)
        assert done.returncode == 1
        assert str(port) in done.stderr.splitlines()[-1]
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            pass
