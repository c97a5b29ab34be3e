"""Admission, fairness, batches, deadlines and the assembly of answers: without sockets, with a clock of our own."""

from __future__ import annotations

import numpy as np
import pytest

from opd.errors import RowError
from opd.question import Question
from opd.serving.job import Job, Piece, Values
from opd.serving.queue import MAX_RETRY_MS, MIN_RETRY_MS, Batch, Queue
from opd.serving.suspects import FORGET_S, Suspects
from opd.wire import digest


def make_job(
    rows: list[list[int]],
    *,
    client: str = "a",
    start: int = 1,
    topk: int = 0,
    temperature: float = 1.0,
    deadline: float = 1e9,
    bad: tuple[int, ...] = (),
    candidates: int = 0,
) -> Job:
    """`candidates` for each position; the c-th of a job's position p, counted over all rows, is 100 p + c."""
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    starts = np.full(len(rows), start, dtype=np.int32)
    ids = np.array([token for row in rows for token in row], dtype=np.int32)
    question = Question(lengths, starts, ids)
    if candidates:
        chosen = 100 * np.arange(question.counts().sum(), dtype=np.int32)[:, None] + np.arange(
            candidates, dtype=np.int32
        )
        question = Question(lengths, starts, ids, chosen)
    return Job(
        question,
        request_id=b"",
        envelope=[],
        client=client,
        topk=topk,
        temperature=temperature,
        arrived=0.0,
        deadline=deadline,
        bad_rows=[RowError(row, "token_range", f"row {row}") for row in bad],
    )


def plain_job(num_rows: int, length: int = 10, **options: object) -> Job:
    """Rows with prompts of their own."""
    return make_job([[row] * length for row in range(num_rows)], **options)  # type: ignore[arg-type]


def make_queue(**limits: int) -> Queue:
    return Queue(**{"max_tokens": 1000, "max_reply_bytes": 1 << 20, **limits})


def filled(*jobs: Job, **limits: int) -> Queue:
    queue = make_queue(**limits)
    for job in jobs:
        assert queue.offer(job, 0.0) is None
    return queue


def drain(queue: Queue, budget: int) -> list[Batch]:
    batches = []
    while (batch := queue.next_batch(budget)) is not None:
        batches.append(batch)
    return batches


def compute(piece: Piece, topk: int) -> Values:
    """What a worker would return: a value that names its token and position."""
    rows = [(piece.job.row_ids(row), int(piece.job.starts[row])) for row in range(piece.lo, piece.hi)]
    parts = [-(ids[start:] + np.arange(start, len(ids)) / 1000) for ids, start in rows]
    logprobs = np.concatenate(parts).astype(np.float32)
    if not topk:
        return Values(logprobs, None, None)
    ids = np.concatenate([ids[start:] for ids, start in rows])
    return Values(
        logprobs, np.stack([ids + k for k in range(topk)], 1), np.stack([logprobs - k for k in range(topk)], 1)
    )


def answer_all(queue: Queue, budget: int) -> None:
    for batch in drain(queue, budget):
        for piece in batch.pieces:
            piece.job.put(piece, compute(piece, batch.topk), [])


def expected(rows: list[list[int]], start: int = 1) -> np.ndarray:
    return np.array([-(row[i] + i / 1000) for row in rows for i in range(start, len(row))], dtype=np.float32)


# batches


def test_requests_of_several_clients_share_a_batch() -> None:
    queue = filled(*(plain_job(2, client=name) for name in "abc"))
    (batch,) = drain(queue, 100)
    assert batch.num_rows == 6 and batch.tokens == 60 and len(batch.pieces) == 3


def test_a_batch_never_mixes_topk_or_temperature() -> None:
    queue = filled(
        plain_job(1, client="a"),
        plain_job(1, client="b", topk=4),
        plain_job(1, client="c", temperature=0.5),
        plain_job(1, client="d"),
    )
    groups = sorted((batch.topk, batch.temperature, batch.num_rows) for batch in drain(queue, 1000))
    assert groups == [(0, 0.5, 1), (0, 1.0, 2), (4, 1.0, 1)]


def test_a_batch_stays_within_the_budget_and_every_row_goes_once() -> None:
    """Seeded mixes of sizes and clients: budgets hold unless a single row is longer."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        jobs = [
            make_job(
                [[int(rng.integers(5))] * int(rng.integers(1, 40)) for _ in range(rng.integers(1, 12))],
                client=str(rng.integers(4)),
            )
            for _ in range(6)
        ]
        budget = int(rng.integers(20, 200))
        queue = filled(*(job for job in jobs if job.missing), max_tokens=10**6)
        seen: list[tuple[int, int]] = []
        for batch in drain(queue, budget):
            assert batch.tokens <= budget or batch.num_rows == 1
            seen += [(id(piece.job), row) for piece in batch.pieces for row in range(piece.lo, piece.hi)]
        assert len(seen) == len(set(seen)) == sum(len(job.lengths) for job in jobs)


def test_a_row_longer_than_the_budget_goes_alone() -> None:
    queue = filled(make_job([[1] * 5, [2] * 50, [3] * 5]))
    assert [batch.tokens for batch in drain(queue, 20)] == [5, 50, 5]


def test_a_request_that_is_cut_keeps_rows_with_one_prompt_together() -> None:
    """Shuffled rows of four prompts: each prompt's rows end up in one batch, next to each other."""
    rows = [[prompt] * 6 + [row] * 4 for row, prompt in enumerate([3, 1, 2, 0, 1, 3, 0, 2, 2, 1, 0, 3])]
    queue = filled(make_job(rows, start=6))
    batches = drain(queue, 60)
    assert [batch.num_rows for batch in batches] == [6, 6]
    prompts = [[int(ids[0]) for ids in _row_ids(batch)] for batch in batches]
    assert prompts == [[3, 3, 3, 1, 1, 1], [2, 2, 2, 0, 0, 0]]


def _row_ids(batch: Batch) -> list[np.ndarray]:
    return [piece.job.row_ids(row) for piece in batch.pieces for row in range(piece.lo, piece.hi)]


def test_a_prompt_group_is_cut_only_when_it_cannot_fit_at_all() -> None:
    rows = [[7] * 6 + [row] * 4 for row in range(8)]
    assert [batch.num_rows for batch in drain(filled(make_job(rows, start=6)), 50)] == [5, 3]


def test_a_second_batch_is_made_early_only_when_it_is_full() -> None:
    queue = filled(plain_job(3))
    assert queue.next_batch(50, full_only=True) is None
    assert queue.offer(plain_job(2, client="b"), 0.0) is None
    batch = queue.next_batch(50, full_only=True)
    assert batch is not None and batch.tokens == 50


# answers


@pytest.mark.parametrize("topk", [0, 3])
@pytest.mark.parametrize("budget", [7, 25, 60, 10_000])
def test_an_answer_is_in_the_order_of_the_request_however_it_was_cut(topk: int, budget: int) -> None:
    rng = np.random.default_rng(5)
    rows = [rng.integers(0, 90, rng.integers(2, 20)).tolist() for _ in range(30)]
    for row in range(0, 30, 3):
        rows[row][:1] = [5]  # shared prompts, so that cutting reorders
    job = make_job(rows, topk=topk)
    answer_all(filled(job), budget)
    (logprobs, topk_ids, topk_logprobs, _), errors = job.answer()
    assert not errors
    np.testing.assert_array_equal(logprobs, expected(rows))
    if topk:
        assert topk_ids is not None and topk_logprobs is not None
        np.testing.assert_array_equal(topk_ids[:, 0], [token for row in rows for token in row[1:]])
        np.testing.assert_array_equal(topk_logprobs[:, 2], logprobs - 2)


def test_bad_rows_hold_nan_and_the_others_their_own_values() -> None:
    rows = [[1, 2], [3, 4, 5], [6, 7], [8, 9]]
    job = make_job(rows, bad=(1,), topk=2)
    queue = filled(job)
    (batch,) = drain(queue, 100)
    (piece,) = batch.pieces
    assert batch.num_rows == 3
    job.put(piece, compute(piece, 2), [RowError(2, "oom", "row 3 is too much")])
    (logprobs, topk_ids, *_), errors = job.answer()
    assert [(e.row, e.code) for e in errors] == [(1, "token_range"), (3, "oom")]
    assert np.isnan(logprobs).tolist() == [False, True, True, False, False]
    assert topk_ids is not None and topk_ids[:, 0].tolist() == [2, -1, -1, 7, 9]


def test_a_row_without_scored_positions_needs_no_model() -> None:
    job = make_job([[5], [1, 2]], start=1)
    assert [batch.tokens for batch in drain(filled(job), 100)] == [2]
    alone = make_job([[5]])
    assert alone.missing == 0
    (logprobs, *_), errors = alone.answer()
    assert len(logprobs) == 0 and not errors


def test_an_answer_with_a_missing_row_cannot_be_made() -> None:
    job = plain_job(4)
    batch = filled(job).next_batch(20)
    assert batch is not None
    job.put(batch.pieces[0], compute(batch.pieces[0], 0), [])
    with pytest.raises(AssertionError):
        job.answer()


def test_a_whole_request_in_one_piece_is_not_copied() -> None:
    job = plain_job(3)
    (batch,) = drain(filled(job), 100)
    (piece,) = batch.pieces
    values = compute(piece, 0)
    job.put(piece, values, [])
    assert job.answer()[0].logprobs is values.logprobs
    assert np.shares_memory(piece.ids, job.question.ids)


def test_candidates_follow_their_rows_through_pieces_and_into_the_answer() -> None:
    """Rows of two prompts, interleaved, with one that is refused and one without a response; budgets that cut them."""
    rows = [[1, 1, 1], [2, 2, 2], [9, 9, 9], [1, 5, 5], [7], [2, 6, 6], [1, 8]]
    for budget in (3, 7, 100):
        job = make_job(rows, candidates=3, bad=(2,))
        queue = filled(job)
        for batch in drain(queue, budget):
            assert batch.num_candidates == 3
            for piece in batch.pieces:
                assert piece.candidates is not None and piece.candidates.shape == (piece.num_values, 3)
                given = compute(piece, 0)
                values = Values(given.logprobs, None, None, -piece.candidates.astype(np.float32))
                job.put(piece, values, [])
        values, errors = job.answer()
        assert [error.row for error in errors] == [2] and values.candidate_logprobs is not None
        want = -job.question.candidates.astype(np.float32)  # type: ignore[union-attr]
        want[4:6] = np.nan  # of row 2
        np.testing.assert_array_equal(values.candidate_logprobs, want)


def test_rows_with_and_without_candidates_are_not_mixed_in_a_batch() -> None:
    queue = filled(plain_job(1), plain_job(1, client="b", candidates=2), plain_job(1, client="c", candidates=2))
    assert [(batch.num_candidates, batch.num_rows) for batch in drain(queue, 1000)] == [(0, 1), (2, 2)]


def test_the_digest_of_a_piece_names_its_rows_and_nothing_else() -> None:
    job = make_job([[1, 2], [3, 4, 5], [6, 7]])
    piece = Piece(job, 1, 3)
    lengths, starts, ids = ([3, 2], [1, 1], [3, 4, 5, 6, 7])
    assert piece.digest() == digest(*(np.array(array, dtype=np.int32) for array in (lengths, starts, ids)))
    assert piece.digest() != Piece(job, 0, 2).digest()


def test_rows_that_were_with_a_dead_worker_are_tried_alone_and_first() -> None:
    queue = filled(plain_job(3, client="a"), plain_job(2, client="b"), plain_job(4, client="c"))
    batch = queue.next_batch(60)
    assert batch is not None
    held = queue.tokens
    for piece in batch.pieces:
        queue.retry_alone(piece)
    assert queue.isolating
    alone = [queue.next_batch(60) for _ in range(batch.num_rows)]
    assert all(one is not None and one.alone and one.num_rows == 1 for one in alone)
    assert not queue.isolating and queue.tokens == held
    after = queue.next_batch(60)
    assert after is not None and not after.alone


def failed_rows(suspects: Suspects, rows: list[list[int]], now: float) -> list[int]:
    """What becomes of a batch of these rows."""
    job = make_job(rows)
    (batch,) = drain(filled(job), 1000)
    suspects.without_poison(batch, now)
    return sorted(job.errors)


def test_only_a_row_that_kills_a_worker_alone_is_refused_and_not_for_ever() -> None:
    """Two deaths of a whole batch may have any reason; the row that was also alone with a third one is found."""
    suspects, job = Suspects(), make_job([[1, 2], [3, 4], [5, 6]])
    for now in (0.0, 1.0):
        suspects.blame([Piece(job, 0, 3)], "killed", now, alone=False)
    assert failed_rows(suspects, [[1, 2], [3, 4]], 2.0) == []
    suspects.blame([Piece(job, 1, 2)], "killed", 2.0, alone=True)
    assert failed_rows(suspects, [[1, 2], [3, 4]], 3.0) == [1]
    assert failed_rows(suspects, [[3, 4]], 2.0 + FORGET_S) == [0]
    assert failed_rows(suspects, [[3, 4]], 2.1 + FORGET_S) == []
    suspects.blame([Piece(job, 1, 2)], "killed", 3.0 + FORGET_S, alone=True)  # a first death once more
    assert failed_rows(suspects, [[3, 4]], 3.0 + FORGET_S) == []
    suspects.acquit(Piece(job, 1, 2))
    suspects.blame([Piece(job, 1, 2)], "killed", 4.0 + FORGET_S, alone=True)
    assert failed_rows(suspects, [[3, 4]], 4.0 + FORGET_S) == []


def test_a_poisoned_row_does_not_hold_up_the_rest_of_its_request() -> None:
    rows = [[1, 2], [3, 4], [5, 6]]
    job = make_job(rows)
    (batch,) = drain(filled(job), 100)
    assert batch.num_rows == 3
    job.fail_row(1, "poison", "stopped the worker")
    for row in (0, 2):
        piece = Piece(job, row, row + 1)
        job.put(piece, compute(piece, 0), [])
    (logprobs, *_), errors = job.answer()
    assert [(e.row, e.code) for e in errors] == [(1, "poison")]
    np.testing.assert_array_equal(logprobs, np.array([-2.001, np.nan, -6.001], np.float32))


# fairness


def test_a_small_request_does_not_wait_for_all_of_a_big_one() -> None:
    """It is served in the next batch, though a thousand rows were there before it."""
    queue = filled(plain_job(1000, client="big"), max_tokens=100_000)
    first = queue.next_batch(100)
    assert queue.offer(plain_job(2, client="small"), 0.0) is None
    second = queue.next_batch(100)
    assert first is not None and second is not None
    assert {piece.job.client for piece in second.pieces} == {"big", "small"}


def test_clients_get_equal_tokens_while_all_of_them_wait() -> None:
    jobs = [plain_job(300, client="one big")]
    jobs += [plain_job(3, client="many small") for _ in range(100)]
    jobs += [plain_job(30, length=10, client="middle") for _ in range(10)]
    queue = filled(*jobs, max_tokens=100_000)
    served = {"one big": 0, "many small": 0, "middle": 0}
    for _ in range(20):
        batch = queue.next_batch(120)
        assert batch is not None
        for piece in batch.pieces:
            served[piece.job.client] += piece.tokens
    assert max(served.values()) - min(served.values()) <= 120


def test_a_client_that_was_away_does_not_get_the_past_refunded() -> None:
    queue = filled(plain_job(500, client="steady"), max_tokens=100_000)
    for _ in range(20):
        queue.next_batch(100)
    assert queue.offer(plain_job(400, client="late"), 0.0) is None
    served = {"steady": 0, "late": 0}
    for _ in range(10):
        batch = queue.next_batch(100)
        assert batch is not None
        for piece in batch.pieces:
            served[piece.job.client] += piece.tokens
    assert abs(served["steady"] - served["late"]) <= 100


# admission


def test_the_first_request_is_let_in_whatever_its_size() -> None:
    assert make_queue(max_tokens=10, max_reply_bytes=10).offer(plain_job(50), 0.0) is None


def test_tokens_beyond_the_limit_are_refused_with_a_time_from_the_measured_speed() -> None:
    queue = filled(plain_job(40, client="a"), plain_job(40, client="b"))
    queue.observe(1000, 1.0)
    refusal = queue.offer(plain_job(30, client="c"), 0.0)
    assert refusal is not None and refusal.code == "queue_full"
    assert refusal.retry_after_ms == 100  # 100 tokens too many at 1000 tokens/s
    assert queue.tokens == 800


def test_retry_times_have_bounds() -> None:
    queue = filled(plain_job(60, client="a"), plain_job(40, client="b"))
    for speed, want in ((10**9, MIN_RETRY_MS), (1e-3, MAX_RETRY_MS)):
        for _ in range(200):
            queue.observe(1000, 1000 / speed)
        refusal = queue.offer(plain_job(30, client="c", deadline=1e12), 0.0)
        assert refusal is not None and refusal.retry_after_ms == want


def test_one_client_gets_half_of_the_queue() -> None:
    queue = filled(plain_job(40, client="a"))
    refusal = queue.offer(plain_job(20, client="a"), 0.0)
    assert refusal is not None and refusal.code == "client_full"
    assert queue.offer(plain_job(20, client="b"), 0.0) is None


def test_reply_bytes_are_bounded_and_count_what_peers_have_not_taken() -> None:
    queue = make_queue(max_tokens=10**6, max_reply_bytes=10_000)
    job = plain_job(2, topk=50)  # 18 values of 404 bytes
    assert queue.offer(job, 0.0, unsent=2_000) is None
    refusal = queue.offer(plain_job(1, client="b", topk=50), 0.0, unsent=2_000)
    assert refusal is not None and refusal.code == "reply_memory"
    mine = queue.offer(plain_job(1, client="c"), 0.0, unsent=2_000, client_unsent=5_000)
    assert mine is not None and mine.code == "reply_memory"
    assert queue.offer(plain_job(1, client="c"), 0.0, unsent=2_000) is None


def test_the_number_of_requests_is_bounded() -> None:
    queue = filled(*(plain_job(1, 2, client=str(i)) for i in range(5)), max_jobs=5)
    refusal = queue.offer(plain_job(1, 2, client="x"), 0.0)
    assert refusal is not None and refusal.code == "queue_full"


def test_work_that_cannot_be_done_in_time_is_refused_at_once() -> None:
    queue = filled(plain_job(40, client="a"))
    queue.observe(100, 1.0)
    refusal = queue.offer(plain_job(10, client="b", deadline=3.0), 0.0)
    assert refusal is not None and refusal.code == "too_slow"
    assert queue.offer(plain_job(10, client="b", deadline=6.0), 0.0) is None


def test_a_wrong_guess_of_the_speed_cannot_refuse_work_for_ever() -> None:
    queue = make_queue()
    queue.observe(1, 1000.0)
    assert queue.offer(plain_job(10, deadline=1.0), 0.0) is None


# deadlines and accounts


def test_jobs_expire_once_in_the_order_of_their_deadlines() -> None:
    jobs = [plain_job(1, client=str(i), deadline=deadline) for i, deadline in enumerate((5.0, 3.0, 9.0))]
    queue = filled(*jobs)
    assert queue.next_deadline() == 3.0
    assert queue.expired(2.9) == []
    late = queue.expired(6.0)
    assert late == [jobs[1], jobs[0]]
    for job in late:
        queue.close(job)
    assert queue.next_deadline() == 9.0 and queue.expired(6.0) == []


def test_an_expired_job_is_not_handed_out() -> None:
    late, good = plain_job(3, client="a", deadline=1.0), plain_job(3, client="a")
    queue = filled(late, good)
    for job in queue.expired(2.0):
        queue.close(job)
    assert [piece.job for batch in drain(queue, 100) for piece in batch.pieces] == [good]


def test_rows_of_an_expired_job_are_not_tried_again() -> None:
    job = plain_job(3, deadline=1.0)
    queue = filled(job)
    (batch,) = drain(queue, 100)
    queue.retry_alone(batch.pieces[0])
    queue.close(queue.expired(2.0)[0])
    assert queue.next_batch(100) is None


def test_nothing_is_held_after_everything_was_closed() -> None:
    """Seeded life of a queue: answered, expired and half-scored jobs all give back what they held."""
    rng = np.random.default_rng(11)
    queue = make_queue(max_tokens=5000)
    for step in range(300):
        queue.offer(plain_job(int(rng.integers(1, 9)), client=str(rng.integers(5)), deadline=step + 8.0), float(step))
        batch = queue.next_batch(int(rng.integers(10, 80)))
        for piece in batch.pieces if batch is not None else []:
            if piece.job.open and rng.random() < 0.9:
                piece.job.put(piece, compute(piece, 0), [])
                if not piece.job.missing:
                    queue.close(piece.job)
        for job in queue.expired(float(step)):
            queue.close(job)
    for job in queue.open_jobs():
        queue.close(job)
    assert (queue.tokens, queue.reply_bytes, queue.num_jobs) == (0, 0, 0)
    assert queue.next_deadline() is None and queue.next_batch(1000) is None
    assert len(queue._deadlines) < 100 and not queue._lanes and not queue._client_tokens and queue._waiting == 0
