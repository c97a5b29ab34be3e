"""The ways to get log-probs of given ids out of vLLM, and the check that the one in use gives the right ones.

TokenIds    SamplingParams(prompt_logprob_token_ids, prompt_logprob_start): vLLM's own scoring of given ids, on the V2
            model runner (0.32 and newer on a GPU). Not run yet: written from the sources of 0.32 and 0.33.
PromptRows  SamplingParams(prompt_logprobs), everywhere else and for the teacher's own top-k. Where the V1 model runner
            is used (on a CPU, and up to 0.28 for most models), vllm_rows.py makes it compute the response's rows only.

Both read the prefix cache, up to the first scored position (vllm_scheduler.py). No value is believed for that alone: a
position is valid only if it is beyond what came from the cache, the ids that come back have to be the ones that were
sent, and a row for which that does not hold is scored again without the cache.

Shapes: L = ids in the row, N = scored positions, K = topk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from opd.errors import ConfigError
from opd.scoring.scorer import Row, RowScores
from opd.scoring.vllm_engine import START

CHECK_LENGTHS = ((64, 40), (64, 7), (33, 1), (1, 50), (200, 120))  # prompt, response; 64 is a multiple of every block
# In nats, between stock values and those of a path. With 16 bits the order of sums changes with the batch: logits are
# rounded to 1/8 at worst, and a value that belongs to another token is off by more than this nearly everywhere.
TOLERANCE = {"float32": 1e-3, "float16": 0.2, "bfloat16": 0.6}
Generate = Callable[[Sequence[Row], Sequence[Any]], Sequence[Any]]  # rows and their SamplingParams -> RequestOutputs


class Path(Protocol):
    """One way to ask and to read the answer."""

    name: str

    def params(self, row: Row, topk: int, *, reuse: bool) -> Any:
        """SamplingParams that ask for the row; `reuse`: what the prefix cache has may be taken."""
        ...

    def read(self, row: Row, output: Any, topk: int) -> RowScores | None:
        """The values in a RequestOutput, or None when it does not have them all: ask again without reuse."""
        ...


def common_params(row: Row, *, reuse: bool, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,  # 0 is refused
        temperature=0.0,  # of that one token; log-probs of a prompt are never scaled
        detokenize=False,
        skip_reading_prefix_cache=not reuse,
        extra_args={START: row.start},
        **more,
    )


class PromptRows:
    """See the module."""

    def __init__(self, name: str = "prompt_logprobs"):
        self.name = name

    def params(self, row: Row, topk: int, *, reuse: bool) -> Any:
        return common_params(row, reuse=reuse, prompt_logprobs=topk, flat_logprobs=True)

    def read(self, row: Row, output: Any, topk: int) -> RowScores | None:
        if not _computed(row, output) or output.prompt_logprobs is None:
            return None
        flat = output.prompt_logprobs
        count, width = len(row.ids) - row.start, topk + 1
        # From the end: with a cached prefix the V2 runner's list has no entries for it, V1's has garbage there, and the
        # one of vllm_rows.py begins with the response.
        values = np.asarray(flat.logprobs[-count * width :], dtype=np.float32)
        ids = np.asarray(flat.token_ids[-count * width :], dtype=np.int64)
        if len(values) != count * width or len(ids) != count * width:
            return None
        values, ids = values.reshape(count, width), ids.reshape(count, width)
        if not np.array_equal(ids[:, 0], row.ids[row.start :]):
            return None
        if not topk:
            return RowScores(values[:, 0])
        return RowScores(values[:, 0].copy(), ids[:, 1:].astype(np.int32), values[:, 1:].copy())


class TokenIds:
    """See the module; has no top-k of the teacher's own."""

    name = "prompt_logprob_token_ids"

    def params(self, row: Row, topk: int, *, reuse: bool) -> Any:
        assert not topk
        targets = np.ascontiguousarray(row.ids[row.start :, None], dtype=np.int32)
        return common_params(row, reuse=reuse, prompt_logprob_token_ids=targets, prompt_logprob_start=row.start - 1)

    def read(self, row: Row, output: Any, topk: int) -> RowScores | None:
        values = output.prompt_token_id_logprobs
        if values is None or not _computed(row, output):  # vLLM drops them when the cache went past the first one
            return None
        values = np.asarray(values, dtype=np.float32)
        return RowScores(values[:, 0]) if values.shape == (len(row.ids) - row.start, 1) else None


def _computed(row: Row, output: Any) -> bool:
    """Whether these are the row's ids, and position `start` and all behind it were computed rather than cached.

    The value at position i needs the hidden state of i - 1, which exists for i > num_cached_tokens only.
    """
    cached = output.num_cached_tokens
    return cached is not None and row.start > cached and np.array_equal(output.prompt_token_ids, row.ids)


def stock_params() -> Any:
    """Plain `prompt_logprobs`, as anybody would ask; the values that a path is held against."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)


def read_stock(row: Row, output: Any) -> np.ndarray:
    entries = output.prompt_logprobs[row.start :]
    return np.array([entry[token].logprob for entry, token in zip(entries, row.ids[row.start :].tolist(), strict=True)])


def choose_paths(llm: Any) -> tuple[Path, Path]:
    """The way for the sampled ids, and the way for the teacher's own top-k."""
    from vllm import RequestOutput, SamplingParams

    config = llm.llm_engine.vllm_config
    v2 = bool(getattr(config, "use_v2_model_runner", False))
    prompt = PromptRows()
    if not v2:
        refusals = [why for why in llm.collective_rpc("opd_use_response_rows") if why]
        if refusals:
            raise ConfigError(
                f"vLLM cannot score the response's rows only: {refusals[0]}; use a version from 0.24 to 0.33"
            )
        prompt = PromptRows("prompt_logprobs of response rows")
    asks = str(getattr(SamplingParams, "__annotations__", {}).get("prompt_logprob_token_ids", ""))
    answers = inspect.signature(RequestOutput.__init__).parameters
    # 0.31 knows the name too, with one list of ids for the whole prompt instead of an array with one per position.
    if v2 and "ndarray" in asks and "prompt_token_id_logprobs" in answers:
        return TokenIds(), prompt
    return prompt, prompt


def check_rows(vocab_size: int, max_length: int) -> list[Row]:
    """A fixed set of rows: groups of two, a repeat, whole blocks, one id, long ones; cut to what the model takes."""
    rng = np.random.default_rng(7)
    rows = []
    for prompt, response in CHECK_LENGTHS:
        prompt = min(prompt, max(max_length - 1, 1))
        shared = rng.integers(0, vocab_size, prompt)
        for _ in range(2):
            ids = np.concatenate([shared, rng.integers(0, vocab_size, response)])[:max_length]
            if len(ids) > prompt:
                rows.append(Row(ids.astype(np.int32), prompt))
    return [*rows, *rows[:1]]


def check_path(path: Path, generate: Generate, rows: Sequence[Row], dtype: str, topk: int) -> float:
    """Hold a path against stock `prompt_logprobs`, with a cold and a warm cache and in two orders.

    Returns:
        The largest difference, in nats.

    Raises:
        ConfigError: they differ, or the path has no values: this build must not serve.
    """
    import torch

    # Stock values come with ranks, whose kernel vLLM compiles on a CPU: ten seconds and more, for this check alone.
    with torch.compiler.set_stance("force_eager"):
        stock_outputs = generate(rows, [stock_params() for _ in rows])
    stock = [read_stock(row, output) for row, output in zip(rows, stock_outputs, strict=True)]
    worst = 0.0
    order = list(range(len(rows)))
    for turn, (kind, some) in enumerate((("cold", order), ("warm", order), ("warm, reversed", order[::-1]))):
        asked = [rows[i] for i in some]
        outputs = generate(asked, [path.params(row, topk, reuse=turn > 0) for row in asked])
        for i, row, output in zip(some, asked, outputs, strict=True):
            scores = path.read(row, output, topk)
            if scores is None and turn > 0:
                (output,) = generate([row], [path.params(row, topk, reuse=False)])
                scores = path.read(row, output, topk)
            if scores is None:
                raise ConfigError(
                    f"vLLM gives no values through {path.name} ({kind} cache); use another version of vLLM"
                )
            difference = np.abs(scores.logprobs.astype(np.float64) - stock[i])
            at = int(np.argmax(np.where(np.isfinite(difference), difference, np.inf)))
            if not difference[at] <= TOLERANCE[dtype]:
                raise ConfigError(
                    f"vLLM's {path.name} gives {scores.logprobs[at]:.5f} where plain prompt_logprobs gives "
                    f"{stock[i][at]:.5f} (position {row.start + at} of {len(row.ids)} ids, {kind} cache, limit "
                    f"{TOLERANCE[dtype]} nats): values of this build cannot be trusted; use another version of vLLM"
                )
            worst = max(worst, float(difference[at]))
    return worst
