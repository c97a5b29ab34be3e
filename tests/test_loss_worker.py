"""Every loss through verl's real actor worker and engine, in this process: one update of a tiny student, without Ray.

Shapes: B = 4 rows, P = 3 prompt columns, R = 4 response columns, K = 3.
"""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT

import opd.cpu  # noqa: F401  before verl
from opd.align import topk_to_padded
from opd.errors import TeacherError
from opd.loss.settings import LOSS, LOSSES, TOPK_IDS, TOPK_LOGPROBS, LossSettings
from opd.worker import METRICS_KEY

VOCAB, K = 11, 3
PROMPTS = [[5, 6, 7], [6, 7], [5, 6, 7], [9]]
RESPONSES = [[1, 2, 3, 4], [4, 4], [8, 9, 10], [2, 2, 2, 2]]
ROWS = list(zip(PROMPTS, RESPONSES, strict=True))
HOLES = {(0, 2)}  # a tool token
P, R = 3, 4


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> str:
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("student")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokens = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(tokens, unk_token="t2")), pad_token="t0", eos_token="t1"
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def make_worker(student):
    """verl's worker as a rank of one, with weights from the same folder each time."""
    from opd.cpu.worker import CpuWorker
    from opd.main_opd import compose

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = {name: os.environ.get(name) for name in rank}
    os.environ.update(rank)

    def make(*overrides: str) -> CpuWorker:
        config = compose(
            ROOT / "recipe" / "digits",
            [
                f"actor_rollout_ref.model.path={student}",
                "actor_rollout_ref.actor.optim.lr=0.01",
                "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
                "actor_rollout_ref.actor.optim.total_training_steps=10",
                *overrides,
            ],
            cpu=True,
        )
        worker = CpuWorker(config.actor_rollout_ref, role="actor")
        worker.init_model()
        return worker

    yield make
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def teacher_of(student: str, *, seed: int = 1) -> transformers.LlamaForCausalLM:
    """Another model of the same shape; seed 0 is the student itself."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(student)
    return transformers.LlamaForCausalLM(config).eval()


def log_probs_of(model) -> list[torch.Tensor]:
    """Of every token of the vocabulary at each response position, [n, V]; computed row by row, without padding."""
    with torch.no_grad():
        return [
            model(torch.tensor([p + r])).logits[0, len(p) - 1 : -1].log_softmax(-1)
            for p, r in zip(PROMPTS, RESPONSES, strict=True)
        ]


def padded(rows: list, fill: float = 0.0) -> torch.Tensor:
    return torch.tensor([list(row) + [fill] * (R - len(row)) for row in rows])


def sampled(log_probs: list[torch.Tensor]) -> list[list[float]]:
    return [x.gather(1, torch.tensor(r)[:, None])[:, 0].tolist() for x, r in zip(log_probs, RESPONSES, strict=True)]


def make_batch(student: str, settings: LossSettings, *, seed: int = 1, advantage: float = 0.0):
    """What V0's trainer hands to `update_actor`, with a teacher's values computed here."""
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    own, teachers = log_probs_of(teacher_of(student, seed=0)), log_probs_of(teacher_of(student, seed=seed))
    prompts = torch.tensor([[0] * (P - len(p)) + p for p in PROMPTS])
    responses = padded(RESPONSES, 0)
    attention = torch.tensor([[0] * (P - len(p)) + [1] * (len(p) + len(r)) + [0] * (R - len(r)) for p, r in ROWS])
    mask = torch.tensor([[int(t < len(r) and (b, t) not in HOLES) for t in range(R)] for b, r in enumerate(RESPONSES)])
    columns = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp_min(0),
        "response_mask": mask,
        "old_log_probs": padded(sampled(own)),
        "ref_log_prob": padded(sampled(teachers)),
        "advantages": torch.full((len(PROMPTS), R), advantage),
        LOSS: torch.from_numpy(settings.to_column(len(PROMPTS))),
    }
    if settings.topk:
        top = [x.topk(settings.topk, dim=-1) for x in teachers]
        ids, logprobs = topk_to_padded(
            [t.indices.numpy() for t in top],
            [t.values.numpy() for t in top],
            [len(r) for r in RESPONSES],
            width=R,
            topk=settings.topk,
        )
        columns |= {TOPK_IDS: torch.from_numpy(ids), TOPK_LOGPROBS: torch.from_numpy(logprobs)}
    batch = DataProto.from_single_dict(columns, meta_info={METRICS_KEY: {"opd/neutral_rows": 0.0}, "temperature": 1.0})
    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=len(PROMPTS),
        mini_batch_size=len(PROMPTS),
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    return data


def update(worker, data) -> dict:
    from verl.utils import tensordict_utils as tu

    metrics = tu.get(worker.update_actor(data), "metrics")
    return {name: float(np.mean(value)) for name, value in metrics.items()}


def settings_of(name: str, **changes) -> LossSettings:
    return LossSettings(name, coef=0.5, topk=K if name.endswith("topk") else 0, **changes)


def expected_loss(student: str, name: str) -> float:
    """Of the top-k losses with a tail, over the tokens that count; in float64 and without padding."""
    own, teachers = log_probs_of(teacher_of(student, seed=0)), log_probs_of(teacher_of(student))
    values = []
    for b, (q_all, p_all) in enumerate(zip(own, teachers, strict=True)):
        for t in range(len(q_all)):
            if (b, t) in HOLES:
                continue
            top = p_all[t].double().topk(K)
            p, q = top.values.exp(), q_all[t].double().exp()[top.indices]
            p, q = (torch.cat([x, 1 - x.sum(0, keepdim=True)]) for x in (p, q))
            m = (p + q) / 2
            forward, reverse = (p * (p / q).log()).sum(), (q * (q / p).log()).sum()
            jsd = ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2
            values.append({"forward_kl_topk": forward, "reverse_kl_topk": reverse, "jsd_topk": jsd}[name])
    return float(torch.stack(values).mean())


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", ["forward_kl_topk", "reverse_kl_topk", "jsd_topk"])
def test_a_top_k_loss_has_its_value_on_the_right_tokens(make_worker, student, name, micro_batch):
    """Computed here without verl, padding, or micro-batches: a shift by one would give another number."""
    worker = make_worker(
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro_batch}",
    )
    got = update(worker, make_batch(student, settings_of(name)))
    expected = expected_loss(student, name)
    assert got["opd/topk_loss"] == pytest.approx(expected, rel=1e-4)
    assert got["loss"] == pytest.approx(0.5 * expected, rel=1e-4)  # no advantage: nothing else
    assert got["opd/coef"] == 0.5
    assert "kl_loss" not in got  # use_kl_loss is on, and would count the teacher twice
    assert 0 < got["opd/student_mass"] < 1 and 0 <= got["opd/topk_overlap"] <= 1
    assert got["grad_norm"] > 0


def test_jagged_columns_as_v1_has_them_give_the_same_loss(make_worker, student):
    data = make_batch(student, settings_of("jsd_topk"))
    for name in (TOPK_IDS, TOPK_LOGPROBS):
        rows = [row[: len(r)].flatten() for row, r in zip(data[name], RESPONSES, strict=True)]
        data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    got = update(make_worker(), data)
    assert got["opd/topk_loss"] == pytest.approx(expected_loss(student, "jsd_topk"), rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_ten_updates_bring_the_student_closer_to_its_teacher(make_worker, student, name):
    """On the same responses each time, so the sampled losses are only asked for what they promise on them."""
    worker = make_worker()
    data = make_batch(student, settings_of(name))
    first = update(worker, data.clone())
    for _ in range(8):
        update(worker, data.clone())
    last = update(worker, data.clone())
    assert first["grad_norm"] > 0
    if name == "sampled":
        assert last["kl_loss"] < 0.5 * first["kl_loss"]
        assert first["kl_coef"] == 0.5  # of the step, not of the configuration
    elif name == "policy_gradient":
        assert last["actor/pg_loss"] < first["actor/pg_loss"] - 1e-3
        assert first["opd/task_advantage_abs"] == 0 and first["opd/teacher_advantage_abs"] > 0
    else:
        assert last["opd/topk_loss"] < 0.5 * first["opd/topk_loss"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_teacher_that_is_the_student_gives_no_gradient(make_worker, student, name):
    got = update(make_worker(), make_batch(student, settings_of(name), seed=0))
    assert got["grad_norm"] < 1e-4
    assert got["loss"] == pytest.approx(0.0, abs=1e-5)


def test_rows_without_a_top_k_have_no_loss_and_are_in_no_mean(make_worker, student):
    data = make_batch(student, settings_of("jsd_topk"))
    whole = update(make_worker(), data.clone())
    data[TOPK_IDS][1], data[TOPK_LOGPROBS][1] = -1, float("nan")
    got = update(make_worker(), data.clone())
    assert got["opd/topk_loss"] < whole["opd/topk_loss"]  # over the same number of tokens: verl's
    assert got["opd/student_mass"] != pytest.approx(whole["opd/student_mass"], rel=1e-4)
    data[TOPK_IDS][:], data[TOPK_LOGPROBS][:] = -1, float("nan")
    none = update(make_worker(), data)
    assert none["opd/topk_loss"] == 0 and none["grad_norm"] == 0 and "opd/student_mass" not in none


def test_a_batch_without_the_teachers_columns_is_refused(make_worker, student):
    worker = make_worker()
    data = make_batch(student, settings_of("jsd_topk"))
    data.pop(TOPK_IDS)
    with pytest.raises(TeacherError, match=r"teacher.loss=jsd_topk, but the batch has no opd_topk_ids"):
        worker.update_actor(data.clone())
    data.pop(LOSS)
    with pytest.raises(TeacherError, match="the batch has no opd_loss"):
        worker.update_actor(data)
