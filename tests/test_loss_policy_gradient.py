"""The reverse KL as an advantage: its value, its gradient through verl's PPO loss, and that GRPO cannot wash it out."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import opd.cpu  # noqa: F401  before verl
from opd.loss.in_verl import add_teacher_advantage, no_task_advantage
from opd.loss.policy_gradient import reverse_kl_advantage

OLD = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.5, -9.0]])
TEACHER = torch.tensor([[-2.0, -2.0, -1.0], [-0.1, -0.5, -9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
TASK = torch.tensor([[0.7, 0.7, 0.7], [-0.7, 0.0, 0.0]])


def test_a_token_is_worth_what_the_teacher_thinks_of_it_more_than_the_student():
    got = reverse_kl_advantage(OLD, TEACHER, 0.5)
    torch.testing.assert_close(got, torch.tensor([[-0.5, 0.0, 1.0], [0.2, 0.0, 0.0]]))


def test_it_is_added_to_the_tasks_advantage_as_it_is():
    data = TensorDict({"advantages": TASK, "old_log_probs": OLD, "ref_log_prob": TEACHER, "response_mask": MASK}, 2)
    metrics = add_teacher_advantage(data, 0.5)
    torch.testing.assert_close(data["advantages"], torch.tensor([[0.2, 0.7, 1.7], [-0.5, 0.0, 0.0]]))
    assert metrics["opd/task_advantage_abs"] == pytest.approx(0.7)
    assert metrics["opd/teacher_advantage_abs"] == pytest.approx((0.5 + 0.0 + 1.0 + 0.2) / 4)


def test_jagged_batches_get_the_same_numbers():
    """V1's layout; every column has offsets of its own, as they come out of TransferQueue."""
    lengths = [3, 1]
    rows = {"advantages": TASK, "old_log_probs": OLD, "ref_log_prob": TEACHER, "response_mask": MASK}
    jagged = {
        name: torch.nested.as_nested_tensor([x[:n] for x, n in zip(column, lengths, strict=True)], layout=torch.jagged)
        for name, column in rows.items()
    }
    data = TensorDict(jagged, 2)
    add_teacher_advantage(data, 0.5)
    torch.testing.assert_close(data["advantages"].values(), torch.tensor([0.2, 0.7, 1.7, -0.5]))
    assert [len(row) for row in data["advantages"].unbind()] == lengths


def test_its_gradient_through_verls_ppo_loss_is_that_of_the_reverse_kl_weighted_by_the_ratio():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=100.0)
    ratio = 1.1  # within the clip range of 0.2
    log_prob = (OLD + math.log(ratio)).requires_grad_()
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=OLD,
        log_prob=log_prob,
        advantages=reverse_kl_advantage(OLD, TEACHER, 0.5),
        response_mask=MASK,
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    expected = ratio * 0.5 * (OLD - TEACHER) * MASK / MASK.sum()
    torch.testing.assert_close(log_prob.grad, expected, rtol=1e-5, atol=1e-6)


def test_groups_of_equal_rewards_keep_the_teachers_advantage_and_lose_it_as_a_reward():
    """GRPO's normalisation: a group in which all succeed, or all fail, has advantages of 0."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards = torch.zeros(4, 3)
    rewards[:, 2] = 1.0
    mask = torch.ones(4, 3)
    grpo, _ = compute_grpo_outcome_advantage(rewards.clone(), mask, np.array(["a"] * 4))
    assert not grpo.any()
    same = torch.full((4, 3), -0.3)  # the teacher says the same about every response
    as_reward, _ = compute_grpo_outcome_advantage(rewards + same, mask, np.array(["a"] * 4))
    assert as_reward.abs().max() < 1e-3
    data = {"advantages": grpo, "old_log_probs": torch.zeros(4, 3), "ref_log_prob": same, "response_mask": mask}
    added = TensorDict(data, 4)
    add_teacher_advantage(added, 1.0)
    torch.testing.assert_close(added["advantages"], same)


def test_adv_estimator_opd_takes_the_tasks_reward_out():
    """Through verl's registry and its own compute_advantage, which hands the estimator what it does."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    batch = DataProto.from_dict(
        {"token_level_rewards": torch.ones(2, 3), "response_mask": MASK}, non_tensors={"uid": np.array(["a", "a"])}
    )
    out = compute_advantage(batch, adv_estimator="opd", config={}).batch
    assert out["advantages"].shape == (2, 3) and not out["advantages"].any() and not out["returns"].any()
    assert no_task_advantage(torch.ones(1, 1), torch.ones(1, 1))[0].dtype == torch.float32
