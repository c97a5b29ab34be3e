"""Cuts a batch into requests.

A prompt's rows stay together and adjacent, so that the teacher computes the prompt once, and several requests per
replica can be under way at the same time. Only a prompt whose rows exceed a whole request is cut, and then its pieces
are a family: they go to the same replica.

Shapes: B = rows of the caller's batch.

Not covered: who gets which request; the client decides that when a replica has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from opd.wire import Limits, reply_bytes

MAX_REPLY_BYTES = 512 << 20  # a larger one is cut off by our own socket, whatever the server would send
ENVELOPE_BYTES = 8192  # at most what a request or a reply needs besides its arrays


@dataclass(eq=False)
class Chunk:
    """Rows that travel in one request, and how it has gone so far."""

    rows: list[int]  # indices into the caller's batch
    tokens: int
    scored: int  # positions that get a value
    family: int | None = None  # set on the pieces of one prompt that had to be cut
    failures: int = 0
    bad_replies: int = 0
    not_before: float = 0.0  # time.monotonic() of its next attempt
    avoid: str = ""  # address where it failed last
    prefer: str = ""  # address that was asked to prefetch these rows


def prompt_digests(rows: Sequence[np.ndarray], starts: Sequence[int]) -> list[bytes]:
    """A name per row, equal where the prompts ids[:start] are equal."""
    return [xxhash.xxh3_128_digest(row[:start].data) for row, start in zip(rows, starts, strict=True)]


def number(names: Sequence[bytes]) -> list[int]:
    """A number per name, in the order of first appearance."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault(name, len(seen)) for name in names]


def group_by_prompt(rows: Sequence[np.ndarray], starts: Sequence[int]) -> list[int]:
    """A number per row, equal where the prompts ids[:start] are equal, in the order of first appearance."""
    return number(prompt_digests(rows, starts))


def request_bytes(num_rows: int, tokens: int, candidates: int = 0) -> int:
    """`candidates` of all positions together."""
    return 4 * (tokens + candidates) + 8 * num_rows + ENVELOPE_BYTES


def common_limits(known: Sequence[Limits]) -> Limits:
    """What all of these servers take, and what our own sockets take from them."""
    limits = [*known, Limits(max_request_bytes=2**40, max_reply_bytes=MAX_REPLY_BYTES, max_rows=2**40)]
    return Limits(
        max_request_bytes=min(limit.max_request_bytes for limit in limits),
        max_reply_bytes=min(limit.max_reply_bytes for limit in limits),
        max_rows=min(limit.max_rows for limit in limits),
    )


@dataclass(frozen=True)
class Caps:
    """What one request may hold. `max_tokens` gives way for a single row that is longer; the others never do."""

    max_tokens: int
    limits: Limits
    topk: int
    num_candidates: int = 0  # per position

    def fits(self, num_rows: int, tokens: int, scored: int) -> bool:
        """Whether a server with these limits takes the request."""
        return (
            num_rows <= self.limits.max_rows
            and request_bytes(num_rows, tokens, scored * self.num_candidates) <= self.limits.max_request_bytes
            and reply_bytes(scored, self.topk, self.num_candidates) <= self.limits.max_reply_bytes
        )

    def has_room(self, num_rows: int, tokens: int, scored: int) -> bool:
        return tokens <= self.max_tokens and self.fits(num_rows, tokens, scored)


def plan(
    wanted: Sequence[int], lengths: Sequence[int], starts: Sequence[int], groups: Sequence[int], caps: Caps
) -> tuple[list[Chunk], list[int]]:
    """Cut rows into chunks.

    Args:
        wanted: the rows to send, as indices into the batch.
        lengths, starts, groups: of the whole batch [B].

    Returns:
        The chunks, and the rows that no request can hold even alone.
    """
    members: dict[int, list[int]] = {}
    too_big = []
    for row in wanted:
        if caps.fits(1, lengths[row], lengths[row] - starts[row]):
            members.setdefault(groups[row], []).append(row)
        else:
            too_big.append(row)

    def size(rows: list[int]) -> tuple[int, int, int]:
        tokens = sum(lengths[row] for row in rows)
        return len(rows), tokens, tokens - sum(starts[row] for row in rows)

    def add(rows: list[int], family: int | None = None) -> None:
        if rows:
            chunks.append(Chunk(rows, *size(rows)[1:], family=family))

    def packed(parts: list[list[int]]) -> list[list[int]]:
        """Join neighbours while there is room."""
        joined: list[list[int]] = []
        total = (0, 0, 0)
        for part in parts:
            more = size(part)
            both = (total[0] + more[0], total[1] + more[1], total[2] + more[2])
            if joined and caps.has_room(*both):
                joined[-1].extend(part)
                total = both
            else:
                joined.append(list(part))
                total = more
        return joined

    chunks: list[Chunk] = []
    whole: list[list[int]] = []  # prompts that fit one request
    for group, rows in members.items():
        if caps.has_room(*size(rows)):
            whole.append(rows)
            continue
        for piece in packed([[row] for row in rows]):
            add(piece, family=group if len(rows) > 1 else None)
    for piece in packed(whole):
        add(piece)
    return chunks, too_big
