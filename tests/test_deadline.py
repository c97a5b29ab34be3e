"""Deadlines and pauses."""

import random
import time

import pytest

from opd.deadline import Backoff, Deadline


def test_a_deadline_counts_down_and_stays_at_zero():
    deadline = Deadline(0.05)
    assert 0 < deadline.left_s <= 0.05 and not deadline.passed
    time.sleep(0.06)
    assert deadline.passed and deadline.left_s == 0.0 and deadline.elapsed_s >= 0.06


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), 1e300])
def test_a_timeout_that_would_never_end_or_never_begin_is_refused(timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be finite and > 0, at most 1e"):
        Deadline(timeout_s)


@pytest.mark.parametrize(
    ("elapsed_s", "attempt_s"),
    [(0, 300), (100, 250), (300, 150), (400, 150), (500, 100), (599, 1), (700, 0)],
)
def test_an_attempt_gets_half_of_what_is_left_but_a_quarter_of_the_whole_at_least(monkeypatch, elapsed_s, attempt_s):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = Deadline(600)
    now += elapsed_s
    assert deadline.attempt_s() == attempt_s


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert Deadline(10).left_s > 9


def test_pauses_are_random_below_a_bound_that_doubles_up_to_a_cap():
    backoff = Backoff(first_s=0.1, most_s=5.0, rng=random.Random(0))
    assert backoff.pause_s(0) == 0.0
    for failures, bound in [(1, 0.1), (2, 0.2), (3, 0.4), (6, 3.2), (7, 5.0), (10_000, 5.0)]:
        pauses = [backoff.pause_s(failures) for _ in range(500)]
        assert 0 <= min(pauses) < 0.1 * bound and 0.9 * bound < max(pauses) <= bound


def test_pauses_can_be_repeated_from_a_seed():
    first, second = (Backoff(first_s=0.1, most_s=5.0, rng=random.Random(7)) for _ in range(2))
    assert [first.pause_s(i) for i in range(9)] == [second.pause_s(i) for i in range(9)]
