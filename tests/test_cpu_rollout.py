"""The CPU rollout's decode loop and its server, without a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verl.workers.config import RolloutConfig

from opd.cpu.generate import Request, generate
from opd.cpu.rollout import CpuReplica, _buckets
from opd.cpu.server import GenerationServer

VOCAB = 19
EOS = 2
PROMPTS = [[1, 5, 6, 7], [1, 9], [1, 5, 6, 7], [1, 10, 11, 12, 13, 14, 3]]


def _config(**kwargs) -> LlamaConfig:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, num_key_value_heads=2, **sizes, **kwargs)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # far from uniform, so that temperature, top-p and top-k have something to do
    return model


def _requests(**kwargs) -> list[Request]:
    return [Request(prompt, max_tokens=12, **{"seed": (7, 0, row), **kwargs}) for row, prompt in enumerate(PROMPTS)]


@torch.inference_mode()
def _teacher_forced(model, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1).tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_forward_over_the_finished_row(model, temperature):
    """The log-prob that comes with a sampled token is the model's, at the sampling temperature."""
    requests = _requests(temperature=temperature)
    for request, completion in zip(requests, generate(model, requests, {EOS}), strict=True):
        expected = _teacher_forced(model, list(request.prompt_ids), completion.token_ids, temperature)
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def test_greedy_equals_transformers_generate(model):
    """Temperature 0 is what transformers decodes greedily, row by row, and its log-probs are those at temperature 1."""
    for request, completion in zip(
        _requests(temperature=0.0), generate(model, _requests(temperature=0.0), {EOS}), strict=True
    ):
        reference = model.generate(
            torch.tensor([request.prompt_ids]), max_new_tokens=12, do_sample=False, eos_token_id=EOS, pad_token_id=0
        )[0, len(request.prompt_ids) :].tolist()
        assert completion.token_ids == reference
        assert completion.log_probs == pytest.approx(
            _teacher_forced(model, list(request.prompt_ids), reference, 1.0), abs=1e-4
        )


def test_a_row_does_not_depend_on_its_batch(model):
    """Alone, among others, in another order: the same request samples the same tokens."""
    requests = _requests()
    together = [c.token_ids for c in generate(model, requests, {EOS})]
    alone = [generate(model, [r], {EOS})[0].token_ids for r in requests]
    reversed_ = [c.token_ids for c in generate(model, requests[::-1], {EOS})][::-1]
    assert together == alone == reversed_
    assert together[0] != together[2]  # the same prompt, another seed


def test_parameters_hold_per_request_in_one_batch(model):
    """A batch of unlike requests gives each row what it gets alone."""
    prompt = PROMPTS[0]
    unlike = [
        Request(prompt, max_tokens=10, temperature=0.0),
        Request(prompt, max_tokens=3, seed=(1,)),
        Request(prompt, max_tokens=10, top_k=1, seed=(2,)),
        Request(prompt, max_tokens=10, top_p=1e-6, seed=(3,)),
        Request(prompt, max_tokens=10, temperature=0.5, top_p=0.9, top_k=5, seed=(4,)),
    ]
    together = generate(model, unlike, ())
    assert [len(c.token_ids) for c in together] == [10, 3, 10, 10, 10]
    assert together[2].token_ids == together[0].token_ids  # top_k=1 leaves the greedy token only
    assert together[3].token_ids == together[0].token_ids  # so does a nucleus of almost no mass
    assert [c.token_ids for c in together] == [generate(model, [r], ())[0].token_ids for r in unlike]


def test_every_eos_id_stops_a_row_and_is_kept(model):
    """A row ends with the first of several EOS ids; the others go on."""
    free = [c.token_ids for c in generate(model, _requests(), ())]
    eos_ids = {free[0][4], free[1][2]}
    for before, completion in zip(free, generate(model, _requests(), eos_ids), strict=True):
        first = next((i for i, token in enumerate(before) if token in eos_ids), len(before) - 1)
        assert completion.token_ids == before[: first + 1]
        assert completion.stopped == (before[first] in eos_ids)


def test_samples_follow_the_model_s_distribution(model):
    """4000 first tokens have the frequencies that softmax, top-k and top-p give."""
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    plain = logits.softmax(-1).numpy()
    ranked = np.argsort(-plain)
    top3 = np.where(np.isin(np.arange(VOCAB), ranked[:3]), plain, 0)
    keep = int(np.searchsorted(plain[ranked].cumsum(), 0.8)) + 1  # the fewest tokens whose mass reaches 0.8
    nucleus = np.where(np.isin(np.arange(VOCAB), ranked[:keep]), plain, 0)
    for parameters, expected in [({}, plain), ({"top_k": 3}, top3), ({"top_p": 0.8}, nucleus)]:
        rows = [Request(PROMPTS[0], max_tokens=1, seed=(i,), **parameters) for i in range(4000)]
        tokens = [c.token_ids[0] for c in generate(model, rows, ())]
        frequency = np.bincount(tokens, minlength=VOCAB) / len(tokens)
        assert np.abs(frequency - expected / expected.sum()).max() < 0.03
        assert frequency[expected == 0].sum() == 0


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"prompt_ids": []}]
)
def test_a_request_that_cannot_work_is_refused(bad):
    """The message names the value."""
    with pytest.raises(ValueError, match="|".join(str(v) for v in bad.values() if v != []) or "empty"):
        Request(**{"prompt_ids": [1], "max_tokens": 1, **bad})


def test_no_requests_give_no_completions(model):
    """An empty batch is not an error."""
    assert generate(model, [], {EOS}) == []


# The server, as a plain object on an event loop.


def _server(model: LlamaForCausalLM, **config) -> GenerationServer:
    defaults = dict(name="cpu", prompt_length=8, response_length=6, tensor_model_parallel_size=1, seed=3)
    return GenerationServer(RolloutConfig(**{**defaults, **config}), model.config, {EOS})


def _arrays(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def test_server_batches_what_waits_and_reproduces(model, monkeypatch):
    """Rows sent at once run as one batch; the same rows in another order sample the same tokens; new weights do not."""
    batches: list[int] = []

    def counting(model, requests, eos_ids):
        batches.append(len(requests))
        return generate(model, requests, eos_ids)

    monkeypatch.setattr("opd.cpu.server.generate", counting)

    async def step(server, order, global_steps):
        await server.load_weights(_arrays(model), global_steps=global_steps, is_last=True)
        outputs = await asyncio.gather(*[server.generate(PROMPTS[0], dict(PARAMS), f"det-{row}") for row in order])
        return dict(zip(order, outputs, strict=True))

    async def main():
        server = _server(model)
        first = await step(server, list(range(16)), global_steps=0)
        again = await step(server, list(range(15, -1, -1)), global_steps=0)
        later = await step(server, list(range(16)), global_steps=1)
        return first, again, later

    first, again, later = asyncio.run(main())
    assert batches == [16, 16, 16]
    assert {r: o.token_ids for r, o in first.items()} == {r: o.token_ids for r, o in again.items()}
    assert {r: o.token_ids for r, o in first.items()} != {r: o.token_ids for r, o in later.items()}
    assert len({tuple(o.token_ids) for o in first.values()}) > 8
    for output in first.values():
        assert output.log_probs == pytest.approx(_teacher_forced(model, PROMPTS[0], output.token_ids, 1.0), abs=1e-4)
        assert output.extra_fields["global_steps"] == 0
        assert len(output.token_ids) <= 6


def test_one_call_for_many_rows_gives_what_many_calls_give(model):
    """The agent loops' client sends the rows that wait in one call."""

    async def main(many: bool):
        server = _server(model)
        await server.load_weights(_arrays(model), global_steps=0, is_last=True)
        rows = [
            {"prompt_ids": p, "sampling_params": dict(PARAMS), "request_id": f"det-{i}"} for i, p in enumerate(PROMPTS)
        ]
        if many:
            return await server.generate_many(rows)
        return await asyncio.gather(*[server.generate(**row) for row in rows])

    assert [o.token_ids for o in asyncio.run(main(True))] == [o.token_ids for o in asyncio.run(main(False))]


def test_no_batch_is_larger_than_max_num_seqs(model, monkeypatch):
    """The rest waits for its turn."""
    sizes: list[int] = []

    def counting(model, requests, eos_ids):
        sizes.append(len(requests))
        return generate(model, requests, eos_ids)

    monkeypatch.setattr("opd.cpu.server.generate", counting)

    async def main():
        server = _server(model, max_num_seqs=4)
        await server.load_weights(_arrays(model), global_steps=0, is_last=True)
        await asyncio.gather(*[server.generate([1, 5], dict(PARAMS), f"det-{i}") for i in range(10)])

    asyncio.run(main())
    assert sizes == [4, 4, 2]


def test_a_greedy_validation_does_not_move_the_training_samples(model):
    """Greedy requests draw nothing, so they leave the counters alone."""

    async def main(validate: bool):
        server = _server(model)
        await server.load_weights(_arrays(model), global_steps=0, is_last=True)
        if validate:
            output = await server.generate(PROMPTS[0], {**PARAMS, "temperature": 0, "logprobs": False}, "det-0")
            assert output.log_probs is None
        return (await server.generate(PROMPTS[0], dict(PARAMS), "det-0")).token_ids

    assert asyncio.run(main(True)) == asyncio.run(main(False))


def test_server_refuses_to_generate_before_it_has_every_weight(model):
    """No weights, or a sync that leaves some unset, is an error, not a random model."""

    async def main():
        server = _server(model)
        with pytest.raises(RuntimeError, match="before the first weight sync"):
            await server.generate([1], dict(PARAMS), "det-0")
        arrays = _arrays(model)
        del arrays["model.norm.weight"]
        with pytest.raises(RuntimeError, match=r"model\.norm\.weight"):
            await server.load_weights(arrays, global_steps=0, is_last=True)
        with pytest.raises(KeyError, match=r"no\.such\.weight"):
            await server.load_weights({"no.such.weight": np.zeros(1)}, global_steps=0, is_last=True)

    asyncio.run(main())


def test_weights_arrive_in_buckets_and_tied_ones_once():
    """Any bucket size fills the model; an output layer tied to the embeddings needs no array of its own."""
    torch.manual_seed(1)
    source = LlamaForCausalLM(_config(tie_word_embeddings=True)).eval()
    named = dict(source.named_parameters())
    assert "lm_head.weight" not in named

    async def main():
        server = _server(source)
        for arrays, is_last in _buckets(named.items(), bucket_bytes=1):
            assert len(arrays) == 1
            await server.load_weights(arrays, global_steps=0, is_last=is_last)
        return (await server.generate([1, 5], {**PARAMS, "temperature": 0}, "x")).token_ids

    assert asyncio.run(main()) == generate(source, [Request([1, 5], max_tokens=6, temperature=0.0)], {EOS})[0].token_ids


def test_a_failing_batch_fails_every_request_of_it_and_no_other(model, monkeypatch):
    """Nobody waits for ever, and the server lives on."""

    def broken(model, requests, eos_ids):
        raise MemoryError("no room")

    async def main():
        server = _server(model)
        await server.load_weights(_arrays(model), global_steps=0, is_last=True)
        with monkeypatch.context() as patch:
            patch.setattr("opd.cpu.server.generate", broken)
            results = await asyncio.gather(
                *[server.generate([1, 5], dict(PARAMS), f"det-{i}") for i in range(3)], return_exceptions=True
            )
        assert all("MemoryError: no room" in str(r) for r in results)
        assert (await server.generate([1, 5], dict(PARAMS), "det-0")).token_ids

    asyncio.run(asyncio.wait_for(main(), timeout=30))


@pytest.mark.parametrize(
    ("params", "kwargs", "message"),
    [
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty=1.1"),
        ({"min_p": 0.1}, {}, "min_p"),
        ({}, {"image_data": ["x"]}, "image_data"),
        ({}, {"prompt_ids": [1] * 14}, "14 tokens"),
    ],
)
def test_what_the_rollout_cannot_do_is_an_error(model, params, kwargs, message):
    """Nothing that was asked for is dropped in silence."""

    async def main():
        server = _server(model)
        await server.load_weights(_arrays(model), global_steps=0, is_last=True)
        request = {"prompt_ids": [1], "sampling_params": {**PARAMS, **params}, "request_id": "det-0", **kwargs}
        await server.generate(**request)

    with pytest.raises(ValueError, match=message):
        asyncio.run(main())


def test_a_replica_of_several_processes_is_refused(model):
    """The message names the three sizes."""
    config = RolloutConfig(name="cpu", tensor_model_parallel_size=2)
    replica = CpuReplica(replica_rank=0, config=dataclasses.replace(config), model_config=None, gpus_per_node=2)
    with pytest.raises(ValueError, match="parallel size"):
        asyncio.run(replica.launch_servers())
