"""The coefficient over the steps, against numbers worked out by hand."""

import math

import pytest

from opd.loss.schedule import Coefficient


def test_a_constant_stays():
    assert [Coefficient("constant", 0.7).at(step) for step in (1, 2, 1000)] == [0.7, 0.7, 0.7]


def test_linear_goes_from_start_to_end_and_stays_there():
    coefficient = Coefficient("linear", 1.0, end=0.2, steps=5)
    assert [coefficient.at(step) for step in (1, 2, 3, 4, 5, 6, 99)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_is_flat_at_both_ends():
    coefficient = Coefficient("cosine", 1.0, end=0.0, steps=5)
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert [coefficient.at(step) for step in (1, 2, 3, 4, 5, 6)] == pytest.approx([1, quarter, 0.5, 1 - quarter, 0, 0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_of_one_step_has_its_start_at_that_step_and_its_end_after_it(kind):
    assert [Coefficient(kind, 1.0, end=0.2, steps=1).at(step) for step in (1, 2, 3)] == pytest.approx([1, 0.2, 0.2])


def test_a_schedule_may_rise():
    assert Coefficient("linear", 0.0, end=1.0, steps=3).at(2) == 0.5


def test_the_same_step_has_the_same_coefficient_in_a_resumed_run():
    whole, resumed = (Coefficient("cosine", 1.0, end=0.1, steps=10) for _ in range(2))
    for step in range(1, 7):
        whole.at(step)
        whole.observe(0.5)
    assert whole.at(7) == resumed.at(7)


def test_the_adaptive_coefficient_follows_ziegler():
    """Error clipped to 0.2, gain 0.1: a factor of 1.02 far above the target, 0.98 far below, 1 + error / 10 else."""
    coefficient = Coefficient("adaptive", 2.0, target_kl=0.1)
    assert coefficient.at(1) == 2.0
    coefficient.observe(5.0)
    assert coefficient.at(2) == pytest.approx(2.0 * 1.02)
    coefficient.observe(0.11)
    assert coefficient.at(3) == pytest.approx(2.0 * 1.02 * 1.01)
    coefficient.observe(-0.01)  # an estimate may be negative
    assert coefficient.at(4) == pytest.approx(2.0 * 1.02 * 1.01 * 0.98)


def test_at_its_target_the_adaptive_coefficient_rests():
    coefficient = Coefficient("adaptive", 2.0, target_kl=0.1)
    coefficient.observe(0.1)
    assert coefficient.at(2) == 2.0


@pytest.mark.parametrize(
    "arguments", [("steps", 1.0), ("linear", 1.0), ("adaptive", 1.0), ("adaptive", 0.0, 0.0, None, 0.1)]
)
def test_what_cannot_be_a_schedule_is_refused(arguments):
    kind, start, *rest = arguments
    with pytest.raises(ValueError, match=kind):
        Coefficient(kind, start, **dict(zip(("end", "steps", "target_kl"), rest, strict=False)))
