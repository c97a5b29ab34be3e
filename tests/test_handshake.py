"""What the handshake lets pass, and what it refuses, with the values in the message."""

import logging

import pytest

from opd.errors import ConfigError, TeacherMismatch
from opd.fingerprint import tokenizer_fingerprint
from opd.handshake import Student, check_teacher, read_student
from opd.wire import ModelInfo


class Tokenizer:
    """The one method of a tokenizer that fingerprints use."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


LETTERS = Tokenizer(list("abcdefgh"))


def student(**changes) -> Student:
    return Student("S", LETTERS, 8, [7], 64, 1.0)._replace(**changes)


def teacher(**changes) -> ModelInfo:
    fields = {
        "name": "T",
        "model": "m",
        "tokenizer": tokenizer_fingerprint(LETTERS),
        "vocab_size": 8,
        "max_length": 64,
        "max_topk": 0,
        "eos_ids": [7],
        "dtype": "float32",
        "backend": "hf",
        "temperature": True,
    }
    return ModelInfo(**(fields | changes))


def test_an_equal_teacher_passes_without_a_word(caplog):
    check_teacher(teacher(), student())
    assert not caplog.records


def test_a_padded_vocabulary_is_no_mismatch():
    """Qwen2.5: heads of 151,936 and 152,064 rows over one tokenizer."""
    check_teacher(teacher(vocab_size=152_064), student(vocab_size=151_936))


def test_a_student_with_more_padding_passes_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check_teacher(teacher(vocab_size=151_936), student(vocab_size=152_064))
    assert "152064" in caplog.text and "151936" in caplog.text


def test_a_teacher_without_all_tokens_is_refused():
    with pytest.raises(TeacherMismatch, match=r"below 7.* up to 7"):
        check_teacher(teacher(vocab_size=7), student())


def test_another_tokenizer_is_refused():
    with pytest.raises(TeacherMismatch, match="different tokens"):
        check_teacher(teacher(tokenizer=tokenizer_fingerprint(Tokenizer(list("abcdefhg")))), student())


def test_a_teacher_without_a_tokenizer_is_refused():
    with pytest.raises(TeacherMismatch, match="does not know its tokenizer"):
        check_teacher(teacher(tokenizer=""), student())


@pytest.mark.parametrize("length, fits", [(63, False), (64, True)])
def test_prompt_plus_response_has_to_fit(length, fits):
    if fits:
        check_teacher(teacher(max_length=length), student())
        return
    with pytest.raises(TeacherMismatch, match=r"takes 63 tokens.*may have 64"):
        check_teacher(teacher(max_length=length), student())


def test_a_temperature_that_the_backend_cannot_apply_is_refused():
    check_teacher(teacher(temperature=False), student())
    check_teacher(teacher(temperature=True), student(temperature=0.7))
    with pytest.raises(ConfigError, match=r"0\.7"):
        check_teacher(teacher(temperature=False), student(temperature=0.7))


def test_other_eos_ids_are_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check_teacher(teacher(eos_ids=[3]), student())
    assert "[3]" in caplog.text and "[7]" in caplog.text


def test_a_missing_student_is_one_clear_sentence():
    with pytest.raises(ConfigError, match="STUDENT"):
        read_student("/no/such/folder", max_length=8, temperature=1.0)
