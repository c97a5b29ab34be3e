"""The student's own K most probable ids at each response position, out of a forward of verl's actor.

The reverse KL is an expectation under the student, so it is the student's top-k that holds most of it: the teacher is
then asked for its log-probs of exactly these ids (`teacher.topk_from=student`). They are chosen once, when a step
begins, with the weights that its first mini-batch starts from.

verl's engine hands the logits of a forward to the loss when a batch says `distillation_use_topk`, and gives back one
number per token for each name that the loss returns: K names, then. `distillation_only` saves the log-probs, which
nobody asks for. It is one more forward of the student: `compute_log_prob`, which comes before it, has no place where
something else could be read off its logits.

Shapes: B rows, R response columns, K top-k, V vocabulary, L rows of logits, N response positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from opd.loss.distribution import CHUNK_ELEMENTS
from opd.loss.in_verl import local_positions, response_positions
from opd.loss.settings import TOPK_IDS

# with the batch: K, and how many ids the teacher knows; the student's head may have rows that no tokenizer uses
NUM_IDS, NUM_KNOWN = "opd_num_ids", "opd_num_known"
_OUTPUT = "opd_own_id_{}"


def infer_topk(actor: Any, data: TensorDict) -> TensorDict | None:
    """Ask verl's actor for the ids.

    Args:
        actor: verl's TrainingWorker; its loss function is as before afterwards.
        data: as for compute_log_prob, with NUM_IDS and NUM_KNOWN; changed in place.

    Returns:
        TOPK_IDS: int32, jagged, R_b * K numbers in row b, most probable first at each position. None on ranks that verl
        takes no outputs from.

    Raises:
        ValueError: more ids than there are.
    """
    num_ids, num_known = tu.pop(data, key=NUM_IDS), tu.pop(data, key=NUM_KNOWN)
    tu.assign_non_tensor(
        data,
        compute_loss=True,  # without it the engine has no function to hand the logits to
        distillation_use_topk=True,
        distillation_only=True,
        calculate_entropy=False,
        calculate_sum_pi_squared=False,
        enable_routing_replay=False,  # as verl's compute_ref_log_prob: nothing is recorded in this forward
    )
    before = actor.loss_fn
    actor.set_loss_fn(partial(_ids_of_logits, num_ids, num_known))
    try:
        output = actor.infer_batch(data)
    finally:
        actor.set_loss_fn(before)
    if output is None:
        return None
    ids_KT = torch.stack([output[_OUTPUT.format(k)].values() for k in range(num_ids)])
    positions_BR, real_BR = (x.to(ids_KT.device) for x in response_positions(data))
    ids_NK = ids_KT[:, positions_BR[real_BR]].T
    offsets = torch.nn.functional.pad(real_BR.sum(1).cumsum(0), (1, 0)) * num_ids
    # flat rows: verl and TransferQueue mix up the dimensions of jagged tensors that have three
    ids = torch.nested.nested_tensor_from_jagged(ids_NK.flatten(), offsets)
    return TensorDict({TOPK_IDS: ids}, batch_size=len(real_BR))


def own_topk(
    logits_LV: torch.Tensor,
    positions_N: torch.Tensor,
    num_ids: int,
    num_known: int,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> torch.Tensor:
    """The ids with the largest logits among the first `num_known`, at some rows of logits.

    Returns:
        int32 [N, num_ids], most probable first.

    Raises:
        ValueError: more ids than there are.
    """
    known = min(num_known, logits_LV.shape[1])
    if num_ids > known:
        raise ValueError(f"teacher.topk={num_ids}, but student and teacher share {known} ids only; lower it")
    ids_NK = torch.empty(len(positions_N), num_ids, dtype=torch.int32, device=logits_LV.device)
    step = max(1, chunk_elements // logits_LV.shape[1])
    for begin in range(0, len(positions_N), step):
        here = slice(begin, begin + step)
        # in the logits' own type: a float32 copy would have the same order
        ids_NK[here] = logits_LV[positions_N[here]][:, :known].topk(num_ids, dim=-1).indices.int()
    return ids_NK


def _ids_of_logits(
    num_ids: int,
    num_known: int,
    model_output: dict | None = None,
    data: TensorDict | None = None,
    dp_group: Any = None,
    student_logits: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """verl calls it twice for a micro-batch: with logits, for ids [1, L] of each token, then for a loss, of 0."""
    if student_logits is None:
        return torch.zeros(()), {}
    assert data is not None
    logits_LV = student_logits.squeeze(0)
    positions_BR, real_BR = local_positions(data, len(logits_LV))
    positions_N = positions_BR[real_BR]
    ids_KL = torch.full((num_ids, len(logits_LV)), -1, dtype=torch.int32, device=logits_LV.device)
    ids_KL[:, positions_N] = own_topk(logits_LV, positions_N, num_ids, num_known).T
    return {_OUTPUT.format(k): ids_KL[k : k + 1] for k in range(num_ids)}
