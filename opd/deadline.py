"""Time: one deadline for a whole call, and the pauses between its attempts.

Not covered: wall clocks. Everything here is monotonic, so a clock that jumps changes nothing.
"""

from __future__ import annotations

import random
import time

MAX_S = 1e9  # 31 years: locks and the wire cannot count much further


def check_seconds(name: str, value: float) -> float:
    """A length of time that a caller gave.

    Raises:
        ValueError: it would never end, or never begin.
    """
    if not 0 < value <= MAX_S:  # NaN fails both
        raise ValueError(f"{name} must be finite and > 0, at most {MAX_S:g} seconds; it is {value!r}")
    return float(value)


class Deadline:
    """The end of a call. Made once, handed to everything that waits."""

    def __init__(self, timeout_s: float):
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def left_s(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self.timeout_s - self.elapsed_s)

    @property
    def passed(self) -> bool:
        return self.left_s == 0.0

    def attempt_s(self) -> float:
        """How long one attempt may take: half of what is left, so that a second one has as long as the first.

        Never less than a quarter of the whole, or a slow teacher would be cut off again and again towards the end.
        """
        left_s = self.left_s
        return min(left_s, max(left_s / 2, self.timeout_s / 4))


class Backoff:
    """Full-jitter exponential pauses: clients that failed together do not come back together."""

    def __init__(self, *, first_s: float, most_s: float, rng: random.Random):
        self._first_s, self._most_s, self._rng = first_s, most_s, rng

    def pause_s(self, failures: int) -> float:
        """A random pause after that many failures in a row; 0 after none."""
        if failures < 1:
            return 0.0
        return self._rng.uniform(0.0, min(self._most_s, self._first_s * 2.0 ** min(failures - 1, 30)))
