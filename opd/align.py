"""Padded batch <-> ragged rows: the one place that knows which teacher value belongs to which response token.

The trainer holds verl's padded batch; the client and the teacher hold ragged rows of token ids.

    input_ids[b]       pad pad  a   b   c  |  x   y   z  pad pad      P = 5 prompt columns, R = 5 response columns
    attention_mask[b]   0   0   1   1   1  |  1   1   1   0   0
    row                         a   b   c     x   y   z               start = 3, the first scored position
    teacher value       log p(x | a b c), log p(y | a b c x), log p(z | a b c x y)
    ref_log_prob[b]                           x   y   z   f   f       f = fill

`ref_log_prob[b, t]` belongs to `responses[b, t]`. There is no shift by one anywhere: a teacher value is named after the
token that it scores, not after the position whose logits it was read from. Trimming uses `attention_mask`, never token
ids (pad may equal eos), and no slice of the form `[-n:]` (n may be 0). `response_mask` plays no part: its holes are
tool or environment tokens, which the teacher has to see as context, and whose values verl masks out of the loss.

Shapes: B rows, P prompt columns, R response columns, S = P + R.

Not covered: packed batches (several sequences in one row).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_MAX_ID = np.iinfo(np.int32).max  # ids travel as int32


class Rows(NamedTuple):
    """A batch without its padding."""

    rows: list[np.ndarray]  # int32 [prompt + response], views of one array
    starts: np.ndarray  # int64 [B], prompt lengths = first scored positions
    response_lengths: np.ndarray  # int64 [B], scored positions of each row


def to_rows(input_ids_BS: Any, attention_mask_BS: Any, *, prompt_width: int) -> Rows:
    """Take the padding out of a batch.

    Args:
        input_ids_BS: integers [B, S], a numpy array or a CPU tensor.
        attention_mask_BS: 0 or 1, [B, S]; 1 on every real token, tool tokens included.
        prompt_width: P; columns before it are prompt, columns from it on are response.

    Raises:
        ValueError: shapes that do not fit, or a row that has no well-defined answer; the message names the row.
    """
    ids_BS, mask_BS = np.asarray(input_ids_BS), np.asarray(attention_mask_BS)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iu":
        raise ValueError(f"input_ids must be integers [B, S], not {ids_BS.dtype} {list(ids_BS.shape)}")
    if mask_BS.shape != ids_BS.shape:
        raise ValueError(f"attention_mask is {list(mask_BS.shape)} but input_ids is {list(ids_BS.shape)}")
    if not 0 < prompt_width <= ids_BS.shape[1]:
        raise ValueError(f"prompt_width is {prompt_width}, outside [1, {ids_BS.shape[1]}]")
    real_BS = mask_BS == 1
    _refuse(~(real_BS | (mask_BS == 0)).all(axis=1), "has attention_mask values other than 0 and 1")
    starts = real_BS[:, :prompt_width].sum(axis=1)
    response_BR = real_BS[:, prompt_width:]
    response_lengths = response_BR.sum(axis=1)
    _refuse(starts + response_lengths == 0, "has attention_mask 0 everywhere: there is no token to score")
    _refuse(starts == 0, "has no prompt token: its first response token would have no context")
    # verl left-aligns its own log-probs of a row, so behind a hole they would belong to other tokens than ours
    _refuse((response_BR[:, 1:] & ~response_BR[:, :-1]).any(axis=1), "has a hole in the response's attention_mask")

    flat = ids_BS[real_BS]  # row-major, so that rows stay together and in order
    lengths = starts + response_lengths
    if flat.size and (flat.min() < 0 or flat.max() > _MAX_ID):
        bad = (ids_BS < 0) | (ids_BS > _MAX_ID)
        _refuse((bad & real_BS).any(axis=1), f"has a token id outside [0, {_MAX_ID}]")
    rows = np.split(flat.astype(np.int32, copy=False), np.cumsum(lengths[:-1])) if len(lengths) else []
    return Rows(rows, starts, response_lengths)


def to_padded(
    values: Sequence[np.ndarray | None], response_lengths: Any, *, fill_BR: Any, allow_missing: bool = False
) -> np.ndarray:
    """Put the teacher's values back where verl keeps `ref_log_prob`.

    `fill_BR` has no default, because no constant is right. 0.0 reads as "the teacher is 100 % sure", and NaN would
    poison the loss, since verl multiplies by the mask and NaN * 0 is NaN. `old_log_probs` is neutral when a
    step begins: where a value is missing, teacher and student agree. In its later mini-batches the student has moved,
    and a weight of 0 keeps such rows neutral (opd/loss/weights.py).

    Args:
        values: one float [n] per row with n = response_lengths[b]; None for a row that the teacher could not score.
        response_lengths: [B], as `to_rows` gave them.
        fill_BR: float [B, R], `old_log_probs`; stays on the padding, and on the rows without a value.
        allow_missing: accept None rows. The caller counts them, and only a user may ask for it.

    Returns:
        float32 [B, R], finite everywhere.

    Raises:
        ValueError: a row with too few or too many values, without a value, or not finite; the message names the row.
    """
    out_BR = np.array(fill_BR, dtype=np.float32, ndmin=1)  # a copy
    lengths = np.asarray(response_lengths, dtype=np.int64)
    if out_BR.ndim != 2:
        raise ValueError(f"fill_BR must be [B, R], not {list(out_BR.shape)}")
    num_rows, width = out_BR.shape
    if len(values) != num_rows or lengths.shape != (num_rows,):
        raise ValueError(f"{len(values)} rows of values and lengths {list(lengths.shape)} for a batch of {num_rows}")
    _refuse((lengths < 0) | (lengths > width), f"has a length outside [0, {width}]")
    missing = np.array([v is None for v in values], dtype=bool)
    if not allow_missing:
        _refuse(missing, "has no teacher value")
    shapes_fit = [v is None or np.shape(v) == (n,) for v, n in zip(values, lengths.tolist(), strict=True)]
    _refuse(~np.array(shapes_fit, dtype=bool), "does not have exactly one value for each of its response tokens")
    if not missing.all():
        mine_BR = (np.arange(width) < lengths[:, None]) & ~missing[:, None]
        out_BR[mine_BR] = np.concatenate([v for v in values if v is not None])
    _refuse(~np.isfinite(out_BR).all(axis=1), "has a value that is not finite, from the teacher or from the fill")
    return out_BR


def topk_to_padded(
    ids: Sequence[np.ndarray | None],
    logprobs: Sequence[np.ndarray | None],
    response_lengths: Any,
    *,
    width: int,
    topk: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Put the teacher's top-k where `to_padded` puts its values of the same tokens.

    Args:
        ids, logprobs: [n, K] per row with n = response_lengths[b]; None for a row that the teacher could not score.
        width: R.

    Returns:
        int32 and float32 [B, R, K]. Where there is no value the ids are -1, and the log-probs NaN: no number would do.

    Raises:
        ValueError: a row that does not have exactly one top-k for each of its response tokens; names the row.
    """
    ids_BRK = np.full((len(ids), width, topk), -1, dtype=np.int32)
    logprobs_BRK = np.full(ids_BRK.shape, np.nan, dtype=np.float32)
    for b, (row_ids, row_logprobs, length) in enumerate(zip(ids, logprobs, response_lengths, strict=True)):
        if row_ids is None or row_logprobs is None:
            continue
        if row_ids.shape != (length, topk) or row_logprobs.shape != (length, topk):
            raise ValueError(f"row {b} has top-k of {row_ids.shape} and {row_logprobs.shape}, not ({length}, {topk})")
        ids_BRK[b, :length], logprobs_BRK[b, :length] = row_ids, row_logprobs
    return ids_BRK, logprobs_BRK


def _refuse(is_bad_B: Any, what: str) -> None:
    bad = np.flatnonzero(is_bad_B)
    if len(bad):
        others = f" (and {len(bad) - 1} more rows)" if len(bad) > 1 else ""
        raise ValueError(f"row {bad[0]} {what}{others}")
