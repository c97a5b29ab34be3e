"""Rows that are sent to the teacher while others are generated: real servers, verl's own padding, the same values."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import ServerProcess, wait_until

import opd.cpu  # noqa: F401  before verl
from opd.client import TeacherClient
from opd.config import TeacherConfig, manager_class
from opd.config_checks import check
from opd.errors import ConfigError
from opd.homes import home_of
from opd.overlap import PrefetchThread
from opd.reference import TeacherReference
from opd.routing import Router
from opd.scoring.oracle import oracle_logprobs
from opd.teacher_prompt import TeacherPrompt
from opd.teachers import Teachers

Start = Callable[..., ServerProcess]


def some_rows(num_prompts: int, per_prompt: int = 2) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 900, 8).tolist() for _ in range(num_prompts)]
    return [(prompt, rng.integers(10, 900, 6).tolist()) for prompt in prompts for _ in range(per_prompt)]


def whole(rows: list[tuple[list[int], list[int]]]) -> tuple[list[np.ndarray], list[int]]:
    return [np.array([*prompt, *response], np.int32) for prompt, response in rows], [len(p) for p, _ in rows]


def one(addresses: list[str] | str) -> Teachers:
    return Teachers(TeacherClient(addresses))


def num_scored(client: TeacherClient, server: ServerProcess) -> int:
    """Rows that the server's worker has computed so far."""
    counters = client.info(server.address).counters
    assert counters is not None
    return counters.rows


# where a row goes


def test_only_the_prompts_of_a_replica_that_goes_down_move() -> None:
    addresses = [f"tcp://teacher-{number}:5555" for number in range(8)]
    prompts = [number.to_bytes(16, "little") for number in range(800)]
    homes = [home_of(prompt, addresses) for prompt in prompts]
    assert [home_of(prompt, addresses[::-1]) for prompt in prompts] == homes
    assert all(60 < homes.count(address) < 140 for address in addresses)
    left = addresses[:3] + addresses[4:]
    assert all(home_of(prompt, left) == home for prompt, home in zip(prompts, homes, strict=True) if home in left)


# the thread


def test_a_finished_row_is_scored_once_and_found_by_another_client(teacher_server: Start) -> None:
    servers = [teacher_server(), teacher_server()]
    addresses = [server.address for server in servers]
    rows = some_rows(8)
    with TeacherClient(addresses) as client, PrefetchThread(one(addresses), topk=2, temperature=0.5) as thread:
        client.wait_until_ready(30)
        for prompt, response in rows:
            thread.add(prompt, response)
        thread.add([1, 2], [])  # nothing to score
        wait_until(lambda: thread.taken == 16, 20)
        wait_until(lambda: sum(num_scored(client, server) for server in servers) == 16, 20)
        ids, starts = whole(rows)
        scores = client.score(ids[::-1], starts, topk=2, temperature=0.5, prefetched=True)
        for row, values in zip(ids[::-1], scores.logprobs, strict=True):
            np.testing.assert_array_equal(values, oracle_logprobs(row, 8, temperature=0.5))
        assert scores.stats.cached == 16
        assert sum(num_scored(client, server) for server in servers) == 16
        servers[0].popen.kill()
        servers[0].wait()
        kept = num_scored(client, servers[1])
        scores = client.score(ids, starts, topk=2, temperature=0.5, prefetched=True)  # the others are scored again
        assert scores.stats.cached == kept


def test_the_time_that_a_row_took_is_told_when_it_is_found(teacher_server: Start) -> None:
    server = teacher_server(ms_per_batch=200)
    rows = some_rows(4, 1)
    with TeacherClient(server.address) as client:
        client.wait_until_ready(30)
        assert client.prefetch(*whole(rows)) == 4
        wait_until(lambda: num_scored(client, server) == 4, 20)
        ids, starts = whole(rows)
        half = client.score(ids[:2], starts[:2], prefetched=True).stats
        both = client.score(ids, starts, prefetched=True).stats
    assert both.cached == 4 and both.seconds < 0.2
    assert 200 <= both.score_ms < 300
    assert half.score_ms == pytest.approx(both.score_ms / 2)  # all rows are of one length


def test_a_teacher_that_takes_nothing_is_complained_about_once(teacher_server: Start, caplog: Any) -> None:
    server = teacher_server(args=["--cache-mb", "0"])
    with caplog.at_level(logging.WARNING, "opd.overlap"), PrefetchThread(one(server.address)) as thread:
        for row in some_rows(3, 1):
            thread.add(*row)
            wait_until(lambda: not thread._rows, 20)
            time.sleep(0.1)
        assert thread._thread.is_alive()
    assert thread.taken == 0
    assert ["took 0 of 1 rows" in record.getMessage() for record in caplog.records] == [True]


def test_a_teacher_that_is_not_there_delays_nobody() -> None:
    before = threading.active_count()
    began = time.monotonic()
    thread = PrefetchThread(one("tcp://127.0.0.1:9"))
    for row in some_rows(50):
        thread.add(*row)
    assert time.monotonic() - began < 0.5
    wait_until(lambda: not thread._rows, 5)  # it asks now, and gives up after 2 s
    thread.close()
    assert time.monotonic() - began < 4.0
    assert not thread._thread.is_alive() and threading.active_count() == before
    thread.add([1], [2])  # a rollout that goes on does not mind
    assert not thread._rows


# verl's hook


def worker_of(cls: Any, thread: PrefetchThread) -> Any:
    """A worker with what postprocessing needs: verl builds the rest out of a whole model folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0} | {str(number): number for number in range(1, 1000)}
    worker = cls.__new__(cls)
    worker.prefetch_thread = thread
    worker.rollout_config = SimpleNamespace(prompt_length=6, response_length=8)
    worker.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "<eos>")), eos_token="<eos>", pad_token="<eos>"
    )
    worker.processor = worker.reward_loop_worker_handles = None
    worker.mm_processor_kwargs, worker.distillation_enabled = {}, False
    return worker


def test_what_verl_pads_is_what_was_sent_and_validations_are_not(teacher_server: Start) -> None:
    """A short row, a full one with a tool's tokens in it, and one that ends with the token that is also the padding."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    from opd.agent_loop import OverlapWorker

    rows = [
        ([5, 6], [7, 8, 0], [1, 1, 1]),
        ([11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26, 27, 28], [1, 1, 0, 0, 0, 1, 1, 1]),
        ([0, 9], [0], [1]),
    ]

    async def finish(worker: Any, validate: bool) -> list:
        outputs = [
            AgentLoopOutput(prompt_ids=p, response_ids=r, response_mask=mask, metrics=AgentLoopMetrics())
            for p, r, mask in rows
        ]
        return [await worker._agent_loop_postprocess(output, validate, raw_prompt=[]) for output in outputs]

    server = teacher_server()
    with TeacherClient(server.address) as client, PrefetchThread(one(server.address), temperature=0.5) as thread:
        reference = TeacherReference(client, TeacherConfig(address=server.address, overlap=True), temperature=0.5)
        worker = worker_of(OverlapWorker, thread)
        asyncio.run(finish(worker, validate=True))
        batch = worker._postprocess(asyncio.run(finish(worker, validate=False))).batch
        wait_until(lambda: num_scored(client, server) == 3, 20)
        assert thread.taken == 3
        values = reference.values(
            input_ids_BS=batch["input_ids"].numpy(),
            attention_mask_BS=batch["attention_mask"].numpy(),
            response_mask_BR=batch["response_mask"].numpy(),
            old_log_probs_BR=np.full((3, 8), -1.0, np.float32),
            step=1,
        )
        assert values.metrics["opd/cached_rows"] == 3
        assert 0 < values.metrics["opd/teacher_seconds_spent"] < 1
        assert num_scored(client, server) == 3
    want = oracle_logprobs(np.array(rows[1][0] + rows[1][1], np.int32), 6, temperature=0.5)
    np.testing.assert_array_equal(values.columns["ref_log_prob"][1], want)


def test_a_rows_own_teachers_and_prompt_are_asked_ahead_as_they_are_asked_later(teacher_server: Start) -> None:
    """One of two teachers, or both, and a system prompt: each question is answered once, for the agent loop."""
    from test_teacher_prompt import PROMPT, QUESTION, make_tokenizer
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    from opd.agent_loop import OverlapWorker

    servers = {"math": teacher_server(vocab=12, seed=1), "code": teacher_server(vocab=12, seed=2)}
    routes = {"sums": {"math": 1.0}, "programs": {"code": 1.0}, "both": {"math": 0.75, "code": 0.25}}

    def teachers() -> Teachers:
        clients = {name: TeacherClient(server.address) for name, server in servers.items()}
        prompts = TeacherPrompt(make_tokenizer(), system_prompt="be brief")
        return Teachers(Router(clients, routes, route_by="data_source"), prompts)

    responses = {"sums": [7, 11], "programs": [6, 4, 7], "both": [5, 11]}
    data = {"data_source": list(responses), "raw_prompt": [QUESTION] * 3}

    async def finish(worker: Any) -> list:
        return [
            await worker._agent_loop_postprocess(
                AgentLoopOutput(
                    prompt_ids=PROMPT, response_ids=ids, response_mask=[1] * len(ids), metrics=AgentLoopMetrics()
                ),
                False,
                raw_prompt=QUESTION,
                data_source=kind,
            )
            for kind, ids in responses.items()
        ]

    with teachers() as asker, PrefetchThread(teachers()) as thread:
        config = TeacherConfig(overlap=True)
        reference = TeacherReference(asker.client, config, prompts=asker.prompts)
        worker = worker_of(OverlapWorker, thread)
        batch = worker._postprocess(asyncio.run(finish(worker))).batch
        wait_until(lambda: thread.taken == 4, 20)
        wait_until(lambda: sum(num_scored(asker.clients[name], servers[name]) for name in servers) == 4, 20)
        arguments = {
            "input_ids_BS": batch["input_ids"].numpy(),
            "attention_mask_BS": batch["attention_mask"].numpy(),
            "response_mask_BR": batch["response_mask"].numpy(),
            "old_log_probs_BR": np.full((3, 8), -1.0, np.float32),
            "step": 1,
        }
        values = reference.values(**arguments, data_columns=data)
        assert values.metrics["opd/cached_rows"] == 4
        assert sum(num_scored(asker.clients[name], servers[name]) for name in servers) == 4
    seen = [1, 9, 10, *PROMPT]  # system be brief, and the student's
    math, code = (oracle_logprobs([*seen, 5, 11], 8, seed=seed, vocab=12) for seed in (1, 2))
    np.testing.assert_allclose(values.columns["ref_log_prob"][2, :2], 0.75 * math + 0.25 * code, atol=1e-6)
    with PrefetchThread(teachers()) as thread:  # a row that no teacher belongs to ends the run, but not here
        thread.add(PROMPT, [7], {"data_source": "poems", "raw_prompt": QUESTION})
        thread.add(PROMPT, [7], {"data_source": "sums"})
        wait_until(lambda: thread._complained, 20)
        assert thread._thread.is_alive() and thread.taken == 0


def test_a_configurations_rollout_asks_what_its_trainer_will_ask(start_teacher: Start, tmp_path: Path) -> None:
    """With a temperature and a top-k, which make another question of the same ids."""
    from test_config import composed
    from test_teacher_prompt import PROMPT, make_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from opd.agent_loop import prefetch_thread_of
    from opd.task_runner import shake_hands

    make_tokenizer().save_pretrained(tmp_path)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=12, **shape)).save_pretrained(tmp_path)
    server = start_teacher("--backend", "hf", "--model", str(tmp_path), "--device", "cpu", "--dtype", "float32")
    config = composed(
        f"actor_rollout_ref.model.path={tmp_path}",
        f"teacher.address={server.wait_ready()}",
        "actor_rollout_ref.rollout.temperature=0.5",
        *("teacher.loss=jsd_topk", "teacher.topk=3", "teacher.overlap=true"),
    )
    reference = shake_hands(config)
    with reference.teachers, prefetch_thread_of(config) as thread:
        thread.add(PROMPT, [7, 4])
        client = reference.teachers.clients["default"]
        wait_until(lambda: num_scored(client, server) == 1, 20)
        values = reference.values(
            input_ids_BS=np.array([[*PROMPT, 7, 4]]),
            attention_mask_BS=np.ones((1, len(PROMPT) + 2), int),
            response_mask_BR=np.ones((1, 2), int),
            old_log_probs_BR=np.full((1, 2), -1.0, np.float32),
            step=1,
        )
    assert values.metrics["opd/cached_rows"] == 1


def test_each_output_of_a_v1_agent_loop_is_handed_over_and_verls_worker_goes_on() -> None:
    from opd.agent_loop_v1 import OverlapManagerTQ, OverlapWorkerTQ, Worker

    worker = OverlapWorkerTQ.__new__(OverlapWorkerTQ)
    handed: list[tuple] = []
    worker.prefetch_thread = SimpleNamespace(add=lambda *row: handed.append(row))  # type: ignore[assignment]
    outputs = [SimpleNamespace(prompt_ids=[1], response_ids=[2]), SimpleNamespace(prompt_ids=[3, 4], response_ids=[5])]
    for validate in (True, False):
        with pytest.raises(KeyError, match="uid"):  # the first thing that verl's own method looks for
            asyncio.run(worker._agent_loop_postprocess(outputs, validate, data_source="sums"))
    assert handed == [([1], [2], {"data_source": "sums"}), ([3, 4], [5], {"data_source": "sums"})]
    assert OverlapManagerTQ.__mro__[1].__name__ == "AgentLoopManagerTQ"
    assert {"_run_prompt", "generate_sequences"} <= set(vars(Worker))


def test_verl_calls_the_hook_and_keeps_the_ids() -> None:
    """If this fails, see where a worker of the installed verl has a finished response, and what it does to its ids."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopOutput, AgentLoopWorker

    from opd.agent_loop_v1 import Worker

    called = 'await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)'
    assert called in inspect.getsource(AgentLoopWorker._run_agent_loop)
    padded = inspect.getsource(AgentLoopWorker._agent_loop_postprocess)
    for name in ("prompt_ids", "response_ids", "response_mask"):
        assert f"self._pad_token_ids(\n            output.{name}," in padded
    assert "self._run_agent_loop(" in inspect.getsource(Worker._run_prompt)
    stored = inspect.getsource(AgentLoopOutput.as_dict)
    for field, name in (("prompts", "prompt_ids"), ("responses", "response_ids")):
        assert f'output["{field}"] = torch.tensor(output.pop("{name}"), dtype=torch.int64)' in stored
    assert "agent_loop_workers_class.options(" in inspect.getsource(AgentLoopManager._init_agent_loop_workers)


# configuration


def test_the_manager_follows_the_trainer_and_an_unknown_one_is_refused() -> None:
    from test_config import composed
    from verl.utils.import_utils import load_class_from_fqn

    on, off = "teacher.overlap=true", "teacher.overlap=false"
    key = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    cases = [
        (composed(on), "opd.cpu.agent_loop.CpuOverlapManager"),
        (composed(), "opd.cpu.agent_loop.CpuAgentLoopManager"),  # shares its cores with the teacher
        (composed(cpu=False), "opd.agent_loop.OverlapManager"),
        (composed(off, cpu=False), None),
        (composed(on, trainer="sync"), "opd.agent_loop_v1.OverlapManagerTQ"),
    ]
    for config, name in cases:
        assert manager_class(config) == name
        assert name is None or hasattr(load_class_from_fqn(name, "AgentLoopManager"), "create")
    with pytest.raises(ConfigError, match=r"my\.Manager does not send finished rows"):
        check(composed(on, f"+{key}=my.Manager", cpu=False))
