"""The transformers scorer against transformers itself, on models of two layers."""

import functools
import math

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from opd.errors import ConfigError, RowError
from opd.scoring import head as head_module
from opd.scoring import hf
from opd.scoring.head import Head, head_logprobs
from opd.scoring.hf import load
from opd.scoring.plan import make_plan, pack
from opd.scoring.scorer import LoadOptions, Row

torch.set_num_threads(1)  # the models are tiny, and two threads on shared cores wait for each other

VOCAB = 300
# Weights this large give log-probs from 0 to -15, as a trained model does.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen3": transformers.Qwen3Config(**COMMON),
    "gemma2": transformers.Gemma2Config(
        **COMMON, sliding_window=8, final_logit_softcapping=5.0, attn_logit_softcapping=5.0
    ),
    "granite": transformers.GraniteConfig(**COMMON, logits_scaling=8.0),
    "sliding": transformers.MistralConfig(**COMMON, sliding_window=8),
}
_folders: dict[str, str] = {}


@pytest.fixture
def folder_of(tmp_path_factory):
    """A function from a name in CONFIGS to a folder with that model."""

    def build(name):
        if name not in _folders:
            torch.manual_seed(1)
            _folders[name] = str(tmp_path_factory.mktemp(name))
            transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(_folders[name])
        return _folders[name]

    return build


@pytest.fixture(autouse=True)
def share_small_prompts(monkeypatch):
    """Share whatever can be shared: at these sizes separate rows would always be cheaper."""
    monkeypatch.setitem(hf.CALL_TOKENS, "cpu", 1)


def make_row(rng, prompt_length, num_scored):
    return Row(rng.integers(0, VOCAB, prompt_length + num_scored).astype(np.int32), prompt_length)


def same_prompt(rng, prompt_length, counts):
    prompt = rng.integers(0, VOCAB, prompt_length)
    return [Row(np.concatenate([prompt, rng.integers(0, VOCAB, n)]).astype(np.int32), prompt_length) for n in counts]


@functools.cache
def reference_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def full_log_softmax(folder, row, temperature=1.0):
    """The reference: eager attention, one row, all logits, float32 [N, V]."""
    logits = reference_model(folder)(torch.from_numpy(row.ids.astype(np.int64))[None]).logits[0, row.start - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def chosen(log_softmax, row):
    targets = torch.from_numpy(row.ids[row.start :].astype(np.int64))
    return log_softmax.gather(1, targets[:, None])[:, 0].numpy()


def check_equal(left, right, atol=1e-5):
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=atol, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_values_equal_the_models_own_log_softmax(folder_of, name, temperature):
    """Shared and separate rows, softcapped and scaled heads, sliding windows: all within 2e-5 in float32."""
    rng = np.random.default_rng(2)
    rows = [*same_prompt(rng, 33, [5, 1, 20, 30, 0]), make_row(rng, 1, 50), make_row(rng, 20, 7)]
    scorer = load(LoadOptions(model=folder_of(name)))
    assert scorer.share
    for row, scores in zip(rows, scorer.score(rows, topk=6, temperature=temperature), strict=True):
        reference = full_log_softmax(folder_of(name), row, temperature)
        np.testing.assert_allclose(scores.logprobs, chosen(reference, row), atol=2e-5, rtol=0)
        values, ids = reference.topk(6)
        assert np.array_equal(scores.topk_ids, ids.numpy())
        np.testing.assert_allclose(scores.topk_logprobs, values.numpy(), atol=2e-5, rtol=0)
        assert (scores.logprobs <= 0).all() and (scores.topk_logprobs <= 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["qwen2", "gemma2", "granite"])
def test_candidates_equal_the_models_own_log_softmax(folder_of, monkeypatch, name, temperature):
    """Softcapped and scaled heads, several tiles and blocks, repeats, the sampled id, and both ends of a tile."""
    monkeypatch.setitem(head_module.BLOCK_VOCAB, "cpu", 64)
    monkeypatch.setitem(head_module.BLOCK_ROWS, "cpu", 16)
    rng = np.random.default_rng(12)
    rows = [*same_prompt(rng, 33, [5, 1, 20, 0]), make_row(rng, 20, 7)]
    rows = [row._replace(candidates=rng.integers(0, VOCAB, (len(row.ids) - row.start, 9))) for row in rows]
    for row in rows:
        row.candidates[:, 0] = row.candidates[:, 1]
        row.candidates[:, 2] = row.ids[row.start :]
        row.candidates[:, 3:7] = [0, 63, 64, VOCAB - 1]
    rows.append(rows[2]._replace(candidates=rows[2].candidates[:, ::-1]))  # the same ids, other candidates
    scorer = load(LoadOptions(model=folder_of(name)))
    assert scorer.info.max_candidates >= 9
    for topk in (0, 4):
        for row, scores in zip(rows, scorer.score(rows, topk=topk, temperature=temperature), strict=True):
            reference = full_log_softmax(folder_of(name), row, temperature)
            want = reference.gather(1, torch.from_numpy(row.candidates.astype(np.int64))).numpy()
            np.testing.assert_allclose(scores.candidate_logprobs, want, atol=2e-5, rtol=0)
            np.testing.assert_allclose(scores.logprobs, chosen(reference, row), atol=2e-5, rtol=0)
            sampled = row.candidates == row.ids[row.start :, None]
            assert (scores.candidate_logprobs == scores.logprobs[:, None])[sampled].all()
            assert (scores.candidate_logprobs <= 0).all() and (scores.topk_ids is None) == (topk == 0)


@pytest.mark.parametrize("prompt_length", [1, 31, 32, 33])
def test_sharing_a_prompt_changes_nothing(folder_of, prompt_length):
    """Prompt lengths around a block, responses of 0, 1 and more tokens, and a row that comes twice."""
    rows = same_prompt(np.random.default_rng(prompt_length), prompt_length, [0, 1, 2, 7, 40, 40])
    rows.append(rows[3])
    scorer = load(LoadOptions(model=folder_of("llama")))
    shared = scorer.score(rows)
    scorer.share = False
    alone = [scorer.score([row])[0] for row in rows]
    check_equal(shared, alone)
    assert [len(scores.logprobs) for scores in shared] == [0, 1, 2, 7, 40, 40, 7]


def test_a_row_does_not_depend_on_its_batch(folder_of):
    """Permuted, alone, and among strangers: the same within 1e-5."""
    rng = np.random.default_rng(3)
    rows = [row for length in (4, 9, 30) for row in same_prompt(rng, length, [3, 11, 1, 25])]
    rows += [make_row(rng, 50, 13), make_row(rng, 1, 1)]
    scorer = load(LoadOptions(model=folder_of("qwen3")))
    together = scorer.score(rows)
    order = rng.permutation(len(rows))
    permuted = scorer.score([rows[i] for i in order])
    check_equal([together[i] for i in order], permuted)
    check_equal(together, [scorer.score([row])[0] for row in rows])
    small = load(LoadOptions(model=folder_of("qwen3"), max_tokens=32))
    check_equal(together, small.score(rows))


def test_a_sampled_id_in_the_top_k_has_one_value(folder_of):
    """The same float in both places, also where the head computes in bfloat16."""
    rows = same_prompt(np.random.default_rng(4), 5, [30, 30])
    for dtype in ("float32", "bfloat16"):
        scorer = load(LoadOptions(model=folder_of("llama"), dtype=dtype))
        for row, scores in zip(rows, scorer.score(rows, topk=VOCAB), strict=True):
            found = scores.topk_ids == row.ids[row.start :, None]
            assert np.array_equal(scores.topk_logprobs[found], scores.logprobs)
            np.testing.assert_allclose(np.exp(scores.topk_logprobs.astype(float)).sum(axis=1), 1, atol=1e-3)


def test_the_teacher_as_its_own_student_has_no_kl_and_a_shift_shows(folder_of):
    """Golden test of the alignment: sample from the model, score the very sequence, compare token by token."""
    folder = folder_of("llama")
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids, sampled = [7, 8, 9], []
    with torch.no_grad():
        for _ in range(24):
            log_softmax = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], dim=-1)
            ids.append(int(torch.multinomial(log_softmax.exp(), 1)))
            sampled.append(float(log_softmax[ids[-1]]))
    student = np.array(sampled)
    teacher = load(LoadOptions(model=folder)).score([Row(np.array(ids, np.int32), 3)])[0].logprobs
    assert np.abs(student - teacher).max() < 1e-4
    assert np.abs(student[1:] - teacher[:-1]).mean() > 0.5


def test_bfloat16_stays_near_float32(folder_of):
    """Rounding costs hundredths of a nat on average here, and never a sign."""
    rows = same_prompt(np.random.default_rng(6), 20, [30, 30])
    exact = load(LoadOptions(model=folder_of("llama"))).score(rows)
    scorer = load(LoadOptions(model=folder_of("llama"), dtype="bfloat16"))
    rounded = scorer.score(rows)
    assert scorer.info.dtype == "bfloat16" and scorer.share
    differences = np.concatenate([a.logprobs - b.logprobs for a, b in zip(exact, rounded, strict=True)])
    assert 0 < np.abs(differences).mean() < 0.15
    assert all((scores.logprobs <= 0).all() for scores in rounded)


def test_weights_that_are_not_a_number_fail_their_rows_and_no_others(folder_of, tmp_path):
    """A NaN in the embedding of id 7 spoils the rows that hold it before a scored id."""
    transformers.AutoModelForCausalLM.from_pretrained(folder_of("llama")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    good, bad = Row(np.array([1, 2, 3, 4], np.int32), 1), Row(np.array([1, 2, 7, 4, 5], np.int32), 2)
    last = Row(np.array([1, 2, 7], np.int32), 2)
    results = load(LoadOptions(model=str(tmp_path))).score([bad, good, last])
    assert isinstance(results[0], RowError) and (results[0].row, results[0].code) == (0, "non_finite")
    assert "2 of 3" in results[0].message and "position 3" in results[0].message
    assert np.isfinite(results[1].logprobs).all() and np.isfinite(results[2].logprobs).all()


def fail_when(scorer, monkeypatch, too_large):
    """Let the model's body report that memory is out whenever too_large(B, length) holds; returns the shapes seen."""
    body, seen = scorer._body, []

    def limited(*, input_ids, **kwargs):
        seen.append(tuple(input_ids.shape))
        if too_large(*input_ids.shape):
            raise torch.OutOfMemoryError("simulated")
        return body(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(scorer, "_body", limited)
    return seen


@pytest.mark.parametrize("share", [True, False])
def test_out_of_memory_halves_the_batch(folder_of, monkeypatch, share):
    """More than two rows in a forward fail; the values are those of an unlimited run."""
    rng = np.random.default_rng(8)
    rows = [row for _ in range(4) for row in same_prompt(rng, 12, [9, 9, 9])]
    scorer = load(LoadOptions(model=folder_of("llama")))
    scorer.share = share
    expected = scorer.score(rows)
    seen = fail_when(scorer, monkeypatch, lambda batch, length: batch > 2)
    check_equal(scorer.score(rows), expected)
    assert max(batch for batch, _ in seen) > 2 and (1, 12) not in seen


def test_a_row_that_does_not_fit_alone_becomes_an_error(folder_of, monkeypatch):
    """Responses, prompts and plain rows that are too long fail alone, and name their index."""
    rng = np.random.default_rng(9)
    rows = [*same_prompt(rng, 10, [60, 5, 5]), *same_prompt(rng, 70, [2, 3]), make_row(rng, 4, 90), make_row(rng, 4, 9)]
    scorer = load(LoadOptions(model=folder_of("llama")))
    expected = scorer.score(rows)
    fail_when(scorer, monkeypatch, lambda batch, length: length > 50)
    results = scorer.score(rows)
    failed = [result for result in results if isinstance(result, RowError)]
    assert [(error.row, error.code) for error in failed] == [(0, "oom"), (3, "oom"), (4, "oom"), (5, "oom")]
    check_equal([results[i] for i in (1, 2, 6)], [expected[i] for i in (1, 2, 6)])


def test_another_error_is_not_taken_for_memory(folder_of, monkeypatch):
    """A bug must show itself, not end as a row error."""
    scorer = load(LoadOptions(model=folder_of("llama")))

    def broken(**kwargs):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(scorer, "_body", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        scorer.score([make_row(np.random.default_rng(0), 2, 2)])


def test_a_head_that_is_not_known_is_refused(folder_of, monkeypatch):
    """A model that changes its logits in its own way is named, with the difference."""
    original = transformers.LlamaForCausalLM.forward

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with pytest.raises(ConfigError, match="LlamaForCausalLM changes its logits"):
        load(LoadOptions(model=folder_of("llama")))


def test_a_cache_that_forgets_turns_sharing_off(folder_of, monkeypatch, caplog):
    """The probe at load sees that shared rows differ; one line says so, and the values stay right."""
    folder = folder_of("llama")
    row = same_prompt(np.random.default_rng(10), 12, [5, 5])
    expected = load(LoadOptions(model=folder)).score(row)
    monkeypatch.setattr(hf.PromptCache, "get_seq_length", lambda self, layer_idx=0: 0)
    scorer = load(LoadOptions(model=folder))
    assert not scorer.share and "prompts are not shared" in caplog.text
    check_equal(scorer.score(row), expected)


def test_a_recurrent_model_is_scored_without_sharing(tmp_path, caplog):
    """Its state is no list of keys."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, initializer_range=0.2)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    scorer = load(LoadOptions(model=str(tmp_path), max_length=64))
    assert not scorer.share and "MambaForCausalLM" not in caplog.text and "rows cannot share" in caplog.text
    rows = same_prompt(np.random.default_rng(11), 9, [4, 12])
    for row, scores in zip(rows, scorer.score(rows), strict=True):
        np.testing.assert_allclose(scores.logprobs, chosen(full_log_softmax(str(tmp_path), row), row), atol=2e-5)


def test_info_describes_the_model(folder_of):
    """Vocabulary from the head, length and EOS from the config, top-k capped to the vocabulary."""
    info = load(LoadOptions(model=folder_of("llama"), max_topk=1000)).info
    assert (info.vocab_size, info.max_length, info.max_topk, info.eos_ids) == (VOCAB, 256, VOCAB, [2])
    assert (info.dtype, info.backend, info.tokenizer, info.temperature) == ("float32", "hf", "", True)
    assert load(LoadOptions(model=folder_of("qwen2"), max_length=40)).info.max_length == 40
    assert load(LoadOptions(model=folder_of("llama"), dtype="bfloat16")).info.model != info.model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "./nowhere"}, "no such folder"),
        ({"model": "/nowhere/at/all"}, "no such folder"),
        ({"max_length": 257}, "max_length 257"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"device": "cuda:99"}, "device 'cuda:99'"),
    ],
)
def test_a_setting_that_cannot_work_is_named(folder_of, options, said):
    """One sentence, and no traceback of somebody else's library."""
    with pytest.raises(ConfigError) as error:
        load(LoadOptions(**{"model": folder_of("llama"), **options}))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_folder_with_missing_weights_is_refused(folder_of, tmp_path):
    """transformers would fill the output layer with random numbers and go on."""
    transformers.AutoModelForCausalLM.from_pretrained(folder_of("llama")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        load(LoadOptions(model=str(tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(LoadOptions(model=str(tmp_path)))


def test_head_by_hand(monkeypatch):
    """Logits 1, 2, 4 by hand: log-softmax of the middle one is -2.16984602; at T = 2 it is -1.46436882."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[1.0], [2.0], [4.0]])
    for tile in (1, 2, 3, 8):
        monkeypatch.setitem(head_module.BLOCK_VOCAB, "cpu", tile)
        plain = head_logprobs(Head(weight, None), hidden, torch.tensor([1]), topk=2)
        assert float(plain.logprobs) == pytest.approx(-2.16984602, abs=1e-6)
        assert plain.topk_ids.tolist() == [[2, 1]]
        assert plain.topk_logprobs[0].tolist() == pytest.approx([-0.16984602, -2.16984602], abs=1e-6)
        cooler = head_logprobs(Head(weight, None), hidden, torch.tensor([1]), temperature=2.0)
        assert float(cooler.logprobs) == pytest.approx(-1.46436882, abs=1e-6)
        capped = head_logprobs(Head(weight, None, scale=0.5, softcap=2.0), hidden, torch.tensor([1]))
        logits = [2 * math.tanh(x / 2) for x in (0.5, 1.0, 2.0)]
        expected = logits[1] - math.log(sum(map(math.exp, logits)))
        assert float(capped.logprobs) == pytest.approx(expected, abs=1e-6)


def test_a_certain_token_keeps_its_digits():
    """At a margin of 40 nats the log-prob is -exp(-40), which subtracting a log-sum-exp would round to 0 or above."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[60.0], [20.0]])
    scores = head_logprobs(Head(weight, None), hidden, torch.tensor([0]))
    assert float(scores.logprobs) == pytest.approx(-math.exp(-40), rel=1e-4)


def test_plan_shares_where_it_pays():
    """Two rows behind 100 ids save 100 tokens: more than a forward of 64, less than one of 128."""
    rows = same_prompt(np.random.default_rng(12), 100, [10, 12])
    shared = make_plan(rows, max_tokens=512, call_tokens=64)
    assert shared.plain == [] and shared.shared[0].prompts == [0] and shared.shared[0].batches == [[1, 0]]
    assert make_plan(rows, max_tokens=512, call_tokens=128).plain == [[1, 0]]
    assert make_plan(rows, max_tokens=512, call_tokens=64, share=False).shared == []


def test_plan_puts_prompts_of_one_length_into_one_forward():
    """Sixteen groups with prompts of 12 ids pay one forward, not sixteen; equal rows are scored once."""
    rng = np.random.default_rng(13)
    rows = [row for _ in range(16) for row in same_prompt(rng, 12, [7] * 4)]
    rows.append(rows[5])
    plan = make_plan(rows, max_tokens=512, call_tokens=64)
    assert len(plan.shared) == 1 and len(plan.shared[0].prompts) == 16 and plan.plain == []
    assert plan.same_as == [*range(64), 5]
    assert sorted(i for batch in plan.shared[0].batches for i in batch) == list(range(64))


def test_pack_pads_only_where_that_is_cheaper_than_a_forward():
    """Longest first; a batch ends at the token budget or when the padding would cost more than starting over."""
    assert pack([10, 100, 98, 10], max_tokens=400, call_tokens=64) == [[1, 2], [0, 3]]
    assert pack([100, 100, 100], max_tokens=200, call_tokens=64) == [[0, 1], [2]]
    assert pack([1000], max_tokens=200, call_tokens=64) == [[0]]
    assert pack([], max_tokens=200, call_tokens=64) == []
