"""Scores rows with vLLM, in this process: on GPUs, on several of them, or on a CPU.

vllm_engine.py starts it, vllm_paths.py asks and reads, and this file decides what is asked and what becomes of the
answers. Rows that share a prompt are sent one behind the other, so that it is computed once; equal rows are sent once.

Start-up holds the values against vLLM's plain `prompt_logprobs` and refuses to serve when they differ. What cannot be
read is asked again without the prefix cache, and never filled. A dead engine ends the process with exit code 70.

Not covered: temperatures other than 1 (vLLM applies none to a prompt), adapters, models with other inputs than ids.

Shapes: L = ids in a row, N = scored positions, K = topk.
"""

from __future__ import annotations

# ruff: noqa: E402
from opd.scoring import vllm_engine

vllm_engine.set_environment()  # before torch: its thread pool reads OMP_WAIT_POLICY when it is loaded

import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from opd.errors import ConfigError, RowError
from opd.fingerprint import model_fingerprint, vocabulary_bytes, vocabulary_fingerprint
from opd.scoring import hf_load, vllm_paths
from opd.scoring.scorer import LoadOptions, Row, RowScores
from opd.wire import ModelInfo, clip

log = logging.getLogger(__name__)

EXIT_DEAD_ENGINE = 70  # as the worker's own "the model is broken"


class VLLMScorer:
    """A vLLM engine behind the Scorer protocol."""

    def __init__(self, llm: Any, info: ModelInfo):
        self.info = info
        self.vocabulary = b""  # see Scorer
        self.rescored = 0  # rows that had to be asked again without the cache
        self._llm = llm
        self._path, self._topk_path = vllm_paths.choose_paths(llm)

    def check(self) -> None:
        """Hold both paths against stock values; raises ConfigError as vllm_paths.check_path."""
        rows = vllm_paths.check_rows(self.info.vocab_size, self.info.max_length)
        worst = vllm_paths.check_path(self._path, self._generate, rows, self.info.dtype, topk=0)
        if self.info.max_topk:
            topk = min(2, self.info.max_topk)
            worst = max(worst, vllm_paths.check_path(self._topk_path, self._generate, rows, self.info.dtype, topk=topk))
        log.info("%s agrees with plain prompt_logprobs to %.1e nats on %d rows", self._path.name, worst, len(rows))

    def score(self, rows: Sequence[Row], *, topk: int = 0, temperature: float = 1.0) -> list[RowScores | RowError]:
        """See Scorer.score; a temperature other than 1 is an error of every row."""
        if temperature != 1.0:
            return [
                RowError(i, "temperature", f"vLLM scores at temperature 1 only, not {temperature:g}")
                for i in range(len(rows))
            ]
        results: dict[int, RowScores | RowError] = {}
        first: dict[tuple[int, bytes], int] = {}
        same_as: list[int] = []
        asked: list[int] = []
        for index, row in enumerate(rows):
            original = first.setdefault((row.start, row.ids.tobytes()), index)
            same_as.append(original)
            if original != index:
                continue
            error = self._refusal(index, row)
            if error is not None:
                results[index] = error
            elif len(row.ids) == row.start:
                results[index] = _nothing(topk)
            else:
                asked.append(index)
        asked.sort(key=lambda i: rows[i].ids[: rows[i].start].tobytes())  # neighbours share most of their prompts
        results |= self._ask(asked, rows, topk)
        out: list[RowScores | RowError] = []
        for index, original in enumerate(same_as):
            result = results[original]
            out.append(result._replace(row=index) if isinstance(result, RowError) else result)
        return out

    def _refusal(self, index: int, row: Row) -> RowError | None:
        """Why vLLM would refuse a row, and with it the whole call."""
        if not 1 <= row.start <= len(row.ids):
            return RowError(index, "bad_start", f"start {row.start} is outside [1, {len(row.ids)}]")
        if len(row.ids) > self.info.max_length:
            return RowError(index, "too_long", f"{len(row.ids)} ids; this teacher takes {self.info.max_length}")
        if row.ids.min() < 0 or row.ids.max() >= self.info.vocab_size:
            return RowError(index, "token_range", f"an id outside the vocabulary of {self.info.vocab_size}")
        return None

    def _ask(self, asked: list[int], rows: Sequence[Row], topk: int) -> dict[int, RowScores | RowError]:
        path = self._topk_path if topk else self._path
        results: dict[int, RowScores | RowError] = {}
        for reuse in (True, False):
            if not asked:
                break
            outputs = self._generate([rows[i] for i in asked], [path.params(rows[i], topk, reuse=reuse) for i in asked])
            again = []
            for i, output in zip(asked, outputs, strict=True):
                scores = path.read(rows[i], output, topk)
                if scores is not None:
                    results[i] = _checked(i, rows[i].start, scores)
                else:
                    again.append(i)
            asked = again
            self.rescored += len(again) if reuse else 0
        for i in asked:
            results[i] = RowError(i, "no_value", "vLLM returned no values for this row, with and without its cache")
        return results

    def _generate(self, rows: Sequence[Row], params: Sequence[Any]) -> Sequence[Any]:
        """vLLM's answers in the order of the rows; ends the process when the engine is dead."""
        from vllm.v1.engine.exceptions import EngineDeadError

        prompts = [{"prompt_token_ids": row.ids.tolist()} for row in rows]
        try:
            outputs: list[Any] = self._llm.generate(prompts, list(params), use_tqdm=False)
        except EngineDeadError as e:
            log.error("the vLLM engine is dead: %s", clip(str(e)))
            os._exit(EXIT_DEAD_ENGINE)  # not sys.exit: the worker's own handlers would go on with it
        if len(outputs) != len(rows):
            raise RuntimeError(f"vLLM returned {len(outputs)} answers to {len(rows)} requests")
        return outputs


def _nothing(topk: int) -> RowScores:
    values = np.zeros(0, np.float32)
    return (
        RowScores(values, np.zeros((0, topk), np.int32), np.zeros((0, topk), np.float32)) if topk else RowScores(values)
    )


def _checked(index: int, start: int, scores: RowScores) -> RowScores | RowError:
    """The values, or an error where one is not a number; top-k values may be -inf only by a model's own mask."""
    for values in (scores.logprobs, scores.topk_logprobs):
        if values is not None and not np.isfinite(values).all():
            at = int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(axis=1)))
            return RowError(index, "non_finite", f"the value at position {start + at} is {values[at].min()}")
    return scores


def load(options: LoadOptions) -> VLLMScorer:
    """Start an engine on a model folder, or a hub name, and check its values.

    Raises:
        ConfigError: as vllm_engine.start_engine and VLLMScorer.check, or a length that the model does not have.
    """
    vllm_engine.import_vllm()  # what is most often wrong comes first
    folder = _folder(options.model)
    config, tokenizer = _describe(folder)
    max_length = _max_length(options, config)
    llm = vllm_engine.start_engine(msgspec.structs.replace(options, model=folder), max_length)
    dtype = str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
    vocabulary = vocabulary_bytes(tokenizer) if tokenizer is not None else b""
    info = ModelInfo(
        name=options.model[-512:],
        model=model_fingerprint(folder, dtype),
        tokenizer=vocabulary_fingerprint(vocabulary) if vocabulary else "",
        vocab_size=int(config.vocab_size),
        max_length=max_length,
        max_topk=min(options.max_topk, int(config.vocab_size)),
        eos_ids=hf_load.eos_ids(SimpleNamespace(generation_config=_generation_config(folder)), config),
        dtype=dtype,
        backend="vllm",
        temperature=False,
    )
    scorer = VLLMScorer(llm, info)
    scorer.vocabulary = vocabulary
    scorer.check()
    return scorer


def _folder(model: str) -> str:
    if os.path.isfile(os.path.join(model, "config.json")):
        return model
    if os.path.isdir(model) or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(
            f"model {model!r}: no folder with a config.json; give one written by save_pretrained, or a hub name"
        )
    from huggingface_hub import snapshot_download

    try:
        # No .bin files: they are pickles. No .py files: code that came with weights is not run.
        return str(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"]))
    except Exception as e:  # no such name, no network, no access: the hub's client has a class for each
        raise ConfigError(
            f"model {model!r} cannot be fetched: {type(e).__name__}: {clip(str(e))}; give a folder"
        ) from e


def _describe(folder: str) -> tuple[Any, Any]:
    """The text model's config, and the tokenizer or None."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError, ImportError) as e:
        raise ConfigError(f"model {folder!r} cannot be loaded: {clip(str(e))}") from e
    return config, hf_load.load_tokenizer(folder)


def _generation_config(folder: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError):
        return None


def _max_length(options: LoadOptions, config: Any) -> int:
    """Ids in one row: one less than the model has positions, since vLLM always generates one id."""
    positions: int = getattr(config, "max_position_embeddings", None) or 0
    if not positions:
        if options.max_length is None:
            raise ConfigError(f"model {options.model!r} names no longest length; give --max-len")
        return options.max_length
    wanted: int = positions - 1 if options.max_length is None else options.max_length
    if not 1 <= wanted < positions:
        raise ConfigError(
            f"max_length {wanted} is outside [1, {positions - 1}]: the model has {positions} positions, and vLLM needs "
            f"one of them"
        )
    return wanted
