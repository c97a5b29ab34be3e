"""Fingerprints: equal for the same thing, different after any change that matters."""

import json
import time

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from opd.errors import ConfigError
from opd.fingerprint import model_fingerprint, read_vocabulary, tokenizer_fingerprint, vocabulary_bytes

torch.set_num_threads(1)  # the models are tiny, and two threads on shared cores wait for each other


class Tokenizer:
    def __init__(self, vocab):
        self.vocab = vocab

    def get_vocab(self):
        return self.vocab


def make_model(rows=64, seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def folder(tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_tokenizer_fingerprint_does_not_change_between_versions():
    """Golden: blake2b-128 over "0 1 a1 2 bc"; a client may be older than its teacher."""
    assert tokenizer_fingerprint(Tokenizer({"bc": 1, "a": 0})) == "d8fb5e22f3249ed7592a4239b407f067"


def test_a_vocabulary_comes_back_from_its_bytes():
    """Spaces, digits and half a surrogate pair within tokens; two tokens of one id."""
    vocab = {"bc": 1, "a": 0, " 7 x": 2, "\ud800": 3, "also": 1}
    assert vocabulary_bytes(Tokenizer({"bc": 1, "a": 0})) == b"0 1 a1 2 bc"
    assert read_vocabulary(vocabulary_bytes(Tokenizer(vocab))) == {(i, token) for token, i in vocab.items()}
    assert read_vocabulary(b"") == set()
    for broken in (b"0 1 a1 9 bc", b"0 1", b"x 1 a", b"0 -1 a", b"0 1 \xff"):
        with pytest.raises(ValueError):
            read_vocabulary(broken)


def test_a_padded_vocabulary_is_the_same_tokenizer():
    """Qwen2.5 has one tokenizer of 151,665 ids and models of 151,936 and 152,064 rows: the model plays no part."""
    tokenizer = Tokenizer({f"token{i}": i for i in range(151_665)})
    names = set()
    for rows in (151_936, 152_064):
        model = make_model(rows)
        assert len(model.get_output_embeddings().weight) == rows
        names.add((tokenizer_fingerprint(tokenizer), model_fingerprint(model, "float32")))
    assert len({name for name, _ in names}) == 1 and len({model for _, model in names}) == 2


def test_any_change_of_the_map_is_another_tokenizer():
    """One token added, renamed, or swapped with another; the order of the dict does not count."""
    vocab = {"a": 0, "b": 1, "<|end|>": 2}
    name = tokenizer_fingerprint(Tokenizer(vocab))
    assert name == tokenizer_fingerprint(Tokenizer(dict(reversed(vocab.items()))))
    others = [{**vocab, "<tool>": 3}, {"a": 0, "c": 1, "<|end|>": 2}, {"a": 1, "b": 0, "<|end|>": 2}, {"a": 0, "b": 1}]
    assert name not in {tokenizer_fingerprint(Tokenizer(other)) for other in others}


def test_tokens_cannot_run_into_each_other():
    """Lengths are part of what is hashed: these two maps spell the same bytes without them."""
    assert tokenizer_fingerprint(Tokenizer({"a1 1 b": 0})) != tokenizer_fingerprint(Tokenizer({"a": 0, "b": 1}))
    assert tokenizer_fingerprint(Tokenizer({"\ud800": 0}))  # half a surrogate pair is a token in some vocabularies


def test_added_tokens_of_a_real_tokenizer_count():
    """get_vocab of transformers includes them."""
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import WordLevel

    def build(*added):
        fast = FastTokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="?")
        tokenizer.add_tokens(list(added))
        return tokenizer

    assert tokenizer_fingerprint(build()) == tokenizer_fingerprint(Tokenizer({"a": 0, "b": 1, "?": 2}))
    assert tokenizer_fingerprint(build("<x>")) == tokenizer_fingerprint(Tokenizer({"a": 0, "b": 1, "?": 2, "<x>": 3}))


def test_a_folder_keeps_its_name_when_it_is_saved_again(folder, tmp_path_factory):
    """Another sharding and another version of transformers hold the same weights."""
    again = tmp_path_factory.mktemp("again")
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(again, max_shard_size="40KB")
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps({**config, "transformers_version": "0.0.1", "_name_or_path": "x"}))
    assert len(list(again.glob("*.safetensors"))) > 1
    assert model_fingerprint(folder, "float32") == model_fingerprint(str(again), "float32")


def test_a_training_step_gives_another_name(folder):
    """Every tensor counts, the smallest too; so do the dtype of the computation and the config."""
    name = model_fingerprint(folder, "float32")
    assert model_fingerprint(folder, "bfloat16") != name
    rewrite(folder, lambda weights: weights["model.norm.weight"].mul_(1 + 1e-6))
    changed = model_fingerprint(folder, "float32")
    assert changed != name
    rewrite(folder, lambda weights: weights["lm_head.weight"].add_(torch.randn(64, 64) * 1e-4))
    assert model_fingerprint(folder, "float32") not in (name, changed)
    last = model_fingerprint(folder, "float32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert model_fingerprint(folder, "float32") != last


def test_the_first_and_last_byte_of_a_large_tensor_count(folder):
    """The blocks reach from one end to the other."""
    for index in (0, -1):
        name = model_fingerprint(folder, "float32")
        rewrite(folder, lambda weights, index=index: weights["lm_head.weight"].view(-1)[index].add_(1))
        assert model_fingerprint(folder, "float32") != name


def test_a_model_in_memory_has_a_name_too():
    """Equal weights, equal name; one step away, another."""
    model, twin, other = make_model(), make_model(), make_model(seed=1)
    assert model_fingerprint(model, "float32") == model_fingerprint(twin, "float32")
    assert model_fingerprint(model, "float32") != model_fingerprint(other, "float32")
    assert model_fingerprint(model.bfloat16(), "bfloat16") != model_fingerprint(twin, "bfloat16")


def test_a_large_file_is_sampled_not_read(tmp_path):
    """200 MB of weights take well under a second of CPU time."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.from_numpy(np.zeros(50_000_000, np.float32))}, tmp_path / "model.safetensors")
    began = time.process_time()
    model_fingerprint(tmp_path, "float32")
    assert time.process_time() - began < 0.5


def test_a_folder_that_is_no_model_is_named(folder, tmp_path_factory):
    """No config, no weights, or a download that broke off: one sentence that names the folder."""
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ConfigError, match="empty"):
        model_fingerprint(empty, "float32")
    (empty / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        model_fingerprint(empty, "float32")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="cut off"):
        model_fingerprint(folder, "float32")
