"""The evaluation at a run's end: the KL to the teachers, and with the prompts, that the training has; real servers."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from test_config import composed
from test_teacher_prompt import QUESTION, make_tokenizer

from opd.evaluate import Evaluation, load_model, main, parse_args
from opd.scoring.oracle import oracle_logprobs
from opd.teachers import teachers_of

SOURCES = ["sums", "programs", "both", "poems"]  # no teacher has poems
WEIGHTS = {"sums": {1: 1.0}, "programs": {2: 1.0}, "both": {1: 0.75, 2: 0.25}}  # seeds of oracles
SEEN = [1, 9, 10, 2, 4, 5, 4, 3]  # system be brief user two plus two assistant


@pytest.fixture
def run(tmp_path, teacher_server) -> Path:
    """The folder of a run with two teachers and a system prompt for them: a student, held-out data, config.yaml."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "?"
    tokenizer.save_pretrained(tmp_path / "student")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=12, eos_token_id=11, pad_token_id=0, bos_token_id=None, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "student")
    rows = [{"prompt": QUESTION, "data_source": s, "reward_model": {"ground_truth": "four"}} for s in SOURCES]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "val.parquet")
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, **_):\n    return 0.5\n")
    math, code = (teacher_server(vocab=12, seed=seed).address for seed in (1, 2))
    config = composed(
        f"data.val_files={tmp_path}/val.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/student",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        *(f"+teacher.teachers.math={math}", f"+teacher.teachers.code={code}", "+teacher.routes.sums=math"),
        *("+teacher.routes.programs=code", "+teacher.routes.both={math: 0.75, code: 0.25}"),
        "teacher.system_prompt=be brief",
    )
    OmegaConf.save(config, tmp_path / "config.yaml", resolve=True)
    return tmp_path


def arguments(run: Path, *more: str) -> list[str]:
    return ["--config", f"{run}/config.yaml", "--models", f"{run}/student", "--out", f"{run}/out.json", *more]


def test_the_kl_is_to_the_teachers_of_each_prompt_which_see_their_own(run):
    assert main(arguments(run)) == 0
    [got] = json.loads((run / "out.json").read_text())
    assert (got["accuracy"], got["prompts"], got["kl_prompts"]) == (0.5, 4, 3)

    # the same samples once more, scored by hand
    args = parse_args(arguments(run))
    config = OmegaConf.load(run / "config.yaml")
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "student")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "student", padding_side="left")
    with teachers_of(config) as teachers:
        evaluation = Evaluation(args, config, teachers)
        evaluation._generate(model, tokenizer, evaluation.rows, do_sample=False)
        torch.manual_seed(0)
        rows = evaluation.taught_rows * args.samples
        sampled = evaluation._generate(model, tokenizer, rows, do_sample=True)
    differences = []
    for row, (prompt, response) in zip(rows, sampled, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        student = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()
        teacher = sum(
            weight * oracle_logprobs([*SEEN, *response], len(SEEN), seed=seed, vocab=12)
            for seed, weight in WEIGHTS[row["data_source"]].items()
        )
        differences.append(student - teacher)
    assert got["kl"] == pytest.approx(np.concatenate(differences).mean(), abs=1e-5)
    assert got["kl_tokens"] == sum(len(response) for _, response in sampled)


def test_held_out_data_without_the_teachers_column_leaves_the_kl_out_and_says_so(run, caplog):
    config = OmegaConf.load(run / "config.yaml")
    config.teacher.prompt_column = "solution"
    OmegaConf.save(config, run / "config.yaml")
    assert main(arguments(run)) == 0
    [got] = json.loads((run / "out.json").read_text())
    assert got["accuracy"] == 0.5 and got["kl"] is None and got["kl_prompts"] == 0
    assert "has no column 'solution'" in caplog.text


def test_a_folder_without_all_weights_is_refused_and_not_measured_with_random_ones(run, capsys):
    from safetensors.torch import load_file, save_file

    weights = load_file(run / "student" / "model.safetensors")
    renamed = {f"base_model.model.{name}": weight for name, weight in weights.items()}
    save_file(renamed, run / "student" / "model.safetensors", metadata={"format": "pt"})
    assert main(arguments(run)) == 1
    assert "lacks 12 of the model's weights, like lm_head.weight" in capsys.readouterr().err


def test_a_response_that_the_teacher_cannot_score_is_treated_as_in_training(run, teacher_server, capsys):
    """A teacher that does not know the student's EOS (id 11): with neutral, the KL is over the responses without it."""
    config = OmegaConf.load(run / "config.yaml")
    config.teacher.teachers, config.teacher.routes, config.teacher.system_prompt = {}, {}, None
    config.teacher.address = teacher_server(vocab=11).address
    OmegaConf.save(config, run / "config.yaml")
    assert main(arguments(run)) == 1
    assert "the teacher could not score" in capsys.readouterr().err
    config.teacher.on_row_error = "neutral"
    OmegaConf.save(config, run / "config.yaml")
    assert main(arguments(run)) == 0
    [got] = json.loads((run / "out.json").read_text())

    args = parse_args(arguments(run))
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "student")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "student", padding_side="left")
    with teachers_of(config) as teachers:
        evaluation = Evaluation(args, config, teachers)
        torch.manual_seed(0)
        sampled = evaluation._generate(model, tokenizer, evaluation.rows * args.samples, do_sample=True)
    known = [(prompt, response) for prompt, response in sampled if 11 not in response]
    assert 0 < len(known) < len(sampled) and got["kl_neutral"] == len(sampled) - len(known)
    differences = []
    for prompt, response in known:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        student = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()
        differences.append(student - oracle_logprobs([*prompt, *response], len(prompt), vocab=11))
    assert got["kl"] == pytest.approx(np.concatenate(differences).mean(), abs=1e-5)
    assert got["kl_tokens"] == sum(len(response) for _, response in known)
    assert got["mean_response_length"] == np.mean([len(response) for _, response in sampled])


@pytest.mark.parametrize("wish", [{"top_k": 1}, {"temperature": 0.01}, {"min_p": 0.999}, {"suppress_tokens": [4, 5]}])
def test_samples_are_of_the_models_own_distribution_whatever_its_folder_wishes(run, wish):
    """64 first tokens: each wish would leave one token only, or take two away."""
    settings = transformers.GenerationConfig(do_sample=True, eos_token_id=11, pad_token_id=0, **wish)
    settings.save_pretrained(run / "student")
    model = load_model(str(run / "student"), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "student", padding_side="left")
    config = OmegaConf.load(run / "config.yaml")
    with teachers_of(config) as teachers:
        evaluation = Evaluation(parse_args(arguments(run)), config, teachers)
        torch.manual_seed(0)
        sampled = evaluation._generate(model, tokenizer, evaluation.rows * 16, do_sample=True)
    seen = {token for _, response in sampled for token in response}
    assert seen == set(range(12))
    assert len({response[0] for _, response in sampled}) > 6
    assert all(response.index(11) == len(response) - 1 for _, response in sampled if 11 in response)


def test_a_template_that_the_training_gives_the_student_is_its_prompt_here_too(run, teacher_server, capsys):
    config = OmegaConf.load(run / "config.yaml")
    config.teacher.teachers, config.teacher.routes, config.teacher.system_prompt = {}, {}, None
    config.teacher.address = teacher_server(vocab=12).address
    kls = []
    for template in (None, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        OmegaConf.update(config, "actor_rollout_ref.model.custom_chat_template", template, force_add=True)
        OmegaConf.save(config, run / "config.yaml")
        assert main(arguments(run)) == 0
        kls.append(json.loads((run / "out.json").read_text())[0]["kl"])
    assert kls[0] != kls[1]
