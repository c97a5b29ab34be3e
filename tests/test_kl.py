"""Sampled-token KL estimates against hand-made numbers, and what each of verl's KL losses does to the gradient."""

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import kl_penalty

from opd import kl
from opd.config_checks import KL_TYPES, LINEAR_KL_TYPES
from opd.errors import TeacherError


def test_estimates_of_a_two_token_distribution_are_the_reverse_kl():
    """Student (3/4, 1/4), teacher (1/2, 1/2): KL(student || teacher) = 3/4 ln 3/2 + 1/4 ln 1/2 = 0.13081."""
    student_T = np.log(np.array([0.75, 0.75, 0.75, 0.25]))  # sampled in exactly the student's proportions
    teacher_T = np.log(np.full(4, 0.5))
    got = kl.estimates(student_T, teacher_T)
    assert got["opd/reverse_kl_k1"] == pytest.approx(0.130812, abs=1e-6)
    assert got["opd/reverse_kl_k3"] == pytest.approx(0.130812, abs=1e-6)  # E[exp(x)] = 1 here
    assert got["opd/teacher_logprob"] == pytest.approx(math.log(0.5))


def test_the_opposite_direction_has_another_value():
    """KL(teacher || student) = 1/2 ln 2/3 + 1/2 ln 2 = 0.14384: a formula with the sides swapped would show."""
    got = kl.estimates(np.log(np.array([0.5, 0.5])), np.log(np.array([0.75, 0.25])))
    assert got["opd/reverse_kl_k1"] == pytest.approx(0.143841, abs=1e-6)


def test_no_tokens_give_no_number():
    assert kl.estimates(np.zeros(0), np.zeros(0)) == {}


def test_tokens_without_a_k3_gradient_are_counted():
    got = kl.estimates(np.array([-3.0, -1.0, -1.0, -1.0]), np.array([-0.1, -13.0, -1.0, -2.0]))
    assert got["opd/k3_dead_fraction"] == 0.5


UNSURE = np.linspace(-3.0, 0.0, 64)  # a student's log-probs of what it sampled


@pytest.mark.parametrize("value", [-0.5, -math.log(1000), 0.0, -1e-8])
def test_a_teacher_that_says_the_same_about_every_token_is_refused(value):
    with pytest.raises(TeacherError, match="64 tokens"):
        kl.refuse_collapsed(np.full(64, value, dtype=np.float32), UNSURE, vocab_size=1000)


def test_uniform_up_to_rounding_is_a_collapse_too_and_a_narrow_range_elsewhere_is_not():
    """bfloat16 rounds a uniform distribution's values apart; -log 1000 = -6.9078."""
    rounded = np.linspace(-6.912, -6.903, 64)
    with pytest.raises(TeacherError, match="of a uniform distribution"):
        kl.refuse_collapsed(rounded, UNSURE, vocab_size=1000)
    kl.refuse_collapsed(rounded + 0.1, UNSURE, vocab_size=1000)


def test_a_working_teacher_and_a_tiny_batch_are_not_refused():
    kl.refuse_collapsed(np.linspace(-3, 0, 64), UNSURE, vocab_size=1000)
    kl.refuse_collapsed(np.full(63, -1.0), UNSURE[:63], vocab_size=1000)


def test_a_certain_teacher_is_believed_where_the_student_is_nearly_certain_too():
    """A text that both know by heart; float32 rounds such log-probs to 0, or to multiples of 1e-7."""
    sure = np.full(64, -0.02)
    for certain in (np.zeros(64), np.full(64, -1e-8), np.linspace(-9e-5, 0, 64)):
        kl.refuse_collapsed(certain.astype(np.float32), sure, vocab_size=1000)
    with pytest.raises(TeacherError, match=r"the value -0\.020000 for every token"):
        kl.refuse_collapsed(np.full(64, -0.02), sure, vocab_size=1000)  # the same everywhere, and not certain


def gradient(kl_type: str, x: float) -> float:
    """d loss / d student log-prob where teacher - student = x."""
    student = torch.tensor([-2.0], requires_grad=True)
    kl_penalty(student, torch.tensor([-2.0 + x]), kl_type).sum().backward()
    return float(student.grad)


@pytest.mark.parametrize("x", [-12.0, -3.0, -0.5, 0.5, 2.0, 3.0, 12.0])
def test_gradients_are_those_of_the_table_in_the_readme(x):
    """README, "Which KL": the one table a user chooses from."""
    assert gradient("k1", x) == 1.0  # whatever the teacher says
    assert gradient("k2", x) == pytest.approx(-x)
    assert gradient("k3+", x) == pytest.approx(-x)
    assert gradient("k1+", x) == pytest.approx(-x)
    assert gradient("abs", x) == -math.copysign(1.0, x)
    dead = x < kl.K3_LOW or x > kl.K3_HIGH
    assert gradient("k3", x) == pytest.approx(0.0 if dead else 1.0 - math.exp(x), rel=1e-4)


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_the_mean_of_two_teachers_has_the_weighted_gradient_exactly_where_the_routes_allow_it(kl_type):
    """Teachers at x = 0.5 and x = -2, weights 3/4 and 1/4: the mean is at x = -1/8."""
    towards_each = 0.75 * gradient(kl_type, 0.5) + 0.25 * gradient(kl_type, -2.0)
    towards_the_mean = gradient(kl_type, 0.75 * 0.5 + 0.25 * -2.0)
    assert (towards_the_mean == pytest.approx(towards_each, abs=1e-6)) == (kl_type in LINEAR_KL_TYPES)


@pytest.mark.parametrize("kl_type", KL_TYPES)
def test_every_accepted_kl_type_exists_in_verl_and_follows_the_teacher(kl_type):
    assert gradient(kl_type, 0.5) != gradient(kl_type, -1.0)
