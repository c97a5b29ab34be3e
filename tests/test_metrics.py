"""/metrics and /healthz of a real server, over real HTTP; and the dashboard, which names only what is there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from conftest import CHILD_ENV, ROOT, ServerProcess, wait_until
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from opd.client import TeacherClient
from opd.errors import ConfigError
from opd.serving.counts import MAX_CODES, Counts, Histogram
from opd.serving.metrics import SILENT_S, MetricsServer, health, registry_of
from opd.wire import Limits, ModelInfo, Reply, ServerInfo

Start = Callable[..., ServerProcess]
MODEL = ModelInfo(
    name="m",
    model="weights",
    tokenizer="t",
    vocab_size=10,
    max_length=8,
    max_topk=0,
    eos_ids=[],
    dtype="float32",
    backend="oracle",
    temperature=True,
)


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.headers["Content-Type"], e.read().decode()


def samples(text: str) -> dict[str, float]:
    """Value by name and labels, as `name{code="x"}`."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def url_of(server: ServerProcess) -> str:
    return server.wait_for(r"metrics at (http://\S+)/metrics")


def scrape(server: ServerProcess) -> dict[str, float]:
    return samples(get(f"{url_of(server)}/metrics")[2])


def healthz(server: ServerProcess) -> tuple[int, dict[str, Any]]:
    code, content_type, body = get(f"{url_of(server)}/healthz")
    assert content_type == "application/json"
    return code, json.loads(body)


def rows(*texts: list[int]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in texts]


def send(address: str, kind: int, body: bytes, *, answered: bool) -> None:
    context = zmq.Context()
    peer = context.socket(kind)
    peer.rcvtimeo = peer.linger = 5000
    peer.connect(address)
    peer.send(body)
    if answered:
        peer.recv_multipart()
    peer.close()
    context.term()


def info_of(counts: Counts, **changes: Any) -> Callable[[], ServerInfo]:
    """What a front would say of itself."""

    def info() -> ServerInfo:
        counters = counts.counters(queued_requests=2, undeliverable=0, dropped=0)
        fields = {"state": "ready", "detail": "works", "version": "0", "limits": Limits(), "model": MODEL, **changes}
        return ServerInfo(counters=counters, **fields)

    return info


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("metrics") / "log"
    server = ServerProcess(log, "--backend", "oracle", "--model", "oracle:oom_id=903", "--metrics-port", "0")
    server.wait_ready()
    yield server
    server.end()


# counting


def test_a_value_on_a_bound_is_below_it_and_buckets_are_cumulative() -> None:
    counts = Counts()
    counts.batch_rows = Histogram((1, 2))
    for value in (1, 1.5, 2, 3):
        counts.batch_rows.observe(value)
    assert counts.batch_rows.counts == [1, 2, 1]
    shown = {f"{s.name}{s.labels}": s.value for m in registry_of(counts, info_of(counts)).collect() for s in m.samples}
    assert shown["opd_teacher_batch_rows_bucket{'le': '1.0'}"] == 1
    assert shown["opd_teacher_batch_rows_bucket{'le': '2.0'}"] == 3
    assert shown["opd_teacher_batch_rows_bucket{'le': '+Inf'}"] == shown["opd_teacher_batch_rows_count{}"] == 4
    assert shown["opd_teacher_batch_rows_sum{}"] == 7.5


def test_error_codes_that_a_scorer_invents_do_not_become_time_series_without_end() -> None:
    counts = Counts()
    for number in range(1000):
        counts.reply(Reply(id=b"", status="ok", boot="b", row_errors=[(0, f"code{number}", ""), (1, "same", "")]))
    assert len(counts.row_errors) == MAX_CODES + 1
    assert sum(counts.row_errors.values()) == 2000 and counts.row_errors["same"] == 1000


@pytest.mark.parametrize(
    ("state", "age_ms", "code"),
    [
        ("ready", 900, 200),
        ("ready", int(SILENT_S * 1000) + 1, 503),
        ("loading", 0, 503),
        ("restarting", 0, 503),
        ("draining", 0, 503),
        ("failed", 0, 503),
    ],
)
def test_only_a_ready_server_whose_worker_gives_signs_of_life_is_healthy(state: str, age_ms: int, code: int) -> None:
    got, body = health(info_of(Counts(), state=state, worker_age_ms=age_ms)())
    assert (got, body["state"]) == (code, state)
    assert body["detail"] == ("works" if age_ms < 1000 else "no sign of life from the worker for 30 s")


# a real server


def test_the_counters_are_what_was_asked(shared: ServerProcess) -> None:
    before = scrape(shared)
    with TeacherClient(shared.address) as client:
        client.wait_until_ready(20)
        client.score(rows([11, 12, 13], [14, 15]), [1, 1], timeout_s=20)
        scores = client.score(rows([11, 12, 903, 14], [16, 17]), [1, 1], timeout_s=20, return_row_errors=True)
        assert [error.code for error in scores.row_errors] == ["oom"]
        client.score(rows([14, 15], [11, 12, 13]), [1, 1], timeout_s=20)  # both are known by now
    send(shared.address, zmq.REQ, b"\xc1", answered=True)
    refused = ('opd_teacher_replies_total{status="error"}', 'opd_teacher_errors_total{code="bad_msgpack"}')
    # a reply is counted once it is sent, when its client may read it already
    wait_until(lambda: set(refused) <= scrape(shared).keys(), 10, "the count of the refusal")
    after = scrape(shared)

    def more(name: str) -> float:
        return after[f"opd_teacher_{name}"] - before.get(f"opd_teacher_{name}", 0.0)

    assert (more("rows_total"), more("tokens_total"), more("batches_total")) == (4, 11, 2)
    assert (more("cache_hits_total"), more("cache_misses_total")) == (2, 4)
    assert more('replies_total{status="ok"}') == 3
    assert more('replies_total{status="error"}') == more('errors_total{code="bad_msgpack"}') == 1
    assert more('row_errors_total{code="oom"}') == 1
    assert more("batch_rows_count") == more("score_seconds_count") == more("queue_seconds_count") == 2
    assert more('batch_rows_bucket{le="1.0"}') == 0 and more('batch_rows_bucket{le="2.0"}') == 2
    assert more("batch_tokens_sum") == 11 and more("request_seconds_count") == 2
    assert 0 < more("score_seconds_sum") <= more("request_seconds_sum")
    assert (after["opd_teacher_queue_requests"], after["opd_teacher_queue_tokens"]) == (0, 0)
    assert after['opd_teacher_state{state="ready"}'] == 1 and after['opd_teacher_state{state="loading"}'] == 0
    assert after["opd_teacher_worker_age_seconds"] < 10 and after["opd_teacher_worker_restarts_total"] == 0
    assert after["process_resident_memory_bytes"] > 1e6


def test_messages_without_an_envelope_are_counted(shared: ServerProcess) -> None:
    before = scrape(shared)["opd_teacher_dropped_messages_total"]
    send(shared.address, zmq.DEALER, b"no envelope", answered=False)
    wait_until(lambda: scrape(shared)["opd_teacher_dropped_messages_total"] == before + 1, 10)


def test_both_text_formats_are_spoken_and_other_paths_are_not_found(shared: ServerProcess) -> None:
    url = url_of(shared)
    code, content_type, _ = get(f"{url}/metrics")
    assert code == 200 and content_type.startswith("text/plain; version=0.0.4")
    code, content_type, body = get(f"{url}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert code == 200 and content_type.startswith("application/openmetrics-text") and body.endswith("# EOF\n")
    assert get(f"{url}/")[0] == 404


def test_peers_that_send_nothing_keep_nobody_waiting(shared: ServerProcess) -> None:
    port = int(url_of(shared).rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert healthz(shared)[0] == 200
        with TeacherClient(shared.address) as client:
            client.score(rows([1, 2, 3]), [1], timeout_s=20)


def test_health_follows_the_server_from_loading_to_draining(start_teacher: Start) -> None:
    model = "oracle:load_s=0.3,ms_per_batch=400"
    server = start_teacher("--backend", "oracle", "--model", model, "--metrics-port", "0")
    code, body = healthz(server)
    assert (code, body["state"], body["model"]) == (503, "loading", None)
    server.wait_ready()
    code, body = healthz(server)
    assert (code, body["state"], body["model"]) == (200, "ready", model)

    os.kill(server.worker_pid(), signal.SIGKILL)
    wait_until(lambda: healthz(server)[1]["state"] == "restarting", 10)
    code, body = healthz(server)
    assert code == 503 and "SIGKILL" in body["detail"]
    wait_until(lambda: healthz(server)[0] == 200, 20)
    assert scrape(server)["opd_teacher_worker_restarts_total"] == 1

    with TeacherClient(server.address) as client:
        client.wait_until_ready(20)
        call = threading.Thread(target=client.score, args=(rows([1, 2]), [1]), kwargs={"timeout_s": 20})
        call.start()
        wait_until(lambda: scrape(server)["opd_teacher_queue_requests"] == 1, 10)
        server.signal(signal.SIGTERM)
        wait_until(lambda: healthz(server)[1]["state"] == "draining", 10)
        assert healthz(server)[0] == 503
        call.join(20)
    assert server.wait(20) == 0


def test_a_taken_port_fails_at_once_with_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "opd.teacher_server", "--backend", "oracle", "--model", "oracle"]
        command += ["--bind", "tcp://127.0.0.1:0", "--metrics-port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, env=CHILD_ENV, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert f"--metrics-port {port}" in line and "Address already in use" in line
    assert "worker" not in ended.stderr and ended.stdout == ""


def test_a_host_that_is_none_is_a_setting_that_cannot_work() -> None:
    counts = Counts()
    for host, port in (("203.0.113.7", 0), ("127.0.0.1", 70_000)):
        with pytest.raises(ConfigError, match="cannot be taken"):
            MetricsServer(host, port, counts, info_of(counts))


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as s:
            s.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_ipv6_is_served_or_refused_by_name_where_the_machine_has_none() -> None:
    counts = Counts()
    if has_ipv6_loopback():
        with MetricsServer("::1", 0, counts, info_of(counts)) as server:
            assert get(server.url)[0] == 200
    else:
        with pytest.raises(ConfigError, match="cannot be taken"):
            MetricsServer("::1", 0, counts, info_of(counts))


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    code = "import sys, opd.teacher_server; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=CHILD_ENV, timeout=60).returncode == 0


# the dashboard

DASHBOARD = ROOT / "docs" / "grafana" / "opd_teacher.json"


def expressions(path: Path) -> list[str]:
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_metric_of_the_dashboard_exists_and_every_metric_is_on_it() -> None:
    counts = Counts()
    counts.reply(Reply(id=b"", status="error", boot="", code="x", row_errors=[(0, "y", "")]))
    counters = counts.counters(queued_requests=0, undeliverable=0, dropped=0)
    cached = replace(info_of(counts)(), counters=replace(counters, cache_hits=1, cache_misses=1))
    exist = {s.name for metric in registry_of(counts, lambda: cached).collect() for s in metric.samples}
    used = {name for text in expressions(DASHBOARD) for name in re.findall(r"\b([a-z_]+)\{", text)}
    assert all(re.search(r"\b[a-z_]+\{", text) for text in expressions(DASHBOARD))
    assert len(used) > 15 and not used - exist
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exist if name.startswith("opd_teacher_")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert not ours - shown - {"opd_teacher_rows_total", "opd_teacher_batches_total"}


def test_the_dashboards_panels_have_titles_places_and_one_data_source() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert [v["name"] for v in board["templating"]["list"]] == ["datasource", "job", "instance"]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places) == len({p["id"] for p in board["panels"]})
    for panel in board["panels"]:
        assert panel["title"] and panel["datasource"]["uid"] == "${datasource}"
