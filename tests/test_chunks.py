"""How a batch is cut into requests: golden plans."""

import time

import numpy as np
import pytest

from opd.chunks import ENVELOPE_BYTES, Caps, common_limits, number, plan, prompt_digests
from opd.wire import Limits


def cut(lengths, groups, *, max_tokens=100, starts=None, topk=0, candidates=0, wanted=None, **limits):
    caps = Caps(max_tokens, Limits(**limits), topk, candidates)
    starts = starts or [1] * len(lengths)
    chunks, too_big = plan(range(len(lengths)) if wanted is None else wanted, lengths, starts, groups, caps)
    return [(chunk.rows, chunk.family) for chunk in chunks], too_big


def test_prompts_are_equal_when_their_ids_and_their_length_are():
    ids = np.array([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 2, 1, 3], dtype=np.int32)
    assert number(prompt_digests(ids, [0, 3, 6, 9, 11, 14], [2, 2, 1, 2, 2])) == [0, 0, 1, 0, 2]


PLANS = {
    "everything fits": ([10, 10, 10], [0, 1, 2], {}, [([0, 1, 2], None)]),
    "nothing to do": ([], [], {}, []),
    "interleaved prompts come together": ([10] * 4, [0, 1, 0, 1], {}, [([0, 2, 1, 3], None)]),
    "a prompt is not parted when it fits a request of its own": (
        [40, 40, 40, 40],
        [0, 1, 1, 2],
        {},
        [([0], None), ([1, 2], None), ([3], None)],
    ),
    "a prompt that exceeds a request is cut into a family": (
        [40, 40, 40, 10, 10],
        [0, 0, 0, 1, 1],
        {},
        [([0, 1], 0), ([2], 0), ([3, 4], None)],
    ),
    "a row above the budget goes alone": ([10, 300, 10], [0, 1, 2], {}, [([1], None), ([0, 2], None)]),
    "the budget is inclusive": ([50, 50, 1], [0, 1, 2], {}, [([0, 1], None), ([2], None)]),
    "the limit on rows is kept": ([1, 1, 1], [0, 1, 2], {"max_rows": 2}, [([0, 1], None), ([2], None)]),
    "the limit on replies is kept": ([11] * 3, [0, 1, 2], {"max_reply_bytes": 80}, [([0, 1], None), ([2], None)]),
    "and counts the top-k": ([11] * 3, [0, 1, 2], {"max_reply_bytes": 240, "topk": 1}, [([0, 1], None), ([2], None)]),
    "and the candidates": (
        [11] * 3,
        [0, 1, 2],
        {"max_reply_bytes": 160, "candidates": 1},
        [([0, 1], None), ([2], None)],
    ),
    "prompts with large replies go apart": ([11] * 2, [0, 1], {"topk": 65_536}, [([0], None), ([1], None)]),
    "but a prompt is not parted for that": ([11] * 2, [0, 0], {"topk": 65_536}, [([0, 1], None)]),
    "candidates count in the request too": (
        [11] * 3,
        [0, 1, 2],
        {"max_request_bytes": ENVELOPE_BYTES + 2 * (8 + 44 + 3 * 40), "candidates": 3},
        [([0, 1], None), ([2], None)],
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_batch_is_cut_as_planned_by_hand(name):
    lengths, groups, settings, chunks = PLANS[name]
    assert cut(lengths, groups, **settings) == (chunks, [])


def test_rows_that_no_request_can_hold_are_set_aside():
    limit = ENVELOPE_BYTES + 8 + 4 * 100
    assert cut([100, 101, 5], [0, 0, 0], max_tokens=1000, max_request_bytes=limit) == ([([0], 0), ([2], 0)], [1])


def test_only_the_wanted_rows_are_cut():
    assert cut([10] * 4, [0, 0, 0, 0], wanted=[1, 3]) == ([([1, 3], None)], [])


def test_a_chunk_knows_its_tokens_and_its_values():
    chunks, _ = plan([0, 1], [10, 20], [4, 5], [0, 1], Caps(100, Limits(), 0))
    assert (chunks[0].tokens, chunks[0].scored) == (30, 21)


def test_the_limits_of_several_servers_are_the_smallest_of_each_and_ours_on_top():
    common = common_limits([Limits(max_rows=5, max_reply_bytes=2**40), Limits(max_rows=9, max_request_bytes=7)])
    assert (common.max_rows, common.max_request_bytes, common.max_reply_bytes) == (5, 7, 512 << 20)


def test_large_batches_are_cut_in_milliseconds():
    began = time.process_time()
    chunks, _ = plan(
        range(16_384), [1000] * 16_384, [100] * 16_384, [i // 8 for i in range(16_384)], Caps(65_536, Limits(), 0)
    )
    assert len(chunks) == 256 and time.process_time() - began < 0.5
