"""A teacher in a thread that speaks opd.wire over a real ROUTER socket, and that tests can make lie, stall or die.

Its honest value for a token is -id / 1000, so every value says which token it belongs to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from opd import wire
from opd.question import Question, unpack

VOCAB = 10_000


def honest_values(question: Question) -> np.ndarray:
    return np.concatenate(
        [-row[start:] / 1000 for row, start in zip(question.rows(), question.starts, strict=True)]
    ).astype("<f4")


def honest_topk(question: Question, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """The sampled id first, then the ones after it; every one less likely than the one before."""
    sampled = np.concatenate([row[start:] for row, start in zip(question.rows(), question.starts, strict=True)])
    ids = (sampled[:, None] + np.arange(topk)) % VOCAB
    values = honest_values(question)[:, None] - 10.0 * np.arange(topk)
    return ids.astype("<i4"), values.astype("<f4")


def honest_candidates(question: Question) -> np.ndarray | None:
    return None if question.candidates is None else (-question.candidates / 1000).astype("<f4")


def default_rows(num_rows: int, *, seed: int = 0, most: int = 12) -> tuple[list[np.ndarray], list[int]]:
    """Ragged rows with random ids; a first id above 3000 keeps honest top-k probabilities below 1."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3000, 4000, rng.integers(2, most)).astype(np.int32) for _ in range(num_rows)]
    return rows, [int(rng.integers(1, len(row))) for row in rows]


class FakeTeacher:
    """See the module. `on_score(fake, envelope, request, question)` sends what it likes; None: the honest answer."""

    def __init__(
        self,
        on_score: Callable[[FakeTeacher, list[bytes], wire.ScoreRequest, Question], None] | None = None,
        *,
        port: int = 0,
        model: str = "model-1",
        tokenizer: str = "tokenizer-1",
        boot: str = "boot-1",
        state: wire.State = "ready",
        detail: str = "",
        limits: wire.Limits | None = None,
        max_topk: int = 64,
        max_candidates: int = 16,
        temperature: bool = True,
        vocabulary: bytes = b"",
        max_length: int = 100_000,
    ):
        self.on_score = on_score or FakeTeacher.be_honest
        self.state: wire.State = state
        self.detail = detail
        self.limits = limits or wire.Limits()
        self.worker_age_ms = 0
        self.model, self.tokenizer, self.boot = model, tokenizer, boot
        self.max_topk, self.max_candidates, self.temperature = max_topk, max_candidates, temperature
        self.max_length = max_length
        self.vocabulary = vocabulary  # what the fingerprint `tokenizer` should be of
        self.requests: list[tuple[wire.ScoreRequest, Question]] = []
        self.asked = 0  # info and ping
        self.prefetched: list[tuple[wire.PrefetchRequest, Question]] = []
        self.paused = False  # alive for TCP and ZMTP, dead for everybody else
        self.raw_info: list[bytes] | None = None  # sent instead of an answer to info
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.sndhwm = 0
        self._router.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.address.rsplit(":", 1)[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeTeacher:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Cut every connection, as a killed process does."""
        self._stop.set()
        self._thread.join(5)

    def send(self, envelope: list[bytes], frames: list) -> None:
        self._router.send_multipart([*envelope, *frames])

    def reply(self, request: wire.ScoreRequest, question: Question, **changes: object) -> wire.Reply:
        """The honest answer, with some fields replaced."""
        fields: dict = {
            "id": request.id,
            "status": "ok",
            "boot": self.boot,
            "model": self.model,
            "tokenizer": self.tokenizer,
            "logprobs": wire.to_bin(honest_values(question), np.float32),
            "ids_digest": wire.digest(*question.arrays()),
        }
        return wire.Reply(**fields | changes)

    def be_honest(self, envelope: list[bytes], request: wire.ScoreRequest, question: Question) -> None:
        topk = honest_topk(question, request.topk) if request.topk else (None, None)
        self.send(envelope, wire.encode_reply(self.reply(request, question), *topk, honest_candidates(question)))

    def refuse(self, envelope: list[bytes], request: wire.ScoreRequest, status: Any, **fields: Any) -> None:
        self.send(envelope, wire.encode_reply(wire.Reply(id=request.id, status=status, boot=self.boot, **fields)))

    def _info(self) -> wire.ServerInfo:
        model = wire.ModelInfo(
            name="fake",
            model=self.model,
            tokenizer=self.tokenizer,
            vocab_size=VOCAB,
            max_length=self.max_length,
            max_topk=self.max_topk,
            eos_ids=[],
            dtype="float32",
            backend="fake",
            temperature=self.temperature,
            max_candidates=self.max_candidates,
        )
        return wire.ServerInfo(
            state=self.state,
            detail=self.detail,
            version="0",
            limits=self.limits,
            model=None if self.state == "loading" else model,
            worker_age_ms=self.worker_age_ms,
        )

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        while not self._stop.is_set():
            if self.paused:
                time.sleep(0.005)
            if not poller.poll(5) or self.paused:
                continue
            frames = self._router.recv_multipart()
            assert frames[1] == b"" and len(frames) == 3
            envelope, request = frames[:2], wire.decode_request(frames[2])
            if isinstance(request, wire.ScoreRequest):
                question = unpack(request, wire.Limits())
                self.requests.append((request, question))
                self.on_score(self, envelope, request, question)
                continue
            self.asked += 1
            if isinstance(request, wire.PrefetchRequest):
                self.prefetched.append((request, unpack(request, wire.Limits())))
            elif isinstance(request, wire.SleepRequest | wire.WakeRequest):
                self.state = "sleeping" if isinstance(request, wire.SleepRequest) else "ready"
            if isinstance(request, wire.VocabRequest) and not self.vocabulary:
                self.refuse(envelope, request, "error", code="no_vocab", message="does not know")
                continue
            if self.raw_info is not None:
                self.send(envelope, self.raw_info)
            else:
                reply = wire.Reply(id=request.id, status="ok", boot=self.boot, info=self._info())
                if isinstance(request, wire.VocabRequest):
                    reply.vocab = memoryview(self.vocabulary)
                self.send(envelope, wire.encode_reply(reply))
        self._router.close(linger=0)
        self._context.term()
