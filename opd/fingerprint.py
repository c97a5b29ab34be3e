"""Short names for "the same tokenizer" and "the same weights", which the handshake compares.

Not secrets and no proof against a forger: they catch a teacher that was swapped, retrained, or given another tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Protocol

from opd.errors import ConfigError

BLOCK_BYTES = 256
BLOCKS_PER_TENSOR = 16
# Where a model came from and who saved it say nothing about its values.
IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


class HasVocab(Protocol):
    """Any tokenizer of transformers."""

    def get_vocab(self) -> dict[str, int]: ...


def tokenizer_fingerprint(tokenizer: HasVocab) -> str:
    """Name the token -> id map, added tokens included.

    The model plays no part, so a vocabulary that is padded (151,936 or 152,064 rows for the same tokenizer) gives the
    same name. Merges, chat template and normalizer are left out: ids travel, text never does.

    Returns:
        32 hexadecimal digits.
    """
    return vocabulary_fingerprint(vocabulary_bytes(tokenizer))


def vocabulary_bytes(tokenizer: HasVocab) -> bytes:
    """The token -> id map as the bytes that its fingerprint is a hash of, so that whoever gets both can check them.

    For each token, in the order of the ids: its id, the number of its UTF-8 bytes, and those: b"0 1 a1 2 bc".
    """
    parts = []
    for token_id, token in sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items()):
        data = token.encode("utf-8", "surrogatepass")
        parts.append(b"%d %d " % (token_id, len(data)) + data)
    return b"".join(parts)


def vocabulary_fingerprint(vocabulary: bytes) -> str:
    """The fingerprint of what vocabulary_bytes returned."""
    h = _hash()
    h.update(vocabulary)
    return str(h.hexdigest())


def read_vocabulary(vocabulary: bytes) -> set[tuple[int, str]]:
    """(id, token) pairs of what vocabulary_bytes returned, perhaps in another process.

    Raises:
        ValueError: bytes that it does not return.
    """
    pairs = set()
    at = 0
    while at < len(vocabulary):
        id_end = vocabulary.index(b" ", at)
        length_end = vocabulary.index(b" ", id_end + 1)
        token_id, length = int(vocabulary[at:id_end]), int(vocabulary[id_end + 1 : length_end])
        begin, at = length_end + 1, length_end + 1 + length
        if length < 0 or at > len(vocabulary):
            raise ValueError(f"token {token_id} has {length} bytes, and {len(vocabulary) - begin} are left")
        pairs.add((token_id, vocabulary[begin:at].decode("utf-8", "surrogatepass")))
    return pairs


def model_fingerprint(model: Any, dtype: str) -> str:
    """Name the weights: those of a folder, or those of a model in memory.

    A folder's name covers config.json (but for IGNORED_CONFIG_KEYS) and, of each tensor in its .safetensors files, the
    name, shape, dtype and 4 KB of its bytes in 16 blocks from its first to its last; small tensors whole. A .bin file
    counts as one tensor. A model's covers its class and the same of each tensor. Not covered: a change that misses
    every block, which no training step does; and the two kinds of names do not compare.

    Args:
        model: a folder, or a torch module.
        dtype: what the values are computed in, since that changes them.

    Returns:
        32 hexadecimal digits.

    Raises:
        ConfigError: the folder has no config.json or no weights, or a file in it cannot be read.
    """
    h = _hash()
    h.update(dtype.encode())
    if isinstance(model, str | os.PathLike):
        _add_folder(h, os.fspath(model))
    else:
        _add_module(h, model)
    return h.hexdigest()


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _add_folder(h: Any, folder: str) -> None:
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        h.update(json.dumps({k: v for k, v in config.items() if k not in IGNORED_CONFIG_KEYS}, sort_keys=True).encode())
        names = sorted(os.listdir(folder))
        weights = [name for name in names if name.endswith(".safetensors")]
        weights = weights or [name for name in names if name.endswith(".bin") and "training_args" not in name]
        if not weights:
            raise ConfigError(f"{folder} has no .safetensors file; save the model with save_pretrained")
        tensors = [tensor for name in weights for tensor in _tensors(os.path.join(folder, name))]
        for name, described, path, begin, end in sorted(tensors):  # by name: another sharding is the same model
            h.update(f"{name} {described} ".encode())
            with open(path, "rb") as file:
                for offset in _blocks(end - begin):
                    file.seek(begin + offset)
                    h.update(file.read(min(BLOCK_BYTES, end - begin - offset)))
    except (OSError, ValueError, KeyError, AttributeError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{folder} is no model folder that can be read: {type(e).__name__}: {e}") from e


def _tensors(path: str) -> list[tuple[str, str, str, int, int]]:
    """Name, dtype and shape, file, and first and last byte of each tensor."""
    size = os.path.getsize(path)
    if path.endswith(".bin"):
        return [(os.path.basename(path), "bin", path, 0, size)]
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > size - 8:
            raise ValueError(f"{os.path.basename(path)} is cut off")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    data = 8 + header_bytes
    for name, tensor in header.items():
        if data + tensor["data_offsets"][1] > size:
            raise ValueError(f"{os.path.basename(path)} is cut off in {name}")
    return [
        (name, f"{t['dtype']} {t['shape']}", path, data + t["data_offsets"][0], data + t["data_offsets"][1])
        for name, t in header.items()
    ]


def _blocks(num_bytes: int) -> list[int]:
    """Offsets of the blocks to read: all, or BLOCKS_PER_TENSOR from the first to the last."""
    if num_bytes <= BLOCK_BYTES * BLOCKS_PER_TENSOR:
        return list(range(0, num_bytes, BLOCK_BYTES))
    return [i * (num_bytes - BLOCK_BYTES) // (BLOCKS_PER_TENSOR - 1) for i in range(BLOCKS_PER_TENSOR)]


def _add_module(h: Any, model: Any) -> None:
    import torch

    h.update(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        h.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        if len(flat):
            sampled = torch.cat([flat[offset : offset + BLOCK_BYTES] for offset in _blocks(len(flat))])
            h.update(sampled.cpu().numpy().tobytes())
