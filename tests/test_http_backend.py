"""The http backend against servers on real sockets that answer, refuse, lie and break; no real SGLang is run here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.errors import ConfigError, RowError
from opd.scoring import http, http_dialects
from opd.scoring.scorer import LoadOptions, Row, RowScores

VOCAB, MAX_LEN, KEY = 1000, 64, "sk-very-secret"
ROWS = [Row(np.array(ids, np.int32), start) for ids, start in [([5, 6, 7, 8], 2), ([9, 9], 1), ([1, 2, 3], 3)]]


def value(token: int, position: int) -> float:
    return -(token + position / 100)


class Server(ThreadingHTTPServer):
    """SGLang's or vLLM's answers with computed values; `spoil` may change or replace an answer, by request number."""

    daemon_threads = True

    def __init__(self, dialect: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.dialect = dialect
        self.model = "teacher"
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.spoil: Callable[[int, dict[str, Any], dict[str, Any]], Any] = lambda number, body, answer: answer
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that gave up

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": self.model, "root": "/not/here", "max_model_len": MAX_LEN + 1}]}
        if path == "/model_info" and self.dialect == "sglang":
            return {"model_path": "/not/here"}
        if path == "/generate" and self.dialect == "sglang":
            return self._sglang(body)
        if path == "/v1/completions" and self.dialect == "vllm":
            return self._vllm(body)
        return 404, {"detail": "Not Found"}

    def _sglang(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, first = body["input_ids"], body["logprob_start_len"]
        entries = [[value(ids[i], i) if i > first else None, ids[i], None] for i in range(first, len(ids))]
        info = {"prompt_tokens": len(ids), "input_token_logprobs": entries}
        if topk := body.get("top_logprobs_num"):
            top = [[[-1.0 - k, k, None] for k in range(topk)] for _ in range(first + 1, len(ids))]
            info["input_top_logprobs"] = [None, *top]
        return {"text": "", "meta_info": info}

    def _vllm(self, body: dict[str, Any]) -> Any:
        ids, topk = body["prompt"], body["prompt_logprobs"]
        if topk > 20:
            return 400, {"error": {"message": f"Requested prompt logprobs of {topk}, which is greater than 20"}}
        entries: list[Any] = [None]
        for i, token in enumerate(ids[1:], start=1):
            own = {str(token): {"logprob": value(token, i), "rank": 500}}
            entries.append(own | {str(k): {"logprob": -0.1 - k / 100, "rank": k + 1} for k in range(topk)})
        return {"choices": [{"prompt_token_ids": ids, "prompt_logprobs": entries}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._send(self.server.answer(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            number = len(self.server.asked)
        self._send(self.server.spoil(number, body, self.server.answer(self.path, body)))

    def _send(self, answer: Any) -> None:
        if answer is None:  # as a server that dies
            self.close_connection = True
            self.connection.close()
            return
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(params=["sglang", "vllm"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": 2, "model_type": "llama"}))
    return str(tmp_path)


@pytest.fixture
def scorer(server: Server, folder: str) -> http.HTTPScorer:
    scorer = http.load(LoadOptions(model="teacher", url=server.url + "/v1/", tokenizer=folder))
    scorer._connection._backoff_s = 0.01
    server.asked.clear()
    return scorer


def test_values_belong_to_the_ids_that_were_sent(scorer, server):
    for row, scores in zip(ROWS, scorer.score(ROWS), strict=True):
        right = [value(int(row.ids[i]), i) for i in range(row.start, len(row.ids))]
        np.testing.assert_allclose(scores.logprobs, np.array(right, np.float32), rtol=1e-6)
    assert len(server.asked) == 2  # a row without scored positions is not sent
    if server.dialect == "sglang":
        assert {body["logprob_start_len"] for body in server.asked} == {0, 1}


def test_top_k_is_the_most_probable_first(scorer, server):
    scores = scorer.score(ROWS, topk=3)[0]
    assert scores.topk_ids.tolist() == [[0, 1, 2]] * 2 and scores.topk_logprobs.shape == (2, 3)
    assert (np.diff(scores.topk_logprobs, axis=1) < 0).all()
    assert scorer.score(ROWS, topk=3)[2].topk_ids.shape == (0, 3)


def test_the_largest_top_k_is_found_at_load(scorer, server):
    assert scorer.info.max_topk == (256 if server.dialect == "sglang" else 20)
    assert scorer.info.max_length == MAX_LEN and scorer.info.vocab_size == VOCAB and scorer.info.eos_ids == [2]
    assert not scorer.info.temperature
    assert {r.code for r in scorer.score(ROWS, temperature=0.7)} == {"temperature"}


def _entries(server: Server, answer: dict[str, Any]) -> list[Any]:
    if server.dialect == "sglang":
        return answer["meta_info"]["input_token_logprobs"]
    return answer["choices"][0]["prompt_logprobs"]


def _set_last(server: Server, answer: dict[str, Any], new: Any) -> dict[str, Any]:
    last = _entries(server, answer)[-1]
    if server.dialect == "sglang":
        last[0] = new
    else:
        next(iter(last.values()))["logprob"] = new
    return answer


@pytest.mark.parametrize(
    "fault", ["one too few", "one too many", "other ids", "missing", "null", "text", "true", "list"]
)
def test_an_answer_that_does_not_fit_is_an_error_of_its_row(scorer, server, fault):
    def spoil(number: int, body: dict[str, Any], answer: dict[str, Any]) -> Any:
        if 6 not in (body.get("input_ids") or body.get("prompt")):
            return answer
        entries = _entries(server, answer)
        if fault == "one too few":
            entries.pop()
        elif fault == "one too many":
            entries.append(entries[-1])
        elif fault == "other ids":
            if server.dialect == "sglang":
                entries[-1][1] += 1
            else:
                answer["choices"][0]["prompt_token_ids"][-1] += 1
        elif fault == "missing":
            entries[-1] = None
        elif fault == "list":
            return [answer]
        else:
            return _set_last(server, answer, {"null": None, "text": "-1.0", "true": True}[fault])
        return answer

    server.spoil = spoil
    bad, good, _ = scorer.score(ROWS)
    assert isinstance(bad, RowError) and (bad.row, bad.code) == (0, "bad_answer")
    assert isinstance(good, RowScores) and np.isfinite(good.logprobs).all()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf"), -9999.0])
def test_a_value_that_is_not_finite_is_an_error_and_never_zero(scorer, server, bad):
    server.spoil = lambda number, body, answer: _set_last(server, answer, bad)
    assert {r.code for r in scorer.score(ROWS[:2])} == {"non_finite"}


def test_a_refused_row_leaves_the_others_alone(scorer, server):
    def spoil(number: int, body: dict[str, Any], answer: Any) -> Any:
        return (
            (400, {"error": {"message": "too hot"}}) if 6 in (body.get("input_ids") or body.get("prompt")) else answer
        )

    server.spoil = spoil
    bad, good, _ = scorer.score(ROWS)
    assert isinstance(bad, RowError) and bad.code == "refused" and "too hot" in bad.message
    assert isinstance(good, RowScores) and len(server.asked) == 2  # a refusal is not tried again
    (long,) = scorer.score([Row(np.ones(MAX_LEN + 1, np.int32), 1)])
    assert isinstance(long, RowError) and long.code == "too_long"


@pytest.mark.parametrize("fault", [(503, {"error": "busy"}), None, (200, b"{not json")])
def test_a_failing_server_is_tried_again_and_not_for_ever(scorer, server, fault):
    server.spoil = lambda number, body, answer: fault if number <= 2 else answer
    assert isinstance(scorer.score(ROWS[:1])[0], RowScores)
    assert len(server.asked) == 3
    server.asked.clear()
    server.spoil = lambda number, body, answer: fault
    with pytest.raises(ConnectionError, match="server is gone"):
        scorer.score(ROWS[:1])
    assert len(server.asked) == http.TRIES
    server.spoil = lambda number, body, answer: fault if 6 in (body.get("input_ids") or body.get("prompt")) else answer
    bad, good, _ = scorer.score(ROWS)
    assert isinstance(bad, RowError) and bad.code == "unavailable" and isinstance(good, RowScores)


def test_a_server_that_never_answers_is_given_up(server):
    connection = http.Connection(server.url, timeout_s=0.1, backoff_s=0.01)
    blocked = threading.Event()
    server.spoil = lambda number, body, answer: blocked.wait(5) and answer
    with pytest.raises(http.Unreachable, match="timed out"):
        connection.call("/generate" if server.dialect == "sglang" else "/v1/completions", ask(server))
    blocked.set()


def ask(server: Server) -> dict[str, Any]:
    dialect = http_dialects.SGLang() if server.dialect == "sglang" else http_dialects.VLLM("teacher")
    return dialect.ask(ROWS[0], 0)[1]


def test_requests_run_side_by_side_but_not_all_at_once(scorer, server):
    running, most, lock = 0, 0, threading.Lock()
    full = threading.Event()

    def spoil(number: int, body: dict[str, Any], answer: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == http.CONCURRENCY:
                full.set()
        full.wait(10)
        with lock:
            running -= 1
        return answer

    server.spoil = spoil
    rows = [Row(np.array([i, i + 1], np.int32), 1) for i in range(2 * http.CONCURRENCY)]
    results = scorer.score(rows)
    assert [float(r.logprobs[0]) for r in results] == pytest.approx(
        [value(i + 1, 1) for i in range(len(rows))], abs=1e-4
    )
    assert most == http.CONCURRENCY


def test_the_key_is_sent_and_never_shown(server, folder, monkeypatch, caplog, capsys):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    options = LoadOptions(model="teacher", url=server.url, tokenizer=folder, api_key_env="TEACHER_KEY")
    scorer = http.load(options)
    assert set(server.keys) == {f"Bearer {KEY}"}
    server.spoil = lambda number, body, answer: (401, {"error": {"message": "wrong key"}})
    (error,) = scorer.score(ROWS[:1])
    assert KEY not in f"{error} {caplog.text} {capsys.readouterr()} {options} {scorer.info}"
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(ConfigError, match="TEACHER_KEY: no such environment variable"):
        http.load(options)


def test_what_cannot_work_is_said_at_load(server, folder):
    def refusal(**changes: Any) -> str:
        options = {"model": "teacher", "url": server.url, "tokenizer": folder} | changes
        with pytest.raises(ConfigError) as caught:
            http.load(LoadOptions(**options))
        return str(caught.value)

    assert "needs --url" in refusal(url=None)
    assert "has to be http://host:port" in refusal(url="tcp://127.0.0.1:1")
    hidden = refusal(url=f"http://me:{KEY}@127.0.0.1:1")
    assert "api-key-env" in hidden and KEY not in hidden
    assert "serves 'teacher'" in refusal(model="student")
    assert "give --tokenizer DIR" in refusal(tokenizer=None)
    assert "no such folder" in refusal(tokenizer=folder + "/nothing")
    assert f"outside [1, {MAX_LEN}]" in refusal(max_length=MAX_LEN + 1)
    server.spoil = lambda number, body, answer: (400, {"error": {"message": "no log-probs today"}})
    assert "no log-probs today" in refusal()


def test_nobody_at_the_address_is_said_at_load(folder, monkeypatch):
    monkeypatch.setattr(http.time, "sleep", lambda s: None)
    with pytest.raises(ConfigError, match="ConnectionRefusedError"):
        http.load(LoadOptions(model="teacher", url="http://127.0.0.1:9", tokenizer=folder))
