"""From verl's padded batch through a real server to `ref_log_prob`, against values computed from the ids."""

import numpy as np
import pytest

from opd.client import TeacherClient
from opd.config import TeacherConfig
from opd.errors import RowsFailed, TeacherError
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
        return reference.ref_log_prob(
            input_ids_BS=ids, attention_mask_BS=MASK, response_mask_BR=RESPONSE_MASK, old_log_probs_BR=OLD
        )


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
