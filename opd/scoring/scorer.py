"""What a scorer promises to the worker process that holds it.

A scorer gets rows of token ids and returns, for each scored position i of a row, log p(ids[i] | ids[:i]).
It never sees text, sockets or padding, and it never fills a value that it does not have.

Shapes: L = ids in the row, start = first scored position (1 <= start <= L), N = L - start scored positions, K = topk,
C = candidates per position, the same in all rows of a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from opd.errors import RowError
from opd.wire import ModelInfo

DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_CANDIDATES = 1024  # per position, of the backends that take any; beyond it they cost more than the head


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `load(options) -> Scorer` of a backend module gets; the server's command line fills it.

    `load` raises ConfigError, in one sentence that names the setting and the next step, for anything a person can put
    right (no such folder, a dtype or a length that the model cannot do); the server ends with that sentence.
    """

    model: str  # a model folder; for the oracle any string, which is its seed; for http the server's name for it
    dtype: str = "auto"  # one of DTYPES; auto: the dtype that the model was saved in
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    max_length: int | None = None  # ids in one row; None: what the model's config allows
    max_tokens: int = 16_384  # ids in one call of score(): the server's token budget, which bounds activation memory
    max_topk: int = 256  # capped by the scorer to its vocabulary
    tensor_parallel_size: int = 1  # vllm: GPUs that hold one copy of the model together
    gpu_memory_utilization: float = 0.9  # vllm: share of each GPU's memory for weights and cache
    url: str | None = None  # http: the server's address
    tokenizer: str | None = None  # http: folder of the tokenizer, when `model` is none
    api_key_env: str | None = None  # http: name of the environment variable that holds the server's key


class Row(NamedTuple):
    """One sequence to score."""

    ids: np.ndarray  # int32 [L], every id in [0, vocab_size), L <= max_length: the front has checked it
    start: int  # first scored position; the N = L - start positions from here on get a value
    candidates: np.ndarray | None = None  # int32 [N, C], in [0, vocab_size), repeats allowed: these get a value too


class RowScores(NamedTuple):
    """The values of one row, natural log."""

    logprobs: np.ndarray  # float32 [N], finite and <= 0 up to rounding
    topk_ids: np.ndarray | None = None  # int32 [N, K], most probable first
    topk_logprobs: np.ndarray | None = None  # float32 [N, K], descending
    candidate_logprobs: np.ndarray | None = None  # float32 [N, C], where the row has candidates


class Scorer(Protocol):
    """A model that scores rows; lives in the worker process, is called from one thread.

    To free the accelerator's memory between steps the worker process is ended and later started again. A scorer that
    can do it faster has `can_sleep = True` and two methods, `sleep()` and `wake()`, after which its values are what
    they were; one whose memory is somewhere else has `no_sleep`, a sentence that says where. One that knows its
    tokenizer has `vocabulary`, the bytes that `info.tokenizer` is the fingerprint of.
    """

    info: ModelInfo

    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores | RowError]:
        """Score every row; one result per row, in order.

        Args:
            rows: sequences, in any order and of any mix of lengths. Rows that share a prompt may come together. Either
                all have candidates, or none, and never more per position than info.max_candidates.
            topk: how many of the model's own most probable ids to return per position, 0 <= topk <= info.max_topk.
            temperature: > 0; the model's logits are divided by it before the softmax.

        Returns:
            A RowScores, or a RowError for a row that could not be scored: non-finite value, out of memory when alone.
        """
        ...
