"""Wire format between the trainer and the teacher, protocol version 2.

The client writes a request and reads a Reply; the server does the reverse. A message is the REQ/REP envelope, one
msgpack map, and, in a reply with top-k or candidates, the raw frames that the map names. Arrays are little-endian
`bin`, never msgpack lists. Nothing here opens a socket, so every rule below is tested with bytes alone.

A request may name C candidate ids for each scored position, one row behind the other, and gets the log-prob of each; an
id that comes twice at a position has its value twice. They are inside the map, so that every request is one frame: the
copy that this costs takes 2 ms for 65,536 positions of 64, next to what scoring so many takes.

Shapes: n = rows, S = all ids of all rows, N = all scored positions = sum(lengths - starts), K = topk,
C = num_candidates. A row whose start is out of range has no scored positions, and so no candidates.

Not covered: compression, streaming, encryption.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct

from opd.errors import WireError

PROTOCOL_VERSION = 2
ID_BYTES = 16
COPY_BYTES = 1 << 20  # frames below are copied when they are sent: giving their memory back would cost more
MAX_TEXT = 512  # characters in any string of a message: peers' strings end up in logs and errors

Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
RequestId: TypeAlias = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)]
Total: TypeAlias = Annotated[float, Meta(ge=0)]
Status: TypeAlias = Literal["ok", "error", "busy", "draining", "expired"]
# draining: it takes no new requests, since it ends or goes to sleep; sleeping: its accelerator's memory is free
State: TypeAlias = Literal["loading", "ready", "restarting", "draining", "sleeping", "failed"]
_Array = TypeVar("_Array", bound=np.generic)


class ModelInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The teacher's model, as its worker reports it after loading."""

    name: Text  # the folder or hub name it was loaded from
    model: Text  # fingerprint of weights, config and dtype
    tokenizer: Text  # fingerprint of the token -> id map; "" when the model folder has no tokenizer
    vocab_size: Count  # rows of the output head: ids in [0, vocab_size) can be scored
    max_length: Count  # most ids in one row
    max_topk: Count
    eos_ids: Annotated[list[int], Meta(max_length=64)]
    dtype: Text
    backend: Text
    temperature: bool  # whether a temperature other than 1 is applied to the logits
    max_candidates: Count = 0  # per position; 0: this backend scores the sampled ids and its own top-k only


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the server takes in one request; more is refused with an error, never cut."""

    max_request_bytes: Count = 64 << 20
    max_reply_bytes: Count = 512 << 20
    max_rows: Count = 65_536


class Counters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server counted since its start; the difference of two answers gives rates and means."""

    uptime_s: Total
    replies: Annotated[dict[Text, int], Meta(max_length=128)]  # by status; without answers to info and ping
    errors: Annotated[dict[Text, int], Meta(max_length=128)]  # by code, of whole requests
    row_errors: Annotated[dict[Text, int], Meta(max_length=128)]  # by code, of single rows
    batches: int
    rows: int  # in those batches
    tokens: int  # in those batches: ids of prompts and responses
    score_s: Total  # sum over those batches
    scored_requests: int  # answered with values that the worker computed
    queue_s: Total  # sum over those requests, from arrival to worker
    request_s: Total  # the same, from arrival to reply
    queued_requests: int  # now: waiting or being scored
    worker_restarts: int
    undeliverable: int  # replies whose peer was gone or did not read
    dropped: int  # messages without an envelope
    cache_hits: int | None = None  # rows; None: this server keeps no results
    cache_misses: int | None = None


class ServerInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer to `info`, `ping`, `sleep`, `wake` and `vocab`. `model` is None until the worker has loaded it once."""

    state: State
    detail: Text  # one sentence for people: what it is doing, or why it failed
    version: Text  # of the package
    limits: Limits
    model: ModelInfo | None = None
    worker_age_ms: Count = 0  # since the worker's last sign of life
    queued_tokens: Count = 0
    counters: Counters | None = None  # None: the server does not say


class Expect(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fingerprints that the client pinned at its handshake."""

    model: Text
    tokenizer: Text


class _Request(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="op"):
    v: int = PROTOCOL_VERSION
    id: RequestId
    client: Text = ""  # for fairness and logs; no meaning beyond that


class InfoRequest(_Request, tag="info"):
    """Who are you?"""


class PingRequest(_Request, tag="ping"):
    """Are you well?"""


class SleepRequest(_Request, tag="sleep"):
    """Answer what you hold, then free the accelerator's memory. Answered at once; `info` tells when it is done."""


class WakeRequest(_Request, tag="wake"):
    """Take the memory back. Answered at once; `info` tells when it is done."""


class VocabRequest(_Request, tag="vocab"):
    """Which token is each id? For a client whose tokenizer has another fingerprint, to find out where they differ."""


class _RowsRequest(_Request):
    budget_ms: Count  # time left when it was sent: relative, since wall clocks differ
    lengths: memoryview  # int32 [n], prompt + response
    starts: memoryview  # int32 [n], first scored position of each row, 1 <= start <= length
    ids: memoryview  # int32 [S]
    topk: Annotated[int, Meta(ge=0, le=65_536)] = 0
    temperature: Annotated[float, Meta(gt=0.0, le=1e3)] = 1.0
    expect: Expect | None = None
    num_candidates: Annotated[int, Meta(ge=0, le=65_536)] = 0
    candidates: memoryview = memoryview(b"")  # int32 [N, C]


class ScoreRequest(_RowsRequest, tag="score"):
    """Score these rows."""


class PrefetchRequest(_RowsRequest, tag="prefetch"):
    """Score these rows when nobody waits, and keep the values for a `score` of the same rows to come.

    Answered at once and without values: ok (it will be tried, while the budget lasts) or busy. A promise of nothing:
    values that were not computed or not kept are computed when they are asked for.
    """


Request: TypeAlias = (
    InfoRequest | PingRequest | ScoreRequest | PrefetchRequest | SleepRequest | WakeRequest | VocabRequest
)


class Reply(Struct, kw_only=True, forbid_unknown_fields=True):
    """The one answer to a request; which fields are filled depends on `status` and on the request."""

    v: int = PROTOCOL_VERSION
    id: Annotated[bytes, Meta(max_length=ID_BYTES)]  # empty when the request had none that could be read
    status: Status
    boot: Text  # names this start of the server process
    # when not ok
    code: Text = ""
    message: Text = ""
    retryable: bool = False
    retry_after_ms: Count = 0
    # info, ping, sleep, wake and vocab
    info: ServerInfo | None = None
    # vocab
    vocab: memoryview = memoryview(b"")  # opd/fingerprint.py vocabulary_bytes: what the tokenizer's fingerprint hashes
    # score
    model: Text = ""
    tokenizer: Text = ""
    logprobs: memoryview = memoryview(b"")  # float32 [N]; NaN on the rows in row_errors
    frames: Annotated[list[Text], Meta(max_length=3)] = []  # names of the raw frames behind the map, in their order
    row_errors: list[tuple[Count, Text, Text]] = []  # row, code, message
    ids_digest: bytes = b""  # digest() of the question that was answered
    queue_ms: float = 0.0
    score_ms: float = 0.0  # the worker's time on these rows, also when it was spent for an earlier request
    cached_rows: Count = 0  # whose values were computed for an earlier request


TOPK_FRAMES = ("topk_ids", "topk_logprobs")  # int32 [N, K], float32 [N, K]
CANDIDATE_FRAMES = ("candidate_logprobs",)  # float32 [N, C]


def frame_names(topk: int, num_candidates: int) -> tuple[str, ...]:
    """The raw frames of a reply to a request for these, in their order."""
    return (TOPK_FRAMES if topk else ()) + (CANDIDATE_FRAMES if num_candidates else ())


def reply_bytes(scored: int, topk: int, num_candidates: int) -> int:
    """4 bytes for the sampled token, 8 for each of its top-k, 4 for each of its candidates."""
    return scored * (4 + 8 * topk + 4 * num_candidates)


class _Head(Struct):
    """The three fields read first, so that another version or op gets a clear answer rather than a schema error."""

    v: int = 0
    op: str = ""
    id: bytes = b""


_encoder = msgspec.msgpack.Encoder()


def _no_extensions(code: int, data: memoryview) -> Any:
    raise WireError("bad_msgpack", f"msgpack extension type {code} is not part of the protocol")


_head_decoder = msgspec.msgpack.Decoder(_Head, ext_hook=_no_extensions)
_request_decoder = msgspec.msgpack.Decoder(Request, ext_hook=_no_extensions)
_reply_decoder = msgspec.msgpack.Decoder(Reply, ext_hook=_no_extensions)
_OPS = ("score", "info", "ping", "prefetch", "sleep", "wake", "vocab")


def new_id() -> bytes:
    return os.urandom(ID_BYTES)


def clip(text: str) -> str:
    """Cut a string to what a message may carry, with control characters escaped: it may come from a peer."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def digest(lengths: np.ndarray, starts: np.ndarray, ids: np.ndarray, candidates: np.ndarray | None = None) -> bytes:
    """Name a question by its content: XXH3-128 over each array's size (uint64) and its int32 values, 16 bytes.

    Candidates are a fourth array, which is there only where they were asked for.

    It tells questions apart that were mixed up. It is no defence against a teacher that lies: nothing here could be.
    """
    h = xxhash.xxh3_128()
    for array in (lengths, starts, ids) if candidates is None else (lengths, starts, ids, candidates):
        h.update(array.size.to_bytes(8, "little"))
        h.update(to_bin(array, np.int32))
    return h.digest()


def to_bin(array: np.ndarray, dtype: type[np.generic]) -> memoryview:
    """The little-endian bytes of an array, without a copy where it has that dtype already."""
    data = np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<"))
    return data.reshape(-1).data.cast("B") if data.size else memoryview(b"")


def from_bin(data: Any, dtype: type[_Array], name: str) -> np.ndarray[Any, np.dtype[_Array]]:
    """A read-only view of received bytes as a 1-d array.

    Raises:
        WireError: the number of bytes is no multiple of the item size.
    """
    item = np.dtype(dtype).newbyteorder("<")
    nbytes = memoryview(data).nbytes
    if nbytes % item.itemsize:
        raise WireError("schema", f"{name} has {nbytes} bytes, which is no multiple of {item.itemsize}")
    return np.frombuffer(data, dtype=item)


def encode_request(request: Request) -> bytes:
    return _encoder.encode(request)


def read_id(body: Any) -> bytes:
    """The id of a request that may be broken otherwise, or b"": an error reply should name its question."""
    try:
        request_id = _head_decoder.decode(body).id
    except Exception:  # four families of decoding errors, and none matters here: the full decode reports it
        return b""
    return request_id if len(request_id) == ID_BYTES else b""


def decode_request(body: Any) -> Request:
    """Decode one request; every malformed input ends here in a WireError and nothing else.

    Raises:
        WireError: code bad_msgpack, version, op or schema.
    """
    head: _Head = _decode(_head_decoder, body)
    if head.v != PROTOCOL_VERSION:
        raise WireError("version", f"request has protocol version {head.v}; this server speaks {PROTOCOL_VERSION}")
    if head.op not in _OPS:
        raise WireError("op", f"unknown op {clip(head.op)!r}; known: {', '.join(_OPS)}")
    return _decode(_request_decoder, body)


def encode_reply(
    reply: Reply,
    topk_ids: np.ndarray | None = None,
    topk_logprobs: np.ndarray | None = None,
    candidate_logprobs: np.ndarray | None = None,
) -> list:
    """Frames behind the envelope's empty one: the map, then the raw frames if there are any."""
    raw = []
    if topk_ids is not None and topk_logprobs is not None:
        raw += [to_bin(topk_ids, np.int32), to_bin(topk_logprobs, np.float32)]
    if candidate_logprobs is not None:
        raw.append(to_bin(candidate_logprobs, np.float32))
    if raw:
        reply.frames = list(frame_names(len(raw) > 1, candidate_logprobs is not None))
    return [_encoder.encode(reply), *raw]


def decode_reply(frames: Sequence[Any]) -> tuple[Reply, dict[str, Any]]:
    """Decode the frames behind the empty one into the reply and its raw frames by name.

    Raises:
        WireError: as decode_request, or frames other than the map names.
    """
    if not frames:
        raise WireError("schema", "a reply without a body")
    head: _Head = _decode(_head_decoder, frames[0])
    if head.v != PROTOCOL_VERSION:
        raise WireError("version", f"reply has protocol version {head.v}; this client speaks {PROTOCOL_VERSION}")
    reply: Reply = _decode(_reply_decoder, frames[0])
    known = [frame_names(topk, candidates) for topk in (0, 1) for candidates in (0, 1)]
    if len(frames) - 1 != len(reply.frames) or tuple(reply.frames) not in known:
        raise WireError("schema", f"{len(frames) - 1} frames follow the map, which names {reply.frames}")
    return reply, dict(zip(reply.frames, frames[1:], strict=True))


def _decode(decoder: Any, body: Any) -> Any:
    try:
        return decoder.decode(body)
    except WireError:
        raise
    except msgspec.ValidationError as e:
        raise WireError("schema", clip(str(e))) from None
    except Exception as e:  # truncated, trailing, bad UTF-8, too deep: msgspec, Unicode and Recursion errors alike
        raise WireError("bad_msgpack", clip(f"{type(e).__name__}: {e}")) from None
