"""A folder as verl saves it of a LoRA student becomes one that transformers loads as the very same model."""

from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from opd.errors import ConfigError
from opd.lora import merge_folder, merged, scales_of


def student(**settings) -> torch.nn.Module:
    """A tiny Llama whose adapters say something."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    model = get_peft_model(base, LoraConfig(**({"r": 4, "lora_alpha": 12, "target_modules": "all-linear"} | settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return model.eval()


def save_as_verl(model, folder) -> None:
    """FSDPCheckpointManager.save_checkpoint with hf_model: the wrapped names beside the base model's config."""
    plain = transformers.LlamaForCausalLM(model.config)
    plain.save_pretrained(folder, state_dict={name: tensor.clone() for name, tensor in model.state_dict().items()})


def test_the_merged_folder_is_the_trained_model(tmp_path):
    model = student()
    save_as_verl(model, tmp_path)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
        with model.disable_adapter():
            assert (model(ids).logits - wanted).abs().max() > 0.05
    lost = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)[1]["missing_keys"]
    assert lost  # what this is for: no error
    merge_folder(tmp_path, scales_of(model))
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, wanted, atol=1e-5, rtol=1e-5)
    assert not (tmp_path / "merging").exists()


def test_only_the_adapted_layers_are_scaled_and_each_by_its_own(tmp_path):
    model = student(target_modules=["q_proj", "down_proj"], alpha_pattern={"q_proj": 40}, use_rslora=True)
    scales = scales_of(model)
    assert scales["model.layers.1.self_attn.q_proj"] == 20 and scales["model.layers.0.mlp.down_proj"] == 6
    weights = merged(model.state_dict(), scales)
    assert set(weights) == set(
        model.get_base_model().config and transformers.LlamaForCausalLM(model.config).state_dict()
    )
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    wanted = layer.base_layer.weight + 20 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(weights["model.layers.1.self_attn.q_proj.weight"], wanted.detach())


ODD = [
    ({"target_modules": ["embed_tokens", "q_proj"]}, "not a linear layer's"),
    ({"use_dora": True}, "not a linear layer's"),
    ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "trains whole layers"),
    ({"target_modules": ["q_proj"], "trainable_token_indices": [3]}, "trains whole layers"),
]


@pytest.mark.parametrize("settings, says", ODD)
def test_an_adapter_of_another_kind_is_named_and_the_folder_is_left_alone(tmp_path, settings, says):
    model = student(**settings)
    save_as_verl(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=rf"{says}.*, the first is '.*(lora_|lm_head|token_adapter)"):
        merge_folder(tmp_path, scales_of(model))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_model_without_adapters_and_a_folder_without_weights_are_none_of_its_business(tmp_path):
    assert scales_of(student().get_base_model().model.norm) == {}
    merge_folder(tmp_path, {"model.layers.0.self_attn.q_proj": 2.0})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("old_size, new_size", [(None, None), (None, 4000), (4000, None), (4000, 4000)])
def test_a_process_that_is_killed_in_between_leaves_one_whole_model(tmp_path, monkeypatch, old_size, new_size):
    """At each rename and removal in turn, from one file or several to one or several; afterwards it is done anew."""
    model, ids = student(), torch.arange(20)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
    save = huggingface_hub.save_torch_state_dict
    monkeypatch.setattr(
        huggingface_hub, "save_torch_state_dict", lambda *a, **k: save(*a, max_shard_size=new_size or "5GB", **k)
    )
    monkeypatch.setattr("opd.lora.shutil.rmtree", lambda *a, **k: None)  # nobody cleans up after a kill
    for die_at in range(100):
        folder = tmp_path / str(die_at)
        plain = transformers.LlamaForCausalLM(model.config)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        plain.save_pretrained(folder, state_dict=state, max_shard_size=old_size or "5GB")
        with monkeypatch.context() as patch:
            calls = iter(range(die_at))
            for name in ("rename", "replace", "unlink"):
                patch.setattr(Path, name, dying(getattr(Path, name), calls))
            try:
                merge_folder(folder, scales_of(model))
            except Killed:
                pass
            else:
                break
        loaded, info = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
        if info["missing_keys"]:  # verl's, all of it: none of its names is the model's
            assert len(info["missing_keys"]) == len(loaded.state_dict())
            assert any("lora_" in key for key in info["unexpected_keys"])
            continue
        with torch.inference_mode():
            torch.testing.assert_close(loaded(ids).logits, wanted, atol=1e-5, rtol=1e-5)
    assert die_at >= (1 if new_size is None else 2)
    assert not list(folder.glob("model-0*"))  # nothing of the old shards is left
    assert (folder / "model.safetensors").exists() == (new_size is None)


class Killed(BaseException):
    pass


def dying(method, calls):
    """The method, until its calls are used up."""

    def call(*args, **kwargs):
        if next(calls, None) is None:
            raise Killed
        return method(*args, **kwargs)

    return call
