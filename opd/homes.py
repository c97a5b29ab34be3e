"""Which replica was asked to prefetch a prompt's rows: a later `score` of them goes there, where their values are.

Not covered: what became of it. A replica that forgot, or that is gone, costs time and no values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

MAX_PROMPTS = 65_536


class Homes:
    """Addresses by the digest of a prompt; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._homes: dict[bytes, str] = {}
        self._tokens: Counter[str] = Counter()  # prefetched so far

    def find(self, prompt: bytes) -> str | None:
        return self._homes.get(prompt)

    def choose(self, prompts: dict[bytes, int], up: Sequence[str]) -> dict[bytes, str]:
        """An address for each prompt: the one it has if that is up, else the one with the fewest tokens.

        Args:
            prompts: ids of all rows of each prompt.
            up: addresses to choose from, at least one.
        """
        # one that was away for a while catches up by no more than this call's share
        least = max(self._tokens[address] for address in up) - sum(prompts.values())
        load = {address: max(self._tokens[address], least) for address in up}
        chosen = {}
        for prompt, tokens in prompts.items():
            home = self._homes.get(prompt)
            if home not in load or home is None:
                home = min(load, key=lambda address: load[address])
            load[home] += tokens
            chosen[prompt] = home
        self._tokens.update({address: load[address] - self._tokens[address] for address in up})
        return chosen

    def remember(self, prompt: bytes, address: str) -> None:
        self._homes.pop(prompt, None)
        self._homes[prompt] = address
        while len(self._homes) > MAX_PROMPTS:
            del self._homes[next(iter(self._homes))]
