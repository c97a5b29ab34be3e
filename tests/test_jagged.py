"""verl's jagged rows to the padded batch and back, by hand-written tensors, and through a real server."""

import numpy as np
import pytest
import torch

from opd.client import TeacherClient
from opd.config import TeacherConfig
from opd.jagged import to_columns, to_padded
from opd.loss.settings import LOSS, TOPK_IDS, TOPK_LOGPROBS, WEIGHTS, LossSettings
from opd.reference import TeacherReference
from opd.scoring.oracle import oracle_logprobs


def jagged(*rows, dtype=torch.int64) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


# Rows 0 and 1 are two outputs of one agent loop: the second prompt holds the first one's turn. The second response has
# two tool tokens, 8 and 9. Row 2 is made up by verl to fill the batch. Row 3 ends at once.
PROMPTS = ([1, 2], [1, 2, 3, 4], [9, 9, 9, 9, 9, 9], [5])
RESPONSES = ([3, 4], [6, 8, 9, 7, 0], [9], [2])
DATA = {
    "prompts": jagged(*PROMPTS),
    "responses": jagged(*RESPONSES),
    "response_mask": jagged([1, 1], [1, 0, 0, 1, 1], [0], [1]),
    "old_log_probs": jagged([-0.1, -0.2], [-0.3, -0.4, -0.5, -0.6, -0.7], [-0.8], [-0.9], dtype=torch.float32),
}
REAL = [0, 1, 3]


def test_prompts_are_padded_left_responses_right_and_made_up_rows_are_left_out():
    padded = to_padded(DATA, REAL)
    # P = 4, R = 5: the made-up row's prompt of 6 tokens does not widen the batch
    np.testing.assert_array_equal(
        padded["input_ids_BS"],
        [[0, 0, 1, 2, 3, 4, 0, 0, 0], [1, 2, 3, 4, 6, 8, 9, 7, 0], [0, 0, 0, 5, 2, 0, 0, 0, 0]],
    )
    np.testing.assert_array_equal(
        padded["attention_mask_BS"],
        [[0, 0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0, 0]],
    )
    np.testing.assert_array_equal(
        padded["response_mask_BR"], [[1, 1, 0, 0, 0], [1, 0, 0, 1, 1], [1, 0, 0, 0, 0]]
    )  # holes on the tool tokens, which the attention mask does not have
    np.testing.assert_allclose(padded["old_log_probs_BR"][1], [-0.3, -0.4, -0.5, -0.6, -0.7])


def test_values_go_back_in_verls_layout_and_made_up_rows_keep_the_students():
    ref_BR = np.array(
        [[-1, -2, 7, 7, 7], [-3, -4, -5, -6, -7], [-8, 7, 7, 7, 7]], dtype=np.float32
    )  # 7 is padding, and must not come through
    back = to_columns({"ref_log_prob": ref_BR}, DATA["old_log_probs"], REAL)["ref_log_prob"]
    assert back.layout == torch.jagged and back.dtype == torch.float32
    assert [[round(v, 4) for v in row.tolist()] for row in back.unbind()] == [
        [-1, -2],
        [-3, -4, -5, -6, -7],
        [-0.8],
        [-8],
    ]
    assert torch.equal(back.offsets(), DATA["responses"].offsets())


def test_the_columns_of_the_loss_go_along_and_made_up_rows_have_no_top_k():
    columns = {
        LOSS: LossSettings(coef=0.5).to_column(3),
        TOPK_IDS: np.arange(30, dtype=np.int32).reshape(3, 5, 2),
        TOPK_LOGPROBS: -np.arange(30, dtype=np.float32).reshape(3, 5, 2),
        WEIGHTS: np.arange(1, 16, dtype=np.float32).reshape(3, 5),
    }
    back = to_columns(columns, DATA["old_log_probs"], REAL)
    assert len(back[LOSS]) == 4
    assert all(LossSettings.from_row(row) == LossSettings(coef=0.5) for row in back[LOSS].tolist())
    assert [row.tolist() for row in back[TOPK_IDS].unbind()] == [
        [0, 1, 2, 3],
        [10, 11, 12, 13, 14, 15, 16, 17, 18, 19],
        [-1, -1],
        [20, 21],
    ]
    logprobs = back[TOPK_LOGPROBS].unbind()
    assert logprobs[2].isnan().all() and logprobs[3].tolist() == [-20, -21]
    # a weight of 0 is no missing value: a made-up row has no signal, and NaN would make the whole loss NaN
    assert [row.tolist() for row in back[WEIGHTS].unbind()] == [[1, 2], [6, 7, 8, 9, 10], [0], [11]]


def test_a_row_whose_columns_differ_in_length_is_refused():
    short = DATA | {"old_log_probs": jagged([-0.1, -0.2], [-0.3], [-0.8], [-0.9], dtype=torch.float32)}
    with pytest.raises(ValueError, match="row 1 has columns of different lengths: responses 5, response_mask 5, old_"):
        to_padded(short, REAL)


def test_each_response_token_gets_the_value_of_a_direct_score(teacher_server):
    """Tool tokens are scored too, as context and for their place, but count in no metric; made-up rows are not sent."""
    server = teacher_server(vocab=10, seed=3)
    with TeacherClient(server.address) as client:
        columns, metrics = TeacherReference(client, TeacherConfig()).values(**to_padded(DATA, REAL), step=1)
    back = to_columns(columns, DATA["old_log_probs"], REAL)["ref_log_prob"].unbind()
    assert back[2].tolist() == DATA["old_log_probs"].unbind()[2].tolist()
    expected = {}
    for i in REAL:
        ids = np.array(PROMPTS[i] + RESPONSES[i], dtype=np.int32)
        expected[i] = oracle_logprobs(ids, len(PROMPTS[i]), seed=3, vocab=10)
        np.testing.assert_allclose(back[i].numpy(), expected[i], atol=1e-6)
    counted = np.concatenate([expected[0], expected[1][[0, 3, 4]], expected[3]])
    assert metrics["opd/teacher_logprob"] == pytest.approx(float(counted.mean()), abs=1e-6)
