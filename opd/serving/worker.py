"""The process that holds the model: loads a Scorer, scores the batches that the front sends, and nothing else.

Started by the supervisor as `python -m opd.serving.worker`; not meant to be started by hand. It exits when its parent
does, however that ends. A scorer that raises gets the rows one by one; if it then cannot repeat the values of a row
that it scored at its start, the process exits, since a device error can leave a model that answers nonsense.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from opd.errors import ConfigError, RowError
from opd.scoring.scorer import LoadOptions, Row, RowScores, Scorer
from opd.serving import link
from opd.serving.job import Values, blank_values
from opd.serving.memory import keep_freed_memory
from opd.wire import COPY_BYTES, clip, digest, to_bin

logger = logging.getLogger(__name__)

BEAT_S = 1.0
LAST_WORDS_S = 1.0  # the front kills this process as soon as it has read why loading failed
MAX_LOGPROB = 1e-5  # above 0 by rounding only
CANARY_IDS, CANARY_TOLERANCE = 4, 0.05
EXIT_BROKEN = 70


class Progress:
    """When the worker last got something done; written by the main thread, read by the heartbeat."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def made(self) -> None:
        self.at = time.monotonic()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m opd.serving.worker", description=__doc__)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--parent", required=True, type=int)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--options", required=True, help="LoadOptions as JSON")
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args(argv)
    die_with(args.parent)
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when to end
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return run(args.folder, args.parent, args.backend, msgspec.json.decode(args.options, type=LoadOptions))


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies, and exit if it is gone already."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run(folder: Path, parent: int, backend: str, options: LoadOptions) -> int:
    context = zmq.Context()
    batches, beats = context.socket(zmq.PAIR), context.socket(zmq.PUSH)
    for socket, name in ((batches, link.BATCHES), (beats, link.BEATS)):
        socket.copy_threshold = COPY_BYTES
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(f"ipc://{folder / name}")
    progress = Progress()
    batches.send(link.encode(link.Hello()))
    threading.Thread(target=_beat, args=(beats, parent, progress), daemon=True).start()
    began = time.monotonic()
    try:
        scorer = load_scorer(backend, options)
        canary = score_canary(scorer)
    except Exception as e:  # whatever a model library raises becomes one sentence for the person who started the server
        logger.debug("loading failed", exc_info=True)
        message = str(e) if isinstance(e, ConfigError) else f"{type(e).__name__} while loading: {e}"
        hint = "" if isinstance(e, ConfigError) else " (--log-level debug shows the traceback)"
        failed = link.LoadFailed(clip(message)[:400] + hint, isinstance(e, ConfigError))
        batches.send(link.encode(failed))
        time.sleep(LAST_WORDS_S)
        os._exit(2)  # not return: a half-loaded library may hang in its own exit handlers
    batches.send(link.encode(_loaded(scorer, began)))
    while True:
        frames = batches.recv_multipart(copy=False)
        progress.made()
        if len(frames) == 1:
            batches.send(link.encode(obey(scorer, canary, link.decode_order(frames[0].buffer))))
            continue
        batches.send_multipart(score_batch(scorer, canary, [frame.buffer for frame in frames]), copy=False)
        progress.made()


def _loaded(scorer: Scorer, began: float) -> link.Loaded:
    can_sleep, no_sleep = getattr(scorer, "can_sleep", False), getattr(scorer, "no_sleep", "")
    vocabulary = getattr(scorer, "vocabulary", b"")
    return link.Loaded(scorer.info, time.monotonic() - began, can_sleep, clip(no_sleep), vocabulary)


def obey(scorer: Any, canary: np.ndarray, order: link.Sleep | link.Wake) -> link.Slept | link.Loaded:
    """Let a scorer sleep or wake. Whatever it raises ends the process, which frees the memory too."""
    if isinstance(order, link.Sleep):
        scorer.sleep()
        return link.Slept()
    began = time.monotonic()
    scorer.wake()
    if not still_sane(scorer, canary):
        logger.error("the model has other values than before it slept; the worker exits")
        os._exit(EXIT_BROKEN)
    return _loaded(scorer, began)


def _beat(beats: zmq.Socket, parent: int, progress: Progress) -> None:
    """Tell the front that this process lives, and how long ago it got something done."""
    while os.getppid() == parent:  # where the kernel has no death signal
        beats.send(link.encode(link.Beat(time.monotonic() - progress.at)))
        time.sleep(BEAT_S)
    os._exit(1)


def load_scorer(backend: str, options: LoadOptions) -> Scorer:
    """Import the backend's module and let it load: a name in opd.scoring, or any other module that can be imported."""
    ours = f"opd.scoring.{backend}"
    try:
        module = importlib.import_module(ours if importlib.util.find_spec(ours) is not None else backend)
    except ImportError as e:
        raise ConfigError(f"backend {backend} cannot be imported here: {e}; install what it needs") from e
    scorer: Scorer = module.load(options)
    return scorer


def score_canary(scorer: Scorer) -> np.ndarray:
    """The values of one short row: of the start, to compare with later; also the proof that the model can score."""
    info = scorer.info
    ids = np.arange(min(CANARY_IDS, info.max_length), dtype=np.int32) % max(info.vocab_size, 1)
    result = scorer.score([Row(ids, 1)])[0]
    if isinstance(result, RowError):
        raise ConfigError(f"the model cannot score a row of {len(ids)} ids: {result.message} [{result.code}]")
    if not np.isfinite(result.logprobs).all():
        raise ConfigError("the model gives values that are not finite for a first short row; check dtype and weights")
    return result.logprobs


def still_sane(scorer: Scorer, canary: np.ndarray) -> bool:
    try:
        return bool(np.allclose(score_canary(scorer), canary, rtol=0, atol=CANARY_TOLERANCE))
    except Exception:  # any error here means the same: this process can no longer score
        logger.debug("the canary failed", exc_info=True)
        return False


def score_batch(scorer: Scorer, canary: np.ndarray, frames: Sequence[memoryview]) -> list[bytes | memoryview]:
    """Score one batch and lay out the answer as the front expects it."""
    head = link.decode_batch(frames[0])
    lengths, starts = (np.frombuffer(frame, dtype=np.int32) for frame in frames[1:3])
    # np.array copies: received frames are read-only and may be unaligned, which torch does not take
    arrays = iter([np.array(np.frombuffer(frame, dtype=np.int32)) for frame in frames[3:]])
    given, first = [], 0
    for count in head.piece_rows:
        mine = slice(first, first + count)
        first += count
        ids = next(arrays)
        candidates = next(arrays).reshape(-1, head.num_candidates) if head.num_candidates else None
        given.append((lengths[mine], starts[mine], ids, candidates))
    pieces = [cut_rows(*arrays_of_piece) for arrays_of_piece in given]
    rows = [row for piece in pieces for row in piece]

    began = time.monotonic()
    if began > head.deadline:  # it waited behind another batch for too long
        results: Sequence[RowScores | RowError] = [
            RowError(i, "expired", "too late to be scored") for i in range(len(rows))
        ]
        seconds = 0.0
    else:
        results = _score(scorer, canary, rows, head.topk, head.temperature)
        seconds = time.monotonic() - began
    out: list[bytes | memoryview] = []
    errors: list[tuple[int, int, str, str]] = []
    first = 0
    for number, piece in enumerate(pieces):
        values, bad = join(piece, results[first : first + len(piece)], head.topk)
        first += len(piece)
        errors += [(number, row, error.code, clip(error.message)) for row, error in bad]
        out.append(to_bin(values.logprobs, np.float32))
        if values.topk_ids is not None and values.topk_logprobs is not None:
            out += [to_bin(values.topk_ids, np.int32), to_bin(values.topk_logprobs, np.float32)]
        if values.candidate_logprobs is not None:
            out.append(to_bin(values.candidate_logprobs, np.float32))
    digests = [digest(*arrays_of_piece) for arrays_of_piece in given]  # now: the scorer may have overwritten them
    return [link.encode(link.Scores(head.seq, seconds, digests, errors)), *out]


def cut_rows(lengths: np.ndarray, starts: np.ndarray, ids: np.ndarray, candidates: np.ndarray | None) -> list[Row]:
    """The rows of one piece, as views."""
    rows, end, value_end = [], 0, 0
    for length, start in zip(lengths.tolist(), starts.tolist(), strict=True):
        begin, end = end, end + length
        value_begin, value_end = value_end, value_end + length - start
        rows.append(Row(ids[begin:end], start, candidates[value_begin:value_end] if candidates is not None else None))
    return rows


def _score(
    scorer: Scorer, canary: np.ndarray, rows: list[Row], topk: int, temperature: float
) -> list[RowScores | RowError]:
    try:
        results = scorer.score(rows, topk=topk, temperature=temperature)
        if len(results) != len(rows):
            raise RuntimeError(f"the scorer returned {len(results)} results for {len(rows)} rows")
        return results
    except Exception as e:  # a model library may raise anything, and the other rows of the batch still have a right
        logger.warning("scoring %d rows raised %s; trying them one by one", len(rows), clip(f"{type(e).__name__}: {e}"))
    results = []
    for index, row in enumerate(rows):
        try:
            (result,) = scorer.score([row], topk=topk, temperature=temperature)
        except Exception as e:  # as above
            result = RowError(index, "scorer_error", f"scoring it raised {type(e).__name__}: {e}")
            if not still_sane(scorer, canary):
                logger.error("the model is broken after %s; the worker exits", clip(f"{type(e).__name__}: {e}"))
                os._exit(EXIT_BROKEN)
        results.append(result)
    return results


def join(
    rows: Sequence[Row], results: Sequence[RowScores | RowError], topk: int
) -> tuple[Values, list[tuple[int, RowError]]]:
    """Put the results of neighbouring rows into one array each; rows without usable values become errors and NaN."""
    bad: dict[int, RowError] = {}
    parts: list[RowScores] = []
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        if isinstance(result, RowError):
            bad[index] = result
        elif not _has_shape(result, row, topk):
            bad[index] = RowError(index, "scorer_error", "the scorer returned arrays of another size than the row has")
        else:
            parts.append(result)
    if not bad:
        values = _stack(parts)
        if _usable(values):
            return values, []
    return _blank_unusable(rows, results, topk, bad)


def _blank_unusable(
    rows: Sequence[Row], results: Sequence[RowScores | RowError], topk: int, bad: dict[int, RowError]
) -> tuple[Values, list[tuple[int, RowError]]]:
    """The slow way, when some row has no value or one that is no log-prob: the others keep theirs."""
    kept = []
    for index, (row, result) in enumerate(zip(rows, results, strict=True)):
        if index not in bad and isinstance(result, RowScores):
            if _usable(Values(*result)):
                kept.append(result)
                continue
            bad[index] = RowError(index, "non_finite", "the model gave a value that is NaN, infinite or above 0")
        width = row.candidates.shape[1] if row.candidates is not None else 0
        kept.append(RowScores(*blank_values(len(row.ids) - row.start, topk, width)))
    return _stack(kept), sorted(bad.items())


def _has_shape(result: RowScores, row: Row, topk: int) -> bool:
    """Whether a result has the arrays that were asked for, and no others."""
    logprobs, topk_ids, topk_logprobs, candidates = result
    num_values = len(row.ids) - row.start
    top = (num_values, topk) if topk else None
    return (
        logprobs.shape == (num_values,)
        and (None if topk_ids is None else topk_ids.shape) == top
        and (None if topk_logprobs is None else topk_logprobs.shape) == top
        and (None if candidates is None else candidates.shape)
        == (None if row.candidates is None else row.candidates.shape)
    )


def _stack(parts: Sequence[RowScores]) -> Values:
    logprobs, *others = zip(*parts, strict=True)
    return Values(np.concatenate(logprobs), *(None if column[0] is None else _concatenate(column) for column in others))


def _usable(values: Values) -> bool:
    """Whether all log-probs are finite and at most 0, apart from rounding; a NaN fails both comparisons."""
    arrays = (values.logprobs, values.topk_logprobs, values.candidate_logprobs)
    return all(
        bool(array.max() <= MAX_LOGPROB and array.min() > -np.inf)
        for array in arrays
        if array is not None and array.size
    )


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One array of all, without a copy where they are neighbours in one buffer already."""
    base = arrays[0].base
    if isinstance(base, np.ndarray) and base.flags.c_contiguous and base.dtype == arrays[0].dtype:
        address = arrays[0].ctypes.data
        begin = address
        for array in arrays:
            if array.base is not base or not array.flags.c_contiguous or array.ctypes.data != address:
                break
            address += array.nbytes
        else:
            offset = (begin - base.ctypes.data) // base.itemsize
            size = (address - begin) // base.itemsize
            return base.reshape(-1)[offset : offset + size].reshape(-1, *arrays[0].shape[1:])
    return np.concatenate(arrays)


if __name__ == "__main__":
    sys.exit(main())
