"""verl's jagged batch (V1 trainers) <-> the padded batch that opd/reference.py takes.

TransferQueue hands out one jagged tensor per field, a row per output of an agent loop, without any padding:

    prompts[i]         a b c         the prompt of row i
    responses[i]       x y t z       tool tokens (t) included: the teacher has to see them
    response_mask[i]   1 1 0 1       0 on tool tokens: they are no signal
    old_log_probs[i]   . . . .       the student's own
    ref_log_prob[i]    x y t z       what goes back: the teacher's value of each response token, in the same order

verl fills a batch up with made-up rows, so that it can be divided among workers and mini-batches. They have no signal
and are not sent to the teacher; their `ref_log_prob` is `old_log_probs`, a KL of 0.

Shapes: N rows in verl's batch, B of them real; P, R the longest prompt and response of those, S = P + R, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData

from opd.loss.settings import LOSS, WEIGHTS

FIELDS = ("prompts", "responses", "response_mask", "old_log_probs")


def to_padded(data: Mapping[str, torch.Tensor], rows: Sequence[int]) -> dict[str, np.ndarray]:
    """The chosen rows as the arguments of `TeacherReference.values`: prompt left-padded, response right-padded.

    Args:
        data: the jagged tensors named in FIELDS, N rows each.
        rows: indices of the B real rows.

    Raises:
        ValueError: a row whose responses, response_mask and old_log_probs differ in length: values would be shifted.
    """
    prompts, responses, masks, old = (
        [column[i].numpy() for i in rows] for column in (data[name].unbind() for name in FIELDS)
    )
    for i, *columns in zip(rows, responses, masks, old, strict=True):
        if len({len(column) for column in columns}) != 1:
            lengths = ", ".join(f"{name} {len(column)}" for name, column in zip(FIELDS[1:], columns, strict=True))
            raise ValueError(f"row {i} has columns of different lengths: {lengths}")
    num_rows = len(rows)
    prompt_width, response_width = max(map(len, prompts), default=0), max(map(len, responses), default=0)
    input_ids_BS = np.zeros((num_rows, prompt_width + response_width), dtype=np.int64)
    attention_mask_BS = np.zeros_like(input_ids_BS)
    response_mask_BR = np.zeros((num_rows, response_width), dtype=np.int64)
    old_log_probs_BR = np.zeros((num_rows, response_width), dtype=np.float32)
    for b in range(num_rows):
        start, end = prompt_width - len(prompts[b]), prompt_width + len(responses[b])
        input_ids_BS[b, start:prompt_width] = prompts[b]
        input_ids_BS[b, prompt_width:end] = responses[b]
        attention_mask_BS[b, start:end] = 1
        response_mask_BR[b, : len(masks[b])] = masks[b]
        old_log_probs_BR[b, : len(old[b])] = old[b]
    return {
        "input_ids_BS": input_ids_BS,
        "attention_mask_BS": attention_mask_BS,
        "response_mask_BR": response_mask_BR,
        "old_log_probs_BR": old_log_probs_BR,
    }


def to_lists(data: Mapping[str, Any], names: Sequence[str], rows: Sequence[int]) -> dict[str, list[Any]]:
    """Columns of the data set, which verl stores beside the tensors, for the chosen rows; without those not there."""
    lists = {}
    for name in names:
        if name in data:
            # depending on what TransferQueue stores in, a list, an array, or a stack of wrapped values
            values = [value.data if isinstance(value, NonTensorData) else value for value in data[name]]
            lists[name] = [values[i] for i in rows]
    return lists


def to_id_lists(column: torch.Tensor, rows: Sequence[int], *, num_ids: int) -> list[np.ndarray]:
    """The ids that `OPDWorker.compute_student_topk` gives, jagged rows of R_i * K numbers: int32 [R_i, K] for each."""
    flat = column.unbind()
    return [flat[i].numpy().reshape(-1, num_ids) for i in rows]


def to_columns(
    columns: Mapping[str, np.ndarray], old_log_probs: torch.Tensor, rows: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Put the teacher's values into verl's layout.

    Args:
        columns: `TeacherValues.columns` of the rows that `to_padded` took.
        old_log_probs: jagged, N rows; gives the lengths, and `ref_log_prob` of the rows that were not scored.
        rows: as given to `to_padded`.

    Returns:
        Jagged tensors of N rows with a value, or K of them in a row, for each response token; the loss, one row of
        numbers each, is dense. Rows that were not scored have weights of 0 and no top-k: ids -1, log-probs NaN.
    """
    old = [row.float() for row in old_log_probs.unbind()]
    out = {}
    for name, column in columns.items():
        values = torch.from_numpy(column)
        if name == LOSS:
            out[name] = values[:1].repeat(len(old), 1)  # every row is the same
            continue
        if name == "ref_log_prob":
            filled = list(old)
        else:
            absent = 0.0 if name == WEIGHTS else float("nan") if values.is_floating_point() else -1
            filled = [values.new_full((len(row), *values.shape[2:]), absent) for row in old]
        for i, row in zip(rows, values, strict=True):
            filled[i] = row[: len(filled[i])]
        # flat rows: verl and TransferQueue mix up the dimensions of jagged tensors that have three
        out[name] = torch.nested.as_nested_tensor([row.flatten() for row in filled], layout=torch.jagged)
    return out
