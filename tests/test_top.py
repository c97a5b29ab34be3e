"""`python -m opd.top` in front of real servers, and the arithmetic of its rates."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import CHILD_ENV, ServerProcess, wait_until

from opd import top
from opd.client import TeacherClient
from opd.wire import Counters, Limits, ModelInfo, Reply, ServerInfo, decode_reply, decode_request, encode_reply

Start = Callable[..., ServerProcess]
TOP = [sys.executable, "-m", "opd.top"]


def run_top(*args: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, *args], capture_output=True, text=True, env=CHILD_ENV, timeout=timeout_s)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def counters(**changes: Any) -> Counters:
    fields: dict[str, Any] = dict.fromkeys(Counters.__struct_fields__, 0)
    fields |= {"replies": {}, "errors": {}, "row_errors": {}}
    return Counters(**fields | {"cache_hits": None, "cache_misses": None} | changes)


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def lines_of(text: str, address: str) -> list[list[str]]:
    return [cells(line) for line in text.splitlines() if line.startswith(address + " ")]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = "oracle:us_per_token=100,oom_id=903"
    server = ServerProcess(tmp_path_factory.mktemp("top") / "log", "--backend", "oracle", "--model", model)
    server.wait_ready()
    with TeacherClient(server.address) as client:
        client.wait_until_ready(20)
        for _ in range(2):  # the second time from the cache
            client.score([np.arange(1, 101, dtype=np.int32)] * 2, [50, 50], timeout_s=20)
        rows = [np.array([1, 903], np.int32)]
        assert client.score(rows, [1], timeout_s=20, return_row_errors=True).row_errors
    yield server
    server.end()


# arithmetic


def test_rates_are_of_the_time_between_two_answers() -> None:
    old = counters(uptime_s=10, tokens=1000, rows=10, batches=2, scored_requests=4, queue_s=1, score_s=2, request_s=3)
    new = counters(uptime_s=14, tokens=9000, rows=50, batches=4, scored_requests=6, queue_s=2, score_s=5, request_s=8)
    assert top.rates(new, old) == top.Rates(0.5, 2000, 20, 4000, 500, 1500, 2500, None)
    assert top.rates(new, None) == top.Rates(6 / 14, 9000 / 14, 12.5, 2250, 2000 / 6, 1250, 8000 / 6, None)


def test_totals_of_years_fit_into_an_answer() -> None:
    whole = info(counters=counters(uptime_s=1e9, tokens=2**60, rows=2**50, score_s=1e9))
    (body,) = encode_reply(Reply(id=b"", status="ok", boot="b", info=whole))
    assert decode_reply([body])[0].info == whole


def test_means_of_nothing_are_not_shown_as_zero() -> None:
    same = counters(uptime_s=10, tokens=1000, rows=10, batches=2, scored_requests=4, cache_hits=3, cache_misses=1)
    later = counters(uptime_s=12, tokens=1000, rows=10, batches=2, scored_requests=4, cache_hits=3, cache_misses=1)
    assert top.rates(later, same) == top.Rates(0, 0, None, None, None, None, None, None)
    assert top.rates(later, None).cache == 0.75


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.1234, "0.123"), (999, "999"), (1234, "1.23k"), (12_345_678, "12.3M")],
)
def test_numbers_have_three_digits_that_matter(value: float | None, text: str) -> None:
    assert top._number(value) == text


# one table


def test_once_shows_all_replicas_and_says_which_do_not_answer(shared: ServerProcess) -> None:
    nobody = free_address()
    done = run_top("--once", f"{shared.address},{nobody}")
    assert done.returncode == 1 and done.stderr == ""
    (line,) = lines_of(done.stdout, shared.address)
    shown = dict(zip(top.COLUMNS, line, strict=True))
    assert (shown["state"], shown["model"]) == ("ready", "oracle:us_per_token=100,oom_id=903")
    assert (shown["rows/batch"], shown["tok/batch"], shown["queued"]) == ("1.5", "101", "0 (0 tok)")
    assert shown["cache"] == "40%"
    assert float(shown["request ms"]) >= float(shown["score ms"]) >= 10
    assert [shown[name] for name in ("busy", "failed", "bad rows", "lost", "restarts")] == ["0", "0", "1", "0", "0"]
    assert "row errors by code: oom 1" in done.stdout
    (line,) = lines_of(done.stdout, nobody)
    assert line[1] == "no answer" and set(line[2:-1]) == {"-"} and line[-1] == "3 s"
    assert "2 replicas, 1 answer" in done.stdout


def test_json_has_the_answers_as_they_came(shared: ServerProcess) -> None:
    done = run_top("--once", "--json", shared.address, shared.address)
    assert done.returncode == 0
    (replica,) = json.loads(done.stdout)["replicas"]
    assert (replica["address"], replica["answers"], replica["problem"]) == (shared.address, True, "")
    assert replica["age_s"] < 5
    seen = replica["info"]["counters"]
    assert (seen["rows"], seen["tokens"], seen["batches"], seen["replies"]) == (3, 202, 2, {"ok": 3})
    assert seen["row_errors"] == {"oom": 1} and (seen["cache_hits"], seen["cache_misses"]) == (2, 3)


def test_a_server_that_loads_says_so(start_teacher: Start) -> None:
    server = start_teacher("--backend", "oracle", "--model", "oracle:load_s=60")
    done = run_top("--once", server.address)
    assert done.returncode == 0
    assert lines_of(done.stdout, server.address)[0][1] == "loading"
    assert f"{server.address}: loading: loading oracle:load_s=60" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nonsense"], "'nonsense' is no address"),
        (["--json", "tcp://127.0.0.1:1"], "--json goes with --once"),
        (["--interval", "0", "tcp://127.0.0.1:1"], "below 0.1"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        top.main(args)
    assert ended.value.code == 2 and message in capsys.readouterr().err


# peers that are not well


@pytest.fixture
def peer() -> Iterator[tuple[zmq.Socket, top.Replica]]:
    """A socket that answers what the test wants, and top's view of it."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    router.rcvtimeo = 5000
    yield router, top.Replica(context, f"tcp://127.0.0.1:{port}")
    context.destroy(linger=0)


def answer(router: zmq.Socket, replica: top.Replica, **fields: Any) -> None:
    """Let top ask, and answer with these fields (or with raw bytes)."""
    replica.ask()
    peer, empty, body = router.recv_multipart()
    reply = Reply(id=decode_request(body).id, **{"status": "ok", "boot": "b", **fields})
    router.send_multipart([peer, empty, *encode_reply(reply)])
    top.listen_for([replica], 5.0, until_all=True)


def model(name: str, weights: str = "w") -> ModelInfo:
    return ModelInfo(
        name=name,
        model=weights,
        tokenizer="t",
        vocab_size=9,
        max_length=9,
        max_topk=0,
        eos_ids=[],
        dtype="float32",
        backend="hf",
        temperature=True,
    )


def info(name: str = "m", weights: str = "w", **changes: Any) -> ServerInfo:
    fields: dict[str, Any] = {"state": "ready", "detail": "works", "version": "0", "limits": Limits()}
    return ServerInfo(**fields | {"model": model(name, weights), "counters": counters(uptime_s=1)} | changes)


def test_text_of_a_peer_cannot_move_the_cursor(peer: tuple[zmq.Socket, top.Replica]) -> None:
    answer(*peer, info=info("evil\x1b[2J", state="loading", detail="\x1b]0;title\x07"))
    text = "\n".join(top.table([peer[1]]))
    assert "\x1b" not in text and "\x07" not in text and "evil\\x1b[2J" in text


def test_a_server_that_does_not_count_is_shown_without_numbers(peer: tuple[zmq.Socket, top.Replica]) -> None:
    answer(*peer, info=info(counters=None))
    line = top.line_of(peer[1])
    assert line[1:3] == ["ready", "m"] and set(line[3:-1]) == {"-"}


def test_an_error_instead_of_an_answer_is_shown(peer: tuple[zmq.Socket, top.Replica]) -> None:
    answer(*peer, status="error", code="version", message="speaks 7")
    assert not peer[1].answers
    text = "\n".join(top.table([peer[1]]))
    assert "no teacher" in text and "version: speaks 7" in text


def test_rates_begin_anew_when_a_server_was_started_again(peer: tuple[zmq.Socket, top.Replica]) -> None:
    replica = peer[1]
    for boot, tokens, has_before in (("a", 100, False), ("a", 300, True), ("b", 50, False)):
        answer(*peer, boot=boot, info=info(counters=counters(uptime_s=1 + tokens, tokens=tokens)))
        assert (replica.before is not None) == has_before


def test_replicas_with_different_weights_are_pointed_out() -> None:
    context = zmq.Context()
    replicas = [top.Replica(context, f"tcp://127.0.0.1:{port}") for port in (1, 2)]
    for replica, weights in zip(replicas, ("x", "y"), strict=True):
        replica.last = top.Sample(info(weights=weights), "b", time.monotonic())
    assert "the replicas serve 2 different models" in top.table(replicas)[-1]
    context.destroy(linger=0)


# live


def test_live_it_draws_in_place_follows_a_replica_and_ends_cleanly_on_ctrl_c(start_teacher: Start) -> None:
    server = start_teacher("--backend", "oracle", "--model", "oracle")
    address = server.wait_ready()
    terminal, its_end = pty.openpty()
    process = subprocess.Popen([*TOP, "--interval", "0.2", address], stdout=its_end, stderr=its_end, env=CHILD_ENV)
    os.close(its_end)
    screen = ""

    def read() -> str:
        nonlocal screen
        while select.select([terminal], [], [], 0)[0]:
            try:
                screen += os.read(terminal, 65_536).decode()
            except OSError:  # Linux says so when the other end is closed
                break
        return screen

    try:
        wait_until(lambda: read().count("1 answer") >= 3, 20)
        assert screen.startswith(top.CLEAR + top.HOME) and screen.count(top.CLEAR) == 1
        assert "ready" in screen and "no answer" not in screen
        server.signal(signal.SIGSTOP)
        wait_until(lambda: "no answer" in read(), 20)
        server.signal(signal.SIGCONT)
        seen = len(read())
        wait_until(lambda: "1 answer" in read()[seen:], 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert "Traceback" not in read()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_a_reader_that_has_seen_enough_ends_it(shared: ServerProcess) -> None:
    process = subprocess.Popen(
        [*TOP, "--interval", "0.1", shared.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=CHILD_ENV
    )
    assert process.stdout is not None and process.stderr is not None
    assert b"1 replicas" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(10) == 0
    assert process.stderr.read() == b""
    process.stderr.close()
