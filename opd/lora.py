"""A LoRA student's checkpoint as a plain model, for everything that loads a folder of Hugging Face's.

verl saves a LoRA student into actor/huggingface under peft's names, beside the base model's config.json:

    base_model.model.X.base_layer.weight   W     X.weight = W + scale * B A
    base_model.model.X.lora_A.default.weight   A, X.lora_B.default.weight   B
    base_model.model.Y.weight                    Y.weight

transformers takes none of these names for the model's, warns, and goes on with random weights. So the folder gets the
merged weights under the model's own names. verl resumes from other files, which stay as they are.

Not covered: adapters of embeddings and of parameters that are no linear layer's, DoRA, and what an adapter loaded from
`lora_adapter_path` may train beside its matrices (peft's modules_to_save and trainable tokens); such a folder is left
alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opd.errors import ConfigError

PREFIX = "base_model.model."
_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."
_WRAPPED = (".modules_to_save.", ".original_module.", ".token_adapter.")  # copies that peft trains in full
NEW = "model-merged"  # unlike verl's names: old shards and new ones never overwrite each other


def scales_of(module: Any) -> dict[str, float]:
    """What each adapter is multiplied with, by the name of its layer in a saved folder; empty: this is no LoRA model.

    Args:
        module: the model as verl trains it, wrapped by FSDP or not.
    """
    return {
        name.replace("_fsdp_wrapped_module.", "").removeprefix(PREFIX): float(layer.scaling["default"])
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A") and "default" in getattr(layer, "scaling", {})
    }


def merged(state: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """A LoRA model's weights under the names, and with the types, that its base model has.

    Args:
        state: by peft's names, see above.
        scales: as scales_of.

    Raises:
        ConfigError: an adapter that is not of a linear layer, or a layer that peft trains in full; names it.
    """
    found = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    adapters = {name.removesuffix(_A) for name in found if name.endswith(_A)}
    odd = [n for n in found if "lora_" in n and not (n.endswith((_A, _B)) and n[: -len(_A)] in adapters & set(scales))]
    if odd:
        raise ConfigError(f"an adapter is not a linear layer's, the first is {odd[0]!r}")
    whole = [name for name in found if any(mark in name for mark in _WRAPPED)]
    if whole:
        raise ConfigError(f"the adapter trains whole layers or tokens, the first is {whole[0]!r}")
    weights = {}
    for name, tensor in found.items():
        if "lora_" in name:
            continue
        layer, base, what = name.partition(_BASE)
        if base and what == "weight" and layer in adapters:
            update = scales[layer] * (found[layer + _B].float() @ found[layer + _A].float())
            tensor = (tensor.float() + update).to(tensor.dtype)
        weights[name.replace(_BASE, ".")] = tensor
    return weights


def merge_folder(folder: Path, scales: Mapping[str, float]) -> None:
    """Replace the weights of a folder that verl saved by the merged ones; without any weights, do nothing.

    At every moment in between the folder holds either all old weights or all new ones, whatever ends the process.

    Raises:
        ConfigError: as merged; the folder is left as it was.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= load_file(file)
    new = folder / "merging"
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    new.mkdir()
    try:
        pattern = NEW + "{suffix}.safetensors"
        save_torch_state_dict(merged(state, scales), new, filename_pattern=pattern, metadata={"format": "pt"})
        _take_over(new, folder)
    finally:
        shutil.rmtree(new)


def _take_over(new: Path, folder: Path) -> None:
    """Put the new weights in the place of the old ones, with one rename or removal that decides which are loaded."""
    old = {*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")}
    index = new / f"{NEW}.safetensors.index.json"
    if not index.exists():
        one = folder / "model.safetensors"  # where there are both, it is loaded and not what an index names
        (new / f"{NEW}.safetensors").replace(one)
        kept = {one}
    else:
        kept = {folder / file.name for file in new.glob("*.safetensors")} | {folder / "model.safetensors.index.json"}
        for shard in new.glob("*.safetensors"):
            shard.replace(folder / shard.name)
        index.replace(folder / "model.safetensors.index.json")
        (folder / "model.safetensors").unlink(missing_ok=True)  # until then it is what is loaded
    for file in old - kept:
        file.unlink(missing_ok=True)
