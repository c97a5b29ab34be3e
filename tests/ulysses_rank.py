"""One of two ranks that share a micro-batch's tokens (Ulysses): `ulysses_rank.py RANK PORT`; fails when a check does.

The logits are given, cut as verl cuts them, and what the processors return goes through verl's own gather.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from tensordict import TensorDict
from verl.utils.ulysses import gather_outputs_and_unpad, set_ulysses_sequence_parallel_group

import opd.cpu  # noqa: F401  before verl's engine
from opd.loss.in_verl import topk_ppo_loss
from opd.loss.settings import TOPK_IDS, TOPK_LOGPROBS, LossSettings
from opd.loss.student_topk import _ids_of_logits

PROMPTS, RESPONSES = [3, 2], [2, 4]  # lengths: 11 tokens, so one is padding
VOCAB, K, RANKS = 7, 3, 2


def batch(logits: torch.Tensor) -> TensorDict:
    lengths = torch.tensor([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    width = max(RESPONSES)
    attention = torch.zeros(2, 3 + width, dtype=torch.long)
    for b, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        attention[b, 3 - p : 3 + r] = 1
    teacher = torch.randn(2, width, VOCAB, generator=torch.Generator().manual_seed(1)).log_softmax(-1).topk(K)
    return TensorDict(
        {
            "input_ids": torch.nested.nested_tensor_from_jagged(torch.zeros(int(lengths.sum()), dtype=int), offsets),
            "prompts": torch.zeros(2, 3, dtype=torch.long),
            "responses": torch.zeros(2, width, dtype=torch.long),
            "attention_mask": attention,
            "response_mask": attention[:, 3:],
            TOPK_IDS: teacher.indices.int(),
            TOPK_LOGPROBS: teacher.values,
        },
        2,
    )


def main(rank: int, port: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    tokens = sum(PROMPTS + RESPONSES)
    logits = torch.randn(tokens, VOCAB, generator=torch.Generator().manual_seed(0))
    data = batch(logits)
    processors = {
        "ids": partial(_ids_of_logits, K, VOCAB),
        "loss": partial(topk_ppo_loss, None, LossSettings("jsd_topk", topk=K)),
    }
    whole = logits.clone().requires_grad_()
    expected = {name: call(student_logits=whole[None], data=data) for name, call in processors.items()}
    weights = torch.linspace(1, 2, tokens)
    (expected["loss"]["opd_loss"][0] * weights).sum().backward()

    set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    padded = torch.nn.functional.pad(logits, (0, 0, 0, 1), value=9.0)  # verl pads the ids, and the model says something
    part = slice(rank * len(padded) // RANKS, (rank + 1) * len(padded) // RANKS)
    mine = padded[part].clone().requires_grad_()
    for name, call in processors.items():
        outputs = call(student_logits=mine[None], data=data)
        assert outputs.keys() == expected[name].keys()
        for key, values in outputs.items():
            got = gather_outputs_and_unpad(values.squeeze(0), gather_dim=0, unpad_dim=0, padding_size=1)
            torch.testing.assert_close(got, expected[name][key].squeeze(0))
            if key == "opd_loss":
                (got * weights).sum().backward()
    grad = torch.nn.functional.pad(whole.grad, (0, 0, 0, 1))[part]
    assert grad.any()
    # verl's gather scales by the number of ranks, since FSDP forms the mean over them
    torch.testing.assert_close(mine.grad, RANKS * grad)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
