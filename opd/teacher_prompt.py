"""A prompt for the teacher's eyes only: privileged context, or another chat template.

    student   its prompt                        | x y z      starts = length of its prompt
    teacher   system prompt, hints, solution... | x y z      starts = length of the teacher's prompt

The response's ids are the student's own, and each value still belongs to the token that it scores, so nothing behind
`starts` changes: log p(x | the teacher's prompt), log p(y | the teacher's prompt, x), and so on.

The teacher's prompt is made from messages, with the student's tokenizer, as verl's agent loop makes the student's. The
student's is made once more on the way and compared with the row: where they differ (tools or images in the prompt, a
prompt that was cut, a later turn of an agent loop with several outputs) the row's prompt says more than its messages,
and the teacher would be asked about another conversation. Such a row ends the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opd.align import Rows
from opd.errors import ConfigError, TeacherError

RAW_PROMPT = "raw_prompt"  # verl's name for a row's messages, in V0 and V1


class TeacherPrompt:
    """Puts the teacher's prompts in the place of the student's.

    Args:
        tokenizer: the student's, with the student's chat template.
        system_prompt: put before the conversation. If that begins with a system message already, it is put before its
            text, with an empty line between them: most templates take one system message only.
        prompt_column: a data column whose messages replace the student's.
        chat_template: text of a Jinja template that replaces the tokenizer's.
        template_arguments: verl's data.apply_chat_template_kwargs, for both sides.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        prompt_column: str | None = None,
        chat_template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ):
        self.system_prompt, self.prompt_column = system_prompt, prompt_column
        self._tokenizer, self._chat_template = tokenizer, chat_template
        mine = ("tokenize", "return_dict", "return_tensors", "add_generation_prompt")
        self._arguments = {k: v for k, v in (template_arguments or {}).items() if k not in mine}

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data that `replace` needs."""
        return (RAW_PROMPT,) if self.prompt_column is None else (RAW_PROMPT, self.prompt_column)

    def student_ids(self, messages: Any) -> np.ndarray:
        """int32; the prompt that verl's agent loop makes of a row's messages."""
        return self._render(_messages(messages), None)

    def teacher_ids(self, messages: Any) -> np.ndarray:
        """int32; the teacher's prompt.

        Args:
            messages: of `prompt_column` if there is one, else the student's.
        """
        conversation = _messages(messages)
        if self.system_prompt is not None:
            conversation = _with_system(self.system_prompt, conversation)
        return self._render(conversation, self._chat_template)

    def _render(self, messages: list[dict[str, Any]], chat_template: str | None) -> np.ndarray:
        arguments = self._arguments if chat_template is None else {**self._arguments, "chat_template": chat_template}
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
        )
        return np.asarray(ids, dtype=np.int32)

    def replace(self, batch: Rows, columns: Mapping[str, Sequence[Any]]) -> Rows:
        """Give each row the teacher's prompt.

        Args:
            batch: rows as the student has them.
            columns: those named by `columns`, a value for each row.

        Raises:
            TeacherError: messages that make no prompt, or not the one that the row has; names the row.
        """
        raw = columns[RAW_PROMPT]
        own = raw if self.prompt_column is None else columns[self.prompt_column]
        made: dict[tuple[bytes, str], np.ndarray] = {}  # a prompt's responses share it
        rows: list[np.ndarray] = []
        starts = np.zeros_like(batch.starts)
        for b, (row, start) in enumerate(zip(batch.rows, batch.starts.tolist(), strict=True)):
            try:
                key = (row[:start].tobytes(), json.dumps([_messages(raw[b]), _messages(own[b])], default=_plain))
                if key not in made:
                    _refuse_other(self.student_ids(raw[b]), row[:start])
                    made[key] = self.teacher_ids(own[b])
            except Exception as e:  # templates raise whatever they like; the row has to be named
                raise TeacherError(f"row {b} gets no prompt for the teacher: {type(e).__name__}: {e}") from e
            rows.append(np.concatenate([made[key], row[start:]]))
            starts[b] = len(made[key])
        return Rows(rows, starts, batch.response_lengths)

    def longest(self, columns: Mapping[str, Sequence[Any]], *, limit: int, max_student: int) -> int:
        """Ids of the longest prompt that the teacher will see.

        Args:
            columns: those named by `columns`, of the whole data set.
            limit: of interest only above it.
            max_student: data.max_prompt_length; verl leaves out longer prompts, so they do not count.

        Raises:
            ConfigError: messages that make no prompt; names the row.
        """
        raw = columns[RAW_PROMPT]
        own = raw if self.prompt_column is None else columns[self.prompt_column]
        longest = 0
        for row, (student, teacher) in enumerate(zip(raw, own, strict=True)):
            try:
                length = len(self.teacher_ids(teacher))
                # the student's prompt is looked at only where it matters
                if length > longest and (length <= limit or len(self.student_ids(student)) <= max_student):
                    longest = length
            except Exception as e:  # as in replace
                raise ConfigError(
                    f"row {row} of the data makes no prompt for the teacher: {type(e).__name__}: {e}"
                ) from e
        return longest


def read_template(path: str) -> str:
    """Text of a chat template's file.

    Raises:
        ConfigError: no such file.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"teacher.chat_template={path} cannot be read: {e}") from None


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages as the data set holds them: a list or an array of maps."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise ValueError(f"a list of messages was expected, not {type(value).__name__}")
    messages = [dict(message) for message in value]
    if not messages:
        raise ValueError("there are no messages")
    return messages


def _plain(array: Any) -> Any:
    return array.tolist()  # parquet's lists within messages


def _with_system(text: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = messages[0]
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    if not isinstance(first.get("content"), str):
        raise ValueError("the conversation's own system message has no plain text that a system prompt can precede")
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]


def _refuse_other(made: np.ndarray, row: np.ndarray) -> None:
    if np.array_equal(made, row):
        return
    same = min(len(made), len(row))
    first = int(np.argmax(np.append(made[:same] != row[:same], True)))
    raise ValueError(
        f"the student's prompt has {len(row)} ids, and its messages make {len(made)}, different from position {first} "
        "on: tools, images, a prompt that was cut, or a later turn of an agent, which a prompt for the teacher alone "
        "cannot replace"
    )
