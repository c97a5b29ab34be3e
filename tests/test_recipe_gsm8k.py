"""The gsm8k recipe: which number its reward takes for the answer, and what its prepare.py writes and refuses."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipe" / "gsm8k"
SAMPLE = ROOT / "tests" / "data" / "gsm8k_sample.jsonl"


def load(name: str) -> ModuleType:
    """A file of the recipe as a module, the way verl loads a reward: by path."""
    spec = importlib.util.spec_from_file_location(f"gsm8k_{name}", RECIPE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reward = load("reward")
prepare = load("prepare")


def score(text: str, truth: str) -> float:
    return reward.compute_score("gsm8k", text, truth)["score"]


RIGHT = [
    # the form that the prompt asks for
    ("6 * 3 = 18\n#### 18", "18"),
    ("#### 18.", "18"),
    ("#### $18", "18"),
    ("####18", "18"),
    ("#### **18**", "18"),
    ("####\n18", "18"),
    ("#### 18.00", "18"),
    ("#### 1,234", "1234"),
    ("#### $1,234,567.50", "1234567.5"),
    ("#### 18 eggs", "18"),
    ("#### 25%", "25"),
    ("#### -18", "-18"),
    ("#### −18", "-18"),
    ("#### -$18", "-18"),
    ("#### $-18", "-18"),
    ("#### .5", "0.5"),
    ("#### 0.50", ".5"),
    ("#### 1/2", "0.5"),
    ("#### 1 1/2", "1.5"),
    ("#### 1½", "1.5"),
    ("#### 36/2", "18"),
    ("#### 3 * 6 = 18", "18"),
    ("#### 3 x 6 = $18", "18"),
    ("#### 3 apples * 6 = 18 apples", "18"),
    ("#### x = 18", "18"),
    ("#### The final answer is 18.", "18"),
    ("#### 1.5 million", "1500000"),
    ("#### 5 million", "5"),
    ("#### \\$18", "18"),
    ("#### \\boxed{18}", "18"),
    ("#### 18\u00a0000", "18000"),
    ("#### 18\u202f000", "18000"),
    # boxed
    (r"so \boxed{18}", "18"),
    (r"$$\boxed{18}$$", "18"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{18\%}", "18"),
    (r"\boxed{18.0}", "18"),
    (r"\boxed{\text{18}}", "18"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    (r"\boxed{\textbf{18}}", "18"),
    (r"\boxed{1,\!234}", "1234"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1\,234}", "1234"),
    (r"\boxed{\frac{36}{2}}", "18"),
    (r"\boxed{\dfrac{1}{2}}", "0.5"),
    (r"\boxed{-\frac{1}{2}}", "-0.5"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{\frac12}", "0.5"),
    (r"\boxed{x = 18}", "18"),
    (r"\boxed{3 \times 6 = 18}", "18"),
    (r"\boxed {18}", "18"),
    # announced in words
    ("The answer is 18.", "18"),
    ("The answer is **18**.", "18"),
    ("The answer is $18 for the 3 of them.", "18"),
    ("**Answer:** 18", "18"),
    ("Answer = 18 apples", "18"),
    ("Final Answer\n\n\\(18\\)", "18"),
    ("### Final Answer:\n$18 per day, for 5 days", "18"),
    ("the answer to the question is about 18", "18"),
    ("The answer is that Janet makes $18. That took 2 days.", "18"),
    ("The answer is obtained by multiplying 3 by 6, giving 18.", "18"),
    ("The answer is 18 because the cost = 2", "18"),
    # no marker: the last number
    ("She makes 9 * 2 = $18 every day.", "18"),
    ("It is `18`", "18"),
    ("She has 18USD", "18"),
    ("between 10-18", "18"),
    ("It cost €18", "18"),
    ("١٨", "18"),
    # what comes after the answer does not matter
    ("#### 18\n" + "I checked 3 times that this is right. " * 40, "18"),
    (r"\boxed{18}" + " In 2 other ways, the same." * 40, "18"),
    ("The answer is 18. " + "We used 9 and 2. " * 60, "18"),
    # the later marker wins, a heading is none, thinking does not count
    (r"\boxed{17} no, wait" + "\n#### 18", "18"),
    ("#### 17 no, wait " + r"\boxed{18}", "18"),
    ("#### 17\nno, wait\n#### 18", "18"),
    ("#### 1. Add them\n9 + 9 = 18\n#### 2. Check\nIt is right.\nThe answer is 18.", "18"),
    ("#### Step 1: 3 + 3\n#### Step 2: 9 + 9\nThe answer is: 18", "18"),
    ("The answer is 18.\n####", "18"),
    (r"\boxed{18} and then \boxed{", "18"),
    ("<think>The answer is 17. #### 17</think>It is 18", "18"),
]

WRONG = [
    ("#### 17", "18"),
    ("#### 180", "18"),
    ("#### 18.5", "18"),
    ("#### -18", "18"),
    ("#### 18", "-18"),
    ("#### 1,8", "18"),
    ("#### 1/3", "0.33"),
    ("#### 5/0", "5"),
    ("#### 18 no, wait\n#### 17", "18"),
    (r"18 \boxed{17}", "18"),
    ("The answer is 17, not 18", "18"),
    ("18 is the number of eggs, she keeps 3", "18"),
    ("<think>#### 18</think>I do not know.", "18"),
    ("#### 18.18.18", "18"),
    ("#### A18", "18"),
    ("eighteen", "18"),
    ("", "18"),
    ("####", "18"),
    (r"\boxed{}", "18"),
    ("#### 1e9", "1000000000"),
    ("0." + "3" * 40, "0"),
    ("9" * 5000, "9"),
]


@pytest.mark.parametrize(("text", "truth"), RIGHT)
def test_a_right_answer_is_right_in_any_dress(text, truth):
    assert score(text, truth) == 1.0


@pytest.mark.parametrize(("text", "truth"), WRONG)
def test_a_wrong_answer_is_wrong_in_any_dress(text, truth):
    assert score(text, truth) == 0.0


@pytest.mark.parametrize("text", ["#### 18.", "#### $18", r"\boxed{18}", "#### 18" + " " * 301])
def test_verls_own_score_misjudges_these_and_is_reported_beside_ours(text):
    assert reward.compute_score("gsm8k", text, "18") == {"score": 1.0, "acc": 1.0, "strict": 0.0}


def test_both_scores_agree_on_the_form_that_the_prompt_asks_for():
    assert reward.compute_score("gsm8k", "#### 18", "18") == {"score": 1.0, "acc": 1.0, "strict": 1.0}


def test_every_response_gets_the_same_keys():
    assert len({tuple(reward.compute_score("gsm8k", text, truth)) for text, truth in RIGHT + WRONG}) == 1


def test_verls_extra_arguments_are_accepted():
    given = dict(data_source="gsm8k", solution_str="#### 18", ground_truth="18", extra_info={"num_turns": 2})
    assert reward.compute_score(**given, reward_router_address=None)["score"] == 1.0


@pytest.mark.parametrize("truth", ["1,234", "$1,234", "1234.0", "1234.", "1234%"])
def test_a_dressed_ground_truth_is_the_same_number(truth):
    assert score("#### 1234", truth) == 1.0


@pytest.mark.parametrize("truth", ["", "many", "3 apples", "18 or 19"])
def test_a_ground_truth_that_is_no_number_is_the_datas_fault_and_raises(truth):
    with pytest.raises(ValueError, match="not a number"):
        score("#### 18", truth)


HOSTILE = {
    "digits": "1",
    "numbers": "1 ",
    "commas": "1,234",
    "fractions": "1/",
    "dots": ".",
    "dashes": "-",
    "spaces": " ",
    "lines": "\n",
    "backslashes": "\\",
    "braces": "{",
    "markers": "####",
    "markers with numbers": "#### 1 x 2 apples * ",
    "open boxes": "\\boxed{",
    "open fractions": "\\frac{1",
    "answers": "answer is ",
    "answers without end": "answer" + "a " * 40,
    "an equation of words": "x = ",
    "letters": "x",
    "dollars": "$ ",
    "thoughts": "<think>",
}


@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("prefix", ["", "#### 3 ", "the answer is ", "\\boxed{"])
def test_time_is_linear_in_hostile_text(prefix, unit):
    """200 000 characters take a fraction of a second; quadratic time would take hours."""
    started_s = time.process_time()
    reward.compute_score("gsm8k", prefix + unit * (200_000 // len(unit)), "18")
    assert time.process_time() - started_s < 3.0


def test_a_megabyte_around_the_answer_changes_nothing():
    noise = "We add 3 and 4 {again} and \\again. " * 30_000
    assert score(f"{noise}#### 18\n{noise}", "18") == 1.0


def test_no_text_makes_the_reward_raise():
    pieces = [*"$-.,/=1{}% \nx٣½\0\ud800", "####", "\\boxed{", "\\frac", "answer is", "23", "456", "million"]
    pieces += ["<think>", "</think>", "**", "\\text{"]
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randrange(25)))
        assert set(reward.compute_score("gsm8k", text, "18")) == {"score", "acc", "strict"}


# ---- prepare.py ----


def run(out: Path, *options: str, train: Path = SAMPLE, val: Path = SAMPLE) -> dict:
    prepare.main(["--out", str(out), "--train-file", str(train), "--val-file", str(val), *options])
    return json.loads((out / "prepared.json").read_text())


@pytest.fixture
def halves(tmp_path) -> dict[str, Path]:
    """The sample as 16 training and 8 validation lines."""
    lines = SAMPLE.read_text().splitlines(keepends=True)
    assert len(lines) == 24
    files = {"train": tmp_path / "train.jsonl", "val": tmp_path / "val.jsonl"}
    files["train"].write_text("".join(lines[:16]))
    files["val"].write_text("".join(lines[16:]))
    return files


def test_rows_have_the_columns_that_verl_reads(tmp_path, halves):
    prepared = run(tmp_path / "out", **halves)
    rows = pq.read_table(prepared["train"]).to_pylist()
    assert len(rows) == prepared["train_rows"] == 16
    assert rows[1]["data_source"] == "gsm8k"
    assert rows[1]["reward_model"] == {"style": "rule", "ground_truth": "2100"}
    assert rows[1]["extra_info"] == {"index": 1, "split": "train"}
    assert rows[1]["prompt"][0]["role"] == "user"
    assert rows[1]["prompt"][0]["content"].startswith("A pump moves 35 litres")
    assert "####" in rows[1]["prompt"][0]["content"]


def test_every_reference_solution_is_judged_right(tmp_path, halves):
    prepared = run(tmp_path / "out", **halves)
    solutions = [json.loads(line)["answer"] for line in SAMPLE.read_text().splitlines()]
    rows = pq.read_table(prepared["train"]).to_pylist() + pq.read_table(prepared["val"]).to_pylist()
    for solution, row in zip(solutions, rows, strict=True):
        assert score(solution, row["reward_model"]["ground_truth"]) == 1.0


def test_prepared_json_names_what_the_run_needs(tmp_path, halves):
    prepared = run(tmp_path / "out", "--seed", "3", "--student", "a/student", **halves)
    assert prepared["recipe"] == "gsm8k"
    assert prepared["seed"] == 3
    assert prepared["student"] == "a/student"
    assert prepared["teacher"] == prepare.TEACHER
    assert prepared["teacher_accuracy"] is None


def test_the_same_inputs_are_prepared_once(tmp_path, halves, capsys):
    out = tmp_path / "out"
    run(out, **halves)
    made_ns = (out / "train.parquet").stat().st_mtime_ns
    run(out, **halves)
    assert "up to date" in capsys.readouterr().err
    assert (out / "train.parquet").stat().st_mtime_ns == made_ns


def test_a_changed_file_or_option_is_prepared_again(tmp_path, halves):
    out = tmp_path / "out"
    assert run(out, **halves)["train_rows"] == 16
    halves["train"].write_text("".join(halves["train"].read_text().splitlines(keepends=True)[:10]))
    assert run(out, **halves)["train_rows"] == 10
    assert run(out, "--train-rows", "4", **halves)["train_rows"] == 4
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_a_question_of_the_validation_set_is_left_out_of_training(tmp_path, halves, capsys):
    assert run(tmp_path / "out", train=SAMPLE, val=halves["val"])["train_rows"] == 16
    assert "8 training questions are also in the validation set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": "#### 1"', r"train\.jsonl:17: not JSON"),
        ('{"question": "q"}', r"train\.jsonl:17: it needs the text fields 'question' and 'answer'"),
        ("[1, 2]", r"train\.jsonl:17: it needs the text fields"),
        ('{"question": "q", "answer": 18}', r"train\.jsonl:17: it needs the text fields"),
        ('{"question": " ", "answer": "#### 1"}', r"train\.jsonl:17: it needs the text fields"),
        ('{"question": "q", "answer": "it is 18"}', r"train\.jsonl:17: the answer has no '####'"),
        ('{"question": "q", "answer": "#### many"}', r"train\.jsonl:17: 'many' after '####' is not a number"),
    ],
)
def test_a_bad_line_is_named_and_leaves_nothing_behind(tmp_path, halves, line, message):
    with halves["train"].open("a") as file:
        file.write(line + "\n")
    with pytest.raises(SystemExit, match=message):
        run(tmp_path / "out", **halves)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.jsonl", "val.jsonl"]


def test_a_missing_or_empty_file_is_named(tmp_path, halves):
    with pytest.raises(SystemExit, match=r"cannot read .*absent\.jsonl: .*No such file"):
        run(tmp_path / "out", train=tmp_path / "absent.jsonl", val=halves["val"])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SystemExit, match=r"empty\.jsonl has no rows"):
        run(tmp_path / "out", train=tmp_path / "empty.jsonl", val=halves["val"])


def test_one_file_alone_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare.main(["--out", str(tmp_path / "out"), "--train-file", str(SAMPLE)])
    assert "go together" in capsys.readouterr().err


def test_an_unreachable_hub_says_what_to_do(tmp_path, monkeypatch):
    import datasets

    def no_network(*args):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(SystemExit, match=r"cannot read openai/gsm8k .*no route.*--train-file"):
        prepare.main(["--out", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_elses_is_not_replaced(tmp_path, halves):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="did not make"):
        run(out, **halves)
    assert (out / "thesis.txt").read_text() == "mine"


def test_the_plan_is_printed_and_nothing_is_made(tmp_path, capsys):
    prepare.main(["--out", str(tmp_path / "out"), "--plan"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["train"] == str(tmp_path / "out" / "train.parquet")
    assert plan["student"] == prepare.STUDENT
    assert not list(tmp_path.iterdir())


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
            if OmegaConf.is_dict(value) and key != "apply_chat_template_kwargs":
                check(value, theirs[key], f"{path}{key}.")

    check({key: own[key] for key in own if key not in ("hydra", "defaults")}, verls, "")


def test_the_recipe_imports_no_other_recipe_and_runs_as_a_script(tmp_path, halves):
    command = [sys.executable, str(RECIPE / "prepare.py"), "--out", str(tmp_path / "out")]
    command += ["--train-file", str(halves["train"]), "--val-file", str(halves["val"])]
    subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
    assert (tmp_path / "out" / "prepared.json").is_file()
    for file in RECIPE.glob("*.py"):
        assert "import recipe" not in file.read_text() and "from recipe" not in file.read_text()
