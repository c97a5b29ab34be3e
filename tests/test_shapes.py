"""The shape in which a batch is trained changes nothing: micro-batches, packing, tool tokens, adapters, temperature.

verl's real actor worker and engine in this process, as in test_loss_worker.py, with a learning rate of 0, so that one
worker can be asked again. Values come from the oracle (opd/scoring/oracle.py) or from a model behind a real server.

Shapes: B = 8 ragged rows, P = 4 prompt columns, R = 6 response columns, K = 3.
"""

from __future__ import annotations

import numpy as np
import pytest
import test_loss_worker
import torch
from test_config import composed
from test_loss_worker import VOCAB, K, settings_of, teacher_of, update

from opd.align import to_padded, to_rows, topk_to_padded
from opd.client import TeacherClient
from opd.config import TeacherConfig
from opd.loss.settings import LOSS, TOPK_IDS, TOPK_LOGPROBS
from opd.reference import TeacherReference
from opd.scoring.oracle import oracle_logprobs, oracle_topk
from opd.worker import METRICS_KEY

student, make_worker = test_loss_worker.student, test_loss_worker.make_worker  # fixtures

PROMPTS = [[5, 6, 7], [6, 7], [5, 6, 7, 8], [9], [2, 3], [8, 8, 8], [4], [3, 4, 5, 6]]
RESPONSES = [[1, 2, 3, 4, 5, 6], [4, 4], [8, 9, 10], [2] * 5, [7], [3, 9, 9, 9, 2], [5, 10, 6, 10], [2, 1]]
# tool tokens: within a row, twice in one row, first, and last in it
HOLES = [(0, 2), (0, 3), (3, 1), (3, 3), (5, 1), (5, 2), (5, 3), (6, 0), (7, 1)]
B, P, R = 8, 4, 6
LOSSES = ("sampled", "jsd_topk")
NO_STEP = "actor_rollout_ref.actor.optim.lr=0"
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")


def columns_of(responses: list[list[int]] = RESPONSES) -> dict[str, torch.Tensor]:
    """verl's padded batch, without any log-probs."""
    ids, attention = torch.zeros(B, P + R, dtype=torch.long), torch.zeros(B, P + R, dtype=torch.long)
    mask = torch.zeros(B, R, dtype=torch.long)
    for b, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
        begin, end = P - len(prompt), P + len(response)
        ids[b, begin:end], attention[b, begin:end] = torch.tensor(prompt + response), 1
        mask[b, : len(response)] = 1
    for b, t in HOLES:
        mask[b, t] = 0
    return {
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp_min(0),
        "response_mask": mask,
    }


def full_batch(student: str, name: str) -> dict[str, torch.Tensor]:
    """With the student's own log-probs, the oracle's, and the columns of a loss."""
    columns = columns_of()
    rows, starts, lengths = to_rows(columns["input_ids"], columns["attention_mask"], prompt_width=P)
    model, old = teacher_of(student, seed=0), torch.full((B, R), -1.0)
    with torch.no_grad():
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):  # one by one, so without padding
            ids = torch.from_numpy(row.astype(np.int64))
            log_probs = model(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
            old[b, : lengths[b]] = log_probs.gather(1, ids[start:, None])[:, 0]
    values = [oracle_logprobs(row, start, vocab=VOCAB) for row, start in zip(rows, starts, strict=True)]
    settings = settings_of(name)
    columns |= {
        "old_log_probs": old,
        "ref_log_prob": torch.from_numpy(to_padded(values, lengths, fill_BR=old)),
        "advantages": torch.linspace(-1, 1, B)[:, None].expand(B, R).clone(),
        LOSS: torch.from_numpy(settings.to_column(B)),
    }
    if settings.topk:
        top = [oracle_topk(row, start, K, vocab=VOCAB) for row, start in zip(rows, starts, strict=True)]
        ids, logprobs = topk_to_padded([t[0] for t in top], [t[1] for t in top], lengths, width=R, topk=K)
        columns |= {TOPK_IDS: torch.from_numpy(ids), TOPK_LOGPROBS: torch.from_numpy(logprobs)}
    return columns


def to_data(columns: dict[str, torch.Tensor]):
    """What V0's trainer hands to `update_actor`."""
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    batch = DataProto.from_single_dict(columns, meta_info={METRICS_KEY: {}, "temperature": 1.0})
    data = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=B,
        mini_batch_size=B,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    return data


def measure(worker, student: str) -> dict[str, dict[str, float]]:
    return {name: update(worker, to_data(full_batch(student, name))) for name in LOSSES}


def micro_batches(size: int) -> list[str]:
    return [
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={size}",
    ]


@pytest.fixture(scope="module")
def whole(make_worker, student):
    """All rows in one micro-batch, padded: what the other shapes are compared with."""
    worker = make_worker(NO_STEP, *micro_batches(B))
    return worker, measure(worker, student)


PACKED = "actor_rollout_ref.model.use_remove_padding=true"
SHAPES = {  # settings, and how often the model is called for an update
    "one row each": (micro_batches(1), 8),
    "up to 16 tokens each": (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16"], 4),  # use_dynamic_bsz is on
    "packed, all rows": ([PACKED, *micro_batches(B)], 1),
    "packed, up to 16 tokens each": ([PACKED, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16"], 4),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_neither_micro_batches_nor_packing_change_loss_or_gradient(whole, make_worker, student, shape):
    """Packing works without flash attention: transformers finds the rows by their position_ids."""
    overrides, num_calls = SHAPES[shape]
    worker = make_worker(NO_STEP, *overrides)
    inputs = []
    worker.actor.engine.module.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    got = measure(worker, student)
    assert len(inputs) == num_calls * len(LOSSES)
    if shape.startswith("packed"):
        assert {rows for rows, _ in inputs} == {1}
        assert sum(tokens for _, tokens in inputs) == len(LOSSES) * sum(map(len, PROMPTS + RESPONSES))
    for name in LOSSES:
        assert_same(got[name], whole[1][name])
        assert got[name]["grad_norm"] > 0.01 and abs(got[name]["actor/pg_loss"]) > 0.01


def assert_same(got: dict[str, float], expected: dict[str, float]) -> None:
    compared = {"loss", "actor/pg_loss", "kl_loss", "opd/topk_loss", "grad_norm"} & expected.keys()
    assert len(compared) == 4 and compared <= got.keys()
    for metric in compared:
        assert got[metric] == pytest.approx(expected[metric], rel=1e-5), metric


# Tool tokens


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_teacher_says_of_a_tool_token_or_of_padding_moves_nothing(whole, student, name):
    worker, expected = whole
    columns = full_batch(student, name)
    outside = columns["response_mask"] == 0
    assert outside.sum() > len(HOLES)
    columns["ref_log_prob"][outside] += 5
    if name != "sampled":
        columns[TOPK_LOGPROBS][outside] += 5
        columns[TOPK_IDS][outside] = torch.tensor([1, 2, 3], dtype=torch.int32)
    got = update(worker, to_data(columns))
    for metric, value in expected[name].items():
        if metric != "mfu" and not metric.startswith("perf/"):  # time and memory
            assert got[metric] == pytest.approx(value, rel=1e-6), metric
    b, t = 0, 4  # right after two tool tokens: the same change of a token that counts is seen
    columns = full_batch(student, name)
    columns["ref_log_prob"][b, t] += 5
    if name != "sampled":
        columns[TOPK_LOGPROBS][b, t] -= 5
    moved = update(worker, to_data(columns))
    for metric in ("loss", "grad_norm"):
        assert abs(moved[metric] - expected[name][metric]) > 1e-4


def test_tool_tokens_are_context_for_the_teacher(teacher_server):
    """Another result of the tool changes what the teacher says of every token after it, and of none before."""
    server = teacher_server(vocab=VOCAB)
    other = [list(response) for response in RESPONSES]
    other[0][3], other[6][0] = 9, 9
    with TeacherClient(server.address) as client:
        reference = TeacherReference(client, TeacherConfig())

        def ask(responses: list[list[int]]) -> np.ndarray:
            columns = columns_of(responses)
            return reference.values(
                input_ids_BS=columns["input_ids"],
                attention_mask_BS=columns["attention_mask"],
                response_mask_BR=columns["response_mask"],
                old_log_probs_BR=np.full((B, R), -1.0, np.float32),
                step=1,
            ).columns["ref_log_prob"]

        first, second = ask(RESPONSES), ask(other)
    for values, responses in ((first, RESPONSES), (second, other)):
        for b in (0, 6):
            row, start = np.array(PROMPTS[b] + responses[b], np.int32), len(PROMPTS[b])
            expected = oracle_logprobs(row, start, vocab=VOCAB)  # of the whole row, tool tokens included
            np.testing.assert_allclose(values[b, : len(expected)], expected, atol=1e-6)
    changed = first != second
    assert not changed[0, :3].any() and changed[0, 3:6].all() and changed[6, 0:4].all()
    changed[[0, 6]] = False
    assert not changed.any()


# LoRA


def meta(temperature: float) -> dict:
    """What V0's loop puts beside the batch."""
    return {"temperature": temperature, "global_token_num": columns_of()["attention_mask"].sum(1).tolist()}


def bare_trainer(worker):
    """Ours, with what verl's methods for log-probs read; its constructor needs data sets."""
    from opd.trainer import OPDTrainer

    trainer = OPDTrainer.__new__(OPDTrainer)
    trainer.config, trainer.global_steps = composed(), 1
    trainer.ref_in_actor, trainer.actor_rollout_wg = True, worker
    return trainer


def set_adapters(worker) -> None:
    """As after some training: a new adapter changes nothing, since its second matrix is 0."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in worker.actor.engine.module.named_parameters():
        if "lora_B" in name:
            local = parameter.data.to_local() if hasattr(parameter.data, "to_local") else parameter.data
            local.copy_(torch.randn(local.shape, generator=generator))


def test_an_adapter_gets_the_gradient_and_its_base_is_no_teacher(whole, make_worker, student, teacher_server):
    """verl would take the base model, with the adapter off, for the reference of a LoRA student."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    worker = make_worker(*LORA, *micro_batches(B))
    first = update(worker, to_data(full_batch(student, "sampled")))
    for metric in ("loss", "kl_loss", "actor/pg_loss"):  # a new adapter is the base model
        assert first[metric] == pytest.approx(whole[1]["sampled"][metric], rel=1e-4)
    assert first["grad_norm"] > 0
    trained = {n for n, p in worker.actor.engine.module.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    set_adapters(worker)

    server = teacher_server(vocab=VOCAB)
    columns = full_batch(student, "sampled")
    base, oracle = columns.pop("old_log_probs"), columns.pop("ref_log_prob")
    trainer = bare_trainer(worker)
    with TeacherClient(server.address) as client:
        trainer.teacher = TeacherReference(client, TeacherConfig())
        batch = DataProto.from_single_dict(columns | {"old_log_probs": base}, meta_info=meta(1.0))
        ours = trainer._compute_ref_log_prob(batch).batch["ref_log_prob"]
        verls = RayPPOTrainer._compute_ref_log_prob(trainer, batch).batch["ref_log_prob"]
        adapted = trainer._compute_old_log_prob(batch)[0].batch["old_log_probs"]
    real = columns["attention_mask"][:, P:].bool()
    torch.testing.assert_close(ours[real], oracle[real], atol=1e-5, rtol=0)
    torch.testing.assert_close(verls[real], base[real], atol=1e-5, rtol=1e-5)  # what must not be the teacher
    assert (ours - verls)[real].abs().mean() > 0.1
    assert (adapted - base)[real].abs().mean() > 0.05  # the student itself is asked with its adapter


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_v1_asks_the_teacher_for_a_lora_student_too(mode):
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls

    from opd.trainer_v1 import PREFIX, OPDTrainerV1

    trainer = (cls := get_trainer_cls(PREFIX + mode)).__new__(cls)
    trainer.config = composed(*LORA, trainer=mode, cpu=False)
    trainer._enable_hybrid_replicas = True
    trainer._init_resource_pool_mgr()
    trainer.ref_in_actor = True  # as verl sets it for an adapter
    assert trainer.ref_in_actor and set(trainer.role_worker_mapping) == {Role.ActorRollout}
    assert cls._compute_ref_log_prob is OPDTrainerV1._compute_ref_log_prob is not PPOTrainer._compute_ref_log_prob


def test_the_rollout_gets_an_adapter_merged_into_its_base(make_worker, student):
    """With model.lora.merge=True, without which the CPU rollout refuses an adapter; verl rounds them to bfloat16."""
    worker = make_worker(*LORA, "actor_rollout_ref.model.lora.merge=true", *micro_batches(B))
    set_adapters(worker)
    named = dict(worker.actor.engine.module.named_parameters())
    full = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named.items()}
    weights, peft_config = worker.actor.engine.get_per_tensor_param()
    sent = dict(weights)
    own = teacher_of(student, seed=0).state_dict()
    assert peft_config is None and sent.keys() == own.keys()
    query = "model.layers.0.self_attn.q_proj"
    a, b = (full[f"base_model.model.{query}.lora_{x}.default.weight"] for x in "AB")
    merged = own[f"{query}.weight"] + 8 / 4 * b @ a
    torch.testing.assert_close(sent[f"{query}.weight"].float(), merged, rtol=1e-2, atol=1e-3)
    assert (merged - own[f"{query}.weight"]).abs().max() > 0.1
    after = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in named.items()}
    assert all(torch.equal(after[n], full[n]) for n in full)  # training goes on with base and adapter apart


# Temperature


def test_at_a_rollout_temperature_the_kl_of_a_model_with_itself_is_0(whole, student, start_teacher):
    """A real model on both sides: verl's engine computes the student's values, the server the teacher's."""
    from verl import DataProto

    worker, _ = whole
    server = start_teacher("--backend", "hf", "--model", student, "--device", "cpu", "--dtype", "float32")
    columns = columns_of()
    batch = DataProto.from_single_dict(columns, meta_info=meta(0.7))
    old = bare_trainer(worker)._compute_old_log_prob(batch)[0].batch["old_log_probs"]
    server.wait_ready()
    kl = {}
    with TeacherClient(server.address) as client:
        for temperature in (0.7, 1.0):
            values = TeacherReference(client, TeacherConfig(), temperature=temperature).values(
                input_ids_BS=columns["input_ids"],
                attention_mask_BS=columns["attention_mask"],
                response_mask_BR=columns["response_mask"],
                old_log_probs_BR=old,
                step=1,
            )
            difference = (torch.from_numpy(values.columns["ref_log_prob"]) - old)[columns["attention_mask"][:, P:] == 1]
            kl[temperature] = float(difference.abs().max())
    assert kl[0.7] < 1e-5
    assert kl[1.0] > 0.01  # what a backend without temperatures would add: the handshake refuses it
