"""Values that are kept, asked for early, and given back after sleep: real servers, and what their workers computed."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ServerProcess, wait_until
from test_queue import make_job

from opd.client import Scores, TeacherClient
from opd.errors import RequestRefused, TeacherUnavailable
from opd.replica import Timing
from opd.scoring.oracle import oracle_candidates, oracle_logprobs, oracle_topk
from opd.serving.cache import ROW_BYTES, ResultCache, row_key
from opd.serving.job import Job, Piece, Values
from opd.serving.prefetch import Prefetcher
from opd.wire import Counters

QUICK = Timing(ping_every_s=0.05, ask_every_s=0.05, first_backoff_s=0.01, most_backoff_s=0.1)
OOM_ID = 903
Start = Callable[..., ServerProcess]
Connect = Callable[..., TeacherClient]


@pytest.fixture
def connect() -> Iterator[Connect]:
    clients: list[TeacherClient] = []

    def make(*servers: ServerProcess, **settings: object) -> TeacherClient:
        clients.append(TeacherClient([s.address for s in servers], timing=QUICK, seed=0, **settings))  # type: ignore
        clients[-1].wait_until_ready(30)
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def some_rows(num_prompts: int, per_prompt: int = 1, *, seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Prompts of 8 ids, each with some responses of 6."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(10, 900, 8) for _ in range(num_prompts)]
    rows = [np.concatenate([p, rng.integers(10, 900, 6)]).astype(np.int32) for p in prompts for _ in range(per_prompt)]
    return rows, [8] * len(rows)


def counters(client: TeacherClient, server: ServerProcess) -> Counters:
    found = client.info(server.address).counters
    assert found is not None
    return found


def assert_right(scores: Scores, rows: list[np.ndarray], starts: list[int], **settings: float) -> None:
    for row, start, values in zip(rows, starts, scores.logprobs, strict=True):
        np.testing.assert_array_equal(values, oracle_logprobs(row, start, **settings))  # type: ignore[arg-type]


# the cache alone


def values_of(job: Job) -> Values:
    return Values(np.arange(job.value_ends[-1], dtype=np.float32), None, None)


def keep(cache: ResultCache, *rows: list[int]) -> Job:
    job = make_job(list(rows))
    cache.put(Piece(job, 0, len(rows)), values_of(job), [], 1.0)
    return job


def test_what_was_not_used_for_the_longest_time_is_forgotten_and_the_bound_holds() -> None:
    """A row of three ids has two values: 8 bytes, and what finding it costs."""
    cache = ResultCache(3 * (8 + ROW_BYTES))
    jobs = [keep(cache, [1, 2, number]) for number in range(3)]
    assert (len(cache), cache.nbytes) == (3, cache.max_bytes)
    assert cache.get(jobs[0].key(0)) is not None
    keep(cache, [1, 2, 3])
    assert [cache.get(job.key(0)) is not None for job in jobs] == [True, False, True]
    assert cache.nbytes <= cache.max_bytes
    keep(cache, *([5, 6, number] for number in range(4)))  # larger than all of it: not kept, and nothing is lost for it
    assert len(cache) == 3


def test_a_row_that_is_kept_twice_outlives_its_older_values() -> None:
    cache = ResultCache(2 * (8 + ROW_BYTES))
    job = keep(cache, [1, 2, 3])
    keep(cache, [1, 2, 3])
    keep(cache, [4, 5, 6])
    assert (len(cache), cache.nbytes) == (2, cache.max_bytes)
    found = cache.get(job.key(0))
    assert found is not None and found.values.logprobs.tolist() == [0.0, 1.0]


def test_everything_that_decides_a_value_is_part_of_its_name() -> None:
    ids = np.array([1, 2, 3], np.int32)
    other = np.array([1, 2, 4], np.int32)
    names = {
        row_key("a", 0, 1.0, 1, ids),
        row_key("b", 0, 1.0, 1, ids),
        row_key("a", 1, 1.0, 1, ids),
        row_key("a", 0, 0.5, 1, ids),
        row_key("a", 0, 1.0, 2, ids),
        row_key("a", 0, 1.0, 1, other),
        row_key("a", 0, 1.0, 1, ids[:2]),
        row_key("a", 0, 1.0, 1, ids, np.array([[5, 6], [7, 8]], np.int32)),
        row_key("a", 0, 1.0, 1, ids, np.array([[5, 6], [8, 7]], np.int32)),
        row_key("a", 0, 1.0, 1, ids, np.array([[5], [6]], np.int32)),
    }
    assert len(names) == 10


def test_a_job_mixes_kept_and_computed_rows_in_the_order_of_the_request() -> None:
    cache = ResultCache(1 << 20)
    cache.put(Piece(make_job([[7, 8, 9]]), 0, 1), Values(np.array([-1, -2], np.float32), None, None), [], 3.0)
    job = make_job([[1, 2], [], [7, 8, 9], [3, 4]], bad=(1,))
    job.recall(cache.get)
    assert (job.missing, job.num_known, job.lengths.tolist()) == (2, 1, [2, 2])
    job.put(Piece(job, 0, 2), Values(np.array([-3, -4], np.float32), None, None), [])
    assert job.score_ms == 3.0  # the kept row's
    values, errors = job.answer()
    assert values.logprobs.tolist() == [-3, -1, -2, -4] and [error.row for error in errors] == [1]


def test_a_prefetch_that_is_late_known_unlucky_or_too_large_is_not_handed_out() -> None:
    prefetcher = Prefetcher(400)  # 100 for prefetches, 50 for each client
    assert prefetcher.offer(make_job([[1] * 60]), 0.0) is not None
    late, job = make_job([[1] * 10], deadline=5.0), make_job([[2] * 10, [3] * 10, [2] * 10])
    assert prefetcher.offer(late, 0.0) is None and prefetcher.offer(job, 0.0) is None
    assert prefetcher.offer(make_job([[4] * 20]), 0.0) is not None
    batch = prefetcher.next_batch(100, 6.0, lambda _, row: row == 1)
    assert batch is not None and [(piece.lo, piece.hi) for piece in batch.pieces] == [(0, 1)]
    assert prefetcher.is_computing(make_job([[9] * 10, [2] * 10])) and not prefetcher.is_computing(make_job([[3] * 10]))
    prefetcher.over(lost=True)
    assert prefetcher.offer(make_job([[2] * 10]), 6.0) is None
    assert prefetcher.next_batch(100, 6.0, lambda _, row: False) is None and prefetcher.tokens == 0


def test_the_candidates_of_waiting_prefetches_are_bounded_too() -> None:
    """800 tokens may be queued, 200 of them to prefetch, with 800 candidates: 9 positions of 80 are 720."""
    prefetcher = Prefetcher(800)
    assert prefetcher.offer(make_job([[1] * 10], candidates=80), 0.0) is None
    refusal = prefetcher.offer(make_job([[2] * 10], client="b", candidates=80), 0.0)
    assert refusal is not None and "candidate ids" in refusal.message
    assert prefetcher.offer(make_job([[2] * 10], client="b", candidates=8), 0.0) is None


def test_room_to_prefetch_comes_back_as_rows_are_handed_out_and_run_late():
    def offer(tokens: int, client: str, now: float, deadline: float = 99.0) -> str:
        rows = [[next(ids)] * 10 for _ in range(tokens // 10)]
        refusal = prefetcher.offer(make_job(rows, client=client, deadline=deadline), now)
        return "" if refusal is None else refusal.message

    def take(tokens: int, now: float) -> int:
        batch = prefetcher.next_batch(tokens, now, lambda _, row: False)
        prefetcher.over()
        return 0 if batch is None else batch.tokens

    ids, prefetcher = itertools.count(1), Prefetcher(400)  # 100 for prefetches, 50 for each client
    assert offer(40, "a", 0.0) == "" and take(20, 0.0) == 20
    assert offer(30, "a", 0.0) == "" and "50 tokens of this client wait" in offer(10, "a", 0.0)
    assert offer(50, "b", 0.0, deadline=5.0) == "" and "100 tokens wait" in offer(10, "c", 4.0)
    assert offer(10, "c", 5.0) == "" and prefetcher.tokens == 60  # what b asked for is too late
    assert [take(50, 6.0), take(50, 6.0), take(50, 6.0)] == [50, 10, 0] and prefetcher.tokens == 0
    assert offer(50, "a", 6.0) == "" and offer(50, "b", 6.0) == "" and prefetcher.tokens == 100
    prefetcher.clear()
    assert prefetcher.tokens == 0 and offer(50, "a", 6.0) == ""


# a server


def test_candidates_are_kept_prefetched_and_never_answered_with_those_of_another(
    teacher_server: Start, connect: Connect
) -> None:
    server = teacher_server()
    client = connect(server)
    rows, starts = some_rows(3, 2)
    rng = np.random.default_rng(3)
    candidates = [rng.integers(0, 1000, (6, 5)).astype(np.int32) for _ in rows]
    others = [each[:, ::-1].copy() for each in candidates]

    def assert_candidates(asked: list[np.ndarray], cached: int) -> None:
        scores = client.score(rows, starts, candidates=asked)
        assert_right(scores, rows, starts)
        assert scores.candidate_logprobs is not None and scores.stats.cached == cached
        for row, start, ids, values in zip(rows, starts, asked, scores.candidate_logprobs, strict=True):
            np.testing.assert_array_equal(values, oracle_candidates(row, start, ids))

    assert client.prefetch(rows, starts, candidates=candidates) == 6
    wait_until(lambda: counters(client, server).batches == 1)
    assert_candidates(candidates, 6)
    assert client.score(rows, starts).stats.cached == 0
    assert_candidates(others, 0)
    assert_candidates(candidates, 6)
    assert_candidates([*candidates[:2], *others[2:]], 6)


def test_a_retry_costs_nothing_and_gives_the_same_bits(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server()
    client = connect(server)
    rows, starts = some_rows(6, 2)
    first = client.score(rows, starts, topk=3)
    again = client.score(rows[::-1], starts[::-1], topk=3)
    assert (first.stats.cached, again.stats.cached) == (0, 12)
    assert first.topk_ids and first.topk_logprobs and again.topk_ids and again.topk_logprobs
    for one, other in (
        (first.logprobs, again.logprobs),
        (first.topk_ids, again.topk_ids),
        (first.topk_logprobs, again.topk_logprobs),
    ):
        for a, b in zip(one, reversed(other), strict=True):
            assert a is not None and b is not None and a.tobytes() == b.tobytes()
    told = counters(client, server)
    assert (told.rows, told.cache_hits, told.cache_misses) == (12, 12, 12)

    more, _ = some_rows(2, seed=1)
    mixed = client.score([rows[0], more[0], rows[5], more[1]], [8] * 4, topk=3)
    assert mixed.stats.cached == 2
    assert_right(mixed, [rows[0], more[0], rows[5], more[1]], [8] * 4)
    want_ids, want = oracle_topk(more[1], 8, 3)
    assert mixed.topk_ids and mixed.topk_logprobs
    np.testing.assert_array_equal(mixed.topk_ids[3], want_ids)
    np.testing.assert_array_equal(mixed.topk_logprobs[3], want)
    # another question about the same rows is another question
    assert client.score(rows, starts).stats.cached == 0
    assert client.score(rows, [9] * 12).stats.cached == 0
    assert_right(cold := client.score(rows, starts, temperature=0.5), rows, starts, temperature=0.5)
    assert cold.stats.cached == 0


def test_a_row_without_a_value_is_not_kept(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server(oom_id=OOM_ID)
    client = connect(server)
    rows, starts = some_rows(3)
    rows[1][9] = OOM_ID
    for cached in (0, 2):
        scores = client.score(rows, starts, return_row_errors=True)
        assert [(error.row, error.code) for error in scores.row_errors] == [(1, "oom")]
        assert scores.stats.cached == cached


def test_values_outlive_the_worker(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server()
    client = connect(server)
    rows, starts = some_rows(4)
    client.score(rows, starts)
    os.kill(server.worker_pid(), signal.SIGKILL)
    wait_until(lambda: len(server.text().split("worker ready")) == 3)
    scores = client.score(rows, starts)
    assert_right(scores, rows, starts)
    assert scores.stats.cached == 4


def test_a_server_may_keep_nothing(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server(args=["--cache-mb", "0"])
    client = connect(server)
    rows, starts = some_rows(4)
    assert client.prefetch(rows, starts) == 0
    for _ in range(2):
        assert client.score(rows, starts).stats.cached == 0
    told = counters(client, server)
    assert (told.rows, told.cache_hits, told.errors) == (8, None, {"no_cache": 1})


def test_prefetched_rows_are_there_when_they_are_asked_for(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server()
    client = connect(server)
    rows, starts = some_rows(5, 2)
    assert client.prefetch(rows, starts, topk=2) == 10
    wait_until(lambda: counters(client, server).rows == 10)
    scores = client.score(rows, starts, topk=2)
    assert scores.stats.cached == 10
    assert_right(scores, rows, starts)
    assert counters(client, server).rows == 10
    assert client.prefetch(rows, starts, topk=2) == 10  # known already: taken, and nothing to do
    assert_right(client.score(*some_rows(1, seed=2)), *some_rows(1, seed=2))
    assert counters(client, server).rows == 11


def test_a_row_that_is_being_prefetched_is_waited_for(teacher_server: Start, connect: Connect) -> None:
    """Also when nobody wants the prefetch any more: what the worker has begun is for whoever asks."""
    server = teacher_server(ms_per_batch=1000)
    client = connect(server)
    rows, starts = some_rows(4, 2)
    client.prefetch(rows[:6], starts[:6], keep_s=0.5)
    time.sleep(0.2)  # with the worker: a request that is read before it is handed over goes first
    scores = client.score(rows, starts)
    assert_right(scores, rows, starts)
    assert (scores.stats.cached, counters(client, server).rows) == (6, 8)


def test_a_request_that_waits_for_a_prefetch_outlives_the_worker(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server(ms_per_batch=600)
    client, other = connect(server), connect(server)
    rows, starts = some_rows(4)
    client.prefetch(rows, starts)
    found: list[Scores] = []
    thread = threading.Thread(target=lambda: found.append(client.score(rows, starts, timeout_s=30)))
    thread.start()
    wait_until(lambda: other.info().queued_tokens == 4 * 14)
    os.kill(server.worker_pid(), signal.SIGKILL)
    thread.join(30)
    assert_right(found[0], rows, starts)
    assert found[0].stats.cached == 0


def test_a_request_that_waits_for_a_prefetch_expires_in_time(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server(ms_per_batch=1000)
    client = connect(server)
    rows, starts = some_rows(2)
    client.prefetch(rows, starts)
    time.sleep(0.1)  # accepted, and with the worker: a request that is read before it is handed over goes first
    began = time.monotonic()
    with pytest.raises(TeacherUnavailable):
        client.score(rows, starts, timeout_s=0.4)
    assert time.monotonic() - began < 0.9
    assert_right(client.score(rows, starts, timeout_s=20), rows, starts)
    assert counters(client, server).rows == 2


def test_prefetching_never_makes_a_request_wait_for_more_than_a_batch(teacher_server: Start, connect: Connect) -> None:
    """Thirty batches of 100 ms wait to be prefetched; each request is through after two or three."""
    server = teacher_server(ms_per_batch=100, args=["--max-tokens", "28"])
    client = connect(server)
    rows, starts = some_rows(60)
    assert client.prefetch(rows, starts) == 60
    for seed in range(3):
        mine, my_starts = some_rows(1, seed=10 + seed)
        began = time.monotonic()
        assert_right(client.score(mine, my_starts), mine, my_starts)
        assert time.monotonic() - began < 1.0
    assert counters(client, server).rows < 45, "the prefetch was through before"
    # what is left of it waits behind nobody and is done by those who ask
    assert_right(client.score(rows, starts), rows, starts)
    assert counters(client, server).rows == 63


def test_prefetch_has_a_room_of_its_own(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server(ms_per_batch=300, args=["--max-queued-tokens", "1000"])
    client = connect(server)
    rows, starts = some_rows(20)
    assert client.prefetch(rows, starts) == 0  # 280 ids, where one client may have 125
    assert client.prefetch(rows[:8], starts[:8]) == 8
    mine, my_starts = some_rows(30, seed=3)
    assert_right(client.score(mine, my_starts), mine, my_starts)
    assert counters(client, server).errors == {"prefetch_full": 1}


def test_a_score_goes_to_the_replica_that_prefetched_its_prompt(teacher_server: Start, connect: Connect) -> None:
    """Also when another client did it: in training that is another process."""
    servers = [teacher_server(), teacher_server()]
    client, other = connect(*servers), connect(*servers[::-1])
    taken = 0
    batches = [some_rows(3, 2, seed=seed) for seed in range(3)]
    for rows, starts in batches:
        taken += other.prefetch(rows, starts)
    assert taken == 18
    wait_until(lambda: sum(counters(client, server).rows for server in servers) == 18)
    rows = [row for rows, _ in batches for row in rows]
    scores = client.score(rows[::-1], [8] * 18, prefetched=True)
    assert_right(scores, rows[::-1], [8] * 18)
    assert scores.stats.cached == 18
    kept = counters(client, servers[1]).rows
    servers[0].signal(signal.SIGKILL)
    servers[0].wait()
    scores = client.score(rows, [8] * 18, prefetched=True)  # its rows are scored by the other
    assert_right(scores, rows, [8] * 18)
    assert scores.stats.cached == kept


def test_prefetch_does_not_mind_a_teacher_that_is_not_there() -> None:
    with TeacherClient("tcp://127.0.0.1:9", timing=QUICK) as client:
        assert client.prefetch(*some_rows(2), timeout_s=0.3) == 0
        with pytest.raises(ValueError, match="row 0 starts at 0"):
            client.prefetch([np.array([1, 2])], [0])


# sleep


def test_a_teacher_that_sleeps_says_so_and_wakes_with_the_same_values(teacher_server: Start, connect: Connect) -> None:
    server = teacher_server(ms_per_batch=300, args=["--cache-mb", "0"])
    client, other = connect(server), connect(server)
    rows, starts = some_rows(4)
    found: list[Scores] = []
    thread = threading.Thread(target=lambda: found.append(other.score(rows, starts)))
    thread.start()
    wait_until(lambda: client.info().queued_tokens > 0)
    worker = server.worker_pid()
    client.sleep(timeout_s=20)
    thread.join(20)
    assert_right(found[0], rows, starts)  # what it held was answered first
    assert client.info().state == "sleeping" and not Path(f"/proc/{worker}").exists()
    client.sleep(timeout_s=20)  # once more: nothing to do
    assert client.prefetch(rows, starts, timeout_s=0.3) == 0
    with pytest.raises(TeacherUnavailable, match="sleeping"):
        other.score(rows, starts, timeout_s=0.5)
    client.wake(20)
    assert client.info().state == "ready" and server.worker_pid() != worker
    for each in (client, other):
        assert_right(each.score(rows, starts), rows, starts)
    client.wake(20)  # awake: nothing to do
    assert client.info().state == "ready"


def sleepy(start_teacher: Start, way: str) -> ServerProcess:
    server = start_teacher("--backend", "sleepy_scorer", "--model", way, "--cache-mb", "0")
    server.wait_ready()
    return server


@pytest.mark.parametrize(("way", "kept"), [("well", True), ("stuck", False), ("changed", False)])
def test_a_backend_may_sleep_by_itself_and_is_held_to_its_values(
    start_teacher: Start, connect: Connect, way: str, kept: bool
) -> None:
    """One that cannot, or that wakes with other values, is replaced by a new process."""
    server = sleepy(start_teacher, way)
    client = connect(server)
    row, want = np.array([7, 8, 9], np.int32), np.array([-8.001, -9.002], np.float32)
    worker = server.worker_pid()
    for _ in range(2 if kept else 1):
        client.sleep(timeout_s=20)
        assert client.info().state == "sleeping"
        client.wake(20)
        np.testing.assert_array_equal(client.score([row], [1]).logprobs[0], want)
    assert (server.worker_pid() == worker) == kept


def test_a_worker_that_dies_asleep_is_started_by_wake(start_teacher: Start, connect: Connect) -> None:
    server = sleepy(start_teacher, "well")
    client = connect(server)
    client.sleep(timeout_s=20)
    os.kill(server.worker_pid(), signal.SIGKILL)
    wait_until(lambda: "its process was ended" in server.text())
    assert client.info().state == "sleeping"
    client.wake(20)
    assert client.score([np.array([7, 8], np.int32)], [1]).logprobs[0] is not None


def test_a_backend_whose_memory_is_elsewhere_refuses_by_name(start_teacher: Start, connect: Connect) -> None:
    client = connect(sleepy(start_teacher, "elsewhere"))
    with pytest.raises(RequestRefused, match="backend sleepy cannot sleep: its memory is elsewhere"):
        client.sleep(timeout_s=20)
    assert client.info().state == "ready"


def test_a_transformers_model_has_the_same_values_after_it_woke(
    start_teacher: Start, connect: Connect, tmp_path: Path
) -> None:
    """By way of the server, whose worker on a CPU loads its folder again, and by way of the moves that a GPU needs."""
    import torch
    import transformers

    from opd.scoring.hf import load
    from opd.scoring.scorer import LoadOptions, Row, RowScores

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    rng = np.random.default_rng(4)
    rows = [rng.integers(0, 300, 40).astype(np.int32) for _ in range(4)]
    server = start_teacher("--model", str(tmp_path), "--cache-mb", "0")
    server.wait_ready()
    client = connect(server)
    before = client.score(rows, [20] * 4, topk=2)
    client.sleep(timeout_s=60)
    client.wake(120)
    after = client.score(rows, [20] * 4, topk=2)
    assert before.topk_logprobs and after.topk_logprobs
    for a, b in zip(before.logprobs + before.topk_logprobs, after.logprobs + after.topk_logprobs, strict=True):
        assert a is not None and b is not None and a.tobytes() == b.tobytes()

    scorer = load(LoadOptions(model=str(tmp_path)))
    for _ in range(2):
        results = scorer.score([Row(row, 20) for row in rows])
        for result, want in zip(results, before.logprobs, strict=True):
            assert isinstance(result, RowScores) and want is not None
            np.testing.assert_allclose(result.logprobs, want, atol=1e-5)
        scorer.sleep()
        scorer.wake()
