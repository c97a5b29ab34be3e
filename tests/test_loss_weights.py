"""Weights and the clamp of each token's teacher term: against verl's own loss where they change nothing, by hand else.

verl's real actor worker in this process, as in test_loss_worker.py.

Shapes: B = 4 rows, P = 3 prompt columns, R = 4 response columns, K = 3.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import test_loss_worker
import torch
from test_loss_worker import (
    HOLES,
    RESPONSES,
    log_probs_of,
    make_batch,
    padded,
    sampled,
    settings_of,
    teacher_of,
    update,
)

from opd.config_checks import KL_TYPES, LINEAR_KL_TYPES
from opd.loss.clamp import clamp_teacher
from opd.loss.in_verl import add_teacher_advantage, weighted_kl_loss
from opd.loss.settings import LOSSES, WEIGHTS
from opd.loss.weights import token_weights

student, make_worker = test_loss_worker.student, test_loss_worker.make_worker  # fixtures

B, R = 4, 4
NO_STEP = "actor_rollout_ref.actor.optim.lr=0"
COUNTS = np.array([[t < len(r) and (b, t) not in HOLES for t in range(R)] for b, r in enumerate(RESPONSES)])
COMPARED = ("loss", "kl_loss", "kl_coef", "actor/pg_loss", "opd/topk_loss", "grad_norm")


@pytest.fixture(scope="module")
def worker(make_worker):
    return make_worker(NO_STEP)


def jagged(values_BR) -> torch.Tensor:
    """V1's layout."""
    rows = [torch.as_tensor(row[: len(r)]) for row, r in zip(values_BR, RESPONSES, strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def test_weights_by_hand():
    counts = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=bool)
    assert token_weights(counts, []).tolist() == counts.astype(float).tolist()
    got = token_weights(counts, [1], discount=0.5)
    assert got.dtype == np.float32
    assert got.tolist() == [[1, 0, 0.5, 0.25, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def loss_arguments(student: str, *, old_seed: int = 0):
    """What verl's engine gives a loss for one micro-batch; a leaf with the student's log-probs, and the rest."""
    from verl.utils import tensordict_utils as tu

    data = make_batch(student, settings_of("sampled"), advantage=0.7)
    data["old_log_probs"] = padded(sampled(log_probs_of(teacher_of(student, seed=old_seed))))
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(COUNTS.sum()), global_batch_size=B)
    data = data.exclude("opd_loss")
    ids = data["input_ids"]
    leaf = torch.linspace(-4, -0.1, ids.values().numel(), requires_grad=True)
    return leaf, {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, ids.offsets())}, data


@pytest.mark.parametrize("loss_agg_mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_with_weights_of_1_loss_and_gradient_are_verls(worker, student, kl_type, loss_agg_mode):
    """Off-policy: the log-probs of the update are not the old ones."""
    from verl.workers.utils.losses import ppo_loss

    config = replace(worker.actor_config, kl_loss_type=kl_type, kl_loss_coef=0.5, loss_agg_mode=loss_agg_mode)
    leaf, output, data = loss_arguments(student)
    expected, verls = ppo_loss(config, output, data)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    data[WEIGHTS] = torch.ones(B, R)
    leaf, output, _ = loss_arguments(student)
    loss, ours = weighted_kl_loss(replace(config, use_kl_loss=False), settings_of("sampled"), output, data)
    (grad,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grad, expected_grad)
    assert expected_grad.abs().max() > 0.01
    assert ours.keys() == verls.keys() and ours["kl_coef"] == verls["kl_coef"] == 0.5
    assert ours["kl_loss"].aggregation == verls["kl_loss"].aggregation
    assert ours["kl_loss"].aggregate() == pytest.approx(verls["kl_loss"].aggregate(), rel=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_an_update_with_weights_of_1_is_that_without(worker, student, name):
    """Padded as V0 has them, and jagged as V1 has them."""
    data = make_batch(student, settings_of(name), advantage=0.3)
    expected = update(worker, data.clone())
    ones = np.ones((B, R), np.float32)
    for weights in (torch.from_numpy(ones), jagged(ones)):
        weighted = data.clone()
        weighted[WEIGHTS] = weights
        if weights.is_nested and name == "policy_gradient":  # V1 has all columns jagged
            for column in ("advantages", "old_log_probs", "ref_log_prob", "response_mask"):
                weighted[column] = jagged(weighted[column])
        got = update(worker, weighted)
        for metric in set(COMPARED) & expected.keys():
            assert got[metric] == pytest.approx(expected[metric], rel=1e-5), metric
    assert expected["grad_norm"] > 0.01


def test_a_neutral_row_has_no_gradient_when_the_student_has_moved_away_from_its_old_log_probs(worker, student):
    """As in every mini-batch of a step but the first: old_log_probs, which stand in for the teacher, are another's."""
    data = make_batch(student, settings_of("sampled"))  # no advantage: only the teacher could move anything
    old = padded(sampled(log_probs_of(teacher_of(student, seed=2))))
    data["old_log_probs"], data["ref_log_prob"] = old, old.clone()
    pulled_back = update(worker, data.clone())
    assert pulled_back["kl_loss"] > 0 and pulled_back["grad_norm"] > 1e-3
    data[WEIGHTS] = torch.from_numpy(token_weights(COUNTS, range(B)))
    got = update(worker, data)
    assert got["kl_loss"] == got["loss"] == got["grad_norm"] == 0.0


def test_a_neutral_row_leaves_the_gradient_of_the_others_alone(worker, student):
    """Row 1 neutral and off-policy: the gradient is that of the other three, whatever stands in for its teacher."""
    norms = []
    for stand_in in (-0.1, -7.0):
        data = make_batch(student, settings_of("sampled"))
        data["ref_log_prob"][1] = stand_in
        data[WEIGHTS] = torch.from_numpy(token_weights(COUNTS, [1]))
        norms.append(update(worker, data)["grad_norm"])
    assert norms[0] == norms[1] > 0.01


def test_a_discount_weighs_the_value_of_each_token(worker, student):
    own, teachers = (log_probs_of(teacher_of(student, seed=seed)) for seed in (0, 1))
    x = padded(sampled(teachers)).double() - padded(sampled(own)).double()
    weights = token_weights(COUNTS, [], discount=0.7)
    # row 0 has a tool token at 2: its last token is the third that counts
    assert weights[0].tolist() == pytest.approx([1, 0.7, 0, 0.49])
    k3 = (x.exp() - 1 - x).numpy()
    data = make_batch(student, settings_of("sampled"))
    data[WEIGHTS] = torch.from_numpy(weights)
    assert update(worker, data)["kl_loss"] == pytest.approx(float((k3 * weights).sum() / COUNTS.sum()), rel=1e-4)
    data = make_batch(student, settings_of("policy_gradient"))
    data[WEIGHTS] = torch.from_numpy(weights)
    add_teacher_advantage(data, 0.5)
    np.testing.assert_allclose((data["advantages"] * COUNTS).numpy(), 0.5 * x * weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["forward_kl_topk", "reverse_kl_topk", "jsd_topk"])
def test_a_weight_is_a_tokens_share_of_a_top_k_loss(worker, student, name):
    """The loss is linear in the weights: those of the rows apart add up, and halves are half."""
    whole = update(worker, make_batch(student, settings_of(name)))["opd/topk_loss"]
    parts = []
    for rows in ([0, 1], [2, 3]):
        data = make_batch(student, settings_of(name))
        data[WEIGHTS] = torch.from_numpy(token_weights(COUNTS, rows) / 2)
        parts.append(update(worker, data)["opd/topk_loss"])
    assert min(parts) > 0 and sum(parts) == pytest.approx(whole / 2, rel=1e-5)


# The clamp


@pytest.mark.parametrize("kl_type", LINEAR_KL_TYPES)
@pytest.mark.parametrize("x, clipped", [(-12.0, -2.0), (-2.5, -2.0), (-1.0, -1.0), (0.5, 0.5), (9.0, 2.0)])
def test_the_gradient_of_a_clamped_token_is_that_of_a_difference_of_the_limit(kl_type, x, clipped):
    from verl.trainer.ppo.core_algos import kl_penalty

    log_prob = torch.tensor([-3.0], requires_grad=True)
    value = kl_penalty(log_prob, clamp_teacher(log_prob, torch.tensor([-3.0 + x]), 2.0), kl_type)
    value.sum().backward()
    assert float(log_prob.grad) == pytest.approx(-clipped)
    plain = kl_penalty(torch.tensor([-3.0]), torch.tensor([-3.0 + clipped]), kl_type)
    torch.testing.assert_close(value.detach(), plain)


def test_the_clamp_of_the_sampled_loss_follows_the_student_through_the_mini_batches(worker, student):
    """At the update the student is 6 nats above its old log-probs: what would count as -1 there is -7, and clipped."""
    leaf, output, data = loss_arguments(student)
    data["advantages"] = torch.zeros(B, R)
    data["old_log_probs"] = torch.full((B, R), -7.0)
    data["ref_log_prob"] = torch.full((B, R), -8.0)
    with torch.no_grad():
        leaf.fill_(-1.0)
    loss, metrics = weighted_kl_loss(
        replace(worker.actor_config, use_kl_loss=False), replace(settings_of("sampled"), clamp=2.0), output, data
    )
    loss.backward()
    counted = leaf.grad[leaf.grad != 0]
    assert len(counted) == COUNTS.sum()
    torch.testing.assert_close(counted, torch.full_like(counted, 0.5 * 2.0 / COUNTS.sum()))  # coefficient 0.5
    assert metrics["kl_loss"].aggregate() == pytest.approx(math.exp(-2) - 1 + 2, rel=1e-5)  # k3 at -2


def test_an_update_is_clamped_without_weights_too(worker, student):
    free = update(worker, make_batch(student, settings_of("sampled")))
    wide = update(worker, make_batch(student, settings_of("sampled", clamp=50.0)))
    narrow = update(worker, make_batch(student, settings_of("sampled", clamp=0.01)))
    for metric in ("loss", "kl_loss", "grad_norm"):
        assert wide[metric] == pytest.approx(free[metric], rel=1e-5)
    assert narrow["grad_norm"] < 0.5 * free["grad_norm"]


def test_a_clamped_advantage_keeps_its_sign():
    from tensordict import TensorDict

    columns = {
        "advantages": torch.tensor([[0.5, 0.5, 0.5]]),
        "old_log_probs": torch.tensor([[-1.0, -1.0, -9.0]]),
        "ref_log_prob": torch.tensor([[-1.5, -21.0, -1.0]]),
        "response_mask": torch.ones(1, 3),
    }
    data = TensorDict(columns, 1)
    add_teacher_advantage(data, 2.0, clamp=3.0)
    torch.testing.assert_close(data["advantages"], torch.tensor([[0.5 - 1.0, 0.5 - 6.0, 0.5 + 6.0]]))
