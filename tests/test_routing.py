"""Several teachers: each row gets the values of its own; what is wrong with a route is said before or at the row."""

import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import wait_until
from fake_teacher import FakeTeacher, honest_values
from omegaconf import OmegaConf

from opd.client import TeacherClient
from opd.config import TeacherConfig
from opd.data_files import read_columns
from opd.errors import ConfigError, RequestRefused, RowsFailed, TeacherError, TeacherUnavailable
from opd.reference import TeacherReference
from opd.routing import Router, read_routes
from opd.scoring.oracle import oracle_logprobs
from opd.wire import encode_reply, to_bin

ROUTES = {"gsm8k": {"math": 1.0}, "mbpp": {"code": 1.0}, "both": {"math": 0.75, "code": 0.25}}
ROWS = [np.array(row, np.int32) for row in ([1, 2, 3, 4], [5, 6, 7], [1, 2, 9, 8, 7], [3, 2, 1])]
STARTS = [2, 1, 2, 2]
SOURCES = ["gsm8k", "mbpp", "both", "gsm8k"]


def router(math: str, code: str, routes=ROUTES) -> Router:
    router = Router({"math": TeacherClient(math), "code": TeacherClient(code)}, routes, route_by="data_source")
    router.wait_until_ready(30)
    return router


def test_each_row_has_its_own_teachers_values_and_several_are_averaged(teacher_server):
    """Through verl's padded batch: P = 3, R = 4; the last row goes to both oracles, 3 parts to 1."""
    servers = [teacher_server(vocab=10, seed=seed) for seed in (1, 2)]
    ids = np.array([[0, 1, 2, 3, 4, 0, 0], [5, 6, 7, 8, 1, 2, 9], [0, 0, 4, 9, 9, 9, 0]])
    mask = np.array([[0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0]])
    old = np.full((3, 4), -0.25, dtype=np.float32)
    arguments = {
        "input_ids_BS": ids,
        "attention_mask_BS": mask,
        "response_mask_BR": mask[:, 3:],
        "old_log_probs_BR": old,
    }
    with router(servers[0].address, servers[1].address) as teachers:
        reference = TeacherReference(teachers, TeacherConfig())
        assert reference.data_columns == ("data_source",)
        sources = {"data_source": np.array(["gsm8k", "mbpp", "both"], dtype=object)}
        values = reference.values(**arguments, step=1, data_columns=sources)
        with pytest.raises(TeacherError, match=r"no column 'data_source', which teacher.route_by .* it has none"):
            reference.values(**arguments, step=1)

    def oracle(row: list[int], start: int, seed: int) -> np.ndarray:
        return oracle_logprobs(row, start, seed=seed, vocab=10)

    expected = old.copy()
    expected[0, :2] = oracle([1, 2, 3, 4], 2, 1)
    expected[1] = code = oracle([5, 6, 7, 8, 1, 2, 9], 3, 2)
    mixed = [oracle([4, 9, 9, 9], 1, seed) for seed in (1, 2)]
    expected[2, :3] = 0.75 * mixed[0] + 0.25 * mixed[1]
    np.testing.assert_allclose(values.columns["ref_log_prob"], expected, atol=1e-6)
    assert values.metrics["opd/math/rows"] == values.metrics["opd/code/rows"] == 2
    assert values.metrics["opd/code/teacher_seconds"] > 0
    own = np.concatenate([code, mixed[1]])  # a teacher's KL is its own, not the mean's
    assert values.metrics["opd/code/reverse_kl_k1"] == pytest.approx(float((-0.25 - own).mean()), abs=1e-5)
    counted = expected[mask[:, 3:] == 1]
    assert values.metrics["opd/reverse_kl_k1"] == pytest.approx(float((-0.25 - counted).mean()), abs=1e-5)


@pytest.mark.parametrize(
    "routes, says",
    [
        ({"a": "maths"}, "'a'.*'maths'.*code, math"),
        ({"a": {"math": 0.5, "code": 0.4}}, r"weights \[0.5, 0.4\]"),
        ({"a": {"math": 1.5, "code": -0.5}}, "must be > 0"),
        ({"a": {"math": "all"}}, "must be > 0"),
        ({"a": {}}, "name or"),
        ({"a": 1}, "name or"),
    ],
)
def test_a_route_to_nobody_or_with_wrong_weights_is_refused(routes, says):
    with pytest.raises(ConfigError, match=says):
        read_routes(routes, ["math", "code"])
    assert read_routes({1: "math"}, ["math"]) == {"1": {"math": 1.0}}


def test_a_value_without_a_route_is_found_in_the_data_and_at_the_row(tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"data_source": ["gsm8k", "mbpp", "poems", "songs"], "n": [1, 2, 3, 4]}), path)
    data = OmegaConf.create({"train_files": [str(path)]})
    columns = read_columns(data, ["data_source"])
    with FakeTeacher() as math, FakeTeacher() as code, router(math.address, code.address) as teachers:
        with pytest.raises(ConfigError, match=r"2 of 4 rows have a data_source without a teacher, the first 'poems'"):
            teachers.check_values(columns["data_source"], str(path))
        teachers.check_values(SOURCES, str(path))
        with pytest.raises(TeacherError, match=r"row 1 has data_source='poems'.* 'gsm8k', 'mbpp', 'both'"):
            teachers.score(ROWS[:2], STARTS[:2], values=["gsm8k", "poems"])
        assert not math.requests and not code.requests  # nothing was asked
    with pytest.raises(ConfigError, match="has no column 'domain'; it has data_source, n"):
        read_columns(data, ["domain"])
    assert read_columns(OmegaConf.create({"train_files": "hdfs://far/train.parquet"}), ["data_source"]) is None


def test_teachers_are_asked_at_the_same_time():
    """Neither answers before both have been asked."""
    both = threading.Barrier(2, timeout=20)

    def wait_for_the_other(fake, envelope, request, question):
        both.wait()
        fake.be_honest(envelope, request, question)

    math, code = FakeTeacher(wait_for_the_other), FakeTeacher(wait_for_the_other)
    with math, code, router(math.address, code.address) as teachers:
        scores, parts = teachers.score(ROWS, STARTS, values=SOURCES, timeout_s=30)
    assert parts["math"].rows == [0, 2, 3] and parts["code"].rows == [1, 2]
    for values, row, start in zip(scores.logprobs, ROWS, STARTS, strict=True):
        np.testing.assert_allclose(values, -row[start:] / 1000, atol=1e-7)
        assert values.dtype == np.float32
    assert scores.stats.rows == 5  # one of the four was asked about twice


def test_what_was_asked_ahead_is_found_at_the_replica_that_has_it(teacher_server):
    servers = [teacher_server() for _ in range(3)]
    rows = [np.array([prompt, 7, 8, 9], np.int32) for prompt in range(10, 22)]
    values = ["gsm8k", "both"] * 6
    with router(f"{servers[0].address},{servers[1].address}", servers[2].address) as teachers:
        assert teachers.prefetch(rows, [1] * 12, values=values) == (18, 18)

        def num_scored() -> int:
            math, code = teachers.clients["math"], teachers.clients["code"]
            asked = [math.info(servers[0].address), math.info(servers[1].address), code.info()]
            return sum(info.counters.rows for info in asked)

        wait_until(lambda: num_scored() == 18, 20)
        found = teachers.score(rows, [1] * 12, values=values, prefetched=True)
        assert found.scores.stats.cached == num_scored() == 18
        with pytest.raises(TeacherError, match="row 0 has data_source='poems'"):
            teachers.prefetch(rows[:1], [1], values=["poems"])


def test_one_deadline_for_all_and_the_first_failure_ends_the_call():
    with (
        FakeTeacher() as math,
        FakeTeacher(lambda *_: None) as silent,
        router(math.address, silent.address) as teachers,
    ):
        began = time.monotonic()
        with pytest.raises(TeacherUnavailable, match=r"did not answer in 1\.0 s"):
            teachers.score(ROWS, STARTS, values=SOURCES, timeout_s=1.0)
        assert time.monotonic() - began < 5

    def refuse(fake, envelope, request, question):
        fake.refuse(envelope, request, "error", code="limit", message="no")

    with FakeTeacher(refuse) as math, FakeTeacher(lambda *_: None) as silent, router(math.address, silent.address) as t:
        began = time.monotonic()
        with pytest.raises(RequestRefused):
            t.score(ROWS, STARTS, values=SOURCES, timeout_s=30)
        assert time.monotonic() - began < 5


def test_a_row_that_one_of_its_teachers_cannot_score_has_no_value():
    def fail_first(fake, envelope, request, question):
        values = honest_values(question)
        values[: int(question.counts()[0])] = np.nan
        reply = fake.reply(request, question, logprobs=to_bin(values, np.float32), row_errors=[(0, "oom", "too big")])
        fake.send(envelope, encode_reply(reply))

    with FakeTeacher() as math, FakeTeacher(fail_first) as code, router(math.address, code.address) as teachers:
        values = ["gsm8k", "gsm8k", "both", "gsm8k"]
        scores, _ = teachers.score(ROWS, STARTS, values=values, return_row_errors=True)
        assert scores.logprobs[2] is None and all(scores.logprobs[row] is not None for row in (0, 1, 3))
        assert [(e.row, e.code) for e in scores.row_errors] == [(2, "oom")]
        assert "teacher 'code'" in scores.row_errors[0].message
        with pytest.raises(RowsFailed, match="1 of 4 rows; the first is row 2"):
            teachers.score(ROWS, STARTS, values=values)


def test_top_k_comes_from_a_rows_one_teacher_and_is_never_averaged():
    with FakeTeacher() as math, FakeTeacher() as code, router(math.address, code.address) as teachers:
        rows = [row + 3000 for row in ROWS[:2]]
        scores, _ = teachers.score(rows, STARTS[:2], values=SOURCES[:2], topk=2)
        assert [ids.tolist() for ids in scores.topk_ids] == [[[3003, 3004], [3004, 3005]], [[3006, 3007], [3007, 3008]]]
        with pytest.raises(TeacherError, match="row 0 has the teachers math, code: their top-k cannot be averaged"):
            teachers.score(rows[:1], STARTS[:1], values=["both"], topk=2)


def test_a_teacher_that_says_the_same_about_every_token_is_named_though_the_mean_varies():
    def constant(fake, envelope, request, question):
        same = np.full(int(question.counts().sum()), -1.5, "<f4")
        fake.send(envelope, encode_reply(fake.reply(request, question, logprobs=to_bin(same, np.float32))))

    ids = np.arange(1, 101).reshape(1, 100)
    ones = np.ones_like(ids)
    with FakeTeacher() as math, FakeTeacher(constant) as code, router(math.address, code.address) as teachers:
        reference = TeacherReference(teachers, TeacherConfig())
        with pytest.raises(TeacherError, match=r"teacher 'code': the teacher gave the value -1.5"):
            reference.values(
                input_ids_BS=ids,
                attention_mask_BS=ones,
                response_mask_BR=ones[:, 20:],
                old_log_probs_BR=np.full((1, 80), -1.0, np.float32),
                step=1,
                data_columns={"data_source": ["both"]},
            )
