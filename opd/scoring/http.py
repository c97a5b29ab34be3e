"""Scores rows with a vLLM or SGLang server that runs already, over its own HTTP interface.

`--backend http --url http://host:port` puts this package's checks, queue and wire in front of such a server. Ids go
in, never text; one HTTP request is one row, so that one row's failure is its own. http_dialects.py knows what the two
kinds of servers are sent and answer.

A reply counts only if it has exactly the values asked for, names the ids that were sent, and every value is finite.
Connections that break and 5xx answers are tried again, three times; a row that stays without an answer becomes an
error, and when no row gets one, the server is gone: the worker ends, and its supervisor starts another when it can.

Not covered: the server's weights. Its name and folder are all it tells, so that restarting it with other weights under
the same name is noticed by nobody. Temperatures other than 1.

Shapes: L = ids in a row, N = scored positions, K = topk.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from opd.errors import ConfigError, RowError
from opd.fingerprint import vocabulary_fingerprint
from opd.scoring import http_dialects
from opd.scoring.scorer import LoadOptions, Row, RowScores
from opd.wire import ModelInfo, clip

log = logging.getLogger(__name__)

CONCURRENCY = 32  # requests under way at once; the servers batch what is
TRIES = 4
BACKOFF_S = 0.5  # doubled for each further try
TIMEOUT_S = 120.0  # without a byte from the server
MAX_ANSWER_BYTES = 256 << 20


class Refused(Exception):
    """The server answered, and said no: trying again cannot help."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """No usable answer, after all tries."""


class Connection:
    """JSON over HTTP to one server, with one kept connection per thread."""

    def __init__(
        self, url: str, api_key: str | None = None, *, timeout_s: float = TIMEOUT_S, backoff_s: float = BACKOFF_S
    ):
        parts = _parse(url)
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s, self._backoff_s = timeout_s, backoff_s
        self._local = threading.local()

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST a body, or GET without one; returns the decoded answer.

        Raises:
            Refused: 3xx or 4xx.
            Unreachable: no connection, no answer in time, 5xx, or no JSON, TRIES times.
        """
        data = None if body is None else json.dumps(body).encode()
        why = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self._backoff_s * 2 ** (attempt - 1))
            try:
                status, answer = self._once(path, data)
            except (OSError, http.client.HTTPException) as e:
                self._drop()
                why = f"{type(e).__name__}: {e}"
                continue
            if status >= 500 or status == 429:
                why = f"status {status}: {_message(answer)}"
                continue
            if status != 200:
                raise Refused(status, f"status {status}: {_message(answer)}")
            try:
                return json.loads(answer)
            except ValueError as e:
                why = f"no JSON: {e}"
        raise Unreachable(clip(f"{TRIES} tries at {path}; the last: {why}"))

    def _once(self, path: str, data: bytes | None) -> tuple[int, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            if self._tls:
                context = ssl.create_default_context()
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=context
                )
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
            self._local.connection = connection
        connection.request("GET" if data is None else "POST", self._prefix + path, body=data, headers=self._headers)
        response = connection.getresponse()
        answer = response.read(MAX_ANSWER_BYTES + 1)
        if len(answer) > MAX_ANSWER_BYTES:
            raise http.client.HTTPException(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return response.status, answer

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None


def _parse(url: str) -> Any:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid or parts.username or parts.password or parts.query or parts.fragment:
        # The address itself is not repeated where it may hold a password.
        raise ConfigError("--url has to be http://host:port or https://host:port; a key belongs into --api-key-env")
    return parts


def _message(answer: bytes) -> str:
    """What a server says about an error, shortened: the servers wrap it in one of two ways."""
    text = answer[:2000].decode("utf-8", "replace")
    try:
        decoded = json.loads(answer)
        error = decoded.get("error", decoded)
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return clip(text)[:300]


class HTTPScorer:
    """A server behind the Scorer protocol."""

    no_sleep = "the model's memory belongs to the server at --url: let that one sleep"

    def __init__(self, connection: Connection, dialect: http_dialects.Dialect, info: ModelInfo):
        self.info = info
        self.vocabulary = b""  # see Scorer
        self._connection = connection
        self._dialect = dialect
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="http")

    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores | RowError]:
        """See Scorer.score; raises ConnectionError when not one row got an answer."""
        if temperature != 1.0:
            message = f"{self._dialect.name} scores at temperature 1 only, not {temperature:g}"
            return [RowError(i, "temperature", message) for i in range(len(rows))]
        results = list(self._pool.map(lambda index: self._one(index, rows[index], topk), range(len(rows))))
        lost = [result for result in results if isinstance(result, RowError) and result.code == "unavailable"]
        if rows and len(lost) == len(rows):
            raise ConnectionError(f"the {self._dialect.name} server is gone: {lost[0].message}")
        return results

    def _one(self, index: int, row: Row, topk: int) -> RowScores | RowError:
        if len(row.ids) == row.start:
            empty = np.zeros((0, topk))
            nothing = np.zeros(0, np.float32)
            return RowScores(nothing, empty.astype(np.int32), empty.astype(np.float32)) if topk else RowScores(nothing)
        if len(row.ids) > self.info.max_length:
            return RowError(index, "too_long", f"{len(row.ids)} ids; this teacher takes {self.info.max_length}")
        path, body = self._dialect.ask(row, topk)
        try:
            return http_dialects.checked(
                index, row, topk, self._dialect.read(row, topk, self._connection.call(path, body))
            )
        except Refused as e:
            return RowError(index, "refused", f"the {self._dialect.name} server refused the row: {e}")
        except Unreachable as e:
            return RowError(index, "unavailable", f"the {self._dialect.name} server did not answer: {e}")
        except http_dialects.BadAnswer as e:
            return RowError(index, "bad_answer", clip(f"the {self._dialect.name} server's answer cannot be used: {e}"))


def load(options: LoadOptions) -> HTTPScorer:
    """Find out what the server at options.url is, and score one short row.

    Raises:
        ConfigError: no such server, a model that it does not serve, no folder of its tokenizer, a key that is not set.
    """
    if not options.url:
        raise ConfigError("--backend http needs --url http://host:port of a running vLLM or SGLang server")
    key = None
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            raise ConfigError(f"--api-key-env {options.api_key_env}: no such environment variable, or it is empty")
    connection = Connection(options.url, key)
    try:
        served = http_dialects.find_model(connection.call("/v1/models"), options.model)
        dialect = _find_dialect(connection, served.name)
        folder = _folder(options, served)
        vocab_size, eos_ids, vocabulary = http_dialects.describe(folder)
        max_length = _max_length(options, served)
        max_topk = _max_topk(connection, dialect, min(options.max_topk, vocab_size))
    except (Refused, Unreachable, http_dialects.BadAnswer) as e:
        raise ConfigError(f"the server at --url is no vLLM or SGLang server that can be used: {clip(str(e))}") from e
    if not vocabulary:
        log.warning(
            "the tokenizer of %s is not known here, and clients that compare theirs will refuse this teacher; "
            "give its folder with --tokenizer",
            served.name,
        )
    named = "\n".join((dialect.name, served.name, served.root, str(served.max_model_len)))
    scorer = HTTPScorer(
        connection,
        dialect,
        ModelInfo(
            name=served.name[-512:],
            model=hashlib.blake2b(named.encode(), digest_size=16).hexdigest(),
            tokenizer=vocabulary_fingerprint(vocabulary) if vocabulary else "",
            vocab_size=vocab_size,
            max_length=max_length,
            max_topk=max_topk,
            eos_ids=eos_ids,
            dtype="unknown",
            backend=f"http ({dialect.name})",
            temperature=False,
        ),
    )
    scorer.vocabulary = vocabulary
    return scorer


def _find_dialect(connection: Connection, model: str) -> http_dialects.Dialect:
    for path in ("/model_info", "/get_model_info"):  # SGLang's; the second is the older name
        try:
            if "model_path" in connection.call(path):
                return http_dialects.SGLang()
        except Refused:
            continue
    return http_dialects.VLLM(model)


def _folder(options: LoadOptions, served: http_dialects.Served) -> str:
    """Where tokenizer and config are: what the user says, else the server's own folder if it is on this machine."""
    if options.tokenizer is not None:
        if not os.path.isdir(options.tokenizer):
            raise ConfigError(f"--tokenizer {options.tokenizer!r}: no such folder")
        return options.tokenizer
    for candidate in (served.root, options.model):
        if os.path.isdir(candidate):
            return candidate
    raise ConfigError(
        f"the folder of {served.name!r} is not on this machine; give --tokenizer DIR with tokenizer and config.json; "
        f"without a tokenizer to compare, every client would refuse this teacher"
    )


def _max_length(options: LoadOptions, served: http_dialects.Served) -> int:
    longest = served.max_model_len - 1  # the server generates one id
    wanted = longest if options.max_length is None else options.max_length
    if not 1 <= wanted <= longest:
        raise ConfigError(
            f"max_length {wanted} is outside [1, {longest}]: the server's limit is {served.max_model_len}, and it "
            f"needs one position for itself; restart it with a larger one"
        )
    return wanted


def _max_topk(connection: Connection, dialect: http_dialects.Dialect, wanted: int) -> int:
    """The largest top-k that the server takes of `wanted`, 20 (vLLM's default cap) and 0; also a first real score."""
    row = Row(np.array([0, 1], np.int32), 1)
    why = ""
    for topk in sorted({wanted, min(wanted, 20), 0}, reverse=True):
        path, body = dialect.ask(row, topk)
        try:
            result = http_dialects.checked(0, row, topk, dialect.read(row, topk, connection.call(path, body)))
        except Refused as e:
            why = str(e)
            continue
        if isinstance(result, RowError):
            raise ConfigError(f"the server cannot score a first short row: {result.message} [{result.code}]")
        if topk < wanted:
            log.warning("the server takes a top-k of %d at most, not %d (vLLM: --max-logprobs)", topk, wanted)
        return topk
    raise ConfigError(f"the server refuses to score a first short row: {why}")
