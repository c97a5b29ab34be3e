"""align: golden tables, written by hand. Token ids are 10·row + position, so a misplaced one is seen at once."""

import numpy as np
import pytest

from opd.align import to_padded, to_rows

PAD = 2  # the eos id too, as in many tokenizers


def batch(*rows):
    """Rows of (input_ids, attention_mask) as two int64 arrays."""
    return np.array([r[0] for r in rows], dtype=np.int64), np.array([r[1] for r in rows], dtype=np.int64)


GOLDEN = {
    "left padding, ragged responses": (
        batch(
            ([PAD, PAD, 11, 12, 13, 14, 15, PAD], [0, 0, 1, 1, 1, 1, 1, 0]),
            ([20, 21, 22, 23, 24, PAD, PAD, PAD], [1, 1, 1, 1, 1, 0, 0, 0]),
            ([PAD, PAD, PAD, 30, 31, 32, 33, 34], [0, 0, 0, 1, 1, 1, 1, 1]),
        ),
        4,
        [[11, 12, 13, 14, 15], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34]],
        [2, 4, 1],
        [3, 1, 4],
    ),
    "every response shorter than the width": (
        batch(
            ([PAD, 11, 12, PAD, PAD, PAD], [0, 1, 1, 0, 0, 0]),
            ([20, 21, 22, PAD, PAD, PAD], [1, 1, 1, 0, 0, 0]),
        ),
        2,
        [[11, 12], [20, 21, 22]],
        [1, 2],
        [1, 1],
    ),
    "an empty response beside a full one": (
        batch(([PAD, 11, PAD, PAD], [0, 1, 0, 0]), ([20, 21, 22, 23], [1, 1, 1, 1])),
        2,
        [[11], [20, 21, 22, 23]],
        [1, 2],
        [0, 2],
    ),
    "real eos tokens equal to the padding stay": (
        batch(([PAD, PAD, 12, PAD, PAD, PAD], [0, 1, 1, 1, 0, 0])),
        3,
        [[PAD, 12, PAD]],
        [2],
        [1],
    ),
    "a response that is only eos": (batch(([PAD, 11, PAD, PAD], [0, 1, 1, 0])), 2, [[11, PAD]], [1], [1]),
    "zeros inside the prompt are dropped, as verl drops them": (
        batch(([10, PAD, 12, 13, PAD], [1, 0, 1, 1, 0])),
        3,
        [[10, 12, 13]],
        [2],
        [1],
    ),
    "no response columns at all": (batch(([PAD, 11, 12], [0, 1, 1])), 3, [[11, 12]], [2], [0]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rows_are_the_real_tokens_and_start_where_the_response_does(name):
    (ids, mask), width, rows, starts, lengths = GOLDEN[name]
    got = to_rows(ids, mask, prompt_width=width)
    assert [r.tolist() for r in got.rows] == rows
    assert got.starts.tolist() == starts
    assert got.response_lengths.tolist() == lengths
    assert all(r.dtype == np.int32 for r in got.rows)


def test_the_first_value_belongs_to_the_first_response_token_and_the_rest_follow_it():
    (ids, mask), width, *_ = GOLDEN["left padding, ragged responses"]
    rows, starts, lengths = to_rows(ids, mask, prompt_width=width)
    values = [-r[s:].astype(np.float32) for r, s in zip(rows, starts, strict=True)]  # the value of token 14 is -14
    padded = to_padded(values, lengths, fill_BR=np.full((3, 4), -0.5))
    assert padded.dtype == np.float32
    assert padded.tolist() == [[-13, -14, -15, -0.5], [-24, -0.5, -0.5, -0.5], [-31, -32, -33, -34]]
    responses = ids[:, width:]
    assert (padded[padded != -0.5] == -responses[padded != -0.5]).all()


def test_holes_of_the_response_mask_are_context_and_keep_their_place():
    # tokens 14 and 15 came from a tool: attention 1, response_mask 0
    ids, mask = batch(([PAD, 11, 12, 13, 14, 15, 16, PAD], [0, 1, 1, 1, 1, 1, 1, 0]))
    rows, starts, lengths = to_rows(ids, mask, prompt_width=3)
    assert rows[0].tolist() == [11, 12, 13, 14, 15, 16]
    padded = to_padded([-rows[0][starts[0] :].astype(np.float32)], lengths, fill_BR=np.full((1, 5), -0.5))
    assert padded.tolist() == [[-13, -14, -15, -16, -0.5]]


def test_tensors_and_every_mask_type_give_the_same_rows():
    import torch

    (ids, mask), width, rows, *_ = GOLDEN["left padding, ragged responses"]
    for t in (torch.int64, torch.int32, torch.bool, torch.float32):
        got = to_rows(torch.tensor(ids), torch.tensor(mask).to(t), prompt_width=width)
        assert [r.tolist() for r in got.rows] == rows
    padded = to_padded([np.ones(1, np.float32)], [1], fill_BR=torch.zeros(1, 2))
    assert torch.from_numpy(padded).dtype == torch.float32


def test_the_fill_is_copied_never_written():
    fill = np.full((1, 2), -0.25, dtype=np.float32)
    assert to_padded([np.array([-1.0], np.float32)], [1], fill_BR=fill).tolist() == [[-1.0, -0.25]]
    assert fill.tolist() == [[-0.25, -0.25]]


def test_a_missing_row_is_an_error_unless_it_was_asked_for_and_then_it_is_neutral():
    values = [np.array([-1.0, -2.0], np.float32), None]
    fill = [[-0.1, -0.2], [-0.3, -0.4]]
    with pytest.raises(ValueError, match="row 1 has no teacher value"):
        to_padded(values, [2, 1], fill_BR=fill)
    padded = to_padded(values, [2, 1], fill_BR=fill, allow_missing=True)
    assert padded.tolist() == np.array([[-1.0, -2.0], [-0.3, -0.4]], np.float32).tolist()
    assert to_padded([None], [1], fill_BR=[[-0.5]], allow_missing=True).tolist() == [[-0.5]]


def test_an_empty_batch_stays_empty():
    rows, starts, lengths = to_rows(np.zeros((0, 4), np.int64), np.zeros((0, 4), np.int64), prompt_width=2)
    assert rows == [] and len(starts) == 0
    assert to_padded([], lengths, fill_BR=np.zeros((0, 2))).shape == (0, 2)


BAD_BATCHES = {
    "row 1 has attention_mask 0 everywhere": batch(([1, 1, 1, 1], [0, 1, 1, 0]), ([1, 1, 1, 1], [0, 0, 0, 0])),
    "row 0 has no prompt token": batch(([1, 1, 1, 1], [0, 0, 1, 1])),
    "row 0 has a hole in the response": batch(([1, 1, 1, 1], [1, 1, 0, 1])),
    "row 0 has attention_mask values other than 0 and 1": batch(([1, 1, 1, 1], [1, 1, 2, 0])),
    "row 1 has a token id outside": batch(([1, 1, 1, 1], [1, 1, 1, 1]), ([1, 1, -1, 1], [1, 1, 1, 1])),
    "row 0 has a token id outside": batch(([1, 1, 2**31, 1], [1, 1, 1, 1])),
}


@pytest.mark.parametrize("message", BAD_BATCHES)
def test_a_row_without_a_well_defined_answer_is_named(message):
    with pytest.raises(ValueError, match=message):
        to_rows(*BAD_BATCHES[message], prompt_width=2)


def test_an_id_out_of_range_on_the_padding_is_nobodys_business():
    ids, mask = batch(([-100, 11, 12, -100], [0, 1, 1, 0]))
    assert to_rows(ids, mask, prompt_width=2).rows[0].tolist() == [11, 12]


@pytest.mark.parametrize(
    ("ids", "mask", "width"),
    [
        (np.zeros((2, 4)), np.ones((2, 4)), 2),  # float ids
        (np.zeros((2, 4), int), np.ones((2, 3)), 2),
        (np.zeros(4, int), np.ones(4), 2),
        (np.zeros((2, 4), int), np.ones((2, 4)), 0),
        (np.zeros((2, 4), int), np.ones((2, 4)), 5),
    ],
)
def test_shapes_that_do_not_fit_are_refused(ids, mask, width):
    with pytest.raises(ValueError):
        to_rows(ids, mask, prompt_width=width)


@pytest.mark.parametrize(
    ("values", "lengths", "fill", "message"),
    [
        ([[-1.0]], [2], np.zeros((1, 3)), "row 0 does not have exactly one value"),
        ([[-1.0, -2.0]], [1], np.zeros((1, 3)), "row 0 does not have exactly one value"),
        ([[-1.0], [-1.0, -2.0]], [1, 1], np.zeros((2, 3)), "row 1 does not have"),
        ([[-1.0]], [1, 1], np.zeros((2, 3)), "1 rows of values"),
        ([[-1.0]], [4], np.zeros((1, 3)), r"row 0 has a length outside \[0, 3\]"),
        ([[float("nan")]], [1], np.zeros((1, 3)), "row 0 has a value that is not finite"),
        ([[-1.0]], [1], np.full((1, 3), np.nan), "row 0 has a value that is not finite"),
        ([[-1.0]], [1], np.zeros(3), r"must be \[B, R\]"),
    ],
)
def test_values_that_do_not_fit_the_batch_are_refused(values, lengths, fill, message):
    with pytest.raises(ValueError, match=message):
        to_padded([np.array(v, np.float32) for v in values], lengths, fill_BR=fill)


def test_rows_are_those_that_verl_gives_to_its_own_reference_model():
    import torch
    from tensordict import TensorDict
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    for name in ("left padding, ragged responses", "every response shorter than the width"):
        (ids, mask), width, *_ = GOLDEN[name]
        t_ids, t_mask = torch.tensor(ids), torch.tensor(mask)
        data = TensorDict(
            {
                "input_ids": t_ids.clone(),
                "prompts": t_ids[:, :width],
                "responses": t_ids[:, width:],
                "attention_mask": t_mask,
                "response_mask": t_mask[:, width:],
                "position_ids": torch.zeros_like(t_ids),
            },
            batch_size=len(ids),
        )
        data = left_right_2_no_padding(data)
        rows, starts, lengths = to_rows(ids, mask, prompt_width=width)
        assert [r.tolist() for r in data["input_ids"].unbind()] == [r.tolist() for r in rows]
        # verl's model output at position i scores the token at i + 1: give every token minus its own id as its value
        flat = torch.cat([torch.cat([-r[1:].float(), torch.zeros(1)]) for r in data["input_ids"].unbind()])
        theirs = no_padding_2_padding(flat, data)
        ours = to_padded(
            [-r[s:].astype(np.float32) for r, s in zip(rows, starts, strict=True)],
            lengths,
            fill_BR=np.zeros(theirs.shape),
        )
        assert ours.tolist() == theirs.tolist()
