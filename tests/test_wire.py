"""The wire format, tested with bytes alone. `msgpack` stands for any client that is not ours."""

from __future__ import annotations

import pickle
import random
import time

import msgpack
import msgspec
import numpy as np
import pytest

from opd import wire
from opd.errors import RowError, WireError
from opd.question import Question, check_model, check_rows, unpack

ID = bytes(range(16))
MODEL = wire.ModelInfo(
    name="m",
    model="fp",
    tokenizer="tk",
    vocab_size=100,
    max_length=8,
    max_topk=4,
    eos_ids=[2],
    dtype="float32",
    backend="oracle",
    temperature=True,
    max_candidates=8,
)
NO_CANDIDATES = {"num_candidates": 0, "candidates": b""}
# two for each of the three scored positions of request_map()
CANDIDATES = {"num_candidates": 2, "candidates": np.array([50, 51, 52, 53, 54, 54], "<i4").tobytes()}


def i32(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def request_map(**changes: object) -> dict[str, object]:
    """A good score request of two rows, as another language would build it."""
    good: dict[str, object] = {
        "v": 2,
        "op": "score",
        "id": ID,
        "client": "test",
        "budget_ms": 5000,
        "lengths": i32(3, 2),
        "starts": i32(1, 1),
        "ids": i32(5, 6, 7, 8, 9),
        "topk": 0,
        "temperature": 1.0,
    }
    good.update(changes)
    return {key: value for key, value in good.items() if value is not ...}


def question(lengths: list[int], starts: list[int], ids: list[int]) -> Question:
    return Question(*(np.array(values, dtype=np.int32) for values in (lengths, starts, ids)))


def code_of(body: object) -> str:
    with pytest.raises(WireError) as caught:
        wire.decode_request(body)
    return caught.value.code


def test_a_ping_has_these_bytes() -> None:
    """Hand-written msgpack: a map of four, nothing hidden."""
    golden = b"\x84" + b"\xa2op\xa4ping" + b"\xa1v\x02" + b"\xa2id\xc4\x10" + ID + b"\xa6client\xa1c"
    assert wire.encode_request(wire.PingRequest(id=ID, client="c")) == golden


@pytest.mark.parametrize(
    ("request_type", "op"),
    [(wire.SleepRequest, b"\xa5sleep"), (wire.WakeRequest, b"\xa4wake"), (wire.VocabRequest, b"\xa5vocab")],
)
def test_sleep_wake_and_vocab_carry_nothing_but_their_name(request_type: type, op: bytes) -> None:
    golden = b"\x84" + b"\xa2op" + op + b"\xa1v\x02" + b"\xa2id\xc4\x10" + ID + b"\xa6client\xa1c"
    assert wire.encode_request(request_type(id=ID, client="c")) == golden
    assert isinstance(wire.decode_request(golden), request_type)


def test_a_prefetch_has_the_columns_of_a_score() -> None:
    """The same map under another op, with the same checks."""
    body = msgpack.packb(request_map(op="prefetch", topk=2))
    got = wire.decode_request(body)
    assert isinstance(got, wire.PrefetchRequest) and got.topk == 2
    assert msgpack.unpackb(wire.encode_request(got)) == request_map(op="prefetch", topk=2, expect=None, **NO_CANDIDATES)
    assert [row.tolist() for row in unpack(got, wire.Limits()).rows()] == [[5, 6, 7], [8, 9]]
    assert code_of(msgpack.packb(request_map(op="prefetch", temperature=0.0))) == "schema"
    assert wire.PrefetchRequest.__struct_fields__ == wire.ScoreRequest.__struct_fields__


def test_a_plain_msgpack_client_and_ours_send_the_same_map() -> None:
    ours = wire.ScoreRequest(
        id=ID,
        client="test",
        budget_ms=5000,
        lengths=memoryview(i32(3, 2)),
        starts=memoryview(i32(1, 1)),
        ids=memoryview(i32(5, 6, 7, 8, 9)),
    )
    assert msgpack.unpackb(wire.encode_request(ours)) == request_map(expect=None, **NO_CANDIDATES)


def test_candidates_of_a_plain_msgpack_client_are_read_back_by_position_and_are_no_extra_frame() -> None:
    body = msgpack.packb(request_map(**CANDIDATES))
    request = wire.decode_request(body)
    assert isinstance(request, wire.ScoreRequest)
    asked = unpack(request, wire.Limits())
    assert asked.candidates is not None and asked.candidates.tolist() == [[50, 51], [52, 53], [54, 54]]
    assert asked.num_candidates == 2 and check_rows(asked, MODEL) == []
    assert msgpack.unpackb(wire.encode_request(request)) == request_map(expect=None, **CANDIDATES)
    assert np.shares_memory(asked.candidates, np.frombuffer(body, np.uint8))


def test_a_request_from_plain_msgpack_is_read_back_exactly() -> None:
    request = wire.decode_request(msgpack.packb(request_map(expect={"model": "a", "tokenizer": "b"})))
    assert isinstance(request, wire.ScoreRequest)
    assert (request.id, request.client, request.budget_ms, request.topk) == (ID, "test", 5000, 0)
    assert request.expect == wire.Expect(model="a", tokenizer="b")
    q = unpack(request, wire.Limits())
    assert [row.tolist() for row in q.rows()] == [[5, 6, 7], [8, 9]]
    assert q.counts().tolist() == [2, 1]


def test_optional_fields_may_be_left_out() -> None:
    request = wire.decode_request(msgpack.packb(request_map(client=..., topk=..., temperature=...)))
    assert isinstance(request, wire.ScoreRequest)
    assert (request.client, request.topk, request.temperature, request.expect) == ("", 0, 1.0, None)


def test_ids_are_not_copied_while_decoding() -> None:
    body = np.frombuffer(msgpack.packb(request_map()), dtype=np.uint8).copy()
    request = wire.decode_request(body.data)
    assert isinstance(request, wire.ScoreRequest)
    assert np.shares_memory(np.frombuffer(request.ids, dtype=np.uint8), body)


def test_a_topk_reply_is_a_map_and_two_raw_frames() -> None:
    reply = wire.Reply(id=ID, status="ok", boot="b", logprobs=wire.to_bin(np.array([-1.5, -2.5]), np.float32))
    topk_ids, topk_logprobs = np.array([[1, 2], [3, 4]]), np.array([[-0.5, -1.5], [-0.25, -3.0]])
    frames = wire.encode_reply(reply, topk_ids, topk_logprobs)
    head = msgpack.unpackb(frames[0])
    assert head["frames"] == ["topk_ids", "topk_logprobs"]
    assert np.frombuffer(head["logprobs"], "<f4").tolist() == [-1.5, -2.5]
    assert bytes(frames[1]) == i32(1, 2, 3, 4)
    assert bytes(frames[2]) == np.array([-0.5, -1.5, -0.25, -3.0], "<f4").tobytes()
    decoded, raw = wire.decode_reply(frames)
    assert decoded.id == ID and list(raw) == ["topk_ids", "topk_logprobs"]


def test_candidates_come_in_one_more_raw_frame_behind_the_topk() -> None:
    for topk in (None, np.zeros((1, 2))):
        reply = wire.Reply(id=ID, status="ok", boot="b")
        frames = wire.encode_reply(reply, topk, topk, np.array([[-0.5, -1.5, -0.5]]))
        names = ["candidate_logprobs"] if topk is None else ["topk_ids", "topk_logprobs", "candidate_logprobs"]
        assert msgpack.unpackb(frames[0])["frames"] == names
        assert bytes(frames[-1]) == np.array([-0.5, -1.5, -0.5], "<f4").tobytes()
        assert list(wire.decode_reply(frames)[1]) == names


@pytest.mark.parametrize("names", [["candidate_logprobs", "topk_ids"], ["topk_ids"], ["logprobs"]])
def test_a_reply_with_other_frames_is_refused(names: list[str]) -> None:
    body = wire.encode_reply(wire.Reply(id=ID, status="ok", boot="b", frames=names))
    with pytest.raises(WireError, match="frames follow the map"):
        wire.decode_reply([*body, *(b"" for _ in names)])


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_topk_reply_that_lost_frames_is_refused(keep: int) -> None:
    frames = wire.encode_reply(wire.Reply(id=ID, status="ok", boot="b"), np.zeros((1, 2)), np.zeros((1, 2)))
    with pytest.raises(WireError):
        wire.decode_reply(frames[:keep])


def test_digest_names_lengths_starts_ids_and_candidates() -> None:
    """A golden value, so that another implementation can be checked, and one change in each array."""
    base = [np.array(values, dtype=np.int32) for values in ([3, 2], [1, 1], [5, 6, 7, 8, 9])]
    assert wire.digest(*base).hex() == "0989854c7eca114dbb8c6e5c8eeb28ae"
    for index in range(3):
        changed = [array.copy() for array in base]
        changed[index][0] += 1
        assert wire.digest(*changed) != wire.digest(*base)
    candidates = np.array([[50, 51], [52, 53], [54, 54]], dtype=np.int32)
    assert wire.digest(*base, candidates).hex() == "a9f397577546142a19bc97c27b462e4f"
    assert wire.digest(*base, candidates[:, ::-1]) != wire.digest(*base, candidates)


def test_every_truncation_of_a_good_request_is_bad_msgpack() -> None:
    body = msgpack.packb(request_map(expect={"model": "a", "tokenizer": "b"}))
    assert {code_of(body[:end]) for end in range(len(body))} == {"bad_msgpack"}


def test_every_bit_flip_of_a_good_request_is_an_error_or_another_request() -> None:
    """Nothing but WireError comes out, and what still decodes never has the digest of the original."""
    body = msgpack.packb(request_map(expect={"model": "a", "tokenizer": "b"}))
    original = wire.decode_request(body)
    assert isinstance(original, wire.ScoreRequest)
    survived = 0
    for bit in range(8 * len(body)):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            request = wire.decode_request(bytes(flipped))
            if isinstance(request, wire.ScoreRequest):
                check_rows(unpack(request, wire.Limits()), MODEL)
        except WireError:
            continue
        survived += 1
        assert msgspec.msgpack.encode(request) != msgspec.msgpack.encode(original)
    assert survived > 100  # flips in ids, id, budget and text are other requests


def test_random_bytes_and_random_edits_raise_only_wire_errors() -> None:
    rng = random.Random(7)
    good = msgpack.packb(request_map())
    for _ in range(5000):
        if rng.random() < 0.3:
            body = rng.randbytes(rng.randrange(64))
        else:
            edited = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                where = rng.randrange(len(edited))
                edited[where : where + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
            body = bytes(edited)
        try:
            request = wire.decode_request(body)
            if isinstance(request, wire.ScoreRequest):
                check_rows(unpack(request, wire.Limits()), MODEL)
        except WireError:
            pass
        wire.read_id(body)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "bad_msgpack"),
        (b"\xc1", "bad_msgpack"),
        (msgpack.packb(request_map()) + b"\x00", "bad_msgpack"),
        (b"\xdd\xff\xff\xff\xff", "schema"),
        (b"\xdf\xff\xff\xff\xff", "bad_msgpack"),
        (b"\x81\xa1x\xc6\xff\xff\xff\xff", "bad_msgpack"),
        (b"\x81\xa1x\xdb\xff\xff\xff\xff", "bad_msgpack"),
        (b"\x81\xa1x\xc9\xff\xff\xff\xff\x05", "bad_msgpack"),
        (b"\x91" * 1025 + b"\x90", "schema"),
        (b"\x81\xa1x" + b"\x91" * 100_000 + b"\x90", "bad_msgpack"),
        (b"\x81\xa1x" + b"\x81\xa1x" * 1_000_000, "bad_msgpack"),
        (msgpack.packb([1, 2]), "schema"),
        (msgpack.packb(7), "schema"),
        (msgpack.packb("score"), "schema"),
        (msgpack.packb(None), "schema"),
        (msgpack.packb({1: 2}), "schema"),
        (msgpack.packb({None: 2}), "schema"),
        (msgpack.packb({}), "version"),
        (pickle.dumps({"v": 2}), "schema"),
        (b'{"v": 2}', "schema"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "schema"),
    ],
)
def test_bytes_that_are_no_request(body: bytes, code: str) -> None:
    got = code_of(body)
    assert got in {code, "schema", "bad_msgpack"} and (code == "version") == (got == "version")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"v": 3}, "version"),
        ({"v": ...}, "version"),
        ({"v": "1"}, "schema"),
        ({"op": "generate"}, "op"),
        ({"op": "SCORE"}, "op"),
        ({"op": ...}, "op"),
        ({"extra": 1}, "schema"),
        ({"Lengths": i32(1)}, "schema"),
        ({"ids": ...}, "schema"),
        ({"budget_ms": ...}, "schema"),
        ({"budget_ms": -1}, "schema"),
        ({"budget_ms": 1.5}, "schema"),
        ({"budget_ms": 2**63}, "schema"),
        ({"id": b"short"}, "schema"),
        ({"id": "x" * 16}, "schema"),
        ({"client": "x" * 513}, "schema"),
        ({"client": None}, "schema"),
        ({"ids": [5, 6, 7, 8, 9]}, "schema"),
        ({"ids": [3.0, 3.5]}, "schema"),
        ({"ids": "56789"}, "schema"),
        ({"ids": None}, "schema"),
        ({"ids": True}, "schema"),
        ({"topk": -1}, "schema"),
        ({"topk": 1.5}, "schema"),
        ({"topk": True}, "schema"),
        ({"topk": 2**31}, "schema"),
        ({"num_candidates": -1}, "schema"),
        ({"num_candidates": 65_537}, "schema"),
        ({"num_candidates": None}, "schema"),
        ({"num_candidates": 2, "candidates": [[50, 51]]}, "schema"),
        ({"temperature": 0.0}, "schema"),
        ({"temperature": -1.0}, "schema"),
        ({"temperature": float("nan")}, "schema"),
        ({"temperature": float("inf")}, "schema"),
        ({"temperature": "1"}, "schema"),
        ({"expect": {"model": "a"}}, "schema"),
        ({"expect": {"model": "a", "tokenizer": "b", "c": 1}}, "schema"),
        ({"client": msgpack.ExtType(5, b"x")}, "schema"),
        ({"budget_ms": msgpack.Timestamp(1)}, "schema"),
    ],
)
def test_a_field_that_breaks_the_schema(changes: dict[str, object], code: str) -> None:
    assert code_of(msgpack.packb(request_map(**changes))) == code


def test_invalid_utf8_is_bad_msgpack() -> None:
    body = msgpack.packb(request_map(client="XXXX")).replace(b"XXXX", b"\xff\xfe\xff\xfe")
    assert code_of(body) == "bad_msgpack"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ids": i32(5, 6, 7, 8, 9)[:-1]}, "schema"),
        ({"lengths": i32(3, 2)[:-2]}, "schema"),
        ({"ids": i32(5, 6, 7, 8)}, "schema"),
        ({"ids": i32(5, 6, 7, 8, 9, 10)}, "schema"),
        ({"lengths": i32(6, -1)}, "schema"),
        ({"lengths": i32(2**31 - 1, 2**31 - 1)}, "schema"),
        ({"starts": i32(1)}, "schema"),
        ({"lengths": b"", "starts": b"", "ids": b""}, "empty_batch"),
        ({"lengths": i32(1, 1, 1, 1), "starts": i32(1, 1, 1, 1), "ids": i32(1, 2, 3, 4)}, "limit"),
        ({"topk": 65_536}, "limit"),
        ({"num_candidates": 65_536}, "limit"),  # by the reply that it would take, before anything is made of that size
        ({"num_candidates": 2, "candidates": i32(50, 51, 52, 53, 54)}, "schema"),
        ({"num_candidates": 2, "candidates": i32(50, 51, 52, 53, 54, 55, 56)}, "schema"),
        ({"num_candidates": 2, "candidates": i32(50, 51, 52, 53, 54, 55)[:-1]}, "schema"),
        ({"num_candidates": 2}, "schema"),
        ({"candidates": i32(50, 51, 52)}, "schema"),
    ],
)
def test_arrays_that_do_not_belong_together(changes: dict[str, object], code: str) -> None:
    request = wire.decode_request(msgpack.packb(request_map(**changes)))
    assert isinstance(request, wire.ScoreRequest)
    with pytest.raises(WireError) as caught:
        unpack(request, wire.Limits(max_rows=3, max_reply_bytes=1000))
    assert caught.value.code == code


@pytest.mark.parametrize("body", [b"\x90", b"\x80", b"\x91"], ids=["arrays", "maps", "nested"])
def test_sixteen_megabytes_of_tiny_objects_are_refused_at_once(body: bytes) -> None:
    began = time.process_time()
    code_of(body * (16 << 20))
    code_of(b"\x81\xa1x\xdc\xff\xff" + body * 70_000)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("lengths", "starts", "ids", "want"),
    [
        ([2], [1], [0, 99], None),
        ([1], [1], [7], None),  # one id, nothing to score: fine
        ([8], [8], [1] * 8, None),
        ([0], [0], [], "empty_row"),
        ([0], [1], [], "empty_row"),
        ([9], [1], [1] * 9, "too_long"),
        ([2], [0], [1, 2], "bad_start"),
        ([2], [-1], [1, 2], "bad_start"),
        ([2], [3], [1, 2], "bad_start"),
        ([2], [1], [1, 100], "token_range"),
        ([2], [1], [1, -1], "token_range"),
        ([2], [1], [-(2**31), 1], "token_range"),
        ([2], [1], [2**31 - 1, 1], "token_range"),
    ],
)
def test_a_row_is_judged_alone(lengths: list[int], starts: list[int], ids: list[int], want: str | None) -> None:
    """The same verdict whether the row comes first, last or between good ones."""
    for before, after in ((0, 0), (2, 0), (0, 2), (2, 2)):
        good = [3] * 4
        q = question(
            [4] * before + lengths + [4] * after,
            [1] * before + starts + [1] * after,
            good * before + ids + good * after,
        )
        errors = check_rows(q, MODEL)
        assert [(error.row, error.code) for error in errors] == ([] if want is None else [(before, want)])
        assert all(isinstance(error, RowError) and str(before) in error.message for error in errors)


def test_a_range_error_names_row_position_and_vocabulary() -> None:
    (error,) = check_rows(question([2, 3], [1, 1], [1, 2, 3, 4, 100]), MODEL)
    assert error == (1, "token_range", "row 1 has id 100 at position 2; this teacher's vocabulary has 100 ids")


def test_a_candidate_out_of_range_fails_its_row_and_no_other() -> None:
    """Rows with a bad start have no candidates; the positions of the rows behind them are still the right ones."""
    asked = question([3, 2, 2, 3], [1, 5, 1, 1], [1] * 10)
    candidates = np.array([[1, 99], [1, 1], [99, 0], [1, 2], [100, -1]], np.int32)
    (start, candidate) = check_rows(msgspec.structs.replace(asked, candidates=candidates), MODEL)
    assert (start.row, start.code) == (1, "bad_start")
    message = "row 3 has candidate 100 at position 2; this teacher's vocabulary has 100 ids"
    assert candidate == (3, "token_range", message)
    candidates[0, 0] = -1
    rows = [error.row for error in check_rows(msgspec.structs.replace(asked, candidates=candidates), MODEL)]
    assert rows == [0, 1, 3]


def test_candidates_that_a_model_cannot_give_are_refused_by_name() -> None:
    request = wire.decode_request(msgpack.packb(request_map(**CANDIDATES)))
    assert isinstance(request, wire.ScoreRequest)
    check_model(request, msgspec.structs.replace(MODEL, max_candidates=2))
    for most, code in ((1, "limit"), (0, "candidates_unsupported")):
        with pytest.raises(WireError) as caught:
            check_model(request, msgspec.structs.replace(MODEL, max_candidates=most))
        assert caught.value.code == code


def test_several_bad_rows_are_each_named_once_in_order() -> None:
    q = question([2, 0, 2, 9], [1, 1, 5, 1], [100, 101, 1, 1] + [200] * 9)
    assert [(e.row, e.code) for e in check_rows(q, MODEL)] == [
        (0, "token_range"),
        (1, "empty_row"),
        (2, "bad_start"),
        (3, "too_long"),
    ]


def test_big_endian_ids_are_out_of_range_rather_than_scored() -> None:
    q = Question(
        np.array([2], np.int32),
        np.array([1], np.int32),
        wire.from_bin(np.array([5, 6], ">i4").tobytes(), np.int32, "ids"),
    )
    assert [e.code for e in check_rows(q, MODEL)] == ["token_range"]


def test_counts_are_zero_where_the_start_is_wrong() -> None:
    assert question([3, 3, 3, 3], [0, 1, 3, 4], [1] * 12).counts().tolist() == [0, 2, 0, 0]


def test_clip_escapes_and_cuts_what_a_peer_sent() -> None:
    assert wire.clip("a\nb\x1b[31m\u202ec") == "a\\nb\\x1b[31m\\u202ec"
    assert len(wire.clip("x" * 10_000)) == wire.MAX_TEXT


def test_the_id_of_a_broken_request_is_found_when_it_can_be() -> None:
    assert wire.read_id(msgpack.packb(request_map(topk="many"))) == ID
    assert wire.read_id(msgpack.packb({"id": b"short"})) == b""
    assert wire.read_id(b"\xc1") == b""


def test_to_bin_and_from_bin_are_inverse_and_do_not_copy() -> None:
    array = np.arange(6, dtype=np.int32)
    data = wire.to_bin(array, np.int32)
    back = wire.from_bin(data, np.int32, "x")
    assert back.tolist() == array.tolist() and np.shares_memory(back, array)
    assert wire.to_bin(np.arange(6)[::2], np.int32).tobytes() == i32(0, 2, 4)
    assert wire.to_bin(np.array([]), np.float32).nbytes == 0
