"""Divergences on the teacher's top-k: values by hand on four tokens, gradients against the plain formula."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opd.cpu  # noqa: F401  before verl
from opd.loss.distribution import topk_loss

# The teacher's two most probable of four tokens are 0 and 2; a quarter is left
TEACHER = torch.tensor([[0.5, 0.125, 0.25, 0.125]]).log()
STUDENT = torch.tensor([[0.125, 0.5, 0.25, 0.125]]).log() + 3.0  # logits: a constant more is the same distribution
IDS = torch.tensor([[0, 2]])
LN2, LN5 = math.log(2), math.log(5)


def loss_of(divergence: str, *, student=STUDENT, ids=IDS, **options):
    positions = torch.arange(len(student))
    return topk_loss(student, positions, ids, TEACHER.gather(1, ids), divergence=divergence, **options)


@pytest.mark.parametrize(
    "divergence, options, expected",
    [
        # p = (1/2, 1/4 | 1/4), q = (1/8, 1/4 | 5/8)
        ("forward_kl", {"tail": True}, LN2 + (LN2 - LN5) / 4 + 0),  # 1/2 ln 4 + 1/4 ln 1 + 1/4 ln 2/5
        ("forward_kl", {"tail": False}, LN2),
        ("reverse_kl", {"tail": True}, -LN2 / 4 + (LN5 - LN2) * 5 / 8),  # 1/8 ln 1/4 + 1/4 ln 1 + 5/8 ln 5/2
        ("reverse_kl", {"tail": False}, -LN2 / 4),
        # m = (5/16, 1/4 | 7/16): 1/2 (1/2 ln 8/5 + 1/4 ln 4/7) + 1/2 (1/8 ln 2/5 + 5/8 ln 10/7)
        ("jsd", {"tail": True, "beta": 0.5}, 0.1017418),
        ("jsd", {"tail": False, "beta": 0.5}, 0.0602327),
        # m = 1/4 p + 3/4 q = (7/32, 1/4 | 17/32)
        ("jsd", {"tail": True, "beta": 0.25}, 0.0799405),
    ],
)
def test_values_on_four_tokens_are_those_worked_out_by_hand(divergence, options, expected):
    assert float(loss_of(divergence, **options).loss_N) == pytest.approx(expected, abs=1e-6)


def test_the_mass_and_the_overlap_are_those_of_the_teachers_top_k():
    got = loss_of("forward_kl")
    assert float(got.student_mass_N) == pytest.approx(3 / 8)
    assert float(got.overlap_N) == 0.5  # the student's own two are 1 and 2


def test_jsd_tends_to_the_forward_and_to_the_reverse_kl():
    assert float(loss_of("jsd", beta=1e-4).loss_N) / 1e-4 == pytest.approx(
        float(loss_of("forward_kl").loss_N), rel=2e-3
    )
    almost = float(loss_of("jsd", beta=1 - 1e-4).loss_N) / 1e-4
    assert almost == pytest.approx(float(loss_of("reverse_kl").loss_N), rel=2e-3)


# not reverse_kl without the tail: it has its minimum elsewhere, see the next test, and opd/config.py refuses it
@pytest.mark.parametrize(
    "divergence, tail",
    [("forward_kl", True), ("forward_kl", False), ("reverse_kl", True), ("jsd", True), ("jsd", False)],
)
def test_a_student_that_agrees_has_no_loss_and_no_gradient(divergence, tail):
    student = (TEACHER + 1.0).requires_grad_()
    loss = loss_of(divergence, student=student, tail=tail).loss_N
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)
    # without the tail the forward KL still draws the rest into the top-k
    limit = 0.2 if divergence == "forward_kl" and not tail else 1e-6
    assert student.grad.abs().max() < limit


def test_without_a_tail_the_reverse_kl_rewards_leaving_the_top_k():
    """Why that pair is refused: a student with the teacher's own top-k is pushed out of it."""
    student = (TEACHER + 1.0).requires_grad_()
    loss_of("reverse_kl", student=student, tail=False).loss_N.sum().backward()
    assert (student.grad[0, IDS[0]] > 0).all()  # descent lowers the logits of the teacher's own tokens


def test_the_whole_vocabulary_has_no_tail():
    ids = torch.tensor([[0, 2, 1, 3]])
    with_tail, without = (loss_of("forward_kl", ids=ids, tail=tail) for tail in (True, False))
    full = float((TEACHER.exp() * (TEACHER - STUDENT.log_softmax(-1))).sum())
    assert float(with_tail.loss_N) == float(without.loss_N) == pytest.approx(full, abs=1e-6)


def test_a_confident_student_keeps_a_finite_loss_and_a_gradient_on_its_tail():
    """Its tail is e^-40, which 1 - mass would round to 0: the loss would be infinite, or its gradient gone."""
    student = torch.tensor([[40.0, 0.0, 39.0, 0.0]], requires_grad=True)
    loss = loss_of("forward_kl", student=student).loss_N
    loss.sum().backward()
    assert 5 < float(loss.detach()) < 15  # about 1/4 * 40
    assert student.grad[0, 1] + student.grad[0, 3] == pytest.approx(-0.25, abs=1e-4)


INF = math.inf


@pytest.mark.parametrize("divergence, beta", [("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)])
@pytest.mark.parametrize(
    "logits",
    [
        [2.0, 0.5, 1.0, -INF],  # an impossible token outside of the teacher's top-k
        [2.0, 0.5, -INF, 0.0],  # one in it
        [2.0, -INF, 1.0, -INF],  # nothing is left for the tail
        [2.0, -INF, -INF, -INF],
        [-INF, 2.0, -INF, 1.0],  # nothing is left in it
    ],
)
def test_an_impossible_token_counts_with_a_probability_of_0(logits, divergence, beta):
    """Against the formula with 0 log 0 = 0, in float64."""
    exact = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    weights = (exact - exact.detach().max()).exp()
    q_all = weights / weights.sum()
    q = torch.cat([q_all[:, IDS[0]], q_all[:, [1, 3]].sum(-1, keepdim=True)], -1)
    p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    m = p if divergence == "reverse_kl" else beta * p + (1 - beta) * q
    expected = torch.special.xlogy(q, (q / m).clamp_min(1e-300)).sum()
    if divergence == "jsd":
        expected = (1 - beta) * expected + beta * (p * (p / m).log()).sum()
    expected.backward()
    student = torch.tensor([logits], requires_grad=True)
    loss = loss_of(divergence, student=student, beta=beta).loss_N
    loss.sum().backward()
    torch.testing.assert_close(loss.detach().double()[0], expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad.double(), exact.grad.nan_to_num(0.0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tail", [True, False])
def test_a_forward_kl_towards_an_impossible_token_is_large_and_draws_to_it(tail):
    student = torch.tensor([[2.0, 0.5, -INF, 0.0]], requires_grad=True)
    loss = loss_of("forward_kl", student=student, tail=tail).loss_N
    loss.sum().backward()
    assert 240 < float(loss.detach()) < 260  # the teacher gives it 1/4
    assert student.grad[0, 2] == pytest.approx(-0.25)  # q sum(p) - p
    assert student.grad.isfinite().all()


def random_batch(*, num_logits=23, num_positions=17, vocab=50, topk=6, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(num_logits, vocab, generator=generator)).to(dtype)
    teacher = (3 * torch.randn(num_positions, vocab, generator=generator)).log_softmax(-1)
    top = teacher.topk(topk, dim=-1)
    positions = torch.randperm(num_logits, generator=generator)[:num_positions]
    weights = torch.rand(num_positions, generator=generator)
    return logits, positions, top.indices, top.values, weights


def naive(logits, positions, ids, logprobs, divergence, beta, tail):
    """In float64 and with the whole log-softmax."""
    q = logits[positions].double().log_softmax(-1).exp().gather(-1, ids)
    p = logprobs.double().exp()
    if tail:
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    if divergence == "forward_kl":
        values = (p * (p / q).log()).sum(-1)
        return values if tail else values.clamp_min(0)
    if divergence == "reverse_kl":
        return (q * (q / p).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("divergence, beta", [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.9)])
def test_values_and_gradients_are_those_of_the_plain_formula_whatever_the_chunk(divergence, beta, tail):
    logits, positions, ids, logprobs, weights = random_batch()
    exact = logits.double().requires_grad_()
    expected = naive(exact, positions, ids, logprobs, divergence, beta, tail)
    (expected * weights).sum().backward()
    for chunk_elements in (1, 250, 2**26):  # one position, five, all
        chunked = logits.clone().requires_grad_()
        options = {"divergence": divergence, "beta": beta, "tail": tail, "chunk_elements": chunk_elements}
        loss = topk_loss(chunked, positions, ids, logprobs, **options).loss_N
        (loss * weights).sum().backward()
        torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(chunked.grad.double(), exact.grad, rtol=1e-4, atol=5e-6)


class LargestTensors(TorchDispatchMode):
    """Records how many elements each operation's results have that are not views or in-place, by type."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.made.append((tensor.numel(), tensor.dtype))
        return out


def test_only_the_gradient_is_as_large_as_the_logits_and_it_is_made_once():
    logits, positions, ids, logprobs, weights = random_batch(
        num_logits=512, num_positions=400, vocab=1000, topk=8, dtype=torch.bfloat16
    )
    logits.requires_grad_()
    chunk = 16 * 1000
    with LargestTensors() as seen:
        loss = topk_loss(logits, positions, ids, logprobs, divergence="jsd", chunk_elements=chunk).loss_N
        (loss * weights).sum().backward()
    assert len(seen.made) > 100
    beyond_a_chunk = [(numel, dtype) for numel, dtype in seen.made if numel > chunk]
    assert beyond_a_chunk == [(512 * 1000, torch.bfloat16)]


def test_nothing_is_read_from_the_logits_after_the_forward_pass():
    """verl's log-prob kernel may write its own gradient over them before this one's turn comes."""
    logits, positions, ids, logprobs, _ = random_batch()
    grads = []
    for spoil in (False, True):
        leaf = logits.clone().requires_grad_()
        middle = leaf * 1.0
        loss = topk_loss(middle, positions, ids, logprobs, divergence="reverse_kl").loss_N
        if spoil:
            middle.data.fill_(float("nan"))
        loss.sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_rows_without_a_teacher_value_get_no_gradient_and_none_at_all_is_fine():
    logits, positions, ids, logprobs, _ = random_batch()
    logits.requires_grad_()
    topk_loss(logits, positions, ids, logprobs, divergence="forward_kl").loss_N.sum().backward()
    untouched = sorted(set(range(23)) - set(positions.tolist()))
    assert len(untouched) == 6 and not logits.grad[untouched].any()
    logits.grad = None
    empty = topk_loss(logits, positions[:0], ids[:0], logprobs[:0], divergence="forward_kl").loss_N
    empty.sum().backward()
    assert empty.shape == (0,) and not logits.grad.any()


def test_an_id_that_the_student_does_not_have_is_refused():
    logits, positions, ids, logprobs, _ = random_batch()
    ids[3, 2] = 50
    with pytest.raises(ValueError, match="has the id 50, but the student's head has 50 rows"):
        topk_loss(logits, positions, ids, logprobs, divergence="forward_kl")


@pytest.mark.parametrize("seed", [0, 1])
def test_forward_kl_without_tail_has_the_numbers_of_verls_own(seed):
    """verl's in-tree `forward_kl_topk` with its default clamps, on tensors without a log-prob below -10."""
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.workers.config import DistillationLossConfig

    logits, _, _, _, weights = random_batch(num_logits=17, num_positions=17, seed=seed)
    logits /= 3
    _, _, ids, logprobs, _ = random_batch(num_logits=17, num_positions=17, seed=seed + 10)
    verls, ours = (logits.clone().requires_grad_() for _ in range(2))
    offsets = torch.tensor([0, 9, 17])
    in_tree = compute_forward_kl_topk(
        student_logits=verls.unsqueeze(0),
        teacher_topk_log_probs=torch.nested.nested_tensor_from_jagged(logprobs, offsets),
        teacher_topk_ids=torch.nested.nested_tensor_from_jagged(ids, offsets),
        config=SimpleNamespace(distillation_loss=DistillationLossConfig(loss_mode="forward_kl_topk", topk=6)),
        data_format="thd",
    )
    expected = in_tree["distillation_losses"].clamp_min(0.0)  # verl.trainer.distillation.losses clamps afterwards
    got = topk_loss(ours, torch.arange(17), ids, logprobs, divergence="forward_kl", tail=False)
    torch.testing.assert_close(got.loss_N, expected[0].detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.student_mass_N, in_tree["student_mass"][0].detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.overlap_N, in_tree["overlap_count"][0] / 6)
    (expected[0] * weights).sum().backward()
    (got.loss_N * weights).sum().backward()
    torch.testing.assert_close(ours.grad, verls.grad, rtol=1e-4, atol=1e-6)
