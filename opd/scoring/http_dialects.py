"""What vLLM's and SGLang's HTTP servers are sent and what they answer; no sockets here.

VLLM     POST /v1/completions with the ids as prompt, prompt_logprobs and return_token_ids. Run against 0.32 on a CPU.
SGLang   POST /generate with input_ids, return_logprob and logprob_start_len. Read in 0.5.23 and run against a small
         imitation of its answers only.

Shapes: L = ids in a row, N = scored positions, K = topk.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple, Protocol

import numpy as np

from opd.errors import ConfigError, RowError
from opd.fingerprint import vocabulary_bytes
from opd.scoring.scorer import Row, RowScores

# vLLM's server writes -9999 where the value is -inf, since JSON has no infinity.
FLOOR = -9998.0


class BadAnswer(Exception):
    """An answer that does not have what was asked for."""


class Served(NamedTuple):
    """A model that a server offers."""

    name: str
    root: str  # the folder or hub name that it was loaded from, or ""
    max_model_len: int


class Dialect(Protocol):
    """One kind of server."""

    name: str

    def ask(self, row: Row, topk: int) -> tuple[str, dict[str, Any]]:
        """Path and body of the request that scores a row."""
        ...

    def read(self, row: Row, topk: int, answer: Any) -> RowScores:
        """The values in an answer. Raises BadAnswer."""
        ...


class VLLM:
    """See the module."""

    name = "vLLM"

    def __init__(self, model: str):
        self._model = model

    def ask(self, row: Row, topk: int) -> tuple[str, dict[str, Any]]:
        body = {"model": self._model, "prompt": row.ids.tolist(), "max_tokens": 1, "temperature": 0.0}
        return "/v1/completions", body | {"prompt_logprobs": topk, "return_token_ids": True}

    def read(self, row: Row, topk: int, answer: Any) -> RowScores:
        (choice,) = _get(answer, "choices", list)
        if _get(choice, "prompt_token_ids", list) != row.ids.tolist():
            raise BadAnswer("it is about other ids than the ones sent")
        entries = _get(choice, "prompt_logprobs", list)
        if len(entries) != len(row.ids):
            raise BadAnswer(f"{len(entries)} positions for {len(row.ids)} ids")
        values, top = [], []
        for position in range(row.start, len(row.ids)):
            entry, token = entries[position], str(row.ids[position])
            if not isinstance(entry, dict) or token not in entry:
                raise BadAnswer(f"position {position} has no value for its own id")
            pairs = {int(key): _number(_get(value, "logprob"), position) for key, value in entry.items()}
            values.append(pairs[int(token)])
            # The sampled id is in the entry too, whether it is one of the most probable or not.
            top.append(sorted(((value, key) for key, value in pairs.items()), reverse=True)[:topk])
        return _scores(values, top, topk)


class SGLang:
    """See the module."""

    name = "SGLang"

    def ask(self, row: Row, topk: int) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {
            "input_ids": row.ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": row.start - 1,
        }
        return "/generate", body | ({"top_logprobs_num": topk} if topk else {})

    def read(self, row: Row, topk: int, answer: Any) -> RowScores:
        info = _get(answer, "meta_info", dict)
        if _get(info, "prompt_tokens", int) != len(row.ids):
            raise BadAnswer(f"it is about {info['prompt_tokens']} ids; {len(row.ids)} were sent")
        # The entry of position start - 1 comes first, and has no value: nothing before it was scored.
        count = len(row.ids) - row.start + 1
        entries = _entries(info, "input_token_logprobs", count)
        values = [_pair(entry, row.start + i) for i, entry in enumerate(entries[1:])]
        ids = [int(entries[0][1]), *(token for _, token in values)]
        if ids != row.ids[row.start - 1 :].tolist():
            raise BadAnswer("it is about other ids than the ones sent")
        top = []
        if topk:
            for i, some in enumerate(_entries(info, "input_top_logprobs", count)[1:]):
                if not isinstance(some, list):
                    raise BadAnswer(f"position {row.start + i} has no top-k")
                top.append(sorted((_pair(entry, row.start + i) for entry in some), reverse=True)[:topk])
        return _scores([value for value, _ in values], top, topk)


def _entries(info: dict[str, Any], name: str, count: int) -> list[Any]:
    entries = _get(info, name, list)
    if len(entries) != count:
        raise BadAnswer(f"{len(entries)} entries in {name}, not {count}")
    first = entries[0]
    if name == "input_token_logprobs" and not (
        isinstance(first, list) and len(first) >= 2 and isinstance(first[1], int)
    ):
        raise BadAnswer(f"the first entry of {name} has no id")
    return entries


def _pair(entry: Any, position: int) -> tuple[float, int]:
    if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[1], int):
        raise BadAnswer(f"position {position} has no value and id")
    return _number(entry[0], position), entry[1]


def _number(value: Any, position: int) -> float:
    # None is what some servers write for NaN; bool is an int.
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadAnswer(f"the value at position {position} is {value!r}")
    return float(value) if value > FLOOR else float("-inf")  # NaN too, which is as unusable


def _get(source: Any, name: str, kind: Any = object) -> Any:
    if not isinstance(source, dict) or not isinstance(source.get(name), kind) or source.get(name) is None:
        raise BadAnswer(f"it has no {name}")
    return source[name]


def _scores(values: list[float], top: list[list[tuple[float, int]]], topk: int) -> RowScores:
    logprobs = np.array(values, np.float32)
    if not topk:
        return RowScores(logprobs)
    if any(len(some) != topk for some in top):
        raise BadAnswer(f"a position has fewer than {topk} ids in its top-k")
    ids = np.array([[token for _, token in some] for some in top], np.int32)
    return RowScores(logprobs, ids, np.array([[value for value, _ in some] for some in top], np.float32))


def checked(index: int, row: Row, topk: int, scores: RowScores) -> RowScores | RowError:
    """The values, if there is one for each scored position and all of them are finite."""
    if scores.logprobs.shape != (len(row.ids) - row.start,):
        raise BadAnswer(f"{len(scores.logprobs)} values for {len(row.ids) - row.start} positions")
    for values in (scores.logprobs, scores.topk_logprobs):
        if values is not None and not np.isfinite(values).all():
            at = int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(axis=1)))
            return RowError(index, "non_finite", f"the value at position {row.start + at} is not finite")
    return scores


def find_model(answer: Any, name: str) -> Served:
    """The model `name` in the answer to GET /v1/models, which both servers have; names may be folders."""
    cards = [card for card in _get(answer, "data", list) if isinstance(card, dict)]
    for card in cards:
        if name in (card.get("id"), card.get("root")):
            length = card.get("max_model_len")
            if not isinstance(length, int) or length < 2:
                raise BadAnswer(f"it names no max_model_len for {name}")
            return Served(str(card["id"]), str(card.get("root") or ""), length)
    names = ", ".join(repr(card.get("id")) for card in cards) or "nothing"
    raise ConfigError(f"--model {name!r}: the server at --url serves {names}; give one of its names")


def describe(folder: str) -> tuple[int, list[int], bytes]:
    """Size of the vocabulary, ids that end a text, and vocabulary_bytes or b"", of a folder with a config.json."""
    from transformers import AutoTokenizer

    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        config = config.get("text_config", config)
        vocab_size = int(config["vocab_size"])
        eos = config.get("eos_token_id")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise ConfigError(
            f"{folder} has no config.json with a vocab_size ({type(e).__name__}); give --tokenizer DIR"
        ) from e
    try:
        vocabulary = vocabulary_bytes(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
    except (OSError, ValueError, KeyError, ImportError):
        vocabulary = b""
    return vocab_size, sorted({int(i) for i in (eos if isinstance(eos, list) else [eos]) if i is not None}), vocabulary
