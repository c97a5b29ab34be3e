"""The checks of a reply, on arrays alone; tests/test_client.py sends the same lies over a socket."""

import time

import numpy as np
import pytest

from opd import wire
from opd.checks import check_reply
from opd.errors import BadReply, TeacherMismatch
from opd.question import Question

EXPECT = wire.Expect(model="m", tokenizer="t")
VOCAB = 100


def question_of(rows, starts):
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    return Question(lengths, np.array(starts, dtype=np.int32), np.concatenate(rows).astype(np.int32))


QUESTION = question_of([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [1, 1, 2])  # 2 + 1 + 2 values
VALUES = np.array([-0.5, -1.5, -2.5, -3.5, 0.0], dtype=np.float32)
TOPK_IDS = np.array([[2, 9], [8, 9], [5, 7], [8, 1], [9, 3]], dtype=np.int32)  # row 0's second token is not in it
TOPK_VALUES = np.array([[-0.5, -2], [-0.3, -1.4], [-2.5, -2.5], [-3.5, -4], [0, -20]], dtype=np.float32)


CANDIDATES = np.array([[2, 50, 50], [60, 61, 62], [5, 5, 70], [80, 8, 9], [9, 1, 2]], dtype=np.int32)
CANDIDATE_VALUES = np.array(
    [[-0.5, -1.2, -1.2], [-3, -2, -1], [-2.5, -2.5, -0.1], [-0.7, -3.5, -0.9], [0, -30, -40]], dtype=np.float32
)


def check(
    values=VALUES,
    topk=None,
    names=(10, 20, 30),
    question=QUESTION,
    vocab_size=VOCAB,
    digest=None,
    candidates=None,
    candidate_values=None,
    **fields,
):
    if candidates is not None:
        question = Question(question.lengths, question.starts, question.ids, candidates)
    digest = digest or wire.digest(*question.arrays())
    fields = {"ids_digest": digest} | fields
    reply = wire.Reply(
        id=b"", status="ok", boot="", model="m", tokenizer="t", logprobs=wire.to_bin(values, np.float32), **fields
    )
    raw = dict(zip(wire.TOPK_FRAMES, topk, strict=True)) if topk is not None else {}
    if candidate_values is not None:
        raw["candidate_logprobs"] = candidate_values
    return check_reply(
        reply,
        raw,
        question,
        digest=digest,
        expect=EXPECT,
        vocab_size=vocab_size,
        topk=topk[0].shape[1] if topk is not None else 0,
        names=names,
    )


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def test_an_honest_reply_passes_untouched():
    got = check()
    assert got.logprobs.tolist() == VALUES.tolist() and got.topk_ids is None and got.row_errors == []
    got = check(topk=(TOPK_IDS, TOPK_VALUES))
    assert got.topk_ids.tolist() == TOPK_IDS.tolist() and got.topk_logprobs.tolist() == TOPK_VALUES.tolist()


def test_the_bounds_are_inclusive():
    assert check(values=changed(VALUES, 0, 1e-5)).logprobs[0] == np.float32(1e-5)
    with pytest.raises(BadReply):
        check(values=changed(VALUES, 0, 1.1e-5))
    check(values=changed(VALUES, 0, -1e30))
    sum_is_1_001 = (TOPK_IDS, changed(TOPK_VALUES, 4, [np.log(0.6), np.log(0.4005)]))
    check(values=changed(VALUES, 4, np.log(0.6)), topk=sum_is_1_001)
    with pytest.raises(BadReply, match="row 30: the top-k probabilities"):
        too_much = (TOPK_IDS, changed(TOPK_VALUES, 4, [np.log(0.6), np.log(0.402)]))
        check(values=changed(VALUES, 4, np.log(0.6)), topk=too_much)
    check(values=changed(VALUES, 0, -0.5009), topk=(TOPK_IDS, TOPK_VALUES))
    with pytest.raises(BadReply, match="row 10: the sampled token has another value"):
        check(values=changed(VALUES, 0, -0.502), topk=(TOPK_IDS, TOPK_VALUES))


def test_a_failed_row_holds_nan_and_nothing_else():
    failed = changed(VALUES, 2, np.nan)
    got = check(values=failed, row_errors=[(1, "oom", "row 1 is too big, says row 1")])
    assert got.row_errors == [(20, "oom", "row 20 is too big, says row 1")]
    for value in (0.0, -1.0, np.inf):
        with pytest.raises(BadReply, match="failed and has values"):
            check(values=changed(VALUES, 2, value), row_errors=[(1, "oom", "")])
    with pytest.raises(BadReply, match="row 20 has log-prob nan"):
        check(values=failed)
    with pytest.raises(BadReply, match="row 30 has log-prob nan"):
        check(values=changed(failed, 3, np.nan), row_errors=[(1, "oom", "")])


def test_a_failed_row_has_no_topk_either_and_its_ids_do_not_matter():
    errors, values = [(1, "oom", "")], changed(VALUES, 2, np.nan)
    blank = (changed(TOPK_IDS, 2, -1), changed(TOPK_VALUES, 2, np.nan))
    assert check(values=values, topk=blank, row_errors=errors).topk_ids[2].tolist() == [-1, -1]
    with pytest.raises(BadReply, match="failed and has top-k values"):
        check(values=values, topk=(TOPK_IDS, TOPK_VALUES), row_errors=errors)
    with pytest.raises(BadReply, match="row 30: a top-k id is outside"):
        check(values=values, topk=(changed(blank[0], 3, 100), blank[1]), row_errors=errors)


def test_all_rows_may_fail():
    errors = [(i, "oom", "") for i in (2, 0, 1)]
    assert [e.row for e in check(values=VALUES * np.nan, row_errors=errors).row_errors] == [30, 10, 20]


@pytest.mark.parametrize(("count", "row"), [(0, 10), (1, 10), (2, 20), (3, 30), (4, 30)])
def test_a_reply_that_is_too_short_names_the_first_row_without_its_values(count, row):
    with pytest.raises(BadReply, match=f"{count} values for 5 tokens; row {row} is the first"):
        check(values=VALUES[:count])


@pytest.mark.parametrize("field", ["model", "tokenizer"])
def test_another_model_is_a_mismatch_before_anything_else(field):
    reply = wire.Reply(id=b"", status="ok", boot="", **{"model": "m", "tokenizer": "t"} | {field: "x"})
    with pytest.raises(TeacherMismatch, match="'x'"):
        check_reply(reply, {}, QUESTION, digest=b"", expect=EXPECT, vocab_size=1, topk=0, names=[0, 1, 2])


def test_another_start_is_another_question():
    other = question_of([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [2, 1, 1])
    with pytest.raises(BadReply, match="answers another question"):
        check(ids_digest=wire.digest(other.lengths, other.starts, other.ids))


def test_an_error_in_any_block_of_a_large_topk_is_found():
    """5000 positions x 64 are looked at in three blocks."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 1000, 501) for _ in range(10)]
    question = question_of(rows, [1] * 10)
    ids = np.argsort(rng.random((5000, 100)), axis=1)[:, :64].astype(np.int32) + 1000
    values = np.tile(-5 - 0.1 * np.arange(64, dtype=np.float32), (5000, 1))
    sampled = np.full(5000, -50, dtype=np.float32)
    check(values=sampled, topk=(ids, values), question=question, vocab_size=1100, names=range(10))
    for position in (0, 1, 2047, 2048, 4095, 4096, 4999):
        twice = changed(ids, (position, 63), ids[position, 0])
        with pytest.raises(BadReply, match=f"row {position // 500}: a top-k id appears twice"):
            check(values=sampled, topk=(twice, values), question=question, vocab_size=1100, names=range(10))


def test_honest_candidates_pass_with_and_without_a_topk():
    """An id that comes twice counts once: row 10's probabilities add up to 0.907, or 1.208 with the second 50."""
    for topk in (None, (TOPK_IDS, TOPK_VALUES)):
        got = check(topk=topk, candidates=CANDIDATES, candidate_values=CANDIDATE_VALUES)
        assert got.candidate_logprobs.tolist() == CANDIDATE_VALUES.tolist()
        assert (got.topk_ids is None) == (topk is None)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ((2, 2), np.nan, "row 20: a candidate's value is no finite log-prob"),
        ((2, 2), -np.inf, "row 20: a candidate's value is no finite log-prob"),
        ((4, 1), 2e-5, "row 30: a candidate's value is no finite log-prob"),
        ((0, 0), -0.502, "row 10: the sampled token has another value among the candidates"),
        ((2, 1), -2.0, "row 20: the sampled token has another value among the candidates"),
        ((3, 0), -0.3, "row 30: the probabilities of the candidates add up to more than 1"),
        (1, 0.0, "row 10: the probabilities of the candidates add up to more than 1"),
    ],
)
def test_a_candidates_value_that_cannot_be_is_refused(where, value, message):
    """Zeros are the value of a teacher that is sure of everything: the sum finds what a range check would not."""
    with pytest.raises(BadReply, match=message):
        check(candidates=CANDIDATES, candidate_values=changed(CANDIDATE_VALUES, where, value))


def test_candidates_that_are_missing_unasked_too_few_or_those_of_a_failed_row_are_refused():
    with pytest.raises(BadReply, match="top-0 and 3 candidates was asked for and the reply has the frames"):
        check(candidates=CANDIDATES)
    with pytest.raises(BadReply, match="top-0 was asked for and the reply has the frames"):
        check(candidate_values=CANDIDATE_VALUES)
    with pytest.raises(BadReply, match="3 candidates of 5 tokens have 12 values"):
        check(candidates=CANDIDATES, candidate_values=CANDIDATE_VALUES[:4])
    failed = {"values": changed(VALUES, 2, np.nan), "row_errors": [(1, "oom", "")], "candidates": CANDIDATES}
    with pytest.raises(BadReply, match="failed and has values of candidates"):
        check(candidate_values=CANDIDATE_VALUES, **failed)
    assert check(candidate_values=changed(CANDIDATE_VALUES, 2, np.nan), **failed).row_errors[0].row == 20


def test_an_error_in_any_block_of_many_candidates_is_found():
    question = question_of([np.arange(501) % 1000 for _ in range(10)], [1] * 10)
    candidates = np.tile(np.arange(64, dtype=np.int32) + 1000, (5000, 1))
    values = np.full((5000, 64), -5, dtype=np.float32)
    settings = {"values": np.full(5000, -7, np.float32), "question": question, "names": range(10)}
    check(candidates=candidates, candidate_values=values, **settings)
    for position in (0, 2047, 2048, 4999):
        wrong = changed(values, (position, 63), np.nan)
        with pytest.raises(BadReply, match=f"row {position // 500}: a candidate's value"):
            check(candidates=candidates, candidate_values=wrong, **settings)


def test_all_checks_together_cost_milliseconds():
    """128 rows x 1024 tokens: 0.5 MB of values, or 67 MB with top-64. Processor time, and ten times what it is."""
    rng = np.random.default_rng(0)
    question = question_of([rng.integers(0, 32_000, 1025) for _ in range(128)], [1] * 128)
    total, topk = 128 * 1024, 64
    values = np.full(total, -2, dtype=np.float32)
    ids = (rng.integers(0, 31_000, (total, 1)) + rng.permutation(64) * 7 + 32_000).astype(np.int32)
    tops = np.tile(-3 - 0.5 * np.arange(topk, dtype=np.float32), (total, 1))
    tops[:, 0] = -2
    ids[:, 0] = np.concatenate([row[1:] for row in question.rows()])

    def best_ms(times, **settings):
        costs = []
        for _ in range(times):
            began = time.process_time()
            check(values=values, question=question, vocab_size=64_000, names=range(128), digest=b"x" * 16, **settings)
            costs.append(1000 * (time.process_time() - began))
        return min(costs)

    plain, top = best_ms(10), best_ms(3, topk=(ids, tops))
    candidates = best_ms(3, candidates=ids, candidate_values=tops)
    print(f"sampled only: {plain:.2f} ms; with top-64: {top:.0f} ms; with 64 candidates: {candidates:.0f} ms")
    assert plain < 5 and top < 800 and candidates < 800
