"""The output layer for response positions only, in vLLM's V1 model runner.

Stock `prompt_logprobs` runs the output layer, a log-softmax over the vocabulary and a count of ranks on every position
of a prompt, all positions of a request at once. Only the response has to be scored here, which is often the smaller
part, and a block of rows at a time keeps the memory small: long rows are what ends stock engines.

Handed to vLLM as `worker_extension_cls`. `opd_use_response_rows` replaces one private method of the model runner, which
is nearly the same in 0.24, 0.32 and 0.33. It says no where that is not what it finds, and the start-up check in
vllm_paths.py holds the values against stock ones. Run with 0.32 on a CPU.

Shapes: R = scored positions of a row, K = topk, V = vocabulary.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors

from opd.scoring.vllm_engine import START

BLOCK_ROWS = 512  # logits of a block take BLOCK_ROWS * V * 8 bytes at most
METHOD = "_get_prompt_logprobs_dict"
NAMES = ("num_prompt_logprobs", "requests", "input_batch", "query_start_loc", "model")


class ResponseRows:
    """Methods that vLLM adds to its workers; called by name through collective_rpc."""

    def opd_use_response_rows(self) -> str:
        """Score response rows only from now on; returns why not, or ""."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        stock = getattr(runner, METHOD, None)
        if stock is None or list(inspect.signature(stock).parameters) != ["hidden_states", "num_scheduled_tokens"]:
            return f"its model runner {type(runner).__name__} has no {METHOD}(hidden_states, num_scheduled_tokens)"
        missing = [name for name in NAMES if not hasattr(runner, name)]
        if missing:
            return f"its model runner {type(runner).__name__} has no {', '.join(missing)}"
        runner.opd_stock_prompt_logprobs = stock
        setattr(runner, METHOD, types.MethodType(response_logprobs, runner))
        return ""


@torch.inference_mode()
def response_logprobs(
    runner: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
) -> dict[str, LogprobsTensors | None]:
    """Instead of GPUModelRunner._get_prompt_logprobs_dict: of each finished request R rows, the sampled id first."""
    requests = {id_: runner.requests[id_] for id_ in runner.num_prompt_logprobs if id_ in num_scheduled_tokens}
    if not all(START in (request.sampling_params.extra_args or {}) for request in requests.values()):
        stock: dict[str, LogprobsTensors | None] = runner.opd_stock_prompt_logprobs(hidden_states, num_scheduled_tokens)
        return stock
    done: dict[str, LogprobsTensors | None] = {}
    pieces: list[tuple[LogprobsTensors, int, torch.Tensor, torch.Tensor]] = []
    for id_, request in requests.items():
        length, start = len(request.prompt_token_ids), request.sampling_params.extra_args[START]
        if request.in_progress_prompt_logprobs_cpu is None:
            request.in_progress_prompt_logprobs_cpu = _blank(length - start, runner.num_prompt_logprobs[id_] + 1)
        values = request.in_progress_prompt_logprobs_cpu
        computed = request.num_computed_tokens
        end = computed + num_scheduled_tokens[id_]
        # The hidden state of position i predicts id i + 1, so the first one wanted is start - 1, the last length - 2.
        low, high = max(computed, start - 1), min(end, length - 1)
        if low < high:
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[id_]]) - computed
            targets = torch.tensor(request.prompt_token_ids[low + 1 : high + 1])
            pieces.append((values, low - (start - 1), hidden_states[offset + low : offset + high], targets))
        if end >= length:
            done[id_] = values
            del runner.num_prompt_logprobs[id_]
            request.in_progress_prompt_logprobs_cpu = None
    _fill(runner.model, pieces)
    return done


def _blank(num_rows: int, width: int) -> LogprobsTensors:
    """NaN and -1: what is never computed is never taken for a value."""
    return LogprobsTensors(
        torch.full((num_rows, width), -1, dtype=torch.int32),
        torch.full((num_rows, width), torch.nan, dtype=torch.float32),
        torch.zeros(num_rows, dtype=torch.int32),  # ranks, which nobody here reads
    )


def _fill(model: Any, pieces: list[tuple[LogprobsTensors, int, torch.Tensor, torch.Tensor]]) -> None:
    """Run the output layer on all pieces, a block of rows at a time: it reads all of its weights for each call."""
    blocks: list[list[tuple[LogprobsTensors, int, torch.Tensor, torch.Tensor]]] = [[]]
    room = BLOCK_ROWS
    for values, first, hidden, targets in pieces:
        begin = 0
        while begin < len(targets):
            end = min(len(targets), begin + room)
            blocks[-1].append((values, first + begin, hidden[begin:end], targets[begin:end]))
            room -= end - begin
            begin = end
            if not room:
                blocks.append([])
                room = BLOCK_ROWS
    for block in blocks:
        if block:
            _fill_block(model, block)


def _fill_block(model: Any, block: list[tuple[LogprobsTensors, int, torch.Tensor, torch.Tensor]]) -> None:
    logits = model.compute_logits(torch.cat([hidden for _, _, hidden, _ in block]))
    targets = torch.cat([targets for _, _, _, targets in block]).to(logits.device)
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    width = max(values.logprobs.shape[1] for values, *_ in block)
    top, top_ids = torch.topk(logprobs, width - 1, dim=-1)
    out = torch.cat([logprobs.gather(1, targets[:, None]), top], dim=1).cpu()
    ids = torch.cat([targets[:, None], top_ids], dim=1).to(torch.int32).cpu()
    begin = 0
    for values, first, hidden, _ in block:
        end = begin + len(hidden)
        columns = values.logprobs.shape[1]
        values.logprobs[first : first + len(hidden)] = out[begin:end, :columns]
        values.logprob_token_ids[first : first + len(hidden)] = ids[begin:end, :columns]
        begin = end
