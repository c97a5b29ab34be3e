"""A teacher without a model, for tests and benchmarks: every value can be computed again from the ids alone.

A hash of (seed, ids before position i) picks a true distribution over the vocabulary: one of 8 Zipf curves, laid over
a seeded permutation of the ids that starts at a place the hash picks too. So the values of one position sum to 1, the
sampled id and the top-k agree, and top-64 is a gather at about the speed of memcpy. A temperature T divides the
exponent of the curve, which is what dividing logits does.

`--model oracle:vocab=1000,max_length=4096,seed=0,us_per_token=0` configures it; OracleSettings lists the keys.

Shapes: n = rows, S = ids of all rows, N = scored positions, K = topk, C = candidates per position, V = vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from opd.errors import ConfigError, RowError
from opd.scoring.scorer import MAX_CANDIDATES, LoadOptions, Row, RowScores
from opd.wire import ModelInfo

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Exponent 1.5 over 300,000 ids ends at -19.9: every log-prob at temperature 1 stays above -20.
EXPONENTS = np.linspace(0.5, 1.5, 8)
MAX_VOCAB = 300_000

TokenId = Annotated[int, Meta(ge=-1)]  # -1: never


class OracleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `--model oracle:key=value,...` may set. The faults fire when a row holds the id anywhere."""

    vocab: Annotated[int, Meta(ge=2, le=MAX_VOCAB)] = 1000
    max_length: Annotated[int, Meta(ge=1)] = 4096
    seed: Annotated[int, Meta(ge=0, le=2**32)] = 0
    eos: TokenId = -1
    tokenizer: str = ""  # the fingerprint to report
    temperature: bool = True  # false: report that temperatures other than 1 are not applied
    us_per_token: Annotated[float, Meta(ge=0)] = 0.0  # a batch lasts at least this long for each of its ids,
    ms_per_batch: Annotated[float, Meta(ge=0)] = 0.0  # plus this
    load_s: Annotated[float, Meta(ge=0)] = 0.0  # loading lasts this long
    kill_id: TokenId = -1  # the process kills itself, as the kernel does when memory is short
    hang_id: TokenId = -1  # the call never returns
    raise_id: TokenId = -1  # the call raises RuntimeError
    nan_id: TokenId = -1  # the row's values hold a NaN, which a scorer must never return
    oom_id: TokenId = -1  # the row gets a RowError


def parse_settings(model: str) -> OracleSettings:
    """Read `oracle` or `oracle:key=value,...`.

    Raises:
        ConfigError: another prefix, an unknown or repeated key, or a value out of range.
    """
    name, _, text = model.partition(":")
    if name != "oracle":
        raise ConfigError(f"the oracle's model is 'oracle' or 'oracle:key=value,...', got {model!r}")
    settings: dict[str, str] = {}
    for item in text.split(",") if text else []:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or key in settings:
            raise ConfigError(f"{model!r}: {item!r} is a repeated key or not of the form key=value")
        settings[key] = value
    try:
        return msgspec.convert(settings, OracleSettings, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{model!r}: {e}; keys: {', '.join(OracleSettings.__struct_fields__)}") from None


def _mix(x: np.ndarray) -> np.ndarray:
    """Finalizer of splitmix64, in place; uint64 arithmetic wraps around on purpose."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class _Draw(NamedTuple):
    curve: np.ndarray  # int64 [N], which exponent
    first: np.ndarray  # int64 [N], where in the permutation rank 0 is


def _draw(ids: np.ndarray, lengths: np.ndarray, starts: np.ndarray, seed: int, vocab: int) -> tuple[_Draw, np.ndarray]:
    """The distribution of every scored position, and where those positions are in `ids` [S]."""
    row_begin = np.cumsum(lengths) - lengths
    position = np.arange(len(ids)) - np.repeat(row_begin, lengths)
    # A sum of hashes of (position, id) names a prefix, so that all prefixes of all rows are one cumsum.
    term = _mix(ids.astype(np.uint64) + position.astype(np.uint64) * GOLDEN + GOLDEN)
    before = np.cumsum(term) - term  # over all rows so far; the part of the earlier rows goes next
    scored = np.flatnonzero(position >= np.repeat(starts, lengths))
    offset = before[np.minimum(row_begin, max(len(ids) - 1, 0))] if len(ids) else before
    key = before[scored] - np.repeat(offset, lengths)[scored]
    key = _mix(key + _mix(np.array([seed], np.uint64) + GOLDEN))
    first = ((key >> np.uint64(32)) * np.uint64(vocab)) >> np.uint64(32)
    return _Draw((key & np.uint64(7)).astype(np.int64), first.astype(np.int64)), scored


@functools.lru_cache(maxsize=8)
def _curves(vocab: int, temperature: float) -> np.ndarray:
    """Log-prob by curve and rank, float32 [8, V], descending."""
    scaled = -np.outer(EXPONENTS / temperature, np.log(np.arange(1, vocab + 1)))
    return (scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))).astype(np.float32)


@functools.lru_cache(maxsize=8)
def _permutation(vocab: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A seeded order of the ids, int32 [2 V] (written twice: any window of V is a view), and its inverse, int64 [V]."""
    order = np.argsort(_mix(np.arange(vocab, dtype=np.uint64) * GOLDEN + np.uint64(seed)), kind="stable")
    inverse = np.empty(vocab, np.int64)
    inverse[order] = np.arange(vocab)
    return np.tile(order.astype(np.int32), 2), inverse


def _given(ids: np.ndarray, draw: _Draw, seed: int, temperature: float, vocab: int) -> np.ndarray:
    """Log-probs of ids [N] or [N, C] under the distributions of the N positions."""
    first, curve = (of_position.reshape(-1, *[1] * (ids.ndim - 1)) for of_position in (draw.first, draw.curve))
    rank = _permutation(vocab, seed)[1][ids] - first
    rank[rank < 0] += vocab
    return _curves(vocab, temperature)[curve, rank]


def _top(draw: _Draw, topk: int, seed: int, temperature: float, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    windows = np.lib.stride_tricks.sliding_window_view(_permutation(vocab, seed)[0], topk)
    return windows[draw.first], np.ascontiguousarray(_curves(vocab, temperature)[:, :topk])[draw.curve]


def oracle_logprobs(
    ids: np.ndarray | Sequence[int], start: int, *, seed: int = 0, temperature: float = 1.0, vocab: int = 1000
) -> np.ndarray:
    """The oracle's log-probs of one row.

    Args:
        ids: [L], in [0, vocab).
        start: first scored position, 1 <= start <= L.
        seed: as in the `--model` string, and so is vocab.
        temperature: divides the logits.

    Returns:
        float32 [L - start]; each depends on the seed, on the ids before its position and on the id there.
    """
    ids = np.asarray(ids, np.int32)
    draw, scored = _draw(ids, np.array([len(ids)]), np.array([start]), seed, vocab)
    return _given(ids[scored], draw, seed, temperature, vocab)


def oracle_topk(
    ids: np.ndarray | Sequence[int],
    start: int,
    topk: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    vocab: int = 1000,
) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's most probable ids of one row and their log-probs: int32 and float32 [L - start, topk]."""
    ids = np.asarray(ids, np.int32)
    draw, _ = _draw(ids, np.array([len(ids)]), np.array([start]), seed, vocab)
    return _top(draw, topk, seed, temperature, vocab)


def oracle_candidates(
    ids: np.ndarray | Sequence[int],
    start: int,
    candidates: np.ndarray | Sequence[Sequence[int]],
    *,
    seed: int = 0,
    temperature: float = 1.0,
    vocab: int = 1000,
) -> np.ndarray:
    """The oracle's log-probs of other ids at a row's scored positions: candidates and result are [L - start, C]."""
    ids = np.asarray(ids, np.int32)
    draw, _ = _draw(ids, np.array([len(ids)]), np.array([start]), seed, vocab)
    return _given(np.asarray(candidates, np.int32), draw, seed, temperature, vocab)


class OracleScorer:
    """The oracle behind the Scorer protocol, with faults and a clock."""

    def __init__(self, settings: OracleSettings, info: ModelInfo):
        self.info = info
        self._settings = settings

    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores | RowError]:
        """See Scorer.score."""
        if not rows:
            return []
        s = self._settings
        started = time.perf_counter()
        lengths = np.array([len(row.ids) for row in rows])
        starts = np.array([row.start for row in rows])
        ids = np.concatenate([row.ids for row in rows])
        self._fail(ids)
        draw, scored = _draw(ids, lengths, starts, s.seed, s.vocab)
        logprobs = _given(ids[scored], draw, s.seed, temperature, s.vocab)
        topk_ids, topk_logprobs = _top(draw, topk, s.seed, temperature, s.vocab) if topk else (None, None)
        candidates = [row.candidates for row in rows if row.candidates is not None]
        candidate_logprobs = (
            _given(np.concatenate(candidates), draw, s.seed, temperature, s.vocab) if candidates else None
        )
        results: list[RowScores | RowError] = []
        end = np.cumsum(lengths - starts)
        for index, row in enumerate(rows):
            mine = slice(end[index] - (lengths[index] - starts[index]), end[index])
            if s.oom_id >= 0 and (row.ids == s.oom_id).any():
                results.append(RowError(index, "oom", f"row {index} holds id {s.oom_id}: the oracle was told to fail"))
                continue
            values = logprobs[mine]
            if s.nan_id >= 0 and (row.ids == s.nan_id).any():
                values[-1:] = np.nan
            others = (None if array is None else array[mine] for array in (topk_ids, topk_logprobs, candidate_logprobs))
            results.append(RowScores(values, *others))
        wanted_s = 1e-3 * s.ms_per_batch + 1e-6 * s.us_per_token * len(ids)
        time.sleep(max(0.0, wanted_s - (time.perf_counter() - started)))
        return results

    def _fail(self, ids: np.ndarray) -> None:
        s = self._settings
        if s.kill_id >= 0 and (ids == s.kill_id).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if s.hang_id >= 0 and (ids == s.hang_id).any():
            while True:
                time.sleep(3600)
        if s.raise_id >= 0 and (ids == s.raise_id).any():
            raise RuntimeError(f"a row holds id {s.raise_id}: the oracle was told to raise")


def load(options: LoadOptions) -> OracleScorer:
    """Build the oracle that `options.model` describes; dtype, device and max_tokens have no meaning for it.

    Raises:
        ConfigError: as parse_settings.
    """
    settings = parse_settings(options.model)
    time.sleep(settings.load_s)
    identity = f"oracle {settings.seed} {settings.vocab}"  # faults and timing do not change what it answers
    info = ModelInfo(
        name=options.model[:512],
        model=hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
        tokenizer=settings.tokenizer,
        vocab_size=settings.vocab,
        max_length=options.max_length or settings.max_length,
        max_topk=min(options.max_topk, settings.vocab),
        eos_ids=[settings.eos] if settings.eos >= 0 else [],
        dtype="float32",
        backend="oracle",
        temperature=settings.temperature,
        max_candidates=MAX_CANDIDATES,
    )
    return OracleScorer(settings, info)
