"""What has to hold before a teacher's value leaves the client.

Pure functions on arrays. A check costs milliseconds (see the test), so none can be switched off.

Shapes: n = rows of the request, N = its scored positions, K = topk, C = candidates per position.

Not covered: whether the values are good. Only that they are numbers that a teacher could have meant for these tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from opd.errors import BadReply, RowError, TeacherMismatch, WireError
from opd.question import Question
from opd.wire import Expect, Reply, frame_names, from_bin

MAX_LOGPROB = 1e-5  # a log-softmax in float32 may round to just above 0
MAX_MASS = 1.0 + 1e-3  # of the top-k probabilities of one position
SAMPLED_TOLERANCE = 1e-3  # between the two values of one token: its own, and the one in the top-k
_BLOCK = 1 << 17  # top-k entries looked at together, so that they stay in the processor's cache


class Values(NamedTuple):
    """The values of one reply, checked. Those of the rows in `row_errors` are NaN and must not be read."""

    logprobs: np.ndarray  # float32 [N]
    topk_ids: np.ndarray | None  # int32 [N, K]
    topk_logprobs: np.ndarray | None  # float32 [N, K]
    candidate_logprobs: np.ndarray | None  # float32 [N, C]
    row_errors: list[RowError]  # `row` counts in the caller's batch

    def arrays(self) -> tuple[np.ndarray | None, ...]:
        return self.logprobs, self.topk_ids, self.topk_logprobs, self.candidate_logprobs


def check_reply(
    reply: Reply,
    raw: Mapping[str, Any],
    question: Question,
    *,
    digest: bytes,
    expect: Expect,
    vocab_size: int,
    topk: int,
    names: Sequence[int] | np.ndarray,
) -> Values:
    """Every check that a score reply must pass, in the order of what a failure would mean.

    Args:
        reply, raw: an `ok` reply and its raw frames; its id is the one of the question.
        question, digest: what was asked, and its digest.
        names: [n] the index of each row in the caller's batch, for messages.

    Raises:
        TeacherMismatch: another model or tokenizer answered than the pinned one.
        BadReply: anything else that does not hold.
    """
    if (reply.model, reply.tokenizer) != (expect.model, expect.tokenizer):
        raise TeacherMismatch(
            f"a reply came from model {reply.model!r}, tokenizer {reply.tokenizer!r}; "
            f"pinned are model {expect.model!r}, tokenizer {expect.tokenizer!r}"
        )
    if reply.ids_digest != digest:
        raise BadReply("the reply answers another question: its digest is not the one of the ids that were sent")
    counts_n = question.counts()
    ends_n = np.cumsum(counts_n)
    total = int(ends_n[-1])
    try:
        logprobs = from_bin(reply.logprobs, np.float32, "logprobs")
    except WireError as e:
        raise BadReply(str(e)) from None
    if len(logprobs) != total:
        message = f"{len(logprobs)} values for {total} tokens"
        if len(logprobs) < total:
            message += f"; row {_row_at(len(logprobs), ends_n, names)} is the first without all of its values"
        raise BadReply(message)

    failed_n = _failed_rows(reply, len(counts_n))
    failed_N = np.repeat(failed_n, counts_n) if failed_n.any() else None
    if failed_N is not None and not np.isnan(logprobs[failed_N]).all():
        raise BadReply("a row is listed as failed and has values at the same time")
    # one look at all of them first, since there may be millions; NaN fails both comparisons
    if total and not (logprobs.max() <= MAX_LOGPROB and logprobs.min() > -np.inf):
        good_N = (logprobs <= MAX_LOGPROB) & (logprobs > -np.inf)
        if failed_N is not None:
            good_N |= failed_N
        if not good_N.all():
            first = int(np.argmin(good_N))
            raise BadReply(f"row {_row_at(first, ends_n, names)} has log-prob {logprobs[first]} for one of its tokens")

    wanted = frame_names(topk, question.num_candidates)
    if tuple(raw) != wanted:
        what = f"top-{topk}" + (f" and {question.num_candidates} candidates" if question.num_candidates else "")
        raise BadReply(f"{what} was asked for and the reply has the frames {list(raw)}, not {list(wanted)}")
    topk_ids = topk_logprobs = candidate_logprobs = None
    if wanted:
        starts_n, rows = question.starts.tolist(), question.rows()
        sampled_N = np.concatenate([row[start:] for row, start in zip(rows, starts_n, strict=True)])
    if topk:
        topk_ids, topk_logprobs = _topk_arrays(raw, total, topk)
        if failed_N is not None and not np.isnan(topk_logprobs[failed_N]).all():
            raise BadReply("a row is listed as failed and has top-k values at the same time")
        bad = _first_bad_topk(topk_ids, topk_logprobs, sampled_N, logprobs, failed_N, vocab_size)
        if bad is not None:
            raise BadReply(f"row {_row_at(bad[0], ends_n, names)}: {bad[1]}")
    if question.candidates is not None:
        candidate_logprobs = _candidate_array(raw, total, question.num_candidates)
        if failed_N is not None and not np.isnan(candidate_logprobs[failed_N]).all():
            raise BadReply("a row is listed as failed and has values of candidates at the same time")
        bad = _first_bad_candidates(question.candidates, candidate_logprobs, sampled_N, logprobs, failed_N)
        if bad is not None:
            raise BadReply(f"row {_row_at(bad[0], ends_n, names)}: {bad[1]}")
    return Values(logprobs, topk_ids, topk_logprobs, candidate_logprobs, _rename(reply.row_errors, names))


def _row_at(position: int, ends_n: np.ndarray, names: Sequence[int] | np.ndarray) -> int:
    return int(names[int(np.searchsorted(ends_n, position, side="right"))])


def _failed_rows(reply: Reply, num_rows: int) -> np.ndarray:
    failed_n = np.zeros(num_rows, dtype=bool)
    for row, code, _ in reply.row_errors:
        if row >= num_rows or failed_n[row]:
            raise BadReply(f"an error [{code}] for row {row} of {num_rows}, which does not exist or was listed before")
        failed_n[row] = True
    return failed_n


def _rename(row_errors: list[tuple[int, str, str]], names: Sequence[int] | np.ndarray) -> list[RowError]:
    """Count rows as the caller does, in the message too: the server only knows its own request."""
    renamed = []
    for row, code, message in row_errors:
        name = int(names[row])
        renamed.append(RowError(name, code, re.sub(rf"^row {row}\b", f"row {name}", message)))
    return renamed


def _topk_arrays(raw: Mapping[str, Any], total: int, topk: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        ids, logprobs = from_bin(raw["topk_ids"], np.int32, "ids"), from_bin(raw["topk_logprobs"], np.float32, "values")
    except WireError as e:
        raise BadReply(str(e)) from None
    if len(ids) != total * topk or len(logprobs) != total * topk:
        raise BadReply(f"top-{topk} of {total} tokens has {len(ids)} ids and {len(logprobs)} values")
    return ids.reshape(total, topk), logprobs.reshape(total, topk)


def _first_bad_topk(
    ids_NK: np.ndarray,
    logprobs_NK: np.ndarray,
    sampled_N: np.ndarray,
    sampled_logprobs_N: np.ndarray,
    failed_N: np.ndarray | None,
    vocab_size: int,
) -> tuple[int, str] | None:
    """The first position whose top-k cannot be, with the reason."""
    step = max(1, _BLOCK // ids_NK.shape[1])
    for begin in range(0, len(ids_NK), step):
        here = slice(begin, begin + step)
        block = (ids_NK[here], logprobs_NK[here], sampled_N[here], sampled_logprobs_N[here], vocab_size)
        if _is_surely_good(*block):
            continue
        for reason, fails in _topk_rules(*block).items():
            if failed_N is not None:
                fails = fails & ~failed_N[here]
            if fails.any():
                return begin + int(np.argmax(fails)), reason
    return None


def _is_surely_good(
    ids: np.ndarray, logprobs: np.ndarray, sampled: np.ndarray, sampled_logprobs: np.ndarray, vocab_size: int
) -> bool:
    """The rules of _topk_rules for a block as a whole, in a quarter of the time; False means: look closer."""
    if ids.view(np.uint32).max() >= vocab_size:  # a negative id is a large one here
        return False
    if not (logprobs[:, 1:] <= logprobs[:, :-1]).all():
        return False
    if not ((logprobs[:, 0] <= MAX_LOGPROB) & (logprobs[:, -1] > -np.inf)).all():
        return False
    ordered = np.sort(ids, axis=1).reshape(-1)
    if (ordered[1:] == ordered[:-1]).any():  # may also be the end of a position and the beginning of the next
        return False
    if np.exp(logprobs).sum(axis=1).max() > MAX_MASS:
        return False
    column = (ids == sampled[:, None]).argmax(axis=1)
    at = np.arange(len(ids))
    is_in = ids[at, column] == sampled
    apart = np.abs(logprobs[at, column] - sampled_logprobs) > SAMPLED_TOLERANCE
    above_last = sampled_logprobs > logprobs[:, -1] + SAMPLED_TOLERANCE
    return not np.where(is_in, apart, above_last).any()


def _topk_rules(
    ids: np.ndarray, logprobs: np.ndarray, sampled: np.ndarray, sampled_logprobs: np.ndarray, vocab_size: int
) -> dict[str, np.ndarray]:
    """Which positions break which rule. NaN breaks the second one: every comparison with it is false."""
    ordered = np.sort(ids, axis=1)
    hit = ids == sampled[:, None]
    column = hit.argmax(axis=1)
    at = np.arange(len(ids))
    is_in = hit[at, column]
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(logprobs[at, column] - sampled_logprobs) > SAMPLED_TOLERANCE
        above_last = sampled_logprobs > logprobs[:, -1] + SAMPLED_TOLERANCE
        descending = (logprobs[:, 1:] <= logprobs[:, :-1]).all(axis=1)
        finite = (logprobs[:, 0] <= MAX_LOGPROB) & (logprobs[:, -1] > -np.inf)
        mass = np.exp(logprobs).sum(axis=1)
        return {
            f"a top-k id is outside [0, {vocab_size})": (ordered[:, 0] < 0) | (ordered[:, -1] >= vocab_size),
            "the top-k values are not finite log-probs in descending order": ~(descending & finite),
            "a top-k id appears twice": (ordered[:, 1:] == ordered[:, :-1]).any(axis=1),
            "the top-k probabilities add up to more than 1": mass > MAX_MASS,
            "the sampled token has another value in the top-k than on its own": is_in & apart,
            "the sampled token is missing in the top-k though it is likelier than the last": ~is_in & above_last,
        }


def _candidate_array(raw: Mapping[str, Any], total: int, width: int) -> np.ndarray:
    try:
        logprobs = from_bin(raw["candidate_logprobs"], np.float32, "candidate values")
    except WireError as e:
        raise BadReply(str(e)) from None
    if len(logprobs) != total * width:
        raise BadReply(f"{width} candidates of {total} tokens have {len(logprobs)} values")
    return logprobs.reshape(total, width)


def _first_bad_candidates(
    ids_NC: np.ndarray,
    logprobs_NC: np.ndarray,
    sampled_N: np.ndarray,
    sampled_logprobs_N: np.ndarray,
    failed_N: np.ndarray | None,
) -> tuple[int, str] | None:
    """The first position whose candidates cannot have these values, with the reason."""
    step = max(1, _BLOCK // ids_NC.shape[1])
    for begin in range(0, len(ids_NC), step):
        here = slice(begin, begin + step)
        fails = _candidate_rules(ids_NC[here], logprobs_NC[here], sampled_N[here], sampled_logprobs_N[here])
        for reason, fails_N in fails.items():
            if failed_N is not None:
                fails_N = fails_N & ~failed_N[here]
            if fails_N.any():
                return begin + int(np.argmax(fails_N)), reason
    return None


def _candidate_rules(
    ids: np.ndarray, logprobs: np.ndarray, sampled: np.ndarray, sampled_logprobs: np.ndarray
) -> dict[str, np.ndarray]:
    """Which positions break which rule. An id that comes twice counts once in the sum."""
    with np.errstate(invalid="ignore", over="ignore"):
        finite = ((logprobs <= MAX_LOGPROB) & (logprobs > -np.inf)).all(axis=1)  # NaN fails both
        apart = (np.abs(logprobs - sampled_logprobs[:, None]) > SAMPLED_TOLERANCE) & (ids == sampled[:, None])
        too_much = np.exp(logprobs).sum(axis=1) > MAX_MASS
        if too_much.any():
            order = np.argsort(ids[too_much], axis=1, kind="stable")
            ordered = np.take_along_axis(ids[too_much], order, axis=1)
            mass = np.exp(np.take_along_axis(logprobs[too_much], order, axis=1))
            mass[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = 0.0
            too_much[too_much] = mass.sum(axis=1) > MAX_MASS
    return {
        "a candidate's value is no finite log-prob": ~finite,
        "the sampled token has another value among the candidates than on its own": apart.any(axis=1),
        "the probabilities of the candidates add up to more than 1": too_much,
    }
