"""The teacher server as strangers see it: real processes, real sockets, and a client of nothing but zmq and msgpack."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import pickle
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio
from conftest import CHILD_ENV, ROOT, ServerProcess, wait_until
from moody_scorer import BREAK_ID, OVERWRITE_ID, SEGFAULT_ID, SHAPE_ID, SHORT_LIST_ID, MoodyScorer

from opd.errors import ConfigError, WireError
from opd.question import check_model
from opd.scoring import oracle
from opd.scoring.scorer import LoadOptions, Row, RowScores
from opd.serving import link
from opd.serving.worker import score_batch
from opd.teacher_server import build_parser, check_reach
from opd.wire import Expect, ModelInfo, ScoreRequest, digest

Rows = list[list[int]]
VOCAB, MAX_LENGTH = 1000, 64
Start = Callable[..., ServerProcess]


# a client of nothing but zmq and msgpack


def score_map(rows: Rows, **changes: Any) -> dict[str, Any]:
    starts = changes.pop("starts", None) or [1] * len(rows)
    request = {
        "v": 2,
        "op": "score",
        "id": os.urandom(16),
        "client": "test",
        "budget_ms": 20_000,
        "lengths": np.array([len(row) for row in rows], "<i4").tobytes(),
        "starts": np.array(starts, "<i4").tobytes(),
        "ids": np.array([token for row in rows for token in row], "<i4").tobytes(),
    }
    request.update(changes)
    return {key: value for key, value in request.items() if value is not ...}


def pack(request: Any) -> bytes:
    data: bytes = msgpack.packb(request)
    return data


class Client:
    """A zmq.REQ socket, or a DEALER that sends the empty frame itself."""

    def __init__(self, address: str, kind: int = zmq.REQ, **options: int):
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.dealer = kind == zmq.DEALER
        for name, value in {"LINGER": 0, "RCVTIMEO": 20_000, "SNDTIMEO": 5000, **options}.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart([b"", *frames] if self.dealer else frames)

    def receive(self) -> dict[str, Any]:
        frames = self.socket.recv_multipart()
        if self.dealer:
            assert frames.pop(0) == b""
        reply: dict[str, Any] = msgpack.unpackb(frames[0])
        assert len(frames) - 1 == len(reply["frames"])
        reply |= {
            name: np.frombuffer(frame, "<i4" if name == "topk_ids" else "<f4")
            for name, frame in zip(reply["frames"], frames[1:], strict=True)
        }
        reply["logprobs"] = np.frombuffer(reply["logprobs"], "<f4")
        return reply

    def ask(self, request: Any) -> dict[str, Any]:
        self.send(request if isinstance(request, bytes) else pack(request))
        return self.receive()

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.ask({"v": 2, "op": "info", "id": os.urandom(16)})["info"]
        return info

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(address: str, kind: int = zmq.REQ, **options: int) -> Client:
        clients.append(Client(address, kind, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def truth(rows: Rows, *, seed: int = 0, topk: int = 0, temperature: float = 1.0) -> list[RowScores]:
    scorer = oracle.load(LoadOptions(model=f"oracle:seed={seed}"))
    scores = scorer.score([Row(np.array(row, np.int32), 1) for row in rows], topk=topk, temperature=temperature)
    assert all(isinstance(score, RowScores) for score in scores)
    return scores  # type: ignore[return-value]


def assert_right(reply: dict[str, Any], rows: Rows, seed: int = 0) -> None:
    assert reply["status"] == "ok", reply
    assert reply["row_errors"] == []
    np.testing.assert_array_equal(
        reply["logprobs"], np.concatenate([score.logprobs for score in truth(rows, seed=seed)])
    )


def random_rows(rng: random.Random, num_rows: int, longest: int = MAX_LENGTH) -> Rows:
    return [[rng.randrange(10, 900) for _ in range(rng.randrange(2, longest + 1))] for _ in range(num_rows)]


GOOD: Rows = [[11, 12, 13], [14, 15]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that do not end it or kill its worker."""
    model = f"oracle:vocab={VOCAB},max_length={MAX_LENGTH},raise_id=901,nan_id=902,oom_id=903"
    limits = [
        "--max-request-bytes",
        "2000000",
        "--max-reply-bytes",
        "4000000",
        "--max-topk",
        "8",
        "--max-tokens",
        "512",
    ]
    server = ServerProcess(tmp_path_factory.mktemp("shared") / "log", "--backend", "oracle", "--model", model, *limits)
    server.wait_ready()
    yield server
    server.end()


@pytest.fixture
def client(shared: ServerProcess, connect: Callable[..., Client]) -> Client:
    return connect(shared.address)


# answers


def test_values_are_the_scorers_own_and_the_reply_names_question_and_model(client: Client) -> None:
    request = score_map(GOOD)
    reply = client.ask(request)
    assert_right(reply, GOOD)
    lengths, starts, ids = (np.frombuffer(request[key], "<i4") for key in ("lengths", "starts", "ids"))
    assert reply["ids_digest"] == digest(lengths, starts, ids)
    assert (reply["v"], reply["id"]) == (2, request["id"])
    assert reply["model"] == client.info()["model"]["model"] and reply["boot"]


def assert_right_topk(reply: dict[str, Any], rows: Rows, topk: int) -> None:
    want = truth(rows, topk=topk)
    ids = [score.topk_ids for score in want if score.topk_ids is not None]
    logprobs = [score.topk_logprobs for score in want if score.topk_logprobs is not None]
    assert reply["frames"][:2] == ["topk_ids", "topk_logprobs"]
    np.testing.assert_array_equal(reply["topk_ids"], np.concatenate(ids).ravel())
    np.testing.assert_array_equal(reply["topk_logprobs"], np.concatenate(logprobs).ravel())


def test_topk_comes_in_two_raw_frames(client: Client) -> None:
    assert_right_topk(client.ask(score_map(GOOD, topk=5)), GOOD, 5)


def assert_right_candidates(reply: dict[str, Any], rows: Rows, candidates: list[np.ndarray]) -> None:
    assert reply["status"] == "ok", reply
    want = [oracle.oracle_candidates(row, 1, some) for row, some in zip(rows, candidates, strict=True)]
    np.testing.assert_array_equal(reply["candidate_logprobs"], np.concatenate(want).ravel())


def candidate_fields(candidates: list[np.ndarray]) -> dict[str, Any]:
    width = candidates[0].shape[1]
    return {"num_candidates": width, "candidates": np.concatenate(candidates).astype("<i4").tobytes()}


def test_candidates_of_a_req_socket_come_in_a_raw_frame_and_the_digest_names_them(client: Client) -> None:
    candidates = [np.array([[12, 500], [13, 13]]), np.array([[0, 999]])]
    request = score_map(GOOD, **candidate_fields(candidates))
    reply = client.ask(request)
    assert_right(reply, GOOD)
    assert reply["frames"] == ["candidate_logprobs"]
    assert_right_candidates(reply, GOOD, candidates)
    assert reply["candidate_logprobs"][0] == reply["logprobs"][0]
    lengths, starts, ids = (np.frombuffer(request[key], "<i4") for key in ("lengths", "starts", "ids"))
    assert (
        reply["ids_digest"] == digest(lengths, starts, ids, np.concatenate(candidates)) != digest(lengths, starts, ids)
    )


def test_candidates_follow_their_rows_when_a_request_is_cut_and_its_prompts_put_together(client: Client) -> None:
    rng = random.Random(3)
    rows = [[7 + number % 3, 8, 9, *row] for number, row in enumerate(random_rows(rng, 60, 60))]
    generator = np.random.default_rng(4)
    candidates = [generator.integers(0, VOCAB, (len(row) - 1, 3)) for row in rows]
    reply = client.ask(score_map(rows, topk=4, **candidate_fields(candidates)))
    assert_right_topk(reply, rows, 4)
    assert_right_candidates(reply, rows, candidates)


def test_a_candidate_outside_the_vocabulary_fails_its_row_alone(client: Client) -> None:
    candidates = [np.array([[12, 500], [13, VOCAB]]), np.array([[1, 2]])]
    reply = client.ask(score_map(GOOD, **candidate_fields(candidates)))
    message = "row 0 has candidate 1000 at position 2; this teacher's vocabulary has 1000 ids"
    assert reply["row_errors"] == [[0, "token_range", message]]
    assert np.isnan(reply["candidate_logprobs"][:4]).all()
    np.testing.assert_array_equal(reply["candidate_logprobs"][4:], oracle.oracle_candidates([14, 15], 1, [[1, 2]])[0])


def test_a_request_larger_than_the_budget_is_cut_and_put_together_again(client: Client) -> None:
    rows = [[7, 8, 9, *row] for row in random_rows(random.Random(1), 60, 60)]
    assert_right(client.ask(score_map(rows)), rows)
    assert_right_topk(client.ask(score_map(rows, topk=4)), rows, 4)


def test_starts_choose_the_scored_positions(client: Client) -> None:
    rows = [[11, 12, 13, 14], [15, 16], [17]]
    reply = client.ask(score_map(rows, starts=[3, 1, 1]))
    whole = truth(rows)
    np.testing.assert_array_equal(reply["logprobs"], np.concatenate([whole[0].logprobs[2:], whole[1].logprobs]))


def test_clients_share_batches_and_each_gets_its_own_values(
    teacher_server: Start, connect: Callable[..., Client]
) -> None:
    server = teacher_server(ms_per_batch=30)
    clients = [connect(server.address) for _ in range(8)]
    rng = random.Random(2)
    for _ in range(3):
        asked = [random_rows(rng, 3) for _ in clients]
        for client, rows in zip(clients, asked, strict=True):
            client.send(pack(score_map(rows, client=f"c{id(client)}")))
        for client, rows in zip(clients, asked, strict=True):
            assert_right(client.receive(), rows)
    assert any(f" rows of {n} requests" in server.text() for n in range(2, 9))


# interoperability


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (zmq.REQ, {}),
        (zmq.REQ, {"REQ_CORRELATE": 1}),
        (zmq.REQ, {"REQ_CORRELATE": 1, "REQ_RELAXED": 1}),
        (zmq.DEALER, {}),
    ],
    ids=["REQ", "REQ+CORRELATE", "REQ+CORRELATE+RELAXED", "DEALER"],
)
def test_every_kind_of_client_socket_works(
    shared: ServerProcess, connect: Any, kind: int, options: dict[str, int]
) -> None:
    client = connect(shared.address, kind, **options)
    for _ in range(3):
        assert_right(client.ask(score_map(GOOD)), GOOD)


def test_an_asyncio_client_works(shared: ServerProcess) -> None:
    async def ask() -> list[bytes]:
        with zmq.asyncio.Context() as context, context.socket(zmq.REQ) as request:
            request.connect(shared.address)
            await request.send(pack(score_map(GOOD)))
            return await asyncio.wait_for(request.recv_multipart(), 20)

    assert msgpack.unpackb(asyncio.run(ask())[0])["status"] == "ok"


def test_two_proxies_in_between_do_not_matter(shared: ServerProcess, connect: Callable[..., Client]) -> None:
    context = zmq.Context()
    backend = shared.address
    for _ in range(2):
        front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        back.connect(backend)
        backend = f"tcp://127.0.0.1:{front.bind_to_random_port('tcp://127.0.0.1')}"
        threading.Thread(target=_proxy, args=(front, back), daemon=True).start()
    client = connect(backend, zmq.REQ, REQ_CORRELATE=1)
    assert_right(client.ask(score_map(GOOD)), GOOD)
    client.close()
    context.destroy(linger=0)


def _proxy(front: zmq.Socket[bytes], back: zmq.Socket[bytes]) -> None:
    with contextlib.suppress(zmq.ZMQError):  # the test is over
        zmq.proxy(front, back)


def test_the_envelope_comes_back_as_it_was_sent(shared: ServerProcess, connect: Callable[..., Client]) -> None:
    dealer = connect(shared.address, zmq.DEALER)
    hops = [b"proxy one", b"\x00\x01\x02\x03\x04", b"x" * 200, b"hop 4", b"hop 5"]
    dealer.socket.send_multipart([*hops, b"", pack(score_map(GOOD))])
    assert dealer.socket.recv_multipart()[:6] == [*hops, b""]


# bad input: each gets its answer, and the next good request is right


def good_again(shared: ServerProcess, connect: Callable[..., Client]) -> None:
    began = time.monotonic()
    assert_right(connect(shared.address).ask(score_map(GOOD)), GOOD)
    assert time.monotonic() - began < 5
    assert shared.popen.poll() is None


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b""], "empty_body"),
        ([], "empty_body"),
        ([b"", b""], "extra_frames"),
        ([pack(score_map(GOOD)), b"x"], "extra_frames"),
        ([b"x"] * 100, "extra_frames"),
        ([b"\xc1"], "bad_msgpack"),
        ([b"x" * 2_000_001], "limit"),
        ([b"\x90" * 2_000_000], "schema"),
        ([b"\x81\xa1x" + b"\x91" * 500_000], "bad_msgpack"),
        ([b"\xdd\xff\xff\xff\xff"], "schema"),
        ([b"\xdf\xff\xff\xff\xff"], "bad_msgpack"),
        ([pickle.dumps(os.system)], "bad_msgpack"),
        ([b'{"v": 2, "op": "score"}'], "schema"),
        ([pack(score_map(GOOD))[:-1]], "bad_msgpack"),
        ([pack(score_map(GOOD)) + b"\x00"], "bad_msgpack"),
        ([pack(score_map(GOOD, v=3))], "version"),
        ([pack(score_map(GOOD, op="train"))], "op"),
        ([pack(score_map(GOOD, extra=1))], "schema"),
        ([pack(score_map(GOOD, ids=[11, 12, 13, 14, 15]))], "schema"),
        ([pack(score_map(GOOD, ids=b"123"))], "schema"),
        ([pack(score_map([]))], "empty_batch"),
        ([pack(score_map(GOOD, topk=9))], "limit"),
        ([pack(score_map([[1] * 64] * 1000, topk=8))], "limit"),
        ([pack(score_map(GOOD, topk=-1))], "schema"),
        ([pack(score_map(GOOD, num_candidates=2, candidates=bytes(20)))], "schema"),
        ([pack(score_map(GOOD, num_candidates=1025, candidates=bytes(3 * 4 * 1025)))], "limit"),
        ([pack(score_map([[1] * 64] * 1000, num_candidates=65_536))], "limit"),
        ([pack(score_map(GOOD, temperature=0.0))], "schema"),
        ([pack(score_map(GOOD, expect={"model": "another", "tokenizer": ""}))], "model_mismatch"),
    ],
)
def test_a_bad_request_gets_a_typed_error(
    shared: ServerProcess, connect: Callable[..., Client], frames: list[bytes], code: str
) -> None:
    dealer = connect(shared.address, zmq.DEALER)
    dealer.send(*frames)
    reply = dealer.receive()
    assert (reply["status"], reply["retryable"]) == ("error", False)
    if code != "bad_msgpack" or reply["code"] != "schema":  # which of the two is the decoder's choice
        assert reply["code"] == code
    assert len(reply["message"]) > 5 and len(reply["logprobs"]) == 0
    good_again(shared, connect)


def test_an_error_names_the_request_that_it_answers(client: Client) -> None:
    request = score_map(GOOD, topk="many")
    assert client.ask(request)["id"] == request["id"]


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ([], "empty_row"),
        ([5] * (MAX_LENGTH + 1), "too_long"),
        ([5, VOCAB], "token_range"),
        ([5, -1], "token_range"),
        ([5, -(2**31)], "token_range"),
        ([5, 2**31 - 1], "token_range"),
        ([5, 901], "scorer_error"),
        ([5, 902], "non_finite"),
        ([5, 903], "oom"),
        ([5], None),
        ([5] * MAX_LENGTH, None),
        ([5, VOCAB - 1], None),
        ([0, 0, 0], None),
    ],
)
def test_a_bad_row_costs_only_itself(client: Client, row: list[int], code: str | None) -> None:
    rows = [GOOD[0], row, GOOD[1]]
    reply = client.ask(score_map(rows, topk=2))
    assert reply["status"] == "ok"
    assert [(at, got) for at, got, _ in reply["row_errors"]] == ([] if code is None else [(1, code)])
    first, last = (score.logprobs for score in truth(GOOD))
    middle = reply["logprobs"][len(first) : -len(last)]
    np.testing.assert_array_equal(reply["logprobs"][: len(first)], first)
    np.testing.assert_array_equal(reply["logprobs"][-len(last) :], last)
    assert len(middle) == max(len(row) - 1, 0)
    assert np.isnan(middle).all() if code else np.isfinite(middle).all()
    assert len(reply["topk_ids"]) == 2 * len(reply["logprobs"])


def test_a_request_of_bad_rows_only_is_answered(client: Client) -> None:
    reply = client.ask(score_map([[VOCAB], [5, -1]]))
    assert [(row, code) for row, code, _ in reply["row_errors"]] == [(0, "token_range"), (1, "token_range")]
    assert np.isnan(reply["logprobs"]).all()


def test_every_truncation_and_many_bit_flips_are_answered(
    shared: ServerProcess, connect: Callable[..., Client]
) -> None:
    """Pipelined: as many answers as questions, and the right one for the good request at the end."""
    good = pack(score_map(GOOD))
    rng = random.Random(4)
    bodies = [good[:end] for end in range(1, len(good))]
    for bit in rng.sample(range(8 * len(good)), 400):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        bodies.append(bytes(flipped))
    dealer = connect(shared.address, zmq.DEALER, SNDHWM=0, RCVHWM=0)
    for body in bodies:
        dealer.send(body)
    statuses = Counter(dealer.receive()["status"] for _ in bodies)
    assert set(statuses) <= {"ok", "error", "busy", "expired"} and statuses["error"] >= len(good) - 1
    good_again(shared, connect)


def test_a_message_without_an_envelope_is_dropped(shared: ServerProcess, connect: Callable[..., Client]) -> None:
    dealer = connect(shared.address, zmq.DEALER, RCVTIMEO=300)
    dealer.socket.send(pack(score_map(GOOD)))
    dealer.socket.send_multipart([b"hop"] * 40 + [b"", pack(score_map(GOOD))])
    with pytest.raises(zmq.Again):
        dealer.receive()
    good_again(shared, connect)


def test_peers_that_do_not_speak_zmtp_are_cut_off(shared: ServerProcess, connect: Callable[..., Client]) -> None:
    """HTTP, TLS, SSH, noise, and hand-written bytes of the old protocol that libzmq would pass on as a message."""
    host, port = shared.address.removeprefix("tcp://").split(":")
    zmtp1_message = b"\x01\x00" + b"\x01\x01" + struct.pack("BB", 1, 1) + b"\x02\x00A"
    garbage = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        b"SSH-2.0-OpenSSH_9.6\r\n",
        random.Random(5).randbytes(4096),
        b"\x00" * 65_536,
        zmtp1_message,
    ]
    silent = socket.create_connection((host, int(port)))
    for data in garbage:
        with socket.create_connection((host, int(port)), timeout=3) as peer:
            try:
                peer.sendall(data)
                while peer.recv(4096):  # b"" at the end; TimeoutError if it stays open
                    pass
            except ConnectionError:
                pass
    silent.settimeout(8)
    try:
        while silent.recv(4096):
            pass
    except ConnectionError:
        pass
    silent.close()
    good_again(shared, connect)
    assert "A" not in {line.split()[-1] for line in shared.text().splitlines() if line.split()}


def test_what_a_peer_sends_is_escaped_in_the_log(shared: ServerProcess, client: Client) -> None:
    client.ask(score_map(GOOD, op="\x1b[31mred\nINFO fake line"))
    client.ask(score_map(GOOD, client="\x1b]0;title\x07"))
    assert "\x1b" not in shared.text() and "\nINFO fake" not in shared.text()


def test_token_ids_are_not_logged(shared: ServerProcess, client: Client) -> None:
    client.ask(score_map([[877, 878, 879], [876, 99_999_876]]))
    logged = re.sub(r"\d\d:\d\d:\d\d,\d{3}", "", shared.text())  # a time may end with any three digits
    assert not re.search(r"\b87[789]\b", logged) and "99999876" not in logged


def test_a_peer_that_is_gone_does_not_matter(shared: ServerProcess, connect: Callable[..., Client]) -> None:
    for _ in range(20):
        leaver = Client(shared.address, zmq.DEALER, LINGER=1000)
        leaver.send(pack(score_map(GOOD)))
        leaver.socket.close(linger=1000)
        leaver.context.term()
    good_again(shared, connect)


def test_what_a_request_asks_of_the_model_is_checked() -> None:
    model = ModelInfo(
        name="m",
        model="a",
        tokenizer="t",
        vocab_size=9,
        max_length=9,
        max_topk=2,
        eos_ids=[],
        dtype="float32",
        backend="b",
        temperature=False,
    )
    base: dict[str, Any] = {
        "id": b"0" * 16,
        "budget_ms": 1,
        "lengths": memoryview(b""),
        "starts": memoryview(b""),
        "ids": memoryview(b""),
    }
    table: list[tuple[dict[str, Any], str | None]] = [
        ({}, None),
        ({"expect": Expect(model="a", tokenizer="t")}, None),
        ({"expect": Expect(model="b", tokenizer="t")}, "model_mismatch"),
        ({"expect": Expect(model="a", tokenizer="u")}, "model_mismatch"),
        ({"topk": 2}, None),
        ({"topk": 3}, "limit"),
        ({"temperature": 0.5}, "temperature"),
    ]
    for change, code in table:
        request = ScoreRequest(**base, **change)
        if code is None:
            check_model(request, model)
            continue
        with pytest.raises(WireError) as caught:
            check_model(request, model)
        assert caught.value.code == code


# load and memory


def test_a_thousand_pipelined_requests_get_a_thousand_answers(
    teacher_server: Start, connect: Callable[..., Client]
) -> None:
    """What does not fit is refused as busy with a time to come back; ids are matched, the order is free."""
    server = teacher_server(ms_per_batch=5, args=["--max-queued-tokens", "2000"])
    dealer = connect(server.address, zmq.DEALER, SNDHWM=0, RCVHWM=0)
    rng = random.Random(6)
    asked = {}
    for _ in range(1000):
        request = score_map(rows := random_rows(rng, 2, 20))
        asked[request["id"]] = rows
        dealer.send(pack(request))
    statuses: Counter[str] = Counter()
    for _ in range(1000):
        reply = dealer.receive()
        rows = asked.pop(reply["id"])
        statuses[reply["status"]] += 1
        if reply["status"] == "ok":
            assert_right(reply, rows)
        else:
            assert reply["status"] == "busy" and reply["retryable"] and 20 <= reply["retry_after_ms"] <= 30_000
    assert statuses["ok"] > 30 and statuses["busy"] > 30 and not asked


def test_a_peer_that_never_reads_costs_bounded_memory(teacher_server: Start, connect: Callable[..., Client]) -> None:
    """300 replies of 4 MB are asked for and never read; the front stays small and serves others."""
    # a small cache: it has a bound of its own, and the replies that come out of it are bounded like the others
    server = teacher_server(args=["--max-queued-reply-bytes", "64000000", "--max-topk", "64", "--cache-mb", "16"])
    rows = [[11] * 128] * 64
    body = pack(score_map(rows, topk=64, client="sloth", budget_ms=600_000))
    assert_right(connect(server.address).ask(score_map(GOOD)), GOOD)
    before = rss_mb(server.pid)
    sloth = connect(server.address, zmq.DEALER, SNDHWM=0, RCVHWM=1, RCVBUF=4096)
    for _ in range(300):
        sloth.send(body)
    reader, quiet = connect(server.address), 0
    while quiet < 20:  # until the server has dealt with all of them
        time.sleep(0.02)
        quiet = quiet + 1 if reader.info()["queued_tokens"] == 0 else 0
    assert_right(reader.ask(score_map(GOOD)), GOOD)
    assert rss_mb(server.pid) - before < 120


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_an_expired_request_is_told_so_and_not_computed(teacher_server: Start, connect: Callable[..., Client]) -> None:
    server = teacher_server(ms_per_batch=400, kill_id=950, args=["--max-tokens", "8"])
    busy, hurried = connect(server.address), connect(server.address)
    busy.send(pack(score_map([[11, 12, 13]] * 8)))
    wait_until(lambda: hurried.info()["queued_tokens"] > 0)
    began = time.monotonic()
    reply = hurried.ask(score_map([[21, 950, 23, 24, 25]], budget_ms=150, client="hurried"))
    assert (reply["status"], reply["retryable"]) == ("expired", True)
    assert time.monotonic() - began < 2
    assert hurried.ask(score_map(GOOD, budget_ms=0))["status"] == "expired"
    assert_right(busy.receive(), [[11, 12, 13]] * 8)
    assert "worker lost" not in server.text()


def test_a_batch_that_waited_too_long_in_the_worker_is_not_scored() -> None:
    """The same bytes with a later deadline are."""
    scorer = MoodyScorer.__new__(MoodyScorer)
    scorer._broken = False
    arrays = [np.array(values, np.int32).tobytes() for values in ([3], [1], [5, 6, 7])]
    for deadline, want in ((time.monotonic() - 0.001, [np.nan, np.nan]), (time.monotonic() + 60, [-6.001, -7.002])):
        head = link.encode(link.Batch(1, 0, 1.0, deadline, [1]))
        answer, logprobs = score_batch(scorer, np.zeros(1), [memoryview(data) for data in (head, *arrays)])
        scores = link.decode_from_worker(answer)
        assert isinstance(scores, link.Scores)
        assert [code for _, _, code, _ in scores.errors] == (["expired"] if np.isnan(want).any() else [])
        np.testing.assert_array_equal(np.frombuffer(logprobs, np.float32), np.array(want, np.float32))


def test_a_scorer_that_forgets_the_candidates_has_no_values_for_the_row() -> None:
    scorer = MoodyScorer.__new__(MoodyScorer)
    scorer._broken = False
    arrays = [np.array(values, np.int32).tobytes() for values in ([3], [1], [5, 6, 7], [1, 2, 3, 4])]
    head = link.encode(link.Batch(1, 0, 1.0, time.monotonic() + 60, [1], 2))
    answer, logprobs, candidates = score_batch(scorer, np.zeros(1), [memoryview(data) for data in (head, *arrays)])
    scores = link.decode_from_worker(answer)
    assert isinstance(scores, link.Scores) and [code for _, _, code, _ in scores.errors] == ["scorer_error"]
    assert np.isnan(np.frombuffer(logprobs, "<f4")).all() and np.isnan(np.frombuffer(candidates, "<f4")).all()
    assert memoryview(candidates).nbytes == 16


def test_a_small_client_is_served_while_a_big_one_waits(teacher_server: Start, connect: Callable[..., Client]) -> None:
    server = teacher_server(ms_per_batch=20, args=["--max-tokens", "64"])
    big, small = connect(server.address), connect(server.address)
    rows = [[11, 12, 13, 14]] * 1600  # a hundred batches
    big.send(pack(score_map(rows, client="big")))
    wait_until(lambda: small.info()["queued_tokens"] > 0)
    for _ in range(5):
        assert_right(small.ask(score_map(GOOD, client="small")), GOOD)
    assert small.info()["queued_tokens"] > 0, "the big request was done before"
    assert_right(big.receive(), rows)


# the worker


def test_a_killed_worker_is_replaced_and_every_request_answered(
    teacher_server: Start, connect: Callable[..., Client]
) -> None:
    server = teacher_server(ms_per_batch=100)
    clients = [connect(server.address) for _ in range(4)]
    rng = random.Random(8)
    asked = [[*random_rows(rng, 3), *GOOD, *GOOD] for _ in clients]  # equal rows are one suspect, and innocent
    for number, (client, rows) in enumerate(zip(clients, asked, strict=True)):
        client.send(pack(score_map(rows, client=str(number))))
    wait_until(lambda: connect(server.address).info()["queued_tokens"] > 0)
    os.kill(server.worker_pid(), signal.SIGKILL)
    for client, rows in zip(clients, asked, strict=True):
        assert_right(client.receive(), rows)
    assert "killed by SIGKILL" in server.text() and server.popen.poll() is None


def test_an_idle_worker_that_dies_is_replaced(teacher_server: Start, connect: Callable[..., Client]) -> None:
    server = teacher_server(load_s=0.5)
    client = connect(server.address)
    boot = client.ask({"v": 2, "op": "ping", "id": os.urandom(16)})["boot"]
    os.kill(server.worker_pid(), signal.SIGKILL)
    wait_until(lambda: client.info()["state"] == "restarting")
    reply = client.ask(score_map(GOOD))
    assert (reply["status"], reply["code"], reply["retryable"]) == ("busy", "restarting", True)
    wait_until(lambda: client.info()["state"] == "ready")
    assert_right(reply := client.ask(score_map(GOOD)), GOOD)
    assert reply["boot"] == boot


def test_a_row_that_kills_the_worker_is_found_and_refused(
    teacher_server: Start, connect: Callable[..., Client]
) -> None:
    """Two workers die; the row gets `poison`, its neighbours and the other clients their values; then it is known."""
    server = teacher_server(kill_id=950, ms_per_batch=50)
    clients = [connect(server.address) for _ in range(3)]
    rng = random.Random(9)
    asked = [random_rows(rng, 4, 20) for _ in clients]
    poisoned = [*asked[0][:2], [11, 950, 12], [11, 950, 12], *asked[0][2:]]
    bodies = [score_map(poisoned, client="0"), *(score_map(rows, client=str(n)) for n, rows in enumerate(asked[1:], 1))]
    for client, body in zip(clients, bodies, strict=True):
        client.send(pack(body))
    reply = clients[0].receive()
    assert reply["status"] == "ok" and [(row, code) for row, code, _ in reply["row_errors"]] == [
        (2, "poison"),
        (3, "poison"),
    ]
    kept = reply["logprobs"][~np.isnan(reply["logprobs"])]
    np.testing.assert_array_equal(kept, np.concatenate([score.logprobs for score in truth(asked[0])]))
    for client, body, rows in zip(clients[1:], bodies[1:], asked[1:], strict=True):
        answer = client.receive()
        while answer["status"] == "busy":  # it reached the server after the first death
            time.sleep(0.05)
            client.send(pack(body))
            answer = client.receive()
        assert_right(answer, rows)
    again = clients[1].ask(score_map([[11, 12], [11, 950, 12], [11, 13]]))
    assert [(row, code) for row, code, _ in again["row_errors"]] == [(1, "poison")]
    only = clients[1].ask(score_map([[11, 950, 12]]))
    assert [(row, code) for row, code, _ in only["row_errors"]] == [(0, "poison")]
    assert server.text().count("worker lost") == 2


def test_a_batch_that_hangs_is_given_up(teacher_server: Start, connect: Callable[..., Client]) -> None:
    server = teacher_server(hang_id=951, args=["--worker-timeout-s", "0.6"])
    reply = connect(server.address).ask(score_map([[11, 951, 12], *GOOD]))
    assert [(row, code) for row, code, _ in reply["row_errors"]] == [(0, "poison")]
    np.testing.assert_array_equal(reply["logprobs"][2:], np.concatenate([score.logprobs for score in truth(GOOD)]))
    assert "no progress in a batch for 0.6 s" in server.text()


def test_a_stopped_worker_shows_in_ping_and_is_replaced_when_there_is_work(
    teacher_server: Start, connect: Callable[..., Client]
) -> None:
    server = teacher_server(args=["--worker-timeout-s", "0.7"])
    client = connect(server.address)
    os.kill(server.worker_pid(), signal.SIGSTOP)
    wait_until(lambda: client.info()["worker_age_ms"] > 1500, what="a worker without a sign of life")
    assert_right(client.ask(score_map(GOOD)), GOOD)
    assert client.info()["worker_age_ms"] < 1500


def moody(tmp_path: Path, **mood: object) -> Path:
    path = tmp_path / "mood.json"
    path.write_text(json.dumps(mood))
    return path


def start_moody(start_teacher: Start, path: Path, *args: str) -> ServerProcess:
    server = start_teacher("--backend", "moody_scorer", "--model", str(path), *args)
    server.wait_ready()
    return server


def moody_truth(rows: Rows) -> np.ndarray:
    return np.array([-(row[i] + i / 1000) for row in rows for i in range(1, len(row))], np.float32)


def test_a_scorer_that_breaks_its_promise_spoils_one_row(
    start_teacher: Start, connect: Callable[..., Client], tmp_path: Path
) -> None:
    """After a device assert the canary fails, so the worker gives way; overwritten ids are seen by their checksum."""
    server = start_moody(start_teacher, moody(tmp_path))
    client = connect(server.address)
    reply = client.ask(score_map(GOOD, num_candidates=1, candidates=bytes(3 * 4)))
    assert (reply["status"], reply["code"]) == ("error", "candidates_unsupported") and "moody" in reply["message"]
    table = [
        (SHAPE_ID, "scorer_error", 0),
        (SHORT_LIST_ID, "scorer_error", 0),
        (SEGFAULT_ID, "poison", 2),
        (BREAK_ID, "poison", 4),
        (OVERWRITE_ID, "poison", 6),
    ]
    for trigger, code, losses in table:
        reply = client.ask(score_map([[1, trigger, 2], *GOOD]))
        assert [(row, got) for row, got, _ in reply["row_errors"]] == [(0, code)]
        np.testing.assert_array_equal(reply["logprobs"][2:], moody_truth(GOOD))
        assert server.text().count("worker lost") == losses


def test_another_model_after_a_restart_ends_the_server(
    start_teacher: Start, connect: Callable[..., Client], tmp_path: Path
) -> None:
    server = start_moody(start_teacher, moody(tmp_path, fingerprint="a"))
    moody(tmp_path, fingerprint="b")
    os.kill(server.worker_pid(), signal.SIGKILL)
    assert server.wait() == 1
    assert "another model than before (model changed)" in server.text() and "Traceback" not in server.text()


def test_a_worker_that_cannot_start_again_ends_the_server_and_those_who_wait_are_told(
    start_teacher: Start, connect: Callable[..., Client], tmp_path: Path
) -> None:
    server = start_moody(start_teacher, moody(tmp_path), "--max-start-failures", "2")
    moody(tmp_path, fail="no memory")
    reply = connect(server.address).ask(score_map([[1, SEGFAULT_ID, 2]]))
    assert (reply["status"], reply["code"], reply["retryable"]) == ("error", "engine_failed", True)
    assert server.wait() == 1
    assert "did not start 2 times in a row" in server.text() and "no memory" in server.text()


def test_a_worker_that_dies_while_loading_is_tried_again_and_then_given_up(
    start_teacher: Start, tmp_path: Path
) -> None:
    path = moody(tmp_path, die=9)
    server = start_teacher("--backend", "moody_scorer", "--model", str(path), "--max-start-failures", "2")
    assert server.wait() == 1
    assert server.text().count("worker lost") == 1 and "exit code 9" in server.text()


# life cycle


def test_info_is_answered_while_the_model_loads(start_teacher: Start, connect: Callable[..., Client]) -> None:
    server = start_teacher("--backend", "oracle", "--model", "oracle:load_s=1.5")
    client = connect(server.address)
    info = client.info()
    assert (info["state"], info["model"]) == ("loading", None) and "oracle:load_s=1.5" in info["detail"]
    assert client.ask({"v": 2, "op": "ping", "id": os.urandom(16)})["info"]["state"] == "loading"
    reply = client.ask(score_map(GOOD))
    assert (reply["status"], reply["code"], reply["retry_after_ms"] > 0) == ("busy", "loading", True)
    wait_until(lambda: client.info()["state"] == "ready")
    assert_right(client.ask(score_map(GOOD)), GOOD)
    assert "vocabulary 1000, max length 4096, float32" in server.text()


def test_a_taken_port_fails_before_the_model_is_loaded(shared: ServerProcess, start_teacher: Start) -> None:
    began = time.monotonic()
    server = start_teacher("--bind", shared.address, "--backend", "oracle", "--model", "oracle:load_s=60")
    assert server.wait() == 2 and time.monotonic() - began < 10
    (line,) = server.text().strip().splitlines()
    assert shared.address in line and "is taken" in line and "--bind" in line


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--backend", "oracle", "--model", "oracle:vocab=zero"], "oracle"),
        (["--backend", "nonsense", "--model", "x"], "backend nonsense cannot be imported"),
        (["--backend", "hf", "--model", "/no/such/folder"], "/no/such/folder"),
        (["--backend", "hf", "--model", "/tmp", "--dtype", "float8"], "invalid choice: 'float8'"),
        (["--backend", "oracle", "--model", "oracle", "--max-tokens", "0"], "0 is not above 0"),
        (["--backend", "oracle", "--model", "oracle", "--bind", "tcp://192.0.2.1:0", "--insecure"], "cannot be bound"),
        (["--backend", "oracle", "--model", "oracle", "--bind", "tcp://0.0.0.0:0"], "--insecure"),
    ],
)
def test_a_setting_that_cannot_work_ends_the_server_with_a_sentence(
    start_teacher: Start, args: list[str], sentence: str
) -> None:
    server = start_teacher(*args)
    assert server.wait(180) == 2
    assert sentence in server.text() and "Traceback" not in server.text()


@pytest.mark.parametrize(
    ("bind", "allowed"),
    [
        ("tcp://127.0.0.1:15555", True),
        ("tcp://127.8.8.8:0", True),
        ("tcp://localhost:15555", True),
        ("tcp://[::1]:15555", True),
        ("ipc:///tmp/teacher", True),
        ("tcp://*:15555", False),
        ("tcp://0.0.0.0:15555", False),
        ("tcp://[::]:15555", False),
        ("tcp://10.0.0.1:15555", False),
        ("tcp://eth0:15555", False),
        ("tcp://teacher.example:15555", False),
    ],
)
def test_only_loopback_needs_no_flag(bind: str, allowed: bool) -> None:
    check_reach(bind, insecure=True)
    if allowed:
        check_reach(bind, insecure=False)
        return
    with pytest.raises(ConfigError, match="--insecure"):
        check_reach(bind, insecure=False)


@pytest.mark.parametrize(
    "bind", ["", "15555", "127.0.0.1:15555", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://", "tcp://127.0.0.1:99999"]
)
def test_what_is_no_address_is_called_so(bind: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        check_reach(bind, insecure=True)


@pytest.mark.parametrize("flag", ["--worker-timeout-s", "--load-timeout-s", "--drain-s"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e12"])
def test_a_length_of_time_that_cannot_be_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--model", "m", f"{flag}={value}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and f"argument {flag}: {value} is no length of time" in error


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--worker-timeout-s", "0"),
        ("--load-timeout-s", "0"),
        ("--gpu-memory-utilization", "nan"),
        ("--gpu-memory-utilization", "90"),
        ("--metrics-port", "65536"),
        ("--metrics-port", "-1"),
    ],
)
def test_a_number_out_of_its_range_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--model", "m", f"{flag}={value}"])
    assert f"argument {flag}: {value} is no" in capsys.readouterr().err


def test_nothing_needs_to_be_waited_for_when_draining() -> None:
    assert build_parser().parse_args(["--model", "m", "--drain-s", "0"]).drain_s == 0


def test_sigterm_answers_what_was_accepted_and_refuses_the_rest(
    teacher_server: Start, connect: Callable[..., Client]
) -> None:
    server = teacher_server(ms_per_batch=100, args=["--max-tokens", "32"])
    clients = [connect(server.address) for _ in range(6)]
    late = connect(server.address)
    rng = random.Random(10)
    asked = [random_rows(rng, 4, 20) for _ in clients]
    for number, (client, rows) in enumerate(zip(clients, asked, strict=True)):
        client.send(pack(score_map(rows, client=str(number))))
    wait_until(lambda: late.info()["queued_tokens"] == sum(len(row) for rows in asked for row in rows))
    server.signal(signal.SIGTERM)
    wait_until(lambda: late.info()["state"] == "draining")
    reply = late.ask(score_map(GOOD))
    assert (reply["status"], reply["retryable"]) == ("draining", True)
    for client, rows in zip(clients, asked, strict=True):
        assert_right(client.receive(), rows)
    assert server.wait() == 0


def test_draining_ends_in_time_and_tells_those_who_still_wait(
    teacher_server: Start, connect: Callable[..., Client]
) -> None:
    server = teacher_server(hang_id=951, args=["--drain-s", "0.4"])
    client, worker = connect(server.address), server.worker_pid()
    client.send(pack(score_map([[11, 951]])))
    wait_until(lambda: connect(server.address).info()["queued_tokens"] > 0)
    server.signal(signal.SIGTERM)
    reply = client.receive()
    assert (reply["status"], reply["retryable"]) == ("draining", True)
    assert server.wait(3) == 0
    assert not alive(worker)


@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGINT,), 130), ((signal.SIGTERM, signal.SIGTERM), 143)],
)
def test_a_second_sigterm_or_ctrl_c_ends_at_once(
    teacher_server: Start, connect: Callable[..., Client], signals: tuple[int, ...], code: int
) -> None:
    server = teacher_server(hang_id=951)
    client, worker = connect(server.address), server.worker_pid()
    client.send(pack(score_map([[11, 951]])))
    other = connect(server.address)
    wait_until(lambda: other.info()["queued_tokens"] > 0)
    for index, number in enumerate(signals):
        if index:
            wait_until(lambda: other.info()["state"] == "draining")
        began = time.monotonic()
        server.signal(number)
    assert server.wait(5) == code
    assert time.monotonic() - began < 2
    assert client.receive()["status"] == "draining"
    wait_until(lambda: not alive(worker), 2)


@pytest.mark.parametrize("stopped", [False, True], ids=["idle worker", "stopped worker"])
def test_no_worker_outlives_a_killed_front(teacher_server: Start, stopped: bool) -> None:
    server = teacher_server()
    worker = server.worker_pid()
    if stopped:
        os.kill(worker, signal.SIGSTOP)
    server.signal(signal.SIGKILL)
    server.wait()
    wait_until(lambda: not alive(worker), 2, "the end of the worker")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_idle_front_uses_no_processor(shared: ServerProcess, client: Client) -> None:
    assert_right(client.ask(score_map(GOOD)), GOOD)
    before = cpu_s(shared.pid)
    time.sleep(1.5)
    assert cpu_s(shared.pid) - before <= 0.03


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# what the code must not do


def test_the_front_imports_no_model_library() -> None:
    code = (
        "import sys, opd.teacher_server\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'ray', 'verl', 'tensordict') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env=CHILD_ENV, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_nothing_untrusted_can_be_executed() -> None:
    """No module of the server or the wire uses pickle, marshal, eval, torch.load or a queue that pickles."""
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing", "eval", "exec"}
    banned |= {"recv_pyobj", "send_pyobj", "allow_pickle"}
    for path in [ROOT / "opd/wire.py", ROOT / "opd/teacher_server.py", *sorted((ROOT / "opd/serving").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "arg", None)}
            names |= {alias.name.split(".")[0] for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            assert not names & banned, f"{path}:{getattr(node, 'lineno', 0)} uses {names & banned}"
