"""Losses beside the sampled KL through whole runs on Ray: what tests/test_loss_worker.py cannot see is the way there.

One run on each of verl's trainers, since a batch's columns take another way to the worker in each.
"""

import pytest
from test_training import prepared, teachers, train  # noqa: F401  fixtures


@pytest.fixture(scope="module")
def policy_gradient(prepared, teachers, tmp_path_factory) -> list[dict]:  # noqa: F811
    """V0, without the task's reward, at a coefficient that halves."""
    return train(
        prepared,
        teachers["teacher"],
        tmp_path_factory.mktemp("run") / "policy_gradient",
        "teacher.loss=policy_gradient",
        "algorithm.adv_estimator=opd",
        "teacher.coef_schedule=linear",
        "teacher.coef_end=0.5",
    )


def test_policy_gradient_alone_trains_from_the_teachers_advantage(policy_gradient):
    assert len(policy_gradient) == 2
    for data in policy_gradient:
        assert data["actor/opd/task_advantage_abs"] == 0
        assert data["actor/opd/teacher_advantage_abs"] > 0.05
        assert data["critic/advantages/max"] == 0  # verl's metric is of the task's
        assert data["actor/grad_norm"] > 0
        assert "actor/kl_loss" not in data


def test_the_coefficient_follows_its_schedule_to_the_worker(policy_gradient):
    assert [data["actor/opd/coef"] for data in policy_gradient] == [1.0, 0.5]


def test_a_top_k_loss_trains_on_v1_whose_columns_are_jagged(prepared, teachers, tmp_path):  # noqa: F811
    steps = train(
        prepared,
        teachers["teacher"],
        tmp_path / "jsd",
        "teacher.loss=jsd_topk",
        "teacher.topk=8",
        "--trainer=sync",
    )
    assert len(steps) == 2
    for data in steps:
        assert 0 < data["actor/opd/topk_loss"] < 0.7  # ln 2 at most
        assert 0.4 < data["actor/opd/teacher_mass"] <= 1.0001  # 8 of 19 tokens
        assert 0 < data["actor/opd/student_mass"] <= 1.0001
        assert 0 < data["actor/opd/topk_overlap"] <= 1
        assert data["actor/grad_norm"] > 0
        assert "actor/kl_loss" not in data
