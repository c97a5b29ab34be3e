"""`GET /metrics` for Prometheus and `GET /healthz` for whoever balances or restarts: HTTP in a thread of its own.

The thread reads what the front counts (counts.py, and the answer to `info`) when somebody asks, and writes nothing.
Imported only with --metrics-port. Names, labels and codes are shown; ids, values and texts of requests never are.

Not covered: TLS and passwords. It listens on loopback unless --metrics-host says otherwise.
"""

from __future__ import annotations

import json
import logging
import math
import socketserver
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.utils import floatToGoString

from opd.errors import ConfigError
from opd.serving.counts import Counts, Histogram
from opd.wire import ServerInfo, State

logger = logging.getLogger(__name__)

PREFIX = "opd_teacher_"
PEER_TIMEOUT_S = 5.0  # for a peer that sends or takes nothing
SILENT_S = 30.0  # the worker's heart beats every second: by then it hangs, or this server's front does

Info = Callable[[], ServerInfo]


class Collector(PrometheusCollector):
    """The counts of a server in Prometheus' form, made anew at every scrape."""

    def __init__(self, counts: Counts, info: Info):
        self._counts = counts
        self._info = info

    def collect(self) -> Iterator[Metric]:
        info, counts = self._info(), self._counts
        counters = info.counters
        assert counters is not None
        yield from _about(info)
        yield _gauge("uptime_seconds", "Since this server started.", counters.uptime_s)
        yield _gauge("queue_requests", "Score requests that wait or are being scored.", counters.queued_requests)
        yield _gauge("queue_tokens", "Ids of those requests.", info.queued_tokens)
        yield _gauge("worker_age_seconds", "Since the worker's last sign of life.", info.worker_age_ms / 1000)
        yield _counter("worker_restarts", "Workers that were lost and replaced.", counters.worker_restarts)
        yield _counter("tokens", "Ids that were scored, prompts and responses.", counters.tokens)
        yield _counter("rows", "Rows that were scored.", counters.rows)
        yield _counter("batches", "Batches that were scored.", counters.batches)
        yield _counter("undeliverable_replies", "Replies whose peer was gone or did not read.", counters.undeliverable)
        yield _counter("dropped_messages", "Messages without an envelope to answer to.", counters.dropped)
        yield _by("replies", "Replies by status; without those to info and ping.", "status", counters.replies)
        yield _by("errors", "Requests that got no values, by code.", "code", counters.errors)
        yield _by("row_errors", "Rows that got no value in a reply that is ok, by code.", "code", counters.row_errors)
        if counters.cache_hits is not None and counters.cache_misses is not None:
            yield _counter("cache_hits", "Rows that were answered from kept results.", counters.cache_hits)
            yield _counter("cache_misses", "Rows that had to be scored.", counters.cache_misses)
        yield _histogram("queue_seconds", "Per scored request: from its arrival to the worker.", counts.queue_s)
        yield _histogram("request_seconds", "Per scored request: from its arrival to its reply.", counts.request_s)
        yield _histogram("score_seconds", "Per batch: the worker's time.", counts.score_s)
        yield _histogram("batch_rows", "Rows of a batch.", counts.batch_rows)
        yield _histogram("batch_tokens", "Ids of a batch.", counts.batch_tokens)


def _about(info: ServerInfo) -> Iterator[Metric]:
    """Which state it is in, and with which model."""
    state = GaugeMetricFamily(PREFIX + "state", "1 for the state that the server is in.", labels=["state"])
    for name in get_args(State):
        state.add_metric([name], float(name == info.state))
    yield state
    if info.model is not None:
        labels = {"version": info.version, "backend": info.model.backend, "dtype": info.model.dtype}
        labels |= {"name": info.model.name, "weights": info.model.model}
        yield InfoMetricFamily(PREFIX + "model", "What is served; the value is always 1.", value=labels)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _by(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    total, buckets = 0, []
    for bound, count in zip([*histogram.bounds, math.inf], list(histogram.counts), strict=True):
        total += count
        buckets.append((floatToGoString(bound), float(total)))
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=histogram.sum)


def registry_of(counts: Counts, info: Info) -> CollectorRegistry:
    """What /metrics shows: the counts, and memory, CPU time and open files of the front's process."""
    registry = CollectorRegistry()
    registry.register(Collector(counts, info))
    ProcessCollector(registry=registry)
    return registry


def health(info: ServerInfo) -> tuple[int, dict[str, Any]]:
    """200 when a request would be scored now, else 503, and the reason in either case."""
    detail, well = info.detail, info.state == "ready"
    if well and info.worker_age_ms > SILENT_S * 1000:
        detail, well = f"no sign of life from the worker for {info.worker_age_ms / 1000:.0f} s", False
    body = {
        "state": info.state,
        "detail": detail,
        "version": info.version,
        "model": info.model.name if info.model is not None else None,
        "queued_tokens": info.queued_tokens,
        "worker_age_s": info.worker_age_ms / 1000,
    }
    return (200 if well else 503), body


class MetricsServer:
    """A context manager: the port is taken when it is made, and answered between entering and leaving."""

    def __init__(self, host: str, port: int, counts: Counts, info: Info):
        """Take the port; 0 takes a free one.

        Raises:
            ConfigError: it is taken, or `host` is no address of this machine.
        """
        handler = type("Handler", (_Handler,), {"info": staticmethod(info), "registry": registry_of(counts, info)})
        kind = type("Server", (_Server,), {"address_family": AF_INET6 if ":" in host else AF_INET})
        try:
            self._http: ThreadingHTTPServer = kind((host, port), handler)
        except (OSError, OverflowError) as e:
            raise ConfigError(
                f"--metrics-port {port} on {host} cannot be taken ({e}); choose another port, or 0 for a free one"
            ) from None
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._http.server_port}/metrics"
        self._thread = threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True)

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a peer that does not read is no reason to stay
    request_queue_size = 128  # with the default of 5, a burst of connections waits for seconds

    def server_bind(self) -> None:
        """Without HTTPServer's question to the name service who we are, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):  # the peer went away, or did nothing for PEER_TIMEOUT_S
            logger.debug("a metrics request from %s ended early: %s", client_address, error)
        else:
            logger.exception("a metrics request failed")


class _Handler(BaseHTTPRequestHandler):
    info: Info
    registry: CollectorRegistry
    timeout = PEER_TIMEOUT_S

    def version_string(self) -> str:
        return "opd"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.registry))
        elif path == "/healthz":
            code, body = health(self.info())
            self._answer(code, "application/json", json.dumps(body).encode() + b"\n")
        else:
            self._answer(404, "text/plain; charset=utf-8", b"there are /metrics and /healthz\n")

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        headers: Iterable[tuple[str, str]] = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
