"""Which rows share a forward pass; plain Python, and the model never appears.

The plan puts rows with equal prompts (ids[:start]) into groups, computes the keys and values of a group's prompt once,
and packs forwards of similar lengths under a token budget. A forward costs its tokens, padding included, plus a fixed
`call_tokens`, the work that the device does in the time it takes to get one forward going; that one number decides
when a group shares its prompt, and when padding a row is cheaper than a forward of its own.

Shapes: L = ids in the row, start = first scored position, N = L - start scored positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from opd.scoring.scorer import Row


class Shared(NamedTuple):
    """Prompts of one length, and the rows that go on from them."""

    prompts: list[int]  # of each group its first row, whose ids[:start] is the prompt
    prompt_of: dict[int, int]  # row -> the entry of `prompts` that it goes on from
    batches: list[list[int]]  # rows of one forward of ids[start:L-1]; rows with N = 1 need none and come last


class Plan(NamedTuple):
    """Every distinct row with N >= 1 is in exactly one part of it."""

    shared: list[Shared]
    plain: list[list[int]]  # rows of one forward of ids[:L-1]
    same_as: list[int]  # for each row the first row that equals it


def make_plan(rows: Sequence[Row], *, max_tokens: int, call_tokens: int, share: bool = True) -> Plan:
    """Arrange the forwards for `rows`.

    Args:
        rows: what to score.
        max_tokens: most ids in one forward, padding included; a longer row goes alone.
        call_tokens: the cost of starting a forward, in tokens.
        share: whether prompts may be shared at all.
    """
    first: dict[tuple[int, bytes, bytes], int] = {}
    same_as = [first.setdefault(_name(row), index) for index, row in enumerate(rows)]
    distinct = [index for index in first.values() if len(rows[index].ids) > rows[index].start]
    groups: dict[bytes, list[int]] = {}
    for index in distinct:
        groups.setdefault(rows[index].ids[: rows[index].start].tobytes(), []).append(index)
    by_length: dict[int, list[list[int]]] = {}
    alone: list[int] = []
    for members in groups.values():
        if share and len(members) > 1:
            by_length.setdefault(rows[members[0]].start, []).append(members)
        else:
            alone += members
    shared: list[Shared] = []
    for prompt_length, same_length in sorted(by_length.items()):
        if _pays(same_length, prompt_length, max_tokens, call_tokens):
            per_part = max(1, max_tokens // prompt_length)
            parts = [same_length[i : i + per_part] for i in range(0, len(same_length), per_part)]
            shared += [_share(rows, part, max_tokens, call_tokens) for part in parts]
        else:
            alone += [index for members in same_length for index in members]
    inputs = [len(rows[index].ids) - 1 for index in alone]
    plain = [[alone[i] for i in batch] for batch in pack(inputs, max_tokens=max_tokens, call_tokens=call_tokens)]
    return Plan(shared, plain, same_as)


def _name(row: Row) -> tuple[int, bytes, bytes]:
    """Equal for rows that get the same values."""
    return row.start, row.ids.tobytes(), row.candidates.tobytes() if row.candidates is not None else b""


def pack(lengths: Sequence[int], *, max_tokens: int, call_tokens: int) -> list[list[int]]:
    """Put sequences into padded batches, longest first; returns indices into `lengths`.

    A batch takes the next sequence while it fits into max_tokens and the padding costs less than another forward.
    """
    batches: list[list[int]] = []
    width = padding = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padding += width - lengths[index]
        if batches and (len(batches[-1]) + 1) * width <= max_tokens and padding <= call_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            width, padding = lengths[index], 0
    return batches


def _pays(groups: list[list[int]], prompt_length: int, max_tokens: int, call_tokens: int) -> bool:
    saved = prompt_length * sum(len(members) - 1 for members in groups)
    forwards = -(-len(groups) * prompt_length // max_tokens)
    return saved > call_tokens * forwards


def _share(rows: Sequence[Row], groups: list[list[int]], max_tokens: int, call_tokens: int) -> Shared:
    prompt_of = {index: group[0] for group in groups for index in group}
    inputs = {index: len(rows[index].ids) - rows[index].start - 1 for index in prompt_of}
    longer = [index for index in prompt_of if inputs[index]]
    packed = pack([inputs[index] for index in longer], max_tokens=max_tokens, call_tokens=call_tokens)
    batches = [[longer[i] for i in batch] for batch in packed]
    done = [index for index in prompt_of if not inputs[index]]
    return Shared([group[0] for group in groups], prompt_of, batches + ([done] if done else []))
