"""A prompt for the teacher alone: its ids in front of the student's response, values where they always are."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fake_teacher import FakeTeacher
from tensordict import NonTensorStack, TensorDict
from test_config import composed

from opd.align import Rows
from opd.client import TeacherClient
from opd.config import TeacherConfig
from opd.errors import ConfigError, RowsFailed, TeacherError, TeacherMismatch
from opd.fingerprint import tokenizer_fingerprint
from opd.jagged import to_lists
from opd.reference import TeacherReference
from opd.scoring.oracle import oracle_logprobs
from opd.task_runner import shake_hands
from opd.teacher_prompt import TeacherPrompt

WORDS = ["?", "system", "user", "assistant", "two", "plus", "is", "four", "hint", "be", "brief", "end"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
QUESTION = [{"role": "user", "content": "two plus two"}]  # user two plus two assistant
PROMPT = [2, 4, 5, 4, 3]


def make_tokenizer():
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    fast = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    fast.pre_tokenizer = Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="?", eos_token="end")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def rows(*pairs: tuple[list[int], list[int]]) -> Rows:
    """Prompt and response of each row."""
    return Rows(
        [np.array(prompt + response, np.int32) for prompt, response in pairs],
        np.array([len(prompt) for prompt, _ in pairs]),
        np.array([len(response) for _, response in pairs]),
    )


@pytest.mark.parametrize(
    "settings, own, expected",
    [
        ({"system_prompt": "be brief"}, None, [1, 9, 10, 2, 4, 5, 4, 3]),
        ({"prompt_column": "hinted"}, [{"role": "user", "content": "hint four two"}], [2, 8, 7, 4, 3]),
        ({"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %} is"}, None, [4, 5, 4, 6]),
        (
            {"prompt_column": "hinted", "system_prompt": "be brief"},
            [{"role": "system", "content": "hint four"}, *QUESTION],
            [1, 9, 10, 8, 7, 2, 4, 5, 4, 3],  # one system message, with both texts
        ),
    ],
)
def test_the_teachers_row_is_its_own_prompt_and_the_students_response(tokenizer, settings, own, expected):
    prompts = TeacherPrompt(tokenizer, **settings)
    columns = {"raw_prompt": np.array([QUESTION, QUESTION], dtype=object), "hinted": [own, own]}
    got = prompts.replace(rows((PROMPT, [7, 11]), (PROMPT, [6])), columns)
    assert [row.tolist() for row in got.rows] == [[*expected, 7, 11], [*expected, 6]]
    assert got.starts.tolist() == [len(expected)] * 2 and got.response_lengths.tolist() == [2, 1]
    assert all(row.dtype == np.int32 for row in got.rows)


def test_the_template_gets_the_arguments_that_verl_gives_it(tokenizer):
    template = "{% if loud %}hint {% endif %}{{ messages[0]['content'] }}"
    prompts = TeacherPrompt(tokenizer, chat_template=template, template_arguments={"loud": True, "tokenize": False})
    assert prompts.teacher_ids(QUESTION).tolist() == [8, 4, 5, 4]


BATCH = {  # P = 6, R = 3
    "input_ids_BS": np.array([[0, *PROMPT, 7, 11, 0], [0, *PROMPT, 6, 4, 7]]),
    "attention_mask_BS": np.array([[0, 1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1]]),
    "response_mask_BR": np.array([[1, 1, 0], [1, 1, 1]]),
    "old_log_probs_BR": np.full((2, 3), -0.25, np.float32),
    "step": 1,
}
RAW = {"raw_prompt": [QUESTION, QUESTION]}
SEEN = [1, 9, 10, *PROMPT]  # with the system prompt


def test_values_are_given_the_teachers_prompt_and_stay_at_the_students_tokens(teacher_server, tokenizer):
    server = teacher_server(vocab=12, seed=3)
    with TeacherClient(server.address) as client:
        config = TeacherConfig()
        reference = TeacherReference(client, config, prompts=TeacherPrompt(tokenizer, system_prompt="be brief"))
        assert reference.data_columns == ("raw_prompt",)
        got_BR = reference.values(**BATCH, data_columns=RAW).columns["ref_log_prob"]
        with pytest.raises(TeacherError, match="no column 'raw_prompt'"):
            reference.values(**BATCH)
    expected_BR = BATCH["old_log_probs_BR"].copy()
    expected_BR[0, :2] = oracle_logprobs([*SEEN, 7, 11], 8, seed=3, vocab=12)
    expected_BR[1] = oracle_logprobs([*SEEN, 6, 4, 7], 8, seed=3, vocab=12)
    np.testing.assert_allclose(got_BR, expected_BR, atol=1e-6)
    assert not np.allclose(got_BR[1], oracle_logprobs([*PROMPT, 6, 4, 7], 5, seed=3, vocab=12), atol=1e-3)


def test_a_row_that_the_longer_prompt_makes_too_long_is_a_row_error_and_is_not_cut(teacher_server, tokenizer):
    server = teacher_server(vocab=12, seed=3, max_length=10)  # row 0 has 8 + 2, row 1 has 8 + 3
    with TeacherClient(server.address) as client:
        prompts = TeacherPrompt(tokenizer, system_prompt="be brief")
        with pytest.raises(RowsFailed, match=r"row 1 has 11 ids; this teacher takes 10 \[too_long\]"):
            TeacherReference(client, TeacherConfig(), prompts=prompts).values(**BATCH, data_columns=RAW)
        neutral = TeacherConfig(on_row_error="neutral", max_neutral_fraction=0.5)
        values = TeacherReference(client, neutral, prompts=prompts).values(**BATCH, data_columns=RAW)
    np.testing.assert_array_equal(values.columns["ref_log_prob"][1], BATCH["old_log_probs_BR"][1])
    assert values.metrics["opd/neutral_rows"] == 1


def test_a_row_whose_prompt_is_not_made_of_its_messages_is_refused(tokenizer):
    """Tools, images, a cut prompt, a later turn: the teacher would be asked about another conversation."""
    prompts = TeacherPrompt(tokenizer, system_prompt="be brief")
    later = ([*PROMPT, 7, 2, 6, 3], [11])  # a second output of an agent loop: its prompt holds the first turn
    with pytest.raises(TeacherError, match=r"row 1 .*has 9 ids, and its messages make 5, different from position 5"):
        prompts.replace(rows((PROMPT, [7]), later), RAW)
    with pytest.raises(TeacherError, match=r"row 0 .*has 5 ids, and its messages make 5, different from position 1"):
        prompts.replace(rows(([2, 5, 5, 4, 3], [7])), {"raw_prompt": [QUESTION]})
    with pytest.raises(TeacherError, match=r"row 0 .*list of messages was expected, not str"):
        prompts.replace(rows((PROMPT, [7])), {"raw_prompt": ["two plus two"]})


def test_columns_come_out_of_verls_v1_batch_as_they_were_put_in():
    other = [{"role": "user", "content": "be"}]
    data = TensorDict(
        {
            "prompts": torch.zeros(3, 2),
            "raw_prompt": NonTensorStack(QUESTION, other, QUESTION),
            "data_source": NonTensorStack("a", "b", "c"),
        },
        batch_size=[3],
    )
    got = to_lists(data, ("data_source", "raw_prompt", "domain"), [0, 2])
    assert got["data_source"] == ["a", "c"]
    assert [[dict(m) for m in messages] for messages in got["raw_prompt"]] == [QUESTION, QUESTION]
    assert "domain" not in got


@pytest.fixture
def student(tmp_path, tokenizer):
    """A folder with a tokenizer and a config.json, and training data: one prompt of 5 ids and one of 7."""
    import transformers

    tokenizer.save_pretrained(tmp_path / "student")
    transformers.LlamaConfig(vocab_size=len(WORDS), eos_token_id=11).save_pretrained(tmp_path / "student")
    long = [{"role": "user", "content": "two plus two plus two"}]
    hints = [[{"role": "user", "content": "hint four"}], [{"role": "user", "content": "hint"}]]
    table = pa.table({"prompt": [QUESTION, long], "hinted": hints, "data_source": ["sums", "sums"]})
    pq.write_table(table, tmp_path / "train.parquet")
    return tmp_path


def settings(folder, *overrides: str):
    return composed(
        f"data.train_files={folder}/train.parquet",
        f"actor_rollout_ref.model.path={folder}/student",
        "data.max_prompt_length=7",
        "data.max_response_length=8",
        *overrides,
    )


@pytest.mark.parametrize(
    "overrides, needed",
    [
        ([], 7 + 8),  # data.max_prompt_length + data.max_response_length
        (["teacher.system_prompt=be brief"], 7 + 3 + 8),  # system be brief
        # verl leaves the prompt of 7 ids out, so it does not count
        (["teacher.system_prompt=be brief", "data.max_prompt_length=6"], 5 + 3 + 8),
        (["teacher.prompt_column=hinted"], 4 + 8),  # user hint four assistant
    ],
)
def test_the_handshake_counts_the_longest_prompt_that_the_teacher_will_see(student, tokenizer, overrides, needed):
    fingerprint = tokenizer_fingerprint(tokenizer)
    says = f"takes {needed - 1} tokens, but prompt .* {needed};"
    with (
        FakeTeacher(tokenizer=fingerprint, max_length=needed - 1) as teacher,
        pytest.raises(TeacherMismatch, match=says),
    ):
        shake_hands(settings(student, f"teacher.address={teacher.address}", *overrides))
    with FakeTeacher(tokenizer=fingerprint, max_length=needed) as teacher:
        shake_hands(settings(student, f"teacher.address={teacher.address}", *overrides)).teachers.close()


def test_a_missing_column_or_template_is_said_before_anything_starts(student, tokenizer):
    with FakeTeacher(tokenizer=tokenizer_fingerprint(tokenizer)) as teacher:
        address = f"teacher.address={teacher.address}"
        with pytest.raises(ConfigError, match="has no column 'solution'; it has prompt, hinted, data_source"):
            shake_hands(settings(student, address, "teacher.prompt_column=solution"))
        with pytest.raises(ConfigError, match=r"teacher.chat_template=/no/such.jinja cannot be read"):
            shake_hands(settings(student, address, "teacher.chat_template=/no/such.jinja"))
        routed = [f"+teacher.teachers.a={teacher.address}", "+teacher.routes.poems=a"]
        with pytest.raises(ConfigError, match="2 of 2 rows have a data_source without a teacher, the first 'sums'"):
            shake_hands(settings(student, *routed))
        reference = shake_hands(settings(student, routed[0], "+teacher.routes.sums=a", "teacher.system_prompt=be"))
        assert set(reference.teachers.clients) == {"a"} and reference.data_columns == ("data_source", "raw_prompt")
        reference.teachers.close()
