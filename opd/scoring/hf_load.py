"""Loading a transformers model as a teacher, and the checks that it is the model its folder says.

Nothing is guessed: weights that are missing from the files, an output layer that is not known, and code that came with
the weights are all refused.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError

from opd.errors import ConfigError
from opd.scoring.head import Head, head_logprobs
from opd.scoring.scorer import DTYPES, LoadOptions
from opd.wire import clip

log = logging.getLogger(__name__)

PROBE_LENGTH = 48
TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece")


def find_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` -> a device that exists."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N")
    if name != "cpu" and int(match[1] or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs; use cpu")
    return torch.device(name)


def load_model(options: LoadOptions) -> tuple[Any, Any]:
    """The model, on the CPU, and its tokenizer, or None where the folder has none.

    Raises:
        ConfigError: no such folder or hub name, files that transformers cannot load, weights missing from them.
    """
    name = options.model
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")
    if not os.path.isdir(name) and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        raise ConfigError(f"model {name!r}: no such folder; give a folder written by save_pretrained, or a hub name")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ConfigError(f"model {name!r}: the folder has no config.json; give one written by save_pretrained")
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        # sdpa leaves a softcap on attention scores out without a word; where there is one only eager is the model.
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            dtype=options.dtype if options.dtype == "auto" else getattr(torch, options.dtype),
            attn_implementation="eager" if softcap else None,  # None: sdpa where the model has it
            trust_remote_code=False,
            use_safetensors=True,  # .bin files are pickles
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as e:
        raise ConfigError(f"model {name!r} cannot be loaded: {_first_line(e)}") from e
    model, loading = loaded
    lost = [*loading["missing_keys"], *loading["mismatched_keys"]]
    if lost:
        # transformers fills them with random numbers and goes on.
        raise ConfigError(f"model {name!r}: {len(lost)} weights are missing or misshapen in its files, like {lost[0]}")
    if str(model.dtype).removeprefix("torch.") not in DTYPES:
        raise ConfigError(f"model {name!r} is stored as {model.dtype}; give a dtype of {', '.join(DTYPES[1:])}")
    return model, load_tokenizer(name)


def load_tokenizer(name: str) -> Any:
    # Some classes make an empty tokenizer when there are no files, whose fingerprint would match no client's.
    if os.path.isdir(name) and not any(file.startswith(TOKENIZER_FILES) for file in os.listdir(name)):
        log.warning("%s has no tokenizer files, so that clients cannot compare theirs", name)
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as e:
        log.warning(
            "the tokenizer of %s cannot be loaded, so that clients cannot compare theirs: %s", name, _first_line(e)
        )
        return None


def _first_line(error: BaseException) -> str:
    return clip(next(iter(str(error).strip().splitlines()), type(error).__name__))


def max_length(options: LoadOptions, config: Any, tokenizer: Any) -> int:
    """Ids in one row: what was asked for, at most what the config allows."""
    positions = getattr(config, "max_position_embeddings", None)
    if options.max_length is not None:
        if options.max_length < 1 or (positions and options.max_length > positions):
            raise ConfigError(f"max_length {options.max_length} is outside [1, {positions}], the model's positions")
        return options.max_length
    if not positions:
        raise ConfigError(f"model {options.model!r} names no longest length; give max_length")
    stated = getattr(tokenizer, "model_max_length", None) or positions
    return int(min(positions, stated))  # 1e30 when a tokenizer has no opinion


def eos_ids(model: Any, config: Any) -> list[int]:
    """Every id that ends a text."""
    for source in (getattr(model, "generation_config", None), config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return sorted({int(i) for i in (ids if isinstance(ids, list | tuple) else [ids])})
    return []


def probe_ids(vocab: int, length: int, seed: int) -> np.ndarray:
    """Ids from the middle of the vocabulary, away from the special ones at both ends, int32 [length]."""
    return (vocab // 4 + (np.arange(length) * 7919 + seed * 104_729) % max(1, vocab // 2)).astype(np.int32)


@torch.inference_mode()
def find_head(model: Any, config: Any) -> tuple[Head, float]:
    """The output layer, and by how much its log-probs differ from those of the model's own logits on a probe.

    Models scale or cap their logits under several names; whatever the names say, only agreement counts.

    Raises:
        ConfigError: nothing known agrees with the model.
    """
    layer = model.get_output_embeddings()
    kind = type(model).__name__
    if not isinstance(layer, torch.nn.Linear):
        raise ConfigError(f"{kind} has a {type(layer).__name__} as its output layer; only Linear is known here")
    vocab = len(layer.weight)
    if len(model.get_input_embeddings().weight) != vocab:
        raise ConfigError(f"{kind} takes {len(model.get_input_embeddings().weight)} ids but gives logits for {vocab}")
    ids = torch.from_numpy(probe_ids(vocab, PROBE_LENGTH, 0).astype(np.int64)).to(layer.weight.device)
    hidden = model.base_model(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
    logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
    own = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]
    # Rounding of a logit, for either side; in float32 the order of the sums is what counts.
    tolerance = 2 * torch.finfo(model.dtype).eps * float(logits.abs().max()) + 1e-4
    difference, head = min(
        (
            (float((head_logprobs(head, hidden, ids[1:]).logprobs - own).abs().max()), head)
            for head in _heads(layer, config)
        ),
        key=lambda pair: pair[0],
    )
    if not difference <= tolerance:
        raise ConfigError(
            f"{kind} changes its logits in a way that this scorer does not know: log-probs differ by up to "
            f"{difference:.2g} nats (limit {tolerance:.1g}); serve it with another backend"
        )
    return head, difference


def _heads(layer: torch.nn.Linear, config: Any) -> list[Head]:
    """What the output layer may be, going by the names that configs use."""
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "output_logit_soft_cap", None)
    scales = [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if value := getattr(config, name, None):
            scales += [float(value), 1 / float(value)]  # Granite divides by logits_scaling, others multiply
    return [Head(layer.weight, layer.bias, scale, softcap) for scale in scales]
