"""Which replica keeps a prompt's rows: a rule that needs no memory, so that several processes agree without talking.

Rows are prefetched by the processes that run the agent loops, and asked for by the trainer's. Rendezvous hashing: each
address draws a number for the prompt, and the largest wins. When one goes down only its own prompts move; when it comes
back they return. A rule that is followed on one side only costs time and no values.

Not covered: load. Hashing spreads prompts evenly on average, some dozens of them over 8 replicas up to half above that.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash


def home_of(prompt: bytes, up: Sequence[str]) -> str:
    """The address among `up`, at least one and in any order, where rows with this prompt digest belong."""
    return max(up, key=lambda address: xxhash.xxh3_64_intdigest(prompt + address.encode()))
