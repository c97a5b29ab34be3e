"""The digits recipe: its tokenizer under verl, held-out strings, seeds, cache, and what a broken-off run leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipe" / "digits"
TINY = ["--teacher-steps", "3", "--student-steps", "2", "--train-prompts", "64", "--val-prompts", "32"]


def load(name: str) -> ModuleType:
    """A file of the recipe as a module, the way verl loads a reward: by path."""
    spec = importlib.util.spec_from_file_location(f"digits_{name}", RECIPE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reward = load("reward")
prepare = load("prepare")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("digits") / "made"
    prepare.main(["--out", str(out), *TINY])
    return json.loads((out / "prepared.json").read_text())


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return AutoTokenizer.from_pretrained(prepared["student"], local_files_only=True)


def test_prepared_json_names_what_the_run_needs(prepared):
    assert prepared["recipe"] == "digits"
    assert prepared["seed"] == 0
    for key in ("student", "teacher", "train", "val"):
        assert Path(prepared[key]).is_absolute() and Path(prepared[key]).exists()
    for key in ("teacher_accuracy", "student_accuracy"):
        assert 0.0 <= prepared[key] <= 1.0


def test_a_prompt_is_its_characters_and_the_mark_and_nothing_else(tokenizer):
    messages = [{"role": "user", "content": "482913"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["4", "8", "2", "9", "1", "3", "="]


def test_verl_builds_the_same_prompt_ids(tokenizer):
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    builder = create_continuous_token_builder(tokenizer, hf_model_type="llama", chat_template_kwargs={})
    ids = builder.build_initial_tokens([{"role": "user", "content": "482913"}])
    assert ids == prepare.rows_of(torch.tensor([482913]))[0, :7].tolist()


def test_verls_dataset_reads_the_rows(prepared, tokenizer):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    config = OmegaConf.load(RECIPE / "config.yaml").data
    dataset = RLHFDataset(prepared["val"], tokenizer, config)
    assert len(dataset) == 32
    row = dataset[0]
    assert row["reward_model"]["ground_truth"] == row["raw_prompt"][0]["content"][::-1]
    assert row["extra_info"] == {"index": 0, "split": "val"}


def test_training_rows_are_what_the_tokenizer_makes_of_prompt_and_answer(tokenizer):
    messages = [{"role": "user", "content": "000123"}, {"role": "assistant", "content": "321000"}]
    ids = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    ids += [*tokenizer.encode("321000"), tokenizer.eos_token_id]
    assert prepare.rows_of(torch.tensor([123]))[0].tolist() == ids


def test_decoding_gives_the_bare_answer_that_the_reward_compares(tokenizer):
    row = prepare.rows_of(torch.tensor([482913]))[0]
    assert tokenizer.decode(row[7:], skip_special_tokens=True) == "319284"


def test_pad_and_end_differ_and_the_models_know_both(prepared, tokenizer):
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for name in ("teacher", "student"):
        model = AutoModelForCausalLM.from_pretrained(prepared[name], local_files_only=True)
        assert model.dtype == torch.float32
        assert model.config.vocab_size == len(tokenizer)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_held_out_strings_are_never_trained_on(prepared, tmp_path, monkeypatch):
    """Neither as prompts of the on-policy steps nor by the supervised training of either model."""
    drawn: list[torch.Tensor] = []
    rows_of = prepare.rows_of
    monkeypatch.setattr(prepare, "rows_of", lambda numbers: drawn.append(numbers) or rows_of(numbers))
    monkeypatch.setattr(prepare, "greedy_accuracy", lambda model, numbers: 0.0)
    prepare.main(["--out", str(tmp_path / "made"), *TINY])
    questions = {
        split: {row["prompt"][0]["content"] for row in pq.read_table(prepared[split]).to_pylist()}
        for split in ("train", "val")
    }
    assert len(questions["train"]) == 64
    assert len(questions["val"]) == 32
    trained = {f"{number:06d}" for numbers in drawn for number in numbers.tolist()}
    assert len(trained) > 250
    assert not questions["val"] & (questions["train"] | trained)


def test_greedy_accuracy_counts_whole_responses():
    """A model that always says 0 is right on 000000 up to the end token, hence never."""

    class Zeros(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, len(prepare.VOCAB))
            logits[..., prepare.VOCAB.index("0")] = 1.0
            return type("Output", (), {"logits": logits})

    assert prepare.greedy_accuracy(Zeros(), torch.tensor([0, 123456])) == 0.0


def test_training_lowers_the_loss(capsys):
    model = prepare.build_model(prepare.STUDENT, seed=0)
    numbers = torch.arange(1000)
    prepare.train(model, numbers, name="x", steps=1, full_steps=100, seed=0)
    prepare.train(model, numbers, name="x", steps=60, full_steps=100, seed=0)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().err.splitlines()]
    assert losses[-1] < losses[0] - 0.5


def test_the_same_seed_makes_the_same_weights_and_another_seed_others(prepared, tmp_path):
    def first_weights(folder: str | Path) -> torch.Tensor:
        return AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj.weight

    prepare.main(["--out", str(tmp_path / "again"), *TINY])
    prepare.main(["--out", str(tmp_path / "other"), *TINY, "--seed", "1"])
    made, again, other = map(
        first_weights, (prepared["student"], tmp_path / "again/student", tmp_path / "other/student")
    )
    assert torch.allclose(made, again, atol=1e-5)
    assert not torch.allclose(made, other, atol=1e-3)


def test_the_same_inputs_are_prepared_once_and_others_again(tmp_path, capsys):
    out = tmp_path / "made"
    prepare.main(["--out", str(out), *TINY])
    made_ns = (out / "prepared.json").stat().st_mtime_ns
    prepare.main(["--out", str(out), *TINY])
    assert capsys.readouterr().err.splitlines()[-1].endswith("is up to date, nothing to do")
    assert (out / "prepared.json").stat().st_mtime_ns == made_ns
    prepare.main(["--out", str(out), *TINY, "--student-steps", "1"])
    assert json.loads((out / "prepared.json").read_text())["inputs"]["student_steps"] == 1
    (out / "val.parquet").unlink()
    prepare.main(["--out", str(out), *TINY, "--student-steps", "1"])
    assert (out / "val.parquet").is_file()
    assert os.listdir(tmp_path) == ["made"]


def test_the_plan_is_printed_and_nothing_is_made(tmp_path, capsys):
    prepare.main(["--out", str(tmp_path / "made"), "--plan"])
    assert json.loads(capsys.readouterr().out)["student"] == str(tmp_path / "made" / "student")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_broken_off_leaves_nothing_behind(tmp_path, number):
    command = [sys.executable, str(RECIPE / "prepare.py"), "--out", str(tmp_path / "made")]
    process = subprocess.Popen([*command, "--teacher-steps", "100000"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "teacher: step 50" in line:
                break
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(timeout=60) == 128 + number
    finally:
        process.kill()
    assert not os.listdir(tmp_path)


def test_a_folder_of_somebody_elses_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="did not make"):
        prepare.main(["--out", str(tmp_path), *TINY])
    assert os.listdir(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--teacher-steps", "0"], "--teacher-steps must be at least 1"),
        (["--teacher-steps", "5", "--student-steps", "6"], "exceeds --teacher-steps"),
        (["--train-prompts", "1000000"], "only 1000000 strings"),
    ],
)
def test_impossible_options_are_named(tmp_path, options, message, capsys):
    with pytest.raises(SystemExit):
        prepare.main(["--out", str(tmp_path / "made"), *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("response", "expected", "digits_right"),
    [
        ("319284", 1.0, 1.0),
        ("319285", 0.0, 5 / 6),
        ("31928", 0.0, 5 / 6),
        ("3192844", 0.0, 6 / 7),
        ("319284=", 0.0, 6 / 7),
        (" 319284", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_reward_is_one_for_exactly_the_answer(response, expected, digits_right):
    result = reward.compute_score("digits", response, "319284", extra_info={"index": 0}, reward_router_address=None)
    assert result == {"score": expected, "acc": expected, "digits_right": pytest.approx(digits_right)}


def test_every_key_of_the_config_is_one_of_verls():
    """Hydra takes a misspelt key of a recipe's own file silently; this does not."""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    own = OmegaConf.load(RECIPE / "config.yaml")
    with initialize_config_module("verl.trainer.config", version_base=None):
        verls = compose("ppo_trainer")

    def check(mine, theirs, path):
        for key, value in mine.items():
            assert key in theirs.keys(), f"{path}{key} is no key of verl"  # noqa: SIM118  `in` is false for a ??? value
            if OmegaConf.is_dict(value):
                check(value, theirs[key], f"{path}{key}.")

    check({key: own[key] for key in own if key not in ("hydra", "defaults")}, verls, "")


def test_the_training_prompts_last_for_the_configured_steps():
    from omegaconf import OmegaConf

    own = OmegaConf.load(RECIPE / "config.yaml")
    prompts = prepare.parse_args(["--out", "x"]).train_prompts
    assert own.trainer.total_training_steps * own.data.train_batch_size <= prompts * own.trainer.total_epochs


def test_a_cached_call_does_not_load_torch(prepared):
    """run_opd.sh asks every time: the answer takes a fraction of a second."""
    out = Path(prepared["train"]).parent
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "assert 'torch' not in sys.modules"
    started_s = time.monotonic()
    subprocess.run([sys.executable, "-c", code, str(RECIPE / "prepare.py"), "--out", str(out), *TINY], check=True)
    assert time.monotonic() - started_s < 10
