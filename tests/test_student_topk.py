"""A top-k loss on the student's own ids: which they are, what the teacher is asked, and what comes out of the loss.

verl's real actor worker in this process and a real teacher server with a tiny model, as in test_loss_worker.py; ids and
losses are compared with those of a direct forward of the same models.

Shapes: B = 4 rows, P = 3 prompt columns, R = 4 response columns, K = 3.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import test_loss_worker
import torch
from conftest import CHILD_ENV
from test_config import composed
from test_loss_worker import (
    HOLES,
    PROMPTS,
    RESPONSES,
    VOCAB,
    K,
    log_probs_of,
    make_batch,
    settings_of,
    teacher_of,
    update,
)

import opd.cpu  # noqa: F401  before verl
from opd.client import TeacherClient
from opd.config import TeacherConfig
from opd.config_checks import check
from opd.errors import ConfigError
from opd.jagged import to_columns, to_id_lists, to_padded
from opd.loss.distribution import topk_loss
from opd.loss.schedule import Coefficient
from opd.loss.settings import DIVERGENCES, TOPK_IDS, TOPK_LOGPROBS, LossSettings, TeacherLoss
from opd.loss.student_topk import NUM_IDS, NUM_KNOWN, own_topk
from opd.reference import TeacherReference
from opd.routing import Router
from opd.worker import METRICS_KEY

student, make_worker = test_loss_worker.student, test_loss_worker.make_worker  # fixtures

B, R = 4, 4
FROM_STUDENT = "student"
# one micro-batch, and several whose rows verl sorts by length and puts back: dynamic batches of up to 16 tokens
SHAPES = {
    "padded": ["actor_rollout_ref.model.use_remove_padding=false"],
    "packed": ["actor_rollout_ref.model.use_remove_padding=true"],
    "packed, small micro-batches": [
        "actor_rollout_ref.model.use_remove_padding=true",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8",
    ],
}


def as_v1(data):
    """The columns that the worker reads, jagged as they come out of TransferQueue."""
    jagged = data.exclude("attention_mask", "prompts", "responses", "response_mask", "loss_mask", "max_response_len")
    mask = [[int((b, t) not in HOLES) for t in range(len(r))] for b, r in enumerate(RESPONSES)]
    for name, rows in (("prompts", PROMPTS), ("responses", RESPONSES), ("response_mask", mask), ("loss_mask", mask)):
        jagged[name] = torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    return jagged


def ask(worker, data, *, num_ids=K, num_known=VOCAB) -> list[np.ndarray]:
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(data, **{NUM_IDS: num_ids, NUM_KNOWN: num_known})
    return to_id_lists(worker.compute_student_topk(data)[TOPK_IDS], range(B), num_ids=num_ids)


def expected_ids(student: str, *, num_ids=K, num_known=VOCAB) -> list[np.ndarray]:
    own = log_probs_of(teacher_of(student, seed=0))
    return [x[:, :num_known].topk(num_ids, dim=-1).indices.numpy() for x in own]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_ids_are_the_top_k_of_a_direct_forward(make_worker, student, shape):
    """Of every response position, tool tokens too, padded as V0 has its batch and jagged as V1 has it."""
    worker = make_worker(*SHAPES[shape])
    loss_fn, calls = worker.actor.loss_fn, []
    worker.actor.engine.module.register_forward_pre_hook(lambda *_: calls.append(1))
    for to_layout in (lambda data: data, as_v1):
        got = ask(worker, to_layout(make_batch(student, settings_of("sampled"))))
        for ids, expected, response in zip(got, expected_ids(student), RESPONSES, strict=True):
            assert ids.dtype == np.int32 and ids.shape == (len(response), K)
            np.testing.assert_array_equal(ids, expected)
    assert worker.actor.loss_fn is loss_fn
    assert len(calls) > 2 if "small" in shape else len(calls) == 2  # one more forward for a step


def test_ids_that_the_teacher_does_not_know_are_left_out(make_worker, student):
    worker = make_worker()
    got = ask(worker, make_batch(student, settings_of("sampled")), num_known=7)
    for ids, expected in zip(got, expected_ids(student, num_known=7), strict=True):
        np.testing.assert_array_equal(ids, expected)
    assert max(ids.max() for ids in got) < 7 < max(ids.max() for ids in expected_ids(student))
    with pytest.raises(ValueError, match=r"teacher.topk=8, but student and teacher share 7 ids only"):
        ask(worker, make_batch(student, settings_of("sampled")), num_ids=8, num_known=7)


def test_an_update_after_it_is_the_update_without_it(make_worker, student):
    """Nothing of the forward stays: neither its loss, nor what it wrote into the batch."""
    worker = make_worker("actor_rollout_ref.actor.optim.lr=0")
    before = update(worker, make_batch(student, settings_of("jsd_topk"), advantage=0.3))
    ask(worker, make_batch(student, settings_of("sampled")))
    after = update(worker, make_batch(student, settings_of("jsd_topk"), advantage=0.3))
    for metric in ("loss", "grad_norm", "actor/pg_loss", "opd/topk_loss"):
        assert after[metric] == before[metric]


def test_the_whole_vocabulary_of_a_step_is_never_copied():
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(3, 63)
    from test_loss_distribution import LargestTensors

    with LargestTensors() as seen:
        ids = own_topk(logits, positions, 5, 900, chunk_elements=8 * 1000)
    assert max(numel for numel, _ in seen.made) == 8 * 1000
    assert torch.equal(ids.long(), logits[positions, :900].topk(5, dim=-1).indices)


def reference(client, name="reverse_kl_topk", *, topk=K, **config) -> TeacherReference:
    loss = TeacherLoss(LossSettings(name, topk=topk, coef=0.5), Coefficient("constant", 0.5), "k3+")
    return TeacherReference(client, TeacherConfig(topk_from=FROM_STUDENT, overlap=False, **config), loss=loss)


@pytest.fixture(scope="module")
def teacher_folder(student, tmp_path_factory) -> str:
    """Another model with the student's tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("teacher")
    teacher_of(student).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(student).save_pretrained(folder)
    return str(folder)


def hf_server(start_teacher, folder: str):
    server = start_teacher("--backend", "hf", "--model", folder, "--device", "cpu", "--dtype", "float32")
    server.wait_ready()
    return server


def from_the_student(student: str, name: str) -> tuple[float, float]:
    """The loss over the tokens that count, and the teacher's mass on the student's ids; in float64."""
    own, teachers = log_probs_of(teacher_of(student, seed=0)), log_probs_of(teacher_of(student))
    losses, masses = [], []
    for b, (q_all, p_all) in enumerate(zip(own, teachers, strict=True)):
        for t in range(len(q_all)):
            if (b, t) in HOLES:
                continue
            q = q_all[t].double().exp().topk(K)
            p = p_all[t].double().exp()[q.indices]
            masses.append(p.sum())
            p, q = (torch.cat([x, 1 - x.sum(0, keepdim=True)]) for x in (p, q.values))
            m = (p + q) / 2
            forward, reverse = (p * (p / q).log()).sum(), (q * (q / p).log()).sum()
            jsd = ((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2
            losses.append({"forward_kl_topk": forward, "reverse_kl_topk": reverse, "jsd_topk": jsd}[name])
    return float(torch.stack(losses).mean()), float(torch.stack(masses).mean())


def padded_batch(student: str):
    """verl's DataProto as V0's loop has it when it comes to the reference policy."""
    from verl import DataProto

    data = make_batch(student, settings_of("sampled"))
    prompts, responses = data["prompts"], data["responses"]
    attention = data["attention_mask"]
    names = ("prompts", "responses", "attention_mask", "response_mask", "old_log_probs")
    columns = {name: data[name] for name in names} | {
        "input_ids": torch.cat([prompts, responses], 1),
        "position_ids": (attention.cumsum(1) - 1).clamp_min(0),
    }
    return DataProto.from_single_dict(columns, meta_info={"temperature": 1.0})


def test_v0_asks_the_student_then_the_teacher_and_the_loss_is_the_one_of_full_logits(
    make_worker, student, teacher_folder, start_teacher
):
    from opd.trainer import OPDTrainer

    server = hf_server(start_teacher, teacher_folder)
    for name in DIVERGENCES:
        worker = make_worker()
        trainer = OPDTrainer.__new__(OPDTrainer)
        trainer.config, trainer.global_steps, trainer.actor_rollout_wg = composed(), 1, worker
        with TeacherClient(server.address) as client:
            trainer.teacher = reference(client, name)
            values = trainer._compute_ref_log_prob(padded_batch(student))
        loss, mass = from_the_student(student, name)
        assert values.meta_info[METRICS_KEY]["opd/teacher_mass"] == pytest.approx(mass, rel=1e-4)
        data = make_batch(student, settings_of(name))
        data[TOPK_IDS], data[TOPK_LOGPROBS] = values.batch[TOPK_IDS], values.batch[TOPK_LOGPROBS]
        first = update(worker, data.clone())
        assert first["opd/topk_loss"] == pytest.approx(loss, rel=1e-4)
        assert first["opd/topk_overlap"] == 1.0  # the student has not moved yet
        for _ in range(9):
            last = update(worker, data.clone())
        assert last["opd/topk_loss"] < 0.5 * first["opd/topk_loss"]


def test_v1s_rows_get_the_values_of_the_same_ids(make_worker, student, teacher_folder, start_teacher):
    """From the worker's jagged ids to the jagged columns; a made-up row (1) is not asked about."""
    server = hf_server(start_teacher, teacher_folder)
    data = as_v1(make_batch(student, settings_of("sampled")))
    ids = ask(make_worker(), data.clone())
    rows = [0, 2, 3]
    fields = {name: data[name] for name in ("prompts", "responses", "response_mask")}
    fields["old_log_probs"] = torch.nested.as_nested_tensor(
        [torch.full((len(r),), -1.0) for r in RESPONSES], layout=torch.jagged
    )
    with TeacherClient(server.address) as client:
        values = reference(client).values(**to_padded(fields, rows), step=1, student_ids=[ids[i] for i in rows])
    columns = to_columns(values.columns, fields["old_log_probs"], rows)
    teachers = log_probs_of(teacher_of(student))
    back = list(zip(columns[TOPK_IDS].unbind(), columns[TOPK_LOGPROBS].unbind(), strict=True))
    for i in rows:
        np.testing.assert_array_equal(back[i][0].reshape(-1, K), ids[i])
        expected = teachers[i].gather(1, torch.from_numpy(ids[i]).long())
        torch.testing.assert_close(back[i][1].reshape(-1, K), expected, atol=1e-5, rtol=0)
    assert (back[1][0] == -1).all() and back[1][1].isnan().all()


def test_a_lora_student_is_asked_with_its_adapter(make_worker, student):
    """verl's own reference log-probs of a LoRA student are those of its base; these must not be."""
    from test_shapes import LORA, set_adapters

    worker = make_worker(*LORA)
    np.testing.assert_array_equal(
        np.concatenate(ask(worker, make_batch(student, settings_of("sampled")))), np.concatenate(expected_ids(student))
    )
    set_adapters(worker)
    adapted = np.concatenate(ask(worker, make_batch(student, settings_of("sampled"))))
    assert (adapted != np.concatenate(expected_ids(student))).mean() > 0.2


def test_ranks_that_share_the_tokens_give_the_ids_and_the_loss_of_one():
    """Ulysses: each rank has the logits of a part of the tokens, and verl gathers what comes back."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = Path(__file__).with_name("ulysses_rank.py")
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(port)], env=CHILD_ENV, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            said = process.communicate(timeout=120)[1].decode()
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in ranks:
            process.kill()


def test_several_teachers_are_asked_for_the_ids_of_their_own_rows(student, teacher_folder, start_teacher):
    servers = {"other": hf_server(start_teacher, teacher_folder), "self": hf_server(start_teacher, student)}
    ids = expected_ids(student)
    batch = padded_batch(student).batch
    clients = {name: TeacherClient(server.address) for name, server in servers.items()}
    with Router(clients, {"a": {"other": 1.0}, "b": {"self": 1.0}}, route_by="source") as router:
        values = reference(router).values(
            input_ids_BS=batch["input_ids"],
            attention_mask_BS=batch["attention_mask"],
            response_mask_BR=batch["response_mask"],
            old_log_probs_BR=batch["old_log_probs"],
            step=1,
            data_columns={"source": ["a", "b", "b", "a"]},
            student_ids=[x.astype(np.int32) for x in ids],
        )
    models = {"a": log_probs_of(teacher_of(student)), "b": log_probs_of(teacher_of(student, seed=0))}
    for b, source in enumerate("abba"):
        n = len(RESPONSES[b])
        np.testing.assert_array_equal(values.columns[TOPK_IDS][b, :n], ids[b])
        expected = models[source][b].gather(1, torch.from_numpy(ids[b]))
        np.testing.assert_allclose(values.columns[TOPK_LOGPROBS][b, :n], expected, atol=1e-5)


# Numbers at the edge: the teacher may find everything that the student says all but impossible


@pytest.mark.parametrize("divergence, beta", [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.9)])
@pytest.mark.parametrize("teachers", [[-40.0, -40.0, -41.0], [-1e-3, -40.0, -15.0], [-90.0, -3.0, -60.0]])
def test_a_teacher_that_finds_the_students_ids_impossible_gives_the_gradient_of_the_full_formula(
    teachers, divergence, beta
):
    logits = torch.tensor([[6.0, 5.0, 4.0, 0.0, -3.0]])
    ids, logprobs = torch.tensor([[0, 1, 2]]), torch.tensor([teachers])
    exact = logits.double().requires_grad_()
    q = exact.softmax(-1).gather(1, ids)
    p = logprobs.double().exp()
    p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    m = beta * p + (1 - beta) * q
    expected = {
        "forward_kl": (p * (p / q).log()).sum(),
        "reverse_kl": (q * (q / p).log()).sum(),
        "jsd": (beta * p * (p / m).log()).sum() + ((1 - beta) * q * (q / m).log()).sum(),
    }[divergence]
    expected.backward()
    ours = logits.clone().requires_grad_()
    loss = topk_loss(ours, torch.arange(1), ids, logprobs, divergence=divergence, beta=beta).loss_N
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(ours.grad).all()
    torch.testing.assert_close(loss.detach().double()[0], expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


# What is refused


@pytest.mark.parametrize("noise, silent", [(0.3, 0.25), (6.0, 0.5)])
def test_without_a_tail_the_forward_kl_on_the_students_own_ids_is_silent_where_the_student_is_too_sure(noise, silent):
    """Why that combination is refused; with the tail every position has a gradient, near the teacher or far."""
    generator = torch.Generator().manual_seed(0)
    teachers = 3 * torch.randn(256, 500, generator=generator)
    logits = teachers + noise * torch.randn(256, 500, generator=generator)
    teachers, ids = teachers.log_softmax(-1), logits.topk(8).indices

    def share_without_gradient(*, tail: bool) -> float:
        student = logits.clone().requires_grad_()
        loss = topk_loss(student, torch.arange(256), ids, teachers.gather(1, ids), divergence="forward_kl", tail=tail)
        loss.loss_N.sum().backward()
        return float((student.grad.abs().sum(-1) == 0).float().mean())

    assert share_without_gradient(tail=False) > silent
    assert share_without_gradient(tail=True) == 0


@pytest.mark.parametrize(
    "overrides, says",
    [
        (["teacher.topk_from=both"], "topk_from=both is unknown; use teacher or student"),
        (["teacher.topk_from=student"], "teacher.loss=sampled, which has no top-k"),
        (["teacher.topk_from=student", "teacher.loss=jsd_topk", "teacher.overlap=true"], "Set teacher.overlap=false"),
        (["teacher.topk_from=student", "teacher.loss=jsd_topk"], None),
        (["teacher.topk_from=student", "teacher.loss=jsd_topk", "teacher.tail=false"], None),
        (["teacher.topk_from=student", "teacher.loss=forward_kl_topk"], None),
        (["teacher.topk_from=student", "teacher.loss=forward_kl_topk", "teacher.tail=false"], "and has no gradient"),
    ],
)
def test_settings_under_which_it_cannot_work_are_refused(overrides, says):
    if says is None:
        return check(composed("teacher.overlap=false", *overrides))
    with pytest.raises(ConfigError, match=says):
        check(composed(*overrides))


def test_a_teacher_that_takes_fewer_ids_is_refused_before_the_first_step():
    from fake_teacher import FakeTeacher

    for most, fits in ((2, False), (0, False), (3, True)):
        with FakeTeacher(max_candidates=most, max_topk=2) as fake, TeacherClient(fake.address) as client:
            if fits:  # its own top-k plays no part
                reference(client)
                continue
            with pytest.raises(ConfigError, match=rf"teacher.topk=3, but the teacher 'fake' .* scores {most} ids"):
                reference(client)


def test_ids_that_nobody_asked_for_and_ids_that_are_missing_are_refused(teacher_server):
    server = teacher_server(vocab=VOCAB)
    arrays = {"input_ids_BS": np.ones((1, 2), int), "attention_mask_BS": np.ones((1, 2), int)}
    arrays |= {"response_mask_BR": np.ones((1, 1), int), "old_log_probs_BR": np.full((1, 1), -1.0), "step": 1}
    with TeacherClient(server.address) as client:
        with pytest.raises(ValueError, match="topk_from=student, but the trainer gave no ids"):
            reference(client).values(**arrays)
        with pytest.raises(ValueError, match="topk_from=teacher, but the trainer gave ids"):
            TeacherReference(client, TeacherConfig()).values(**arrays, student_ids=[np.zeros((1, 3), np.int32)])
