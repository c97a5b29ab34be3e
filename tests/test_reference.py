"""From verl's padded batch through a real server to `ref_log_prob`, against values computed from the ids."""

import numpy as np
import pytest

from opd.client import TeacherClient
from opd.config import TeacherConfig
from opd.errors import ConfigError, RowsFailed, TeacherError
from opd.loss.schedule import Coefficient
from opd.loss.settings import LOSS, LOSS_WIDTH, TOPK_IDS, TOPK_LOGPROBS, WEIGHTS, LossSettings, TeacherLoss
from opd.reference import TeacherReference
from opd.scoring.oracle import oracle_logprobs

# P = 3 prompt columns, R = 4 response columns; pad is 9, and so is eos
IDS = np.array([[9, 1, 2, 3, 4, 9, 9], [5, 6, 7, 8, 1, 2, 9], [9, 9, 4, 9, 9, 9, 9]])
MASK = np.array([[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0]])
RESPONSE_MASK = np.array([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]])
OLD = np.full((3, 4), -0.25, dtype=np.float32)


def score(server, config: TeacherConfig, ids=IDS, temperature=1.0):
    with TeacherClient(server.address) as client:
        reference = TeacherReference(client, config, temperature=temperature)
        values = reference.values(
            input_ids_BS=ids, attention_mask_BS=MASK, response_mask_BR=RESPONSE_MASK, old_log_probs_BR=OLD, step=1
        )
        return values.columns["ref_log_prob"], values.metrics


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_response_token_gets_its_own_value_and_padding_the_students(teacher_server, temperature):
    server = teacher_server(vocab=10, seed=3)
    got_BR, metrics = score(server, TeacherConfig(), temperature=temperature)
    expected_BR = OLD.copy()
    for row, ids, start in ((0, [1, 2, 3, 4, 9], 2), (1, [5, 6, 7, 8, 1, 2, 9], 3)):
        values = oracle_logprobs(np.array(ids, dtype=np.int32), start, seed=3, vocab=10, temperature=temperature)
        expected_BR[row, : len(values)] = values
    np.testing.assert_allclose(got_BR, expected_BR, atol=1e-6)
    assert got_BR.dtype == np.float32
    counted = expected_BR[RESPONSE_MASK == 1]  # the hole in row 1 is context, not signal
    assert metrics["opd/reverse_kl_k1"] == pytest.approx(float((-0.25 - counted).mean()), abs=1e-5)
    assert metrics["opd/neutral_rows"] == 0


def test_a_row_that_fails_ends_the_run_unless_told_otherwise(teacher_server):
    server = teacher_server(vocab=10)
    bad = IDS.copy()
    bad[1, 4] = 10  # outside the teacher's vocabulary
    with pytest.raises(RowsFailed, match="row 1 has id 10 at position 4"):
        score(server, TeacherConfig(), ids=bad)


def test_a_neutral_row_has_the_students_values_and_is_counted(teacher_server):
    server = teacher_server(vocab=10, seed=3)
    bad = IDS.copy()
    bad[1, 4] = 10
    got_BR, metrics = score(server, TeacherConfig(on_row_error="neutral", max_neutral_fraction=0.5), ids=bad)
    np.testing.assert_array_equal(got_BR[1], OLD[1])
    assert metrics["opd/neutral_rows"] == 1
    good_BR, _ = score(server, TeacherConfig())
    np.testing.assert_array_equal(got_BR[[0, 2]], good_BR[[0, 2]])
    row0 = got_BR[0, :3]
    assert metrics["opd/reverse_kl_k1"] == pytest.approx(float((-0.25 - row0).mean()), abs=1e-5)


def test_too_many_neutral_rows_end_the_run(teacher_server):
    server = teacher_server(vocab=10)
    bad = IDS.copy()
    bad[1, 4] = 10
    with pytest.raises(TeacherError, match=r"1 of 3 rows .*max_neutral_fraction=0\.3"):
        score(server, TeacherConfig(on_row_error="neutral", max_neutral_fraction=0.3), ids=bad)


def values(server, loss: TeacherLoss, *, ids=IDS, steps=(1,), config=None) -> list:
    with TeacherClient(server.address) as client:
        reference = TeacherReference(client, config or TeacherConfig(), loss=loss)
        batch = {"input_ids_BS": ids, "attention_mask_BS": MASK, "response_mask_BR": RESPONSE_MASK}
        return [reference.values(**batch, old_log_probs_BR=OLD, step=step) for step in steps]


def test_the_loss_of_each_step_travels_as_a_column(teacher_server):
    server = teacher_server(vocab=10)
    loss = TeacherLoss(LossSettings("policy_gradient"), Coefficient("linear", 1.0, end=0.5, steps=3), "k3+")
    got = values(server, loss, steps=(1, 2, 3))
    assert [column.columns[LOSS].shape for column in got] == [(3, LOSS_WIDTH)] * 3
    settings = [LossSettings.from_row(column.columns[LOSS][2].tolist()) for column in got]
    assert settings == [LossSettings("policy_gradient", coef=coef) for coef in (1.0, 0.75, 0.5)]
    assert set(got[0].columns) == {"ref_log_prob", LOSS}  # nothing else is asked of the teacher


def test_weights_go_along_only_where_one_may_differ_from_1(teacher_server):
    server = teacher_server(vocab=10)
    neutral = TeacherConfig(on_row_error="neutral", max_neutral_fraction=0.5)
    bad = IDS.copy()
    bad[1, 4] = 10
    loss = TeacherLoss(LossSettings(), Coefficient("constant", 1.0), "k3+")
    assert WEIGHTS not in values(server, loss)[0].columns
    whole, partly = (values(server, loss, ids=ids, config=neutral)[0].columns[WEIGHTS] for ids in (IDS, bad))
    np.testing.assert_array_equal(whole, RESPONSE_MASK)
    np.testing.assert_array_equal(partly, RESPONSE_MASK * [[1], [0], [1]])
    topk = TeacherLoss(LossSettings("jsd_topk", topk=3), Coefficient("constant", 1.0), "k3+")
    assert WEIGHTS not in values(server, topk, ids=bad, config=neutral)[0].columns  # it has no top-k: no loss anyway
    later = values(server, topk, config=TeacherConfig(token_discount=0.5))[0].columns[WEIGHTS]
    assert later.dtype == np.float32
    # the tool token in row 1 does not count, so the one behind it is the second
    np.testing.assert_array_equal(later, [[1, 0.5, 0.25, 0], [1, 0, 0.5, 0.25], [0, 0, 0, 0]])


def test_the_share_of_clamped_tokens_is_a_metric_and_the_values_stay_as_they_are(teacher_server):
    server = teacher_server(vocab=10, seed=3)
    free, clamped = (
        values(server, TeacherLoss(LossSettings(clamp=clamp), Coefficient("constant", 1.0), "k3+"))[0]
        for clamp in (np.inf, 1.0)
    )
    differences = np.abs(free.columns["ref_log_prob"] - OLD)[RESPONSE_MASK == 1]
    assert 0 < (differences > 1.0).mean() < 1
    assert clamped.metrics["opd/clamped_fraction"] == pytest.approx((differences > 1.0).mean())
    assert "opd/clamped_fraction" not in free.metrics
    np.testing.assert_array_equal(clamped.columns["ref_log_prob"], free.columns["ref_log_prob"])


def test_the_adaptive_coefficient_sees_the_measured_kl(teacher_server):
    server = teacher_server(vocab=10)
    loss = TeacherLoss(LossSettings(), Coefficient("adaptive", 1.0, target_kl=0.01), "k3+")
    got = values(server, loss, steps=(1, 2))
    assert got[0].metrics["opd/reverse_kl_k1"] > 0.012  # far above the target
    assert [column.columns[LOSS][0, 1] for column in got] == [1.0, pytest.approx(1.02)]


def test_a_top_k_loss_gets_the_teachers_top_k_beside_the_sampled_value(teacher_server):
    """The oracle's top-k of every response token; none on the padding, and none for a row that failed."""
    server = teacher_server(vocab=10, seed=3)
    loss = TeacherLoss(LossSettings("jsd_topk", topk=3), Coefficient("constant", 1.0), "k3+")
    bad = IDS.copy()
    bad[1, 4] = 10
    neutral = TeacherConfig(on_row_error="neutral", max_neutral_fraction=0.5)
    whole, partly = values(server, loss)[0], values(server, loss, ids=bad, config=neutral)[0]
    ids_BRK, logprobs_BRK = whole.columns[TOPK_IDS], whole.columns[TOPK_LOGPROBS]
    assert ids_BRK.shape == logprobs_BRK.shape == (3, 4, 3)
    tokens_BR = MASK[:, 3:] == 1  # with the tool token in row 1, which has a value, and no part in the loss
    assert (ids_BRK[tokens_BR] >= 0).all() and (ids_BRK[~tokens_BR] == -1).all()
    assert np.isnan(logprobs_BRK[~tokens_BR]).all() and (np.diff(logprobs_BRK[tokens_BR]) <= 0).all()
    sampled_BR = IDS[:, 3:]
    for b, t in zip(*np.nonzero(tokens_BR), strict=True):  # where the sampled token is in the top-k: the same number
        for k in np.flatnonzero(ids_BRK[b, t] == sampled_BR[b, t]):
            assert logprobs_BRK[b, t, k] == pytest.approx(whole.columns["ref_log_prob"][b, t], abs=1e-5)
    counted = np.exp(logprobs_BRK[RESPONSE_MASK == 1]).sum(-1)
    assert whole.metrics["opd/teacher_mass"] == pytest.approx(float(counted.mean()), abs=1e-6)
    assert (partly.columns[TOPK_IDS][1] == -1).all()
    np.testing.assert_array_equal(partly.columns[TOPK_IDS][0], ids_BRK[0])


def test_a_larger_top_k_than_the_teacher_gives_is_refused_before_the_first_step(teacher_server):
    server = teacher_server(vocab=10)
    loss = TeacherLoss(LossSettings("jsd_topk", topk=11), Coefficient("constant", 1.0), "k3+")
    with pytest.raises(ConfigError, match=r"teacher.topk=11, but the teacher .* gives 10"):
        values(server, loss)


@pytest.mark.parametrize("kl_type, warnings", [("k3", 1), ("low_var_kl", 1), ("k3+", 0)])
def test_tokens_without_a_k3_gradient_are_complained_about_once(teacher_server, caplog, kl_type, warnings):
    server = teacher_server(vocab=10, seed=3)
    loss = TeacherLoss(LossSettings(), Coefficient("constant", 1.0), kl_type)
    with TeacherClient(server.address) as client:
        reference = TeacherReference(client, TeacherConfig(), loss=loss)
        old = np.full((3, 4), -20.0, dtype=np.float32)  # the teacher likes every token far more
        batch = {"input_ids_BS": IDS, "attention_mask_BS": MASK, "response_mask_BR": RESPONSE_MASK}
        for step in (1, 2):
            got = reference.values(**batch, old_log_probs_BR=old, step=step)
    assert got.metrics["opd/k3_dead_fraction"] == 1.0
    said = [record.getMessage() for record in caplog.records if "have no gradient" in record.getMessage()]
    assert len(said) == warnings and all("100 % of the tokens" in text for text in said)
