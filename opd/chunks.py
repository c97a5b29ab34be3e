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
from xxhash import xxh3_128_digest

from opd.wire import Limits, reply_bytes

MAX_REPLY_BYTES = 512 << 20  # a larger one is cut off by our own socket, whatever the server would send
JOINED_REPLY_BYTES = 8 << 20  # prompts share a request up to here: beyond, new memory costs more than a request
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

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, tokens, scored positions."""
        return len(self.rows), self.tokens, self.scored

    def add(self, other: Chunk) -> None:
        self.rows += other.rows
        self.tokens += other.tokens
        self.scored += other.scored


def prompt_digests(ids: np.ndarray, ends: Sequence[int], starts: Sequence[int]) -> list[bytes]:
    """A name per row, equal where the prompts are equal.

    Args:
        ids: int32 [S], the rows one behind the other.
        ends: [B + 1], where each row ends, and before them 0.
        starts: [B], lengths of the prompts.
    """
    view = ids.data.cast("B")
    return [xxh3_128_digest(view[4 * end : 4 * (end + start)]) for end, start in zip(ends[:-1], starts, strict=True)]


def number(names: Sequence[bytes]) -> list[int]:
    """A number per name, in the order of first appearance."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault(name, len(seen)) for name in names]


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
        """Whether rows of one prompt may be one request."""
        return tokens <= self.max_tokens and self.fits(num_rows, tokens, scored)

    def may_join(self, num_rows: int, tokens: int, scored: int) -> bool:
        """Whether what might be two requests should be one."""
        nbytes = reply_bytes(scored, self.topk, self.num_candidates)
        return nbytes <= JOINED_REPLY_BYTES and self.has_room(num_rows, tokens, scored)


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
    for row in wanted:
        members.setdefault(groups[row], []).append(row)

    def chunk_of(rows: list[int], family: int | None = None) -> Chunk:
        tokens = sum([lengths[row] for row in rows])
        return Chunk(rows, tokens, tokens - sum([starts[row] for row in rows]), family)

    pieces: list[Chunk] = []  # of prompts that exceed one request
    whole: list[Chunk] = []  # prompts that fit one
    too_big: list[int] = []
    for group, rows in members.items():
        chunk = chunk_of(rows)
        if not caps.has_room(*chunk.size):
            fits = {row: caps.fits(1, lengths[row], lengths[row] - starts[row]) for row in rows}
            too_big += [row for row in rows if not fits[row]]
            chunk = chunk_of([row for row in rows if fits[row]])
        if not caps.has_room(*chunk.size):
            family = group if len(chunk.rows) > 1 else None
            pieces += _joined([chunk_of([row], family) for row in chunk.rows], caps)
        elif chunk.rows:
            whole.append(chunk)
    return pieces + _joined(whole, caps), too_big


def _joined(chunks: Sequence[Chunk], caps: Caps) -> list[Chunk]:
    """Neighbours together, while there is room."""
    joined: list[Chunk] = []
    for chunk in chunks:
        if joined and caps.may_join(*map(sum, zip(joined[-1].size, chunk.size, strict=True))):
            joined[-1].add(chunk)
        else:
            joined.append(chunk)
    return joined
