"""Messages between the front and its worker process: one msgpack head, then raw arrays.

Two ZMQ links over ipc in a folder of mode 0700: BATCHES (PAIR, the worker's main thread) and BEATS (PUSH, its
heartbeat). A batch goes down as [Batch, lengths int32, starts int32, and per piece ids int32 (candidates int32)]; its
answer comes up as [Scores, and per piece logprobs float32 (topk_ids int32, topk_logprobs float32) (candidate_logprobs
float32)].
A message of one frame is no batch but an order: Sleep or Wake.
Both ends are the same package at the same version, so there is no version field.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from opd.wire import ModelInfo


class Batch(msgspec.Struct, tag=True):
    seq: int
    topk: int
    temperature: float
    deadline: float  # time.monotonic(), which both processes share: nobody waits for the batch after it
    piece_rows: list[int]  # rows of each piece
    num_candidates: int = 0  # per position


class Sleep(msgspec.Struct, tag=True):
    """Free the accelerator's memory; answered with Slept. Sent alone, and only to a worker that said `can_sleep`."""


class Wake(msgspec.Struct, tag=True):
    """Take it back; answered with Loaded, as after the start."""


class Hello(msgspec.Struct, tag=True):
    """The worker process is there and begins to load."""


class Loaded(msgspec.Struct, tag=True):
    info: ModelInfo
    seconds: float
    can_sleep: bool = False  # else the process is ended to free its memory
    no_sleep: str = ""  # why that makes no sense here
    vocabulary: bytes = b""  # what info.tokenizer is the fingerprint of, where the scorer knows


class LoadFailed(msgspec.Struct, tag=True):
    message: str
    config: bool  # a setting is wrong: trying again cannot help


class Slept(msgspec.Struct, tag=True):
    """The accelerator's memory is free."""


class Beat(msgspec.Struct, tag=True):
    """Sent by a thread of its own, so it goes on while a batch runs; `idle_s` is the age of the last real progress."""

    idle_s: float


class Scores(msgspec.Struct, tag=True):
    seq: int
    seconds: float  # 0 when the batch came too late to be scored
    digests: list[bytes]  # of the lengths, starts, ids and candidates of each piece, as they were scored
    errors: list[tuple[int, int, str, str]]  # piece, row within it, code, message; those rows hold NaN


FromWorker: TypeAlias = Hello | Loaded | LoadFailed | Slept | Beat | Scores

encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode
decode_order = msgspec.msgpack.Decoder(Sleep | Wake).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
BATCHES, BEATS = "batches", "beats"  # names of the two sockets in the folder
