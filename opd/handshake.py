"""What has to be true of a teacher before the first step: checked once, at the start, in one place.

A vocabulary that one side padded is no mismatch (Qwen2.5 has heads of 151,936 and of 152,064 rows over one tokenizer):
what counts is that both map the same tokens to the same ids, and that the teacher has a row for each of them. A teacher
that knows more tokens than the student passes too: none of the student's ids means something else to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from opd.errors import ConfigError, RequestRefused, TeacherMismatch
from opd.fingerprint import read_vocabulary, tokenizer_fingerprint
from opd.wire import ModelInfo, clip

logger = logging.getLogger(__name__)


class Student(NamedTuple):
    """What the checks need to know of the student."""

    name: str
    tokenizer: Any  # transformers' tokenizer
    vocab_size: int  # rows of its output head
    eos_ids: list[int]
    max_length: int  # longest prompt + longest response
    temperature: float  # of the rollout


def read_student(path: str, *, max_length: int, temperature: float) -> Student:
    """Read a student's tokenizer and configuration, not its weights."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        first_line = str(e).strip().splitlines()[0]
        raise ConfigError(f"cannot read the student {path!r}: {first_line}; check STUDENT (a Hugging Face folder)")
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # not every folder has a generation_config.json
        eos = None
    eos = config.eos_token_id if eos is None else eos
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    text_config = config.get_text_config()
    return Student(path, tokenizer, text_config.vocab_size, eos_ids, max_length, temperature)


def check_teacher(teacher: ModelInfo, student: Student, vocabulary: Callable[[], bytes] | None = None) -> None:
    """Compare a teacher that is ready with the student that it is to teach.

    Args:
        vocabulary: asks the teacher which token each id is (TeacherClient.vocabulary); called only when the
            fingerprints of the tokenizers differ. Without it, these have to be equal.

    Raises:
        TeacherMismatch: other tokenizer, a vocabulary that lacks tokens, or too short; names both sides' values.
        ConfigError: a rollout temperature that this teacher cannot apply.
    """
    if teacher.tokenizer != tokenizer_fingerprint(student.tokenizer):
        _check_tokens(teacher, student, vocabulary)
    top_id = max(student.tokenizer.get_vocab().values())
    if teacher.vocab_size <= top_id:
        raise TeacherMismatch(
            f"the teacher {teacher.name!r} scores ids below {teacher.vocab_size}, but the student's tokenizer goes "
            f"up to {top_id}: those tokens would have no value. Use a teacher with the whole vocabulary"
        )
    if teacher.vocab_size < student.vocab_size:
        logger.warning(
            "the student's head has %d rows, the teacher's %d; ids from %d on are padding that no token uses: "
            "a response that samples one has no teacher value and is treated as teacher.on_row_error says",
            student.vocab_size,
            teacher.vocab_size,
            teacher.vocab_size,
        )
    if teacher.max_length < student.max_length:
        raise TeacherMismatch(
            f"the teacher {teacher.name!r} takes {teacher.max_length} tokens, but prompt + response may have "
            f"{student.max_length}; start it with --max-len {student.max_length} if the model allows it, or lower "
            "data.max_prompt_length or data.max_response_length"
        )
    if student.temperature != 1.0 and not teacher.temperature:
        raise ConfigError(
            f"rollout.temperature is {student.temperature}, but the backend {teacher.backend!r} of the teacher scores "
            "at 1.0 only: the KL of a model with itself would not be 0. Use temperature 1.0, or --backend hf"
        )
    if set(teacher.eos_ids) != set(student.eos_ids):
        logger.warning(
            "EOS ids differ: teacher %s, student %s. A teacher that expects another end of a response scores the "
            "student's last token low, and may teach it to go on or to stop early",
            sorted(teacher.eos_ids),
            sorted(student.eos_ids),
        )


def _check_tokens(teacher: ModelInfo, student: Student, vocabulary: Callable[[], bytes] | None) -> None:
    """For fingerprints that differ: pass if each of the student's ids is the same token for the teacher."""
    theirs = f"has the tokenizer {teacher.tokenizer}" if teacher.tokenizer else "does not know its tokenizer"
    difference = ""
    if teacher.tokenizer and vocabulary is not None:
        try:
            pairs = read_vocabulary(vocabulary())
        except RequestRefused as e:
            difference = f" (it cannot say which: {e})"
        except ValueError as e:
            raise TeacherMismatch(f"the vocabulary of the teacher {teacher.name!r} cannot be read: {e}") from None
        else:
            tokens = student.tokenizer.get_vocab()
            difference = first_difference(tokens, pairs)
            if not difference:
                more = len(pairs) - len(tokens)
                logger.info("the teacher %r has the student's %d tokens and %d more", teacher.name, len(tokens), more)
                return
    raise TeacherMismatch(
        f"the teacher {teacher.name!r} {theirs}, the student {student.name!r} has "
        f"{tokenizer_fingerprint(student.tokenizer)}: the same id would mean different tokens{difference}. "
        "Use a teacher of the student's model family, with its tokenizer in its folder"
    )


def first_difference(student: Mapping[str, int], teacher: Collection[tuple[int, str]]) -> str:
    """The lowest of the student's ids that is not the same token for the teacher, in words; "" if there is none.

    Args:
        student: token -> id.
        teacher: (id, token) pairs.
    """
    mine = {(token_id, token) for token, token_id in student.items()}
    differ = sorted(mine.difference(teacher))
    if not differ:
        return ""
    token_id, token = differ[0]
    others = sorted(other for other_id, other in teacher if other_id == token_id)
    theirs = f"{clip(repr(others[0]))} for the teacher" if others else "no token of the teacher's"
    return f": id {token_id} is {clip(repr(token))} for the student and {theirs} ({len(differ)} of {len(mine)} differ)"
