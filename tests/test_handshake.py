"""What the handshake lets pass, and what it refuses, with the values in the message."""

import logging

import pytest
from fake_teacher import FakeTeacher

from opd.client import TeacherClient
from opd.errors import ConfigError, TeacherMismatch
from opd.fingerprint import read_vocabulary, tokenizer_fingerprint, vocabulary_bytes
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


def test_other_tokens_are_refused_with_the_first_that_differs():
    def refusal(theirs: Tokenizer, mine: Tokenizer = LETTERS) -> str:
        info = teacher(tokenizer=tokenizer_fingerprint(theirs))
        with pytest.raises(TeacherMismatch, match="different tokens") as e:
            check_teacher(info, student(tokenizer=mine), lambda: vocabulary_bytes(theirs))
        return str(e.value)

    swapped = refusal(Tokenizer(list("abcdefhg")))
    assert "id 6 is 'g' for the student and 'h' for the teacher (2 of 8 differ)" in swapped
    more = refusal(LETTERS, Tokenizer([*"abcdefgh", "<tool>"]))
    assert "id 8 is '<tool>' for the student and no token of the teacher's (1 of 9 differ)" in more
    assert "it cannot say" not in swapped


def test_a_teacher_with_more_tokens_than_the_student_passes():
    """Every id that the student can use is the same token to both."""
    extended = Tokenizer([*"abcdefgh", "<tool>", "<image>"])
    info = teacher(tokenizer=tokenizer_fingerprint(extended), vocab_size=10)
    check_teacher(info, student(), lambda: vocabulary_bytes(extended))
    with pytest.raises(TeacherMismatch, match="scores ids below 7"):  # the other checks still hold
        check_teacher(teacher(tokenizer=info.tokenizer, vocab_size=7), student(), lambda: vocabulary_bytes(extended))


def test_equal_fingerprints_ask_for_no_vocabulary():
    check_teacher(teacher(), student(), lambda: pytest.fail("asked"))


def test_a_server_tells_its_vocabulary_over_the_wire(start_teacher):
    """A real front and worker; \u00e4 has two bytes."""
    server = start_teacher("--backend", "lettered_scorer", "--model", "abcd\u00e4fgh")
    with TeacherClient(server.wait_ready()) as client:
        info = client.wait_until_ready(30)
        assert read_vocabulary(client.vocabulary(10)) == set(enumerate("abcd\u00e4fgh"))
        with pytest.raises(TeacherMismatch, match="id 4 is 'e' for the student and '\u00e4' for the teacher"):
            check_teacher(info, student(), client.vocabulary)
        check_teacher(info, student(tokenizer=Tokenizer(list("abcd")), eos_ids=[]), client.vocabulary)


def test_a_teacher_that_does_not_know_its_tokens_or_tells_others_than_it_named_is_refused():
    with FakeTeacher(tokenizer="f" * 32) as fake, TeacherClient(fake.address) as client:
        info = client.wait_until_ready(30)
        with pytest.raises(TeacherMismatch, match=r"different tokens \(it cannot say which: .*does not know"):
            check_teacher(info, student(), client.vocabulary)
        fake.vocabulary = vocabulary_bytes(LETTERS)
        with pytest.raises(TeacherMismatch, match=f"pinned is '{'f' * 32}'"):
            check_teacher(info, student(), client.vocabulary)


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
