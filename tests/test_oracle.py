"""The oracle teacher: what the other tests and the benchmarks build on."""

import time

import numpy as np
import pytest

from opd.errors import ConfigError, RowError
from opd.scoring.oracle import load, oracle_candidates, oracle_logprobs, oracle_topk
from opd.scoring.scorer import LoadOptions, Row

VOCAB = 257


def make_row(rng, length, start):
    return Row(rng.integers(0, VOCAB, length).astype(np.int32), start)


def test_values_do_not_change_between_versions():
    """Golden: the server's, the client's and the trainer's tests all compare with these."""
    np.testing.assert_allclose(
        oracle_logprobs([5, 6, 7, 8, 9], 1), [-7.858236, -8.356261, -11.0160885, -7.39946], rtol=1e-6
    )
    np.testing.assert_allclose(
        oracle_logprobs([5, 6, 7, 8, 9], 1, seed=1, temperature=0.7),
        [-10.361963, -5.861757, -9.429051, -11.3251705],
        rtol=1e-6,
    )


def test_a_candidate_has_the_value_it_would_have_as_the_sampled_id():
    """The golden values above, for the same ids as candidates; and every id behind one prefix."""
    values = oracle_candidates([5, 6, 7, 8, 9], 1, [[6, 3], [7, 7], [8, 1], [9, 999]])
    np.testing.assert_allclose(values[:, 0], [-7.858236, -8.356261, -11.0160885, -7.39946], rtol=1e-6)
    assert values[1, 1] == values[1, 0] and values.dtype == np.float32
    for temperature in (0.7, 1.0):
        settings = {"vocab": VOCAB, "seed": 3, "temperature": temperature}
        every = oracle_candidates([3, 1, 4, 1], 3, [range(VOCAB)], **settings)
        assert every[0].tolist() == [oracle_logprobs([3, 1, 4, token], 3, **settings)[0] for token in range(VOCAB)]


def test_the_scorer_gives_each_row_its_candidates():
    rng = np.random.default_rng(4)
    scorer = load(LoadOptions(model=f"oracle:vocab={VOCAB}"))
    rows = [make_row(rng, length, start) for length, start in ((9, 4), (3, 3), (5, 1))]
    rows = [row._replace(candidates=rng.integers(0, VOCAB, (len(row.ids) - row.start, 6))) for row in rows]
    for row, scores in zip(rows, scorer.score(rows, topk=2, temperature=0.7), strict=True):
        want = oracle_candidates(row.ids, row.start, row.candidates, vocab=VOCAB, temperature=0.7)
        assert scores.candidate_logprobs.shape == row.candidates.shape and (scores.candidate_logprobs == want).all()
    assert scorer.score([make_row(rng, 3, 1)])[0].candidate_logprobs is None


def test_a_value_depends_on_every_earlier_id_and_on_no_later_one():
    """Change the id at position 4: the values before it stay, and those from it on change."""
    ids = np.arange(10, 22)
    changed = ids.copy()
    changed[4] = 99
    same = oracle_logprobs(ids, 1) == oracle_logprobs(changed, 1)
    assert same[:3].all() and not same[3:].any()
    assert (oracle_logprobs(ids, 1)[5:] == oracle_logprobs(ids, 6)).all()


def test_swapping_two_earlier_ids_changes_the_value():
    """A prefix is a sequence, not a bag."""
    assert oracle_logprobs([1, 2, 3, 4], 3) != oracle_logprobs([2, 1, 3, 4], 3)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_one_position_is_a_distribution_over_the_vocabulary(temperature):
    """All ids, put behind the same prefix, have probabilities that sum to 1, and top-k lists the same values."""
    rows = [[3, 1, 4, token] for token in range(VOCAB)]
    values = np.array([oracle_logprobs(row, 3, vocab=VOCAB, temperature=temperature)[0] for row in rows])
    assert np.exp(values.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    top_ids, top_values = oracle_topk(rows[0], 3, VOCAB, vocab=VOCAB, temperature=temperature)
    assert sorted(top_ids[0]) == list(range(VOCAB))
    assert (values[top_ids[0]] == top_values[0]).all() and (np.diff(top_values[0]) <= 0).all()


def test_temperature_divides_the_logits():
    """log-softmax(log p / T) of the distribution at T = 1 is the distribution at T."""
    ids, plain = oracle_topk([1, 2], 1, VOCAB, vocab=VOCAB)
    ids_hot, hot = oracle_topk([1, 2], 1, VOCAB, vocab=VOCAB, temperature=0.7)
    scaled = plain[0].astype(np.float64) / 0.7
    np.testing.assert_allclose(hot[0], scaled - np.log(np.exp(scaled).sum()), atol=1e-5)
    assert (ids == ids_hot).all()


def test_values_stay_above_minus_20_at_the_largest_vocabulary():
    """A benchmark with a real vocabulary sees values like a model's."""
    values = oracle_logprobs(np.random.default_rng(0).integers(0, 300_000, 5000), 1, vocab=300_000)
    assert values.min() > -20 and values.max() < 0


def test_a_batch_gives_each_row_the_value_it_has_alone():
    """Rows of all lengths in one call, one without scored positions."""
    rng = np.random.default_rng(1)
    rows = [make_row(rng, length, start) for length, start in [(5, 1), (9, 9), (1, 1), (40, 13), (7, 7)]]
    scorer = load(LoadOptions(model=f"oracle:vocab={VOCAB},seed=7"))
    for row, scores in zip(rows, scorer.score(rows, topk=4, temperature=0.9), strict=True):
        how = {"seed": 7, "vocab": VOCAB, "temperature": 0.9}
        assert np.array_equal(scores.logprobs, oracle_logprobs(row.ids, row.start, **how))
        top_ids, top_values = oracle_topk(row.ids, row.start, 4, **how)
        assert np.array_equal(scores.topk_ids, top_ids) and np.array_equal(scores.topk_logprobs, top_values)
        assert scores.logprobs.dtype == np.float32 and scores.topk_ids.dtype == np.int32


def test_top_64_of_128_rows_is_cheap():
    """Half a second would do for the wire benchmark; it takes a tenth of that when the machine is quiet."""
    rng = np.random.default_rng(2)
    rows = [Row(rng.integers(0, 151_936, 2048).astype(np.int32), 1024) for _ in range(128)]
    scorer = load(LoadOptions(model="oracle:vocab=151936"))
    scorer.score(rows, topk=64)
    began = time.process_time()
    scorer.score(rows, topk=64)
    assert time.process_time() - began < 0.5


def test_faults_touch_only_the_row_that_asked():
    """nan_id and oom_id spoil their row; raise_id ends the call."""
    scorer = load(LoadOptions(model="oracle:nan_id=11,oom_id=12,raise_id=13"))
    good, nan, oom = (Row(np.array([1, token, 2, 3], np.int32), 1) for token in (10, 11, 12))
    results = scorer.score([nan, good, oom])
    assert np.isnan(results[0].logprobs).sum() == 1
    assert np.array_equal(results[1].logprobs, oracle_logprobs(good.ids, 1))
    assert isinstance(results[2], RowError) and (results[2].row, results[2].code) == (2, "oom")
    with pytest.raises(RuntimeError, match="13"):
        scorer.score([Row(np.array([13, 1], np.int32), 1)])


def test_the_clock_is_kept():
    """1000 ids at 50 us and 10 ms for the batch: 60 ms."""
    scorer = load(LoadOptions(model="oracle:us_per_token=50,ms_per_batch=10"))
    began = time.perf_counter()
    scorer.score([Row(np.zeros(1000, np.int32), 1)])
    assert time.perf_counter() - began >= 0.06


def test_info_says_what_was_asked_for():
    """Faults and timing leave the fingerprint alone, so that replicas which differ in them count as one teacher."""
    info = load(LoadOptions(model="oracle:vocab=50,seed=2,max_length=64,eos=3,tokenizer=abc", max_topk=99)).info
    assert (info.vocab_size, info.max_length, info.max_topk, info.eos_ids, info.tokenizer) == (50, 64, 50, [3], "abc")
    assert load(LoadOptions(model="oracle", max_length=77)).info.max_length == 77
    assert info.model == load(LoadOptions(model="oracle:vocab=50,seed=2,kill_id=3,us_per_token=1")).info.model
    assert info.model != load(LoadOptions(model="oracle:vocab=50,seed=3")).info.model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("llama", "'oracle:key=value,...'"),
        ("oracle:foo=1", "unknown field `foo`"),
        ("oracle:vocab=many", "vocab"),
        ("oracle:vocab=1", ">= 2"),
        ("oracle:seed", "key=value"),
        ("oracle:seed=1,seed=2", "repeated"),
    ],
)
def test_a_wrong_model_string_is_refused_by_name(model, said):
    """Every typing mistake gets a sentence."""
    with pytest.raises(ConfigError, match="oracle") as error:
        load(LoadOptions(model=model))
    assert said in str(error.value)
