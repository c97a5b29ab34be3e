"""verl's V1 trainers for real: Ray, TransferQueue, verl, teacher processes, two steps on the digits recipe.

One run takes most of a minute, nearly all of it Ray and verl starting; so each run serves several claims.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from digits_run import Recorder, train, with_columns

PROMPTS, RESPONSES = 6, 4  # in a step: 24 rows
ROWS = PROMPTS * RESPONSES
MINI_BATCH = 8  # prompts: verl fills the 24 rows up to 32
SMALL = (
    f"data.train_batch_size={PROMPTS}",
    "data.val_max_samples=8",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
    f"actor_rollout_ref.rollout.n={RESPONSES}",
    "trainer.val_before_train=False",
)
WEIGHTS = {"math": 0.75, "code": 0.25}  # of the two teachers, for prompts that have both


@pytest.fixture(scope="module")
def other(prepared, tmp_path_factory) -> Path:
    """Another teacher: the first one, half as sure of everything."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(prepared["teacher"])
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(prepared["teacher"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def start(prepared, other, tmp_path_factory):
    """Start both teachers, as often as it is called."""
    folder = tmp_path_factory.mktemp("teachers")
    started: list[Recorder] = []

    def start(*args: str) -> dict[str, Recorder]:
        models = {"math": prepared["teacher"], "code": other}
        new = {name: Recorder(model, folder / f"{name}{len(started)}.log", *args) for name, model in models.items()}
        started.extend(new.values())
        for recorder in new.values():
            recorder.wait_ready()
        return new

    yield start
    for recorder in started:
        recorder.end()


@pytest.fixture(scope="module")
def teachers(start) -> dict[str, Recorder]:
    """Without a cache: each row is asked about as often as it comes."""
    return start("--cache-mb", "0")


@pytest.fixture(scope="module")
def routed(prepared, tmp_path_factory) -> dict:
    """The data with three kinds of prompts."""
    path = tmp_path_factory.mktemp("routed") / "train.parquet"
    kinds = ("sums", "programs", "both")
    return prepared | {"train": with_columns(prepared["train"], path, lambda i, _: {"data_source": kinds[i % 3]})}


def routes(addresses: dict[str, str], both: str) -> list[str]:
    return [
        *(f"+teacher.teachers.{name}={address}" for name, address in addresses.items()),
        *("+teacher.routes.sums=math", "+teacher.routes.programs=code", f"+teacher.routes.both={both}"),
    ]


class Sync:
    """Two steps with two teachers, one of them or both for each prompt."""

    def __init__(self, routed: dict, teachers: dict[str, Recorder], run_dir: Path):
        both = str(WEIGHTS).replace("'", "")
        addresses = {name: recorder.address for name, recorder in teachers.items()}
        self.steps = train(routed, run_dir, *SMALL, *routes(addresses, both), trainer="sync")
        self.asked = {name: recorder.asked() for name, recorder in teachers.items()}
        self.run_dir = run_dir


@pytest.fixture(scope="module")
def sync(routed, teachers, tmp_path_factory) -> Sync:
    return Sync(routed, teachers, tmp_path_factory.mktemp("run") / "sync")


def logprobs_of(model_folder: str | Path, rows: list[dict]) -> list[torch.Tensor]:
    """Of the whole vocabulary at each row's response positions, by transformers alone, one row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder).float().eval()
    with torch.inference_mode():
        return [model(torch.tensor(row["ids"])[None]).logits[0, row["start"] - 1 : -1].log_softmax(-1) for row in rows]


def direct(model_folder: str | Path, rows: list[dict]) -> list[np.ndarray]:
    """Log-probs of each row's response tokens under a model."""
    return [
        logprobs.gather(-1, torch.tensor(row["ids"])[row["start"] :, None]).squeeze(-1).double().numpy()
        for row, logprobs in zip(rows, logprobs_of(model_folder, rows), strict=True)
    ]


def test_sync_logs_each_teachers_metrics_at_each_step_and_fills_are_not_scored(sync):
    assert [data["training/global_step"] for data in sync.steps] == [1, 2]
    for data in sync.steps:
        assert data["actor/opd/reverse_kl_k1"] > 0.05
        assert data["actor/opd/teacher_logprob"] < 0
        assert data["actor/opd/scored_tokens_per_s"] > 0
        assert data["actor/opd/neutral_rows"] == 0
        assert data["actor/kl_loss"] > 0
        rows = {name: data[f"actor/opd/{name}/rows"] for name in WEIGHTS}
        assert all(0 < count < ROWS for count in rows.values()) and ROWS < sum(rows.values()) < 2 * ROWS
        assert data["actor/opd/math/reverse_kl_k1"] > data["actor/opd/code/reverse_kl_k1"] + 0.2  # far surer
    for name, asked in sync.asked.items():
        assert len(asked) == sum(data[f"actor/opd/{name}/rows"] for data in sync.steps)


def test_the_loss_of_sync_sees_the_values_of_a_direct_score(sync, prepared, other):
    """At the first step the student is the one that was prepared: both sides can be computed again from the ids."""
    first = sync.steps[0]
    asked = {name: sync.asked[name][: int(first[f"actor/opd/{name}/rows"])] for name in WEIGHTS}
    prompts = {name: {tuple(row["ids"][: row["start"]]) for row in rows} for name, rows in asked.items()}
    both = prompts["math"] & prompts["code"]
    assert both and prompts["math"] - both and prompts["code"] - both  # all three routes were taken

    def kept(name: str, *, shared: bool) -> list[dict]:
        return [row for row in asked[name] if (tuple(row["ids"][: row["start"]]) in both) == shared]

    math, code, mixed = kept("math", shared=False), kept("code", shared=False), kept("math", shared=True)
    assert len(math) + len(code) + len(mixed) == ROWS
    averaged = [
        WEIGHTS["math"] * a + WEIGHTS["code"] * b
        for a, b in zip(direct(prepared["teacher"], mixed), direct(other, mixed), strict=True)
    ]
    teacher = np.concatenate([*direct(prepared["teacher"], math), *direct(other, code), *averaged])
    student = np.concatenate(direct(prepared["student"], [*math, *code, *mixed]))
    assert first["actor/opd/teacher_logprob"] == pytest.approx(teacher.mean(), abs=1e-4)
    assert first["actor/opd/student_logprob"] == pytest.approx(student.mean(), abs=1e-4)
    x = teacher - student
    k3 = np.expm1(x) - x
    assert k3.max() < 10  # verl clamps there
    # verl's number, from the ref_log_prob that it took out of TransferQueue; values shifted by one give another
    assert first["actor/kl_loss"] == pytest.approx(k3.mean(), rel=1e-3)


def test_an_interrupted_run_goes_on_at_the_next_step_with_the_same_teachers(sync, routed, start):
    """The same models, at other addresses. Its last two steps score rows while others are generated, and train on the
    top-k as verl's own distillation does, without the bucket for what is left.
    """
    teachers = start()
    addresses = {name: recorder.address for name, recorder in teachers.items()}
    checkpoints = sync.run_dir / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (checkpoints / "global_step_2" / "actor" / "huggingface" / "model.safetensors").is_file()
    recorded = (checkpoints / "teacher.json").read_bytes()
    assert set(json.loads(recorded)) == set(WEIGHTS)
    overrides = [*SMALL, "trainer.total_training_steps=4"]
    overrides += ["teacher.loss=forward_kl_topk", "teacher.topk=8", "teacher.tail=false", "teacher.overlap=true"]
    steps = train(routed, sync.run_dir, *overrides, *routes(addresses, "math"), trainer="sync")
    assert [data["training/global_step"] for data in steps] == [3, 4]
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (checkpoints / "teacher.json").read_bytes() == recorded
    for data in steps:
        assert data["actor/opd/math/rows"] + data["actor/opd/code/rows"] == ROWS
        assert data["actor/opd/cached_rows"] == ROWS  # all were scored before the trainer asked
        assert data["actor/opd/reverse_kl_k1"] > 0.05
        assert data["actor/opd/topk_loss"] > 0.05
        assert data["actor/grad_norm"] > 0
        assert "actor/kl_loss" not in data
    asked = {name: recorder.asked() for name, recorder in teachers.items()}
    prompts = {name: {tuple(row["ids"][: row["start"]]) for row in rows} for name, rows in asked.items()}
    before = {tuple(row["ids"][: row["start"]]) for rows in sync.asked.values() for row in rows}
    assert not (prompts["math"] | prompts["code"]) & before  # the data goes on, too


def test_colocate_async_trains_on_the_students_own_top_k(prepared, teachers, tmp_path):
    """On a CPU nothing is interrupted when training starts: the rollout goes on, and what it sends is used later."""
    overrides = ("teacher.loss=jsd_topk", "teacher.topk_from=student", "teacher.topk=8")
    address = f"teacher.address={teachers['math'].address}"
    steps = train(prepared, tmp_path / "colocate_async", *SMALL, *overrides, address, trainer="colocate_async")
    asked = teachers["math"].asked()
    assert len(asked) == 2 * ROWS  # and not 2 * 32
    first = asked[:ROWS]  # at the first step the student is the one that was prepared
    for row, logprobs in zip(first, logprobs_of(prepared["student"], first), strict=True):
        assert row["candidates"] == logprobs.topk(8).indices.tolist()
    assert len(steps) == 2
    for data in steps:
        assert data["actor/opd/reverse_kl_k1"] > 0.05
        assert 0 < data["actor/opd/topk_loss"] < 0.7  # ln 2 at most
        assert 0.2 < data["actor/opd/teacher_mass"] <= 1.0001  # 8 of 19 tokens
        assert 0.4 < data["actor/opd/student_mass"] <= 1.0001
        assert data["actor/opd/topk_overlap"] == 1  # one update a step: the ids are those of its own weights
        assert data["actor/grad_norm"] > 0
        assert "actor/kl_loss" not in data
