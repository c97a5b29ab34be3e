"""The client against teachers that lie, stall, restart and die: real sockets, honest value of a token = -id / 1000."""

import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zmq
from conftest import CHILD_ENV, wait_until
from fake_teacher import VOCAB, FakeTeacher, default_rows, honest_candidates, honest_topk, honest_values

from opd import wire
from opd.client import TeacherClient
from opd.errors import (
    BadReply,
    ConfigError,
    OPDError,
    RequestRefused,
    RowsFailed,
    TeacherMismatch,
    TeacherUnavailable,
)
from opd.question import Question
from opd.replica import Timing

QUICK = Timing(ping_every_s=0.05, ask_every_s=0.05, silent_after_s=1.5, first_backoff_s=0.01, most_backoff_s=0.1)


def client_of(*teachers, timing=QUICK, **settings):
    return TeacherClient([t if isinstance(t, str) else t.address for t in teachers], timing=timing, seed=0, **settings)


def assert_honest(scores, rows, starts):
    assert len(scores.logprobs) == len(rows)
    for row, start, values in zip(rows, starts, scores.logprobs, strict=True):
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, (-row[start:] / 1000).astype(np.float32))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def first_then(action, times=1):
    """Do `action` for the first requests and be honest from then on."""

    def on_score(fake, envelope, request, question):
        if len(fake.requests) <= times:
            action(fake, envelope, request, question)
        else:
            fake.be_honest(envelope, request, question)

    return on_score


def swallow(fake, envelope, request, question):
    pass


# ------------------------------------------------------------------------------------------------ values and order


def test_values_come_back_in_the_callers_order_whatever_the_requests_were():
    rows, starts = default_rows(40)
    with FakeTeacher() as teacher, client_of(teacher, max_tokens_per_request=30) as client:
        scores = client.score(rows, starts, timeout_s=10)
        assert_honest(scores, rows, starts)
        assert len(teacher.requests) == scores.stats.requests > 8
        assert scores.stats.rows == 40 and scores.stats.tokens == sum(map(len, rows)) and scores.stats.retries == 0
        assert scores.stats.scored == sum(len(v) for v in scores.logprobs)
        assert scores.topk_ids is None and scores.topk_logprobs is None and scores.row_errors == []


def test_topk_comes_with_the_rows_it_belongs_to():
    rows, starts = default_rows(9, seed=1)
    with FakeTeacher() as teacher, client_of(teacher, max_tokens_per_request=20) as client:
        scores = client.score(rows, starts, topk=5, timeout_s=10)
        assert_honest(scores, rows, starts)
        for row, start, ids, values in zip(rows, starts, scores.topk_ids, scores.topk_logprobs, strict=True):
            assert ids.shape == values.shape == (len(row) - start, 5)
            assert (ids == row[start:, None] + np.arange(5)).all()
            np.testing.assert_allclose(values[:, 2], -row[start:] / 1000 - 20, rtol=1e-6)


def some_candidates(rows, starts, width, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3000, 4000, (len(row) - start, width)) for row, start in zip(rows, starts, strict=True)]


@pytest.mark.parametrize("topk", [0, 3])
def test_candidates_come_with_the_positions_they_were_chosen_for(topk):
    rows, starts = default_rows(9, seed=1)
    rows.append(np.array([3000, 3001])), starts.append(2)  # no response: nothing to ask, and nothing missing
    candidates = some_candidates(rows, starts, 4)
    with FakeTeacher() as teacher, client_of(teacher, max_tokens_per_request=20) as client:
        scores = client.score(rows, starts, topk=topk, candidates=candidates, timeout_s=10)
        assert_honest(scores, rows, starts)
        assert len(teacher.requests) > 2 and (scores.topk_ids is None) == (topk == 0)
        for ids, values in zip(candidates, scores.candidate_logprobs, strict=True):
            assert values.shape == ids.shape and values.dtype == np.float32
            np.testing.assert_array_equal(values, (-ids / 1000).astype(np.float32))
        assert client.score(rows, starts, timeout_s=10).candidate_logprobs is None
        assert client.prefetch(rows[:9], starts[:9], candidates=candidates[:9]) == 9
        assert {question.num_candidates for _, question in teacher.prefetched} == {4}


def test_requests_with_candidates_keep_the_teachers_limit_on_bytes():
    rows, starts = default_rows(12)
    limits = wire.Limits(max_request_bytes=10_000)
    with FakeTeacher(limits=limits) as teacher, client_of(teacher) as client:
        client.wait_until_ready(5)
        client.score(rows, starts, timeout_s=10)
        assert len(teacher.requests) == 1
        client.score(rows, starts, candidates=some_candidates(rows, starts, 16), timeout_s=10)
        sizes = [len(wire.encode_request(request)) for request, _ in teacher.requests[1:]]
        assert len(sizes) > 1 and max(sizes) <= 10_000


def test_a_reply_for_other_candidates_is_refused():
    def other(fake, envelope, request, question):
        swapped = Question(question.lengths, question.starts, question.ids, question.candidates[:, ::-1])
        fake.send(envelope, wire.encode_reply(fake.reply(request, swapped), None, None, honest_candidates(swapped)))

    rows, starts = hostile_rows()
    candidates = some_candidates(rows, starts, 2)
    with FakeTeacher(first_then(other)) as teacher, client_of(teacher) as client:
        scores = client.score(rows, starts, candidates=candidates, timeout_s=10)
        assert scores.stats.retries == 1
        np.testing.assert_array_equal(scores.candidate_logprobs[0], (-candidates[0] / 1000).astype(np.float32))


@pytest.mark.parametrize(
    ("most", "width", "code"), [(0, 1, "candidates_unsupported"), (3, 4, "candidates"), (3, 3, None)]
)
def test_a_teacher_that_cannot_give_so_many_candidates_is_not_asked(most, width, code):
    rows, starts = hostile_rows()
    candidates = some_candidates(rows, starts, width)
    with FakeTeacher(max_candidates=most) as teacher, client_of(teacher) as client:
        if code is None:
            assert client.score(rows, starts, candidates=candidates, timeout_s=10).candidate_logprobs
            return
        with pytest.raises(RequestRefused) as caught:
            client.score(rows, starts, candidates=candidates, timeout_s=10)
        assert caught.value.code == code and teacher.requests == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[:2], "3 rows and 2 arrays of candidates"),
        (lambda c: [*c[:2], c[2][:1]], r"row 2 must be integers \[2, 4\].*not int64 \[1, 4\]"),
        (lambda c: [*c[:2], c[2][:, :3]], r"row 2 must be integers \[2, 4\].*not int64 \[2, 3\]"),
        (lambda c: [*c[:2], c[2][:, 0]], "row 2 must be integers"),
        (lambda c: [*c[:2], c[2] * 1.0], "row 2 must be integers .* not float64"),
        (lambda c: [*c[:2], c[2] + 2**32], "the candidates of row 2 have an id that does not fit 32 bits"),
        (lambda c: [each[:, :0] for each in c], "row 0 must be integers"),
    ],
)
def test_candidates_that_do_not_fit_the_rows_are_the_callers_mistake(change, message):
    rows, starts = hostile_rows()
    with FakeTeacher() as teacher, client_of(teacher) as client:
        with pytest.raises(ValueError, match=message):
            client.score(rows, starts, candidates=change(some_candidates(rows, starts, 4)))
        assert teacher.requests == []


def test_rows_of_one_prompt_travel_together_and_a_budget_is_kept():
    prompts = [np.arange(3000 + p, 3000 + p + 4) for p in (0, 50, 100)]
    rows = [np.concatenate([prompts[i % 3], [3500 + i]]).astype(np.int32) for i in range(9)]  # prompts interleaved
    with FakeTeacher() as teacher, client_of(teacher, max_tokens_per_request=31) as client:
        assert_honest(client.score(rows, [4] * 9, timeout_s=10), rows, [4] * 9)
        asked = [[int(row[0]) for row in question.rows()] for _, question in teacher.requests]
        assert sorted(asked) == [[3000, 3000, 3000, 3050, 3050, 3050], [3100, 3100, 3100]]


def test_a_prompt_that_had_to_be_cut_stays_on_one_replica():
    prompt = np.arange(3000, 3010)
    rows = [np.append(prompt, 3500 + i).astype(np.int32) for i in range(12)]
    with FakeTeacher() as a, FakeTeacher() as b, client_of(a, b, max_tokens_per_request=35) as client:
        client.wait_until_ready(5)
        assert_honest(client.score(rows, [10] * 12, timeout_s=10), rows, [10] * 12)
        assert sorted([len(a.requests), len(b.requests)]) == [0, 4]


def test_a_small_batch_is_spread_over_all_replicas():
    rows, starts = default_rows(12)
    with FakeTeacher() as a, FakeTeacher() as b, FakeTeacher() as c, client_of(a, b, c) as client:
        client.wait_until_ready(5)
        assert_honest(client.score(rows, starts, timeout_s=10), rows, starts)
        assert all(teacher.requests for teacher in (a, b, c))


def test_a_batch_without_values_needs_no_teacher():
    with client_of(f"tcp://127.0.0.1:{free_port()}") as client:
        assert client.score([], [], timeout_s=1).logprobs == []
        scores = client.score([np.array([1, 2, 3])], [3], topk=2, timeout_s=1)
        assert scores.logprobs[0].shape == (0,) and scores.topk_ids[0].shape == (0, 2)
        assert scores.stats.requests == 0


def test_a_row_without_response_has_no_values_and_its_neighbours_have_theirs():
    rows = [np.array([3001, 3002]), np.array([3003, 3004]), np.array([3005, 3006])]
    with FakeTeacher() as teacher, client_of(teacher) as client:
        scores = client.score(rows, [2, 1, 2], timeout_s=5)
        assert [v.tolist() for v in scores.logprobs] == [[], [np.float32(-3.004)], []]
        assert len(teacher.requests[0][1].lengths) == 1


@pytest.mark.parametrize(
    ("rows", "starts", "message"),
    [
        ([[1, 2]], [0], r"row 0 starts at 0, outside \[1, 2\]"),
        ([[1, 2], [1, 2]], [1, 3], r"row 1 starts at 3, outside \[1, 2\]"),
        ([[]], [1], "row 0 must be a 1-d array of integers"),
        ([[1.0, 2.0]], [1], "row 0 must be a 1-d array of integers"),
        ([[[1, 2]]], [1], "row 0 must be a 1-d array of integers"),
        ([[1, 2**31]], [1], "row 0 has an id that does not fit 32 bits"),
        ([[1, 2], [1, -(2**31) - 1]], [1, 1], "row 1 has an id that does not fit 32 bits"),
        ([[1, 2]], [1, 1], "1 rows and 2 starts"),
        ([[1, 2]], 1, "1 rows and starts 1 of type int64; write one start for each row"),
        ([[1, 2]], [[1]], r"1 rows and starts \[\[1\]\] of type int64; write one start for each row"),
        ([[1, 2]], [1.5], "1 rows and 1 starts of type float64"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused_before_anything_is_sent(rows, starts, message):
    with client_of(f"tcp://127.0.0.1:{free_port()}") as client, pytest.raises(ValueError, match=message):
        client.score([np.array(row) for row in rows], starts, timeout_s=1)


# ------------------------------------------------------------------------------------------------ limits


def test_the_servers_limits_are_kept_before_sending():
    rows, starts = default_rows(30)
    limits = wire.Limits(max_request_bytes=8192 + 200, max_reply_bytes=300, max_rows=3)
    with FakeTeacher(limits=limits) as teacher, client_of(teacher) as client:
        assert_honest(client.score(rows, starts, topk=2, timeout_s=10), rows, starts)
        for request, question in teacher.requests:
            assert len(question.lengths) <= 3 and int(question.counts().sum()) * 20 <= 300
            assert len(wire.encode_request(request)) <= limits.max_request_bytes


def test_a_row_that_no_request_can_hold_fails_alone_and_is_never_sent():
    rows = [np.arange(3000, 3010), np.arange(3000, 3100), np.arange(3000, 3010)]
    with FakeTeacher(limits=wire.Limits(max_request_bytes=8192 + 100)) as teacher, client_of(teacher) as client:
        with pytest.raises(RowsFailed, match="row 1 has 100 ids: alone it exceeds") as caught:
            client.score(rows, [1, 1, 1], timeout_s=5)
        assert [(e.row, e.code) for e in caught.value.row_errors] == [(1, "limit")]
        assert all(len(row) == 10 for _, question in teacher.requests for row in question.rows())


def test_what_the_teacher_cannot_do_is_said_before_anything_is_sent():
    rows, starts = default_rows(3)
    with FakeTeacher(max_topk=4, temperature=False) as teacher, client_of(teacher) as client:
        with pytest.raises(RequestRefused, match=r"topk=5 was asked for; the teacher at .* gives 4"):
            client.score(rows, starts, topk=5, timeout_s=5)
        with pytest.raises(RequestRefused, match=r"at temperature 1 only, not at 0.7"):
            client.score(rows, starts, temperature=0.7, timeout_s=5)
        assert teacher.requests == []


# ------------------------------------------------------------------------------------------------ rows that fail


def fail_rows_of(bad_ids):
    def on_score(fake, envelope, request, question):
        values, errors, end = honest_values(question), [], 0
        for index, (row, start) in enumerate(zip(question.rows(), question.starts, strict=True)):
            begin, end = end, end + len(row) - start
            if int(row[0]) in bad_ids:
                values[begin:end] = np.nan
                errors.append((index, "token_range", f"row {index} has an id too many"))
        reply = fake.reply(request, question, logprobs=wire.to_bin(values, np.float32), row_errors=errors)
        fake.send(envelope, wire.encode_reply(reply))

    return on_score


def test_failed_rows_raise_all_together_under_the_callers_numbers():
    rows = [np.array([3000 + i, 1, 2], dtype=np.int32) for i in range(8)]
    on_score = fail_rows_of({3002, 3005, 3006})
    with FakeTeacher(on_score) as teacher, client_of(teacher, max_tokens_per_request=6) as client:
        with pytest.raises(RowsFailed, match="could not score 3 of 8 rows; the first is row 2: row 2 has an id") as e:
            client.score(rows, [1] * 8, timeout_s=5)
        assert [error.row for error in e.value.row_errors] == [2, 5, 6]
        assert e.value.row_errors[1].message == "row 5 has an id too many"


def test_failed_rows_are_none_when_asked_for_and_the_others_keep_their_values():
    rows = [np.array([3000 + i, 1, 2], dtype=np.int32) for i in range(8)]
    with FakeTeacher(fail_rows_of({3002})) as teacher, client_of(teacher) as client:
        scores = client.score(rows, [1] * 8, timeout_s=5, return_row_errors=True)
        assert scores.logprobs[2] is None
        assert [error.row for error in scores.row_errors] == [2]
        good = [0, 1, 3, 4, 5, 6, 7]
        assert all(scores.logprobs[i].tolist() == [np.float32(-0.001), np.float32(-0.002)] for i in good)


# ------------------------------------------------------------------------------------------------ hostile replies


def with_values(change):
    """Send the honest reply with other values."""

    def on_score(fake, envelope, request, question):
        values = change(honest_values(question))
        fake.send(envelope, wire.encode_reply(fake.reply(request, question, logprobs=wire.to_bin(values, np.float32))))

    return on_score


def with_fields(**changes):
    def on_score(fake, envelope, request, question):
        fake.send(envelope, wire.encode_reply(fake.reply(request, question, **changes)))

    return on_score


def with_frames(change):
    """Send the honest reply with other frames."""

    def on_score(fake, envelope, request, question):
        topk = honest_topk(question, request.topk) if request.topk else (None, None)
        fake.send(envelope, change(wire.encode_reply(fake.reply(request, question), *topk)))

    return on_score


def with_topk(change):
    def on_score(fake, envelope, request, question):
        ids, values = honest_topk(question, request.topk)
        fake.send(envelope, wire.encode_reply(fake.reply(request, question), *change(ids, values)))

    return on_score


def put(value):
    def change(values):
        values[-1] = value
        return values

    return change


def put_topk(column, *, token=None, value=None):
    def change(ids, values):
        if token is not None:
            ids[-1, column] = token
        if value is not None:
            values[-1, column] = value
        return ids, values

    return change


NAN, INF = float("nan"), float("inf")
HOSTILE = {
    "short by one": (with_values(lambda v: v[:-1]), 0, "row 2 is the first without all of its values"),
    "no values at all": (with_values(lambda v: v[:0]), 0, "row 0 is the first without"),
    "one too many": (with_values(lambda v: np.append(v, np.float32(-1))), 0, "7 values for 6 tokens"),
    "an extra row": (with_values(lambda v: np.append(v, v[:3])), 0, "9 values for 6 tokens"),
    "half a float": (with_fields(logprobs=b"12345"), 0, "no multiple of 4"),
    "NaN": (with_values(put(NAN)), 0, "row 2 has log-prob nan"),
    "+inf": (with_values(put(INF)), 0, "row 2 has log-prob inf"),
    "-inf": (with_values(put(-INF)), 0, "row 2 has log-prob -inf"),
    "a probability": (with_values(put(0.5)), 0, "row 2 has log-prob 0.5"),
    "just above 0": (with_values(put(2e-5)), 0, "row 2 has log-prob"),
    "wrong digest": (with_fields(ids_digest=b"x" * 16), 0, "answers another question"),
    "no digest": (with_fields(ids_digest=b""), 0, "answers another question"),
    "row error out of range": (with_fields(row_errors=[(3, "oom", "")]), 0, "row 3 of 3"),
    "row error twice": (with_fields(row_errors=[(0, "oom", ""), (0, "oom", "")]), 0, "listed before"),
    "row error with values": (with_fields(row_errors=[(0, "oom", "")]), 0, "has values at the same time"),
    "missing map": (with_frames(lambda f: []), 0, "without a body"),
    "extra frame": (with_frames(lambda f: [*f, b"more"]), 0, "frames follow the map"),
    "unasked top-k": (with_topk(lambda i, v: (np.zeros((6, 1)), np.zeros((6, 1)))), 0, "top-0 was asked for"),
    "truncated map": (with_frames(lambda f: [f[0][:-3]]), 0, "bad_msgpack"),
    "not msgpack": (with_frames(lambda f: [b"\xc1"]), 0, "bad_msgpack"),
    "a pickle": (with_frames(lambda f: [pickle.dumps({"v": 1})]), 0, "bad_msgpack"),
    "a list": (with_frames(lambda f: [b"\x93\x01\x02\x03"]), 0, "schema"),
    "top-k missing": (with_fields(), 4, "top-4 was asked for and the reply has the frames"),
    "one top-k frame": (with_frames(lambda f: f[:2]), 4, "frames follow the map"),
    "top-k of too few": (with_topk(lambda i, v: (i[:-1], v[:-1])), 4, "has 20 ids and 20 values"),
    "top-k id = vocab": (with_topk(put_topk(3, token=VOCAB)), 4, "row 2: a top-k id is outside"),
    "top-k id = -1": (with_topk(put_topk(3, token=-1)), 4, "row 2: a top-k id is outside"),
    "top-k id twice": (with_topk(lambda i, v: (i * 0 + i[:, :1], v)), 4, "row 0: a top-k id appears twice"),
    "top-k unsorted": (with_topk(put_topk(3, value=-1.0)), 4, "row 2: the top-k values are not finite .* descending"),
    "top-k NaN": (with_topk(put_topk(1, value=NAN)), 4, "row 2: the top-k values are not finite"),
    "top-k -inf": (with_topk(put_topk(3, value=-INF)), 4, "row 2: the top-k values are not finite"),
    "top-k > 0": (with_topk(put_topk(0, value=0.5)), 4, "row 2: the top-k values are not finite"),
    "top-k mass": (with_topk(lambda i, v: (i, v * 0 - 0.9)), 4, "row 0: the top-k probabilities add up to more than 1"),
    "top-k and sampled differ": (with_topk(put_topk(0, value=-1.0)), 4, "row 2: the sampled token has another value"),
    "sampled token not in top-k": (with_topk(lambda i, v: (i - 5, v)), 4, "row 0: the sampled token is missing"),
}


def without_empty_frame(fake, envelope, request, question):
    fake.send(envelope[:1], [b"x", *wire.encode_reply(fake.reply(request, question))])


HOSTILE["no empty frame"] = (without_empty_frame, 0, "not empty")


def hostile_rows():
    return [np.array([3000 + 10 * i, 3001 + 10 * i, 3002 + 10 * i], dtype=np.int32) for i in range(3)], [1, 1, 1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_is_a_typed_error_after_three_tries_and_no_value_leaks(name, caplog):
    on_score, topk, message = HOSTILE[name]
    rows, starts = hostile_rows()
    with FakeTeacher(on_score) as teacher, client_of(teacher) as client:
        with pytest.raises(BadReply) as caught:
            client.score(rows, starts, topk=topk, timeout_s=10)
        assert len(teacher.requests) == 3
    assert re.search(message, f"{caught.value} {caplog.text}")


@pytest.mark.parametrize("name", ["short by one", "NaN", "wrong digest", "truncated map", "missing map"])
def test_one_bad_reply_costs_a_retry_on_a_new_connection(name):
    rows, starts = hostile_rows()
    with FakeTeacher(first_then(HOSTILE[name][0])) as teacher, client_of(teacher) as client:
        scores = client.score(rows, starts, timeout_s=10)
        assert_honest(scores, rows, starts)
        assert scores.stats.retries == 1 and scores.stats.faults == 1 and len(teacher.requests) == 2


def test_a_bad_replica_is_replaced_by_a_good_one():
    rows, starts = default_rows(12)
    with FakeTeacher(HOSTILE["NaN"][0]) as bad, FakeTeacher() as good, client_of(bad, good) as client:
        client.wait_until_ready(5)
        for _ in range(3):
            assert_honest(client.score(rows, starts, timeout_s=10), rows, starts)


def test_the_answer_to_a_under_the_id_of_b_is_never_taken():
    """Both are under way; the teacher swaps their ids. Lengths fit, only the digest tells."""
    held: list = []

    def swap(fake, envelope, request, question):
        held.append((request, question))
        if len(held) == 2:
            (request_a, question_a), (request_b, question_b) = held
            fake.send(envelope, wire.encode_reply(fake.reply(request_b, question_a)))
            fake.send(envelope, wire.encode_reply(fake.reply(request_a, question_b)))

    rows, starts = [np.array([3000, 3001]), np.array([3002, 3003])], [1, 1]
    with FakeTeacher(first_then(swap, times=2)) as teacher, client_of(teacher, max_tokens_per_request=2) as client:
        scores = client.score(rows, starts, timeout_s=10)
        assert_honest(scores, rows, starts)
        assert len(held) == 2 and scores.stats.faults >= 1


@pytest.mark.parametrize("field", ["model", "tokenizer"])
def test_a_reply_from_another_model_stops_the_call_at_once(field):
    rows, starts = default_rows(3)
    with FakeTeacher(with_fields(**{field: "other"})) as teacher, client_of(teacher) as client:
        with pytest.raises(TeacherMismatch, match=f"{field} 'other'.*pinned"):
            client.score(rows, starts, timeout_s=10)
        assert len(teacher.requests) == 1


def test_another_protocol_version_stops_the_call():
    rows, starts = default_rows(3)
    on_score, mismatch = with_fields(v=3), "protocol version 3; this client speaks 2"
    with FakeTeacher(on_score) as teacher, client_of(teacher) as client, pytest.raises(TeacherMismatch, match=mismatch):
        client.score(rows, starts, timeout_s=10)


# ------------------------------------------------------------------------------------------------ late and lost


def test_a_teacher_that_swallows_the_first_request_is_asked_again():
    rows, starts = default_rows(3)
    with FakeTeacher(first_then(swallow)) as teacher, client_of(teacher) as client:
        scores = client.score(rows, starts, timeout_s=3)  # the first attempt may take half of it
        assert_honest(scores, rows, starts)
        assert scores.stats.retries == 1 and 1.5 <= scores.stats.seconds < 3


def test_a_late_reply_is_dropped_by_its_id_and_never_answers_the_next_call():
    """The reply to the call that timed out arrives before the next call's own, with as many values."""
    held: list = []

    def retain(fake, envelope, request, question):
        if not held:
            held.append((envelope, request, question))
            return
        old_envelope, old_request, old_question = held[0]
        fake.be_honest(old_envelope, old_request, old_question)
        fake.be_honest(envelope, request, question)

    first, second = [np.array([3000, 3001])], [np.array([3000, 3002])]
    with FakeTeacher(retain) as teacher, client_of(teacher) as client:
        client.wait_until_ready(5)
        teacher.on_score = lambda *a: held.append(a[1:])
        with pytest.raises(TeacherUnavailable):
            client.score(first, [1], timeout_s=0.3)
        teacher.on_score = retain
        scores = client.score(second, [1], timeout_s=5)
        assert_honest(scores, second, [1])
        assert scores.stats.late_replies >= 1


def test_a_reply_that_comes_twice_is_taken_once():
    def twice(fake, envelope, request, question):
        fake.be_honest(envelope, request, question)
        fake.be_honest(envelope, request, question)

    rows, starts = default_rows(9)
    with FakeTeacher(twice) as teacher, client_of(teacher, max_tokens_per_request=20) as client:
        for _ in range(3):
            assert_honest(client.score(rows, starts, timeout_s=5), rows, starts)


def test_an_unanswered_call_ends_at_its_deadline_with_the_values_and_the_next_step():
    rows, starts = [np.arange(3000, 3010)] * 4, [1] * 4
    with FakeTeacher(swallow) as teacher, client_of(teacher) as client:
        began = time.monotonic()
        with pytest.raises(TeacherUnavailable) as caught:
            client.score(rows, starts, timeout_s=0.8)
        assert 0.8 <= time.monotonic() - began < 1.8
        text = str(caught.value)
        assert text.startswith("teacher did not answer in 0.8 s (4 rows, 40 tokens; 1 of 1 requests open")
        assert teacher.address in text
        assert text.endswith("raise teacher.timeout_s or lower teacher.max_tokens_per_request")
        teacher.on_score = FakeTeacher.be_honest
        assert_honest(client.score(rows, starts, timeout_s=5), rows, starts)


def test_nobody_there_ends_at_the_deadline_too():
    text = r"1 of 1 requests open, 0 retries\): tcp://.*: no connection yet"
    with client_of(f"tcp://127.0.0.1:{free_port()}") as client, pytest.raises(TeacherUnavailable, match=text):
        client.score([np.array([1, 2])], [1], timeout_s=0.3)


def test_requests_carry_the_time_that_is_left_and_the_pinned_fingerprints():
    rows, starts = default_rows(3)
    with FakeTeacher() as teacher, client_of(teacher, client_name="me") as client:
        client.score(rows, starts, timeout_s=100)
        (request, _), *_ = teacher.requests
        assert 49_000 < request.budget_ms <= 50_000  # half: a second attempt has as long
        assert request.expect == wire.Expect(model="model-1", tokenizer="tokenizer-1")
        assert request.client == "me" and request.topk == 0 and request.temperature == 1.0


# ------------------------------------------------------------------------------------------------ statuses


def refuse_first(status, times=1, **fields):
    return first_then(lambda fake, envelope, request, _: fake.refuse(envelope, request, status, **fields), times)


def test_busy_is_tried_again_not_before_the_time_it_names():
    rows, starts = default_rows(3)
    on_score = refuse_first("busy", code="queue_full", retry_after_ms=300)
    with FakeTeacher(on_score) as teacher, client_of(teacher) as client:
        scores = client.score(rows, starts, timeout_s=5)
        assert_honest(scores, rows, starts)
        assert scores.stats.retries == 1 and scores.stats.seconds >= 0.3


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        ("expired", {"code": "expired"}),
        ("error", {"code": "internal", "retryable": True}),
        ("draining", {"code": "draining"}),
        ("busy", {"code": "restarting", "retry_after_ms": 1}),
    ],
)
def test_a_refusal_that_will_pass_is_tried_again(status, fields):
    rows, starts = default_rows(3)
    with FakeTeacher(refuse_first(status, times=3, **fields)) as teacher, client_of(teacher) as client:
        scores = client.score(rows, starts, timeout_s=5)
        assert_honest(scores, rows, starts)
        assert scores.stats.retries == 3


@pytest.mark.parametrize("status", ["busy", "draining"])
def test_busy_and_draining_go_to_the_other_replica_meanwhile(status):
    rows, starts = default_rows(12)
    on_score = refuse_first(status, times=99, retry_after_ms=60_000)
    with FakeTeacher(on_score) as a, FakeTeacher() as b, client_of(a, b) as client:
        client.wait_until_ready(5)
        scores = client.score(rows, starts, timeout_s=5)
        assert_honest(scores, rows, starts)
        assert scores.stats.seconds < 4 and scores.stats.faults == 0


def test_an_error_that_a_retry_cannot_help_is_raised_at_once():
    rows, starts = default_rows(3)
    on_score = refuse_first("error", times=9, code="schema", message="lengths do not add up", retryable=False)
    with FakeTeacher(on_score) as teacher, client_of(teacher) as client:
        with pytest.raises(RequestRefused, match=r"lengths do not add up \[schema\]") as caught:
            client.score(rows, starts, timeout_s=5)
        assert caught.value.code == "schema" and len(teacher.requests) == 1


def test_a_teacher_that_says_it_is_another_model_stops_the_call():
    rows, starts = default_rows(3)
    on_score = refuse_first("error", code="model_mismatch", message="I am another")
    with FakeTeacher(on_score) as teacher, client_of(teacher) as client:
        with pytest.raises(TeacherMismatch, match="I am another"):
            client.score(rows, starts, timeout_s=5)
        assert len(teacher.requests) == 1


# ------------------------------------------------------------------------------------------------ getting ready


def test_a_teacher_that_loads_is_waited_for_and_progress_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="opd")
    timing = Timing(ask_every_s=0.05, log_every_s=0.2)
    with FakeTeacher(state="loading", detail="shard 3 of 9") as teacher, client_of(teacher, timing=timing) as client:
        threading.Timer(0.7, lambda: setattr(teacher, "state", "ready")).start()
        model = client.wait_until_ready(10)
        assert model.model == "model-1" and model.vocab_size == VOCAB
        lines = [r.getMessage() for r in caplog.records if "waiting for the teacher" in r.getMessage()]
        assert len(lines) >= 2
        assert f"{teacher.address}: loading (shard 3 of 9)" in lines[0]


def test_a_client_may_start_before_its_teacher():
    port = free_port()
    with client_of(f"tcp://127.0.0.1:{port}") as client:
        later = []
        threading.Timer(0.5, lambda: later.append(FakeTeacher(port=port))).start()
        try:
            assert client.wait_until_ready(10).model == "model-1"
        finally:
            later[0].stop()


def test_a_teacher_that_failed_is_reported_at_once():
    bad = FakeTeacher(state="failed", detail="no such folder")
    with FakeTeacher() as good, bad, client_of(good, bad) as client:
        began = time.monotonic()
        with pytest.raises(TeacherUnavailable, match=f"{re.escape(bad.address)} failed: no such folder"):
            client.wait_until_ready(60)
        assert time.monotonic() - began < 10


def test_a_wait_in_vain_names_every_address_and_its_last_state():
    nobody = f"tcp://127.0.0.1:{free_port()}"
    with FakeTeacher() as up, FakeTeacher(state="loading", detail="shard 1") as loading:
        with client_of(up, loading, nobody) as client, pytest.raises(TeacherUnavailable) as caught:
            client.wait_until_ready(1)
        text = str(caught.value)
        assert text.startswith("no teacher ready after 1.0 s: ")
        assert f"{up.address}: up" in text and f"{loading.address}: loading (shard 1)" in text
        assert f"{nobody}: no connection yet" in text and text.endswith("or raise teacher.ready_timeout_s")


def other_teacher(field):
    return FakeTeacher(model="other") if field == "model" else FakeTeacher(tokenizer="other")


@pytest.mark.parametrize("field", ["model", "tokenizer"])
def test_replicas_of_different_models_are_refused_naming_both(field):
    with FakeTeacher() as a, other_teacher(field) as b, client_of(a, b) as client:
        with pytest.raises(TeacherMismatch) as caught:
            client.wait_until_ready(5)
        assert a.address in str(caught.value) and b.address in str(caught.value)
        assert "other" in str(caught.value) and f"{field}-1" in str(caught.value)


@pytest.mark.parametrize("garbage", [[b"\xc1"], [], [b"\x81\xa1v\x02"], [b"\x81\xa1v\x02", b"more"]])
def test_a_stranger_that_answers_garbage_is_named(garbage):
    with FakeTeacher() as teacher, client_of(teacher) as client:
        teacher.raw_info = garbage
        with pytest.raises(TeacherUnavailable, match="a reply that breaks the protocol"):
            client.wait_until_ready(1)
        teacher.raw_info = None
        client.wait_until_ready(5)


def test_an_http_server_is_not_a_teacher():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(10)

        def answer():
            try:
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + b"x" * 100)
                    connection.close()
            except OSError:
                pass

        threading.Thread(target=answer, daemon=True).start()
        with client_of(f"tcp://127.0.0.1:{listener.getsockname()[1]}") as client:
            with pytest.raises((TeacherUnavailable, ConfigError)) as caught:
                client.wait_until_ready(1)
            assert "no connection yet" not in str(caught.value)


def test_info_tells_the_state_of_each_replica():
    with FakeTeacher() as a, FakeTeacher(state="loading", detail="shard 1") as b, client_of(a, b) as client:
        assert client.info(timeout_s=5).state == "ready"
        assert client.info(b.address, timeout_s=5).detail == "shard 1"
        with pytest.raises(ConfigError, match="not among"):
            client.info("tcp://elsewhere:1")
        b.stop()
        with pytest.raises(TeacherUnavailable, match=r"no answer to info in 0\.3 s"):
            client.info(b.address, timeout_s=0.3)


@pytest.mark.parametrize("addresses", [[], "", " , ", ["127.0.0.1:5555"], ["tcp://nowhere"], "tcp://a:1,tcp://a:1"])
def test_an_address_that_cannot_work_is_refused_when_the_client_is_made(addresses):
    with pytest.raises(ConfigError):
        TeacherClient(addresses)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://127.0.0.1:65536", "'tcp://127.0.0.1:65536' has the port '65536'; ports go from 1 to 65535"),
        ("tcp://127.0.0.1:0", "has the port '0'"),
        ("tcp://127.0.0.1:", "has the port ''"),
        ("tcp://127.0.0.1:http", "has the port 'http'"),
        ("tcp://127.0.0.1:-1", "has the port '-1'"),
        ("tcp://127.0.0.1", "has no port; write tcp://host:port"),
        ("127.0.0.1:1", "has no scheme; write tcp://127.0.0.1:1"),
        ("http://127.0.0.1:1", "has no scheme; write tcp://127.0.0.1:1"),
    ],
)
def test_an_address_without_a_port_that_can_be_is_named_at_once(address, message):
    with pytest.raises(ConfigError) as caught:
        TeacherClient(["tcp://127.0.0.1:5555", address])
    assert message in str(caught.value)


def test_a_length_of_time_that_cannot_be_is_named():
    rows, starts = default_rows(2)
    with TeacherClient("tcp://127.0.0.1:9") as client:
        for wrong in (0, -1.0, float("inf"), float("nan"), 1e12):
            for call in (
                lambda wrong=wrong: client.wait_until_ready(wrong),
                lambda wrong=wrong: client.score(rows, starts, timeout_s=wrong),
                lambda wrong=wrong: client.prefetch(rows, starts, timeout_s=wrong),
                lambda wrong=wrong: client.sleep(timeout_s=wrong),
            ):
                with pytest.raises(ValueError, match=f"timeout_s must be finite and > 0.*; it is {wrong}"):
                    call()
            with pytest.raises(ValueError, match=f"keep_s must be finite and > 0.*; it is {wrong}"):
                client.prefetch(rows, starts, keep_s=wrong)


def test_a_string_may_hold_several_addresses():
    with FakeTeacher() as a, FakeTeacher() as b, TeacherClient(f"{a.address}, {b.address}") as client:
        client.wait_until_ready(5)
        assert a.asked and b.asked


def refusing_router(context, *, curve):
    """A ROUTER that lets nobody in: it wants CURVE, or its authenticator says no."""
    router = context.socket(zmq.ROUTER)
    if curve:
        router.curve_publickey, router.curve_secretkey = zmq.curve_keypair()
        router.curve_server = True
    else:
        router.zap_domain = b"test"
    router.bind("tcp://127.0.0.1:*")
    return router, router.getsockopt_string(zmq.LAST_ENDPOINT)


@pytest.mark.parametrize("curve", [True, False])
def test_a_handshake_that_is_refused_is_a_setting_that_is_wrong_and_said_at_once(curve):
    from zmq.auth.thread import ThreadAuthenticator

    context = zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.deny("127.0.0.1")
    router, address = refusing_router(context, curve=curve)
    try:
        with client_of(address) as client:
            for call in (lambda: client.wait_until_ready(20), lambda: client.score(*default_rows(2), timeout_s=20)):
                began = time.monotonic()
                with pytest.raises(ConfigError, match=f"{address}: .*is it the right port"):
                    call()
                assert time.monotonic() - began < 10
    finally:
        router.close(linger=0)
        authenticator.stop()
        context.term()


# ------------------------------------------------------------------------------------------------ restarts, deaths


def test_a_restart_with_the_same_model_is_survived_and_counted():
    rows, starts = default_rows(3)
    with FakeTeacher() as teacher, client_of(teacher) as client:
        client.score(rows, starts, timeout_s=5)
        teacher.stop()
        with FakeTeacher(port=teacher.port, boot="boot-2"):
            scores = client.score(rows, starts, timeout_s=5)
            assert_honest(scores, rows, starts)
            assert scores.stats.boot_changes == 1


def test_a_restart_with_another_model_stops_the_call_and_no_value_is_used():
    rows, starts = default_rows(3)
    with FakeTeacher() as teacher, client_of(teacher) as client:
        client.score(rows, starts, timeout_s=5)
        teacher.stop()
        with FakeTeacher(port=teacher.port, boot="boot-2", model="model-2") as other:
            with pytest.raises(TeacherMismatch, match=r"'model-2'.*'model-1'"):
                client.score(rows, starts, timeout_s=5)
            assert other.requests == []


def test_a_call_pings_at_once_however_new_the_last_news_is():
    rows, starts = default_rows(3)
    with FakeTeacher() as teacher, client_of(teacher, timing=Timing(ping_every_s=60)) as client:
        client.wait_until_ready(10)
        asked = teacher.asked
        client.score(rows, starts, timeout_s=10)
        wait_until(lambda: teacher.asked > asked, 2, "a ping")


def test_a_boot_that_changes_behind_a_proxy_is_noticed_by_the_next_ping():
    """No connection breaks, and the request that the old process had is sent again."""
    rows, starts = default_rows(3)
    with FakeTeacher(first_then(swallow)) as teacher, client_of(teacher) as client:
        threading.Timer(0.3, lambda: setattr(teacher, "boot", "boot-2")).start()
        scores = client.score(rows, starts, timeout_s=20)
        assert_honest(scores, rows, starts)
        assert scores.stats.boot_changes == 1 and scores.stats.seconds < 9


def test_one_of_three_replicas_may_die_in_the_middle_of_a_call():
    rows, starts = default_rows(60)
    die = threading.Event()

    def slow(fake, envelope, request, question):
        time.sleep(0.02)
        fake.be_honest(envelope, request, question)

    def dying(fake, envelope, request, question):
        die.set()

    def kill(teacher):
        die.wait(5)
        teacher.stop()

    teachers = [FakeTeacher(slow), FakeTeacher(slow), FakeTeacher(dying)]
    with client_of(*teachers, max_tokens_per_request=20) as client:
        client.wait_until_ready(5)
        killer = threading.Thread(target=kill, args=(teachers[2],))
        killer.start()
        scores = client.score(rows, starts, timeout_s=20)
        killer.join()
        assert_honest(scores, rows, starts)
        assert scores.stats.faults >= 1 and scores.stats.retries >= 1 and scores.stats.seconds < 9
    for teacher in teachers:
        teacher.stop()


def test_a_replica_that_comes_back_is_used_again():
    rows, starts = default_rows(12)
    with FakeTeacher() as a, FakeTeacher() as b, client_of(a, b) as client:
        client.wait_until_ready(5)
        b.stop()
        assert_honest(client.score(rows, starts, timeout_s=5), rows, starts)
        with FakeTeacher(port=b.port) as again:
            client.wait_until_ready(5)
            assert_honest(client.score(rows, starts, timeout_s=5), rows, starts)
            assert again.requests


def test_a_front_that_hangs_is_left_for_another_replica():
    """TCP and ZMTP still answer, so no event tells."""
    rows, starts = default_rows(12)
    with FakeTeacher() as a, FakeTeacher() as b, client_of(a, b) as client:
        client.wait_until_ready(5)
        b.paused = True
        scores = client.score(rows, starts, timeout_s=30)
        assert_honest(scores, rows, starts)
        assert 1.4 < scores.stats.seconds < 10 and scores.stats.faults >= 1
        b.paused = False
        client.wait_until_ready(5)


def test_a_worker_that_hangs_is_noticed_by_its_age_though_the_front_answers():
    rows, starts = default_rows(12)

    def hang(fake, envelope, request, question):
        fake.worker_age_ms = 10_000_000

    with FakeTeacher() as a, FakeTeacher(hang) as b, client_of(a, b) as client:
        client.wait_until_ready(5)
        scores = client.score(rows, starts, timeout_s=30)
        assert_honest(scores, rows, starts)
        assert scores.stats.seconds < 10 and b.requests


def test_all_replicas_down_is_waited_for_with_progress_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="opd")
    rows, starts = default_rows(3)
    timing = Timing(ask_every_s=0.05, first_backoff_s=0.01, most_backoff_s=0.1, log_every_s=0.3)
    with FakeTeacher() as teacher, client_of(teacher, timing=timing) as client:
        client.wait_until_ready(5)
        teacher.stop()
        later = []
        threading.Timer(1.0, lambda: later.append(FakeTeacher(port=teacher.port))).start()
        try:
            assert_honest(client.score(rows, starts, timeout_s=20), rows, starts)
        finally:
            later[0].stop()
        lines = [r.getMessage() for r in caplog.records if "requests not answered after" in r.getMessage()]
        assert lines and re.search(r"1 of 1 requests not answered after \d+ s; waiting \d+ s more at most", lines[0])


def test_a_killed_server_that_is_started_again_answers_the_same_call(teacher_server):
    from opd.scoring.oracle import oracle_logprobs

    port = free_port()
    args = ["--bind", f"tcp://127.0.0.1:{port}"]
    server = teacher_server(us_per_token=20_000, args=args)
    rows = [np.arange(i, i + 20, dtype=np.int32) for i in range(4)]
    with client_of(server.address, timing=Timing(most_backoff_s=0.5)) as client:
        client.wait_until_ready(20)

        def kill_and_restart():
            time.sleep(0.5)
            server.signal(signal.SIGKILL)
            server.wait()
            teacher_server(args=args)

        thread = threading.Thread(target=kill_and_restart)
        thread.start()
        scores = client.score(rows, [10] * 4, timeout_s=60)
        thread.join()
        for row, values in zip(rows, scores.logprobs, strict=True):
            np.testing.assert_allclose(values, oracle_logprobs(row, 10), rtol=1e-6)
        assert scores.stats.boot_changes == 1 and scores.stats.faults >= 1

        scores = client.score(rows, [10] * 4, topk=7, temperature=0.7, timeout_s=20)
        for row, values in zip(rows, scores.logprobs, strict=True):
            np.testing.assert_allclose(values, oracle_logprobs(row, 10, temperature=0.7), rtol=1e-6)
        bad = [*rows, np.array([5, 5000], dtype=np.int32)]
        with pytest.raises(RowsFailed, match="row 4 has id 5000 at position 1"):
            client.score(bad, [10, 10, 10, 10, 1], timeout_s=20)


# ------------------------------------------------------------------------------------------------ prefetch and sleep


def prompts_of(requests):
    return {row[:start].tobytes() for _, q in requests for row, start in zip(q.rows(), q.starts, strict=True)}


def test_a_prefetch_asks_what_the_score_will_ask_and_of_the_same_replica():
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3000, 4000, length).astype(np.int32) for length in (4, 6, 8, 5, 7)]
    rows = [np.concatenate([p, rng.integers(3000, 4000, 3).astype(np.int32)]) for p in prompts for _ in range(4)]
    starts = [len(p) for p in prompts for _ in range(4)]
    with FakeTeacher() as a, FakeTeacher() as b, client_of(a, b, max_tokens_per_request=30) as client:
        client.wait_until_ready(10)
        assert client.prefetch(rows, starts, topk=2, temperature=0.5, keep_s=30.0) == 20
        order = rng.permutation(20)
        for _ in range(2):
            mixed, mixed_starts = [rows[i] for i in order], [starts[i] for i in order]
            scores = client.score(mixed, mixed_starts, topk=2, temperature=0.5, prefetched=True)
            assert_honest(scores, mixed, mixed_starts)
        for teacher in (a, b):
            assert prompts_of(teacher.prefetched) == prompts_of(teacher.requests)
        assert len(prompts_of(a.prefetched) | prompts_of(b.prefetched)) == 5
        request, _ = (a.prefetched + b.prefetched)[0]
        assert (request.topk, request.temperature, request.budget_ms) == (2, 0.5, 30_000)
        assert request.expect == wire.Expect(model="model-1", tokenizer="tokenizer-1")


def test_a_prefetch_leaves_out_replicas_that_are_down_and_a_score_does_not_wait_for_them():
    rows, starts = default_rows(8, seed=6)
    with FakeTeacher() as a, FakeTeacher() as b, client_of(a, b) as client:
        client.wait_until_ready(10)
        assert client.prefetch(rows, starts) == 8
        a.stop()
        assert_honest(client.score(rows, starts, timeout_s=20), rows, starts)
        assert client.prefetch(rows, starts) == 8
        assert prompts_of(b.prefetched) == {row[:start].tobytes() for row, start in zip(rows, starts, strict=True)}


def test_a_prefetch_that_nobody_answers_ends_in_time_and_takes_nothing():
    rows, starts = default_rows(4)
    with FakeTeacher() as teacher, client_of(teacher) as client:
        client.wait_until_ready(10)
        teacher.paused = True
        began = time.monotonic()
        assert client.prefetch(rows, starts, timeout_s=0.3) == 0
        assert time.monotonic() - began < 1.5


def test_sleep_and_wake_reach_every_replica_and_a_score_waits_for_the_second():
    rows, starts = default_rows(6)
    with FakeTeacher() as a, FakeTeacher() as b, client_of(a, b) as client:
        client.sleep(timeout_s=10)
        assert (a.state, b.state) == ("sleeping", "sleeping")
        with pytest.raises(TeacherUnavailable, match="sleeping"):
            client.score(rows, starts, timeout_s=0.3)
        assert not a.requests and not b.requests
        client.wake(10)
        assert (a.state, b.state) == ("ready", "ready")
        assert_honest(client.score(rows, starts), rows, starts)


def test_a_teacher_that_was_put_to_sleep_by_another_client_is_left_for_its_replica():
    def sleepy(fake, envelope, request, question):
        fake.state = "sleeping"
        fake.refuse(envelope, request, "busy", code="sleeping", retryable=True, retry_after_ms=10)

    rows, starts = default_rows(6)
    with FakeTeacher(sleepy) as a, FakeTeacher() as b, client_of(a, b) as client:
        client.wait_until_ready(10)
        assert_honest(client.score(rows, starts), rows, starts)
        asked = len(a.requests)
        for _ in range(2):
            assert_honest(client.score(rows, starts), rows, starts)
        assert len(a.requests) == asked > 0


# ------------------------------------------------------------------------------------------------ processes, threads


def test_two_clients_at_once_each_get_their_own():
    with FakeTeacher() as teacher:
        failures = []

        def work(seed):
            try:
                with client_of(teacher, max_tokens_per_request=40) as client:
                    for step in range(10):
                        rows, starts = default_rows(20, seed=100 * seed + step)
                        assert_honest(client.score(rows, starts, timeout_s=20), rows, starts)
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert failures == []


def test_threads_that_share_a_client_follow_one_another():
    with FakeTeacher() as teacher, client_of(teacher, max_tokens_per_request=40) as client:
        failures = []

        def work(seed):
            try:
                for step in range(10):
                    rows, starts = default_rows(20, seed=100 * seed + step)
                    assert_honest(client.score(rows, starts, timeout_s=20), rows, starts)
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert failures == []


def test_waiting_for_another_thread_counts_against_the_deadline():
    with FakeTeacher(swallow) as teacher, client_of(teacher) as client:

        def occupy():
            with pytest.raises(TeacherUnavailable):
                client.score(*default_rows(2), timeout_s=1)

        thread = threading.Thread(target=occupy)
        thread.start()
        time.sleep(0.2)
        with pytest.raises(TeacherUnavailable, match=r"another thread has been using this client for 0\.2 s"):
            client.score(*default_rows(2), timeout_s=0.2)
        thread.join()


def _score_in_child(client, pipe):
    try:
        client.score(*default_rows(2), timeout_s=5)
        pipe.send("answered")
    except OPDError as e:
        pipe.send(str(e))
    client.close()


def test_a_forked_child_is_told_and_the_parent_goes_on():
    rows, starts = default_rows(3)
    with FakeTeacher() as teacher, client_of(teacher) as client:
        client.score(rows, starts, timeout_s=5)
        ours, theirs = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=_score_in_child, args=(client, theirs))
        child.start()
        assert ours.poll(10) and f"was forked into {child.pid}" in ours.recv()
        child.join(10)
        assert child.exitcode == 0
        assert_honest(client.score(rows, starts, timeout_s=5), rows, starts)


def test_a_client_cannot_be_pickled():
    with FakeTeacher() as teacher, client_of(teacher) as client, pytest.raises(TypeError, match="make one there"):
        pickle.dumps(client)


def test_ctrl_c_is_prompt_and_leaves_the_client_usable_on_a_new_connection():
    """It may have come between two frames of a message, so the old connection is given up and its reply lost."""
    rows, starts = default_rows(3)
    held: list = []

    def hold_then_answer_both(fake, envelope, request, question):
        held.append((envelope, request, question))
        if len(held) == 2:
            for each in held:
                fake.be_honest(*each)

    with FakeTeacher(hold_then_answer_both) as teacher, client_of(teacher) as client:
        client.wait_until_ready(5)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client.score(rows, starts, timeout_s=60)
        assert time.monotonic() - began < 10
        scores = client.score(rows, starts, timeout_s=5)
        assert_honest(scores, rows, starts)
        assert len(held) == 2 and scores.stats.late_replies == 0


def test_close_is_prompt_and_final():
    rows, starts = default_rows(3)
    with FakeTeacher(swallow) as teacher:
        client = client_of(teacher, f"tcp://127.0.0.1:{free_port()}")
        with pytest.raises(TeacherUnavailable):
            client.score(rows, starts, timeout_s=0.3)
        began = time.monotonic()
        client.close()
        client.close()
        assert time.monotonic() - began < 2
        with pytest.raises(OPDError, match="closed"):
            client.score(rows, starts, timeout_s=1)


def test_close_ends_a_call_in_another_thread():
    with FakeTeacher(swallow) as teacher:
        client = client_of(teacher)
        ended = []

        def work():
            try:
                client.score(*default_rows(2), timeout_s=60)
            except OPDError as e:
                ended.append(str(e))

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.2)
        client.close()
        thread.join(5)
        assert ended == ["this TeacherClient was closed by another thread"]


def test_the_client_needs_neither_torch_nor_verl_nor_ray_nor_vllm():
    code = (
        "import sys, opd.client, opd.align\n"
        "bad = [m for m in ('torch', 'verl', 'ray', 'vllm', 'transformers', 'pandas') if m in sys.modules]\n"
        "assert not bad, bad"
    )
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


def test_many_calls_leave_no_sockets_and_no_memory_behind():
    """The reply is 8 MB each time: a leak of one in ten would show."""
    rows = [np.full(4001, 3000, dtype=np.int32) + np.arange(4001, dtype=np.int32) % 7 for _ in range(4)]

    def open_files():
        return len(os.listdir("/proc/self/fd"))

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with FakeTeacher() as teacher, client_of(teacher) as client:

        def least_memory(calls: int) -> int:
            """After any of some calls: the allocator may keep two replies' worth now and then."""
            least = sys.maxsize
            for _ in range(calls):
                client.score(rows, [1] * 4, topk=60, timeout_s=20)
                teacher.requests.clear()
                least = min(least, resident_bytes())
            return least

        least_memory(3)  # what is made once
        files, memory = open_files(), least_memory(8)
        least_memory(24)
        assert least_memory(8) - memory < 16 << 20
        assert open_files() <= files


def test_a_client_that_nobody_closed_is_let_go_when_it_is_collected():
    """libzmq would wait for ever for its sockets, in the middle of whatever the process does by then."""
    code = """
import gc
from opd.client import TeacherClient
def forget(): TeacherClient("tcp://127.0.0.1:9")
forget()
gc.collect()
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], env=CHILD_ENV, capture_output=True, text=True, timeout=30)
    assert done.stdout == "went on\n", done.stderr
