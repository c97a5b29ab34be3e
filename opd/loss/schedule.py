"""The coefficient of the teacher's loss over the steps of a run.

Constant, linear and cosine depend on the step alone, so a resumed run goes on where it was. The adaptive one follows
the measured KL; opd/coefficient_record.py keeps it for a resumed run.
"""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine", "adaptive")

# Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2: the error is clipped to 20 %, and the gain is 0.1,
# so the coefficient changes by at most 2 % a step
MAX_ERROR, GAIN = 0.2, 0.1


class Coefficient:
    """The coefficient of each step.

    Args:
        kind: one of SCHEDULES.
        start: at step 1, also of a schedule of one step: a run of one step trains with the weight that it was given.
        end: linear and cosine arrive there at step `steps`, and stay; with one step, from step 2 on.
        steps: length of the way from start to end.
        target_kl: adaptive: nats per token; while the KL is above it, the coefficient grows.
    """

    def __init__(
        self, kind: str, start: float, *, end: float = 0.0, steps: int | None = None, target_kl: float | None = None
    ):
        if kind not in SCHEDULES:
            raise ValueError(f"schedule {kind!r} is not one of {SCHEDULES}")
        if kind in ("linear", "cosine") and (steps is None or steps < 1):
            raise ValueError(f"a {kind} schedule needs a number of steps >= 1, not {steps}")
        if kind == "adaptive" and (target_kl is None or target_kl <= 0 or start <= 0):
            raise ValueError(f"an adaptive coefficient needs start={start} and target_kl={target_kl} above 0")
        self.kind, self.start, self.end, self.steps, self.target_kl = kind, start, end, steps, target_kl
        self._adapted = start

    def at(self, step: int) -> float:
        """The coefficient of a step, counted from 1 as verl does."""
        if self.kind == "constant":
            return self.start
        if self.kind == "adaptive":
            return self._adapted
        assert self.steps is not None
        way = min(1.0, (step - 1) / max(1, self.steps - 1))
        if self.kind == "cosine":
            way = (1.0 - math.cos(math.pi * way)) / 2
        return self.start + way * (self.end - self.start)

    def resume(self, coef: float) -> None:
        """Go on with the coefficient that an adaptive schedule had come to."""
        self._adapted = coef

    def observe(self, kl: float) -> None:
        """Take a step's measured KL into account, in nats per token; only the adaptive schedule does anything."""
        if self.kind == "adaptive":
            assert self.target_kl is not None
            error = min(MAX_ERROR, max(-MAX_ERROR, kl / self.target_kl - 1.0))
            self._adapted *= 1.0 + GAIN * error
