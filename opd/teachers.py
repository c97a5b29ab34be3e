"""Who is asked what about a row: the teachers of a configuration, and the prompts that they see.

Trainers ask for scores (opd/reference.py), the processes of the rollout ask ahead (opd/overlap.py), and a run's end
asks about the students before and after (opd/evaluate.py). All three come through `Teachers`, so that a row is the same
question each time: the same teachers, the same ids, the same `starts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from opd import config as settings
from opd.align import Rows
from opd.client import TeacherClient
from opd.errors import TeacherError
from opd.routing import DEFAULT, Routed, Router
from opd.teacher_prompt import TeacherPrompt, read_template
from opd.wire import ModelInfo


class Teachers:
    """One teacher or several, and the prompts that they see. Use it as a context manager, or call `close`.

    Args:
        client: of the teacher, or of several; the caller's to hand over.
        prompts: makes their prompts where these are not the student's.
    """

    def __init__(self, client: TeacherClient | Router, prompts: TeacherPrompt | None = None):
        self.client, self.prompts = client, prompts

    @property
    def clients(self) -> dict[str, TeacherClient]:
        """By the teacher's name."""
        return self.client.clients if isinstance(self.client, Router) else {DEFAULT: self.client}

    def wait_until_ready(self, timeout_s: float = 600.0) -> dict[str, ModelInfo]:
        """Wait until all have loaded; raises as TeacherClient.wait_until_ready."""
        ready = self.client.wait_until_ready(timeout_s)
        return ready if isinstance(ready, dict) else {DEFAULT: ready}

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Teachers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Columns of the data that a row's question depends on; none with one teacher and no prompts."""
        routed = [self.client.route_by] if isinstance(self.client, Router) else []
        return tuple(dict.fromkeys([*routed, *(self.prompts.columns if self.prompts is not None else ())]))

    def score(self, batch: Rows, data_columns: Mapping[str, Sequence[Any]], **arguments: Any) -> Routed:
        """Ask about a batch and wait.

        Args:
            batch: rows as the student has them.
            data_columns: those that self.data_columns names, a value for each row.
            arguments: of TeacherClient.score.

        Returns:
            The scores, with several teachers also what each of them said.

        Raises:
            TeacherError: a column that is missing, or a row that no teacher or no prompt belongs to; and as
                TeacherClient.score and Router.score.
        """
        batch = self._as_asked(batch, data_columns)
        if isinstance(self.client, Router):
            values = data_columns[self.client.route_by]
            return self.client.score(batch.rows, batch.starts, values=values, **arguments)
        return Routed(self.client.score(batch.rows, batch.starts, **arguments), {})

    def prefetch(self, batch: Rows, data_columns: Mapping[str, Sequence[Any]], **arguments: Any) -> tuple[int, int]:
        """Ask ahead, with a `score` of the same rows to come.

        Args:
            batch, data_columns: as for score.
            arguments: of TeacherClient.prefetch.

        Returns:
            How many questions teachers took, and how many there were; a row is one to each of its teachers.

        Raises:
            TeacherError: as score; and as TeacherClient.prefetch.
        """
        batch = self._as_asked(batch, data_columns)
        if isinstance(self.client, Router):
            values = data_columns[self.client.route_by]
            return self.client.prefetch(batch.rows, batch.starts, values=values, **arguments)
        return self.client.prefetch(batch.rows, batch.starts, **arguments), len(batch.rows)

    def _as_asked(self, batch: Rows, data_columns: Mapping[str, Sequence[Any]]) -> Rows:
        missing = [name for name in self.data_columns if name not in data_columns]
        if missing:
            raise TeacherError(
                f"the batch has no column {missing[0]!r}, which teacher.route_by or a prompt for the teacher needs; "
                f"it has {', '.join(data_columns) or 'none'}"
            )
        return batch if self.prompts is None else self.prompts.replace(batch, data_columns)


def teachers_of(config: DictConfig, *, tokenizer: Any = None) -> Teachers:
    """The teachers of a composed configuration; none has been waited for.

    Args:
        tokenizer: the student's, which nobody else may use meanwhile; read from its folder if it is not given.

    Raises:
        ConfigError: as TeacherClient, or a chat template that cannot be read.
    """
    prompts = _prompts_of(config, tokenizer)
    teacher = config.teacher
    clients = {
        name: TeacherClient(where, max_tokens_per_request=teacher.max_tokens_per_request)
        for name, where in settings.teachers(teacher).items()
    }
    if not teacher.teachers:  # one teacher needs no column that says so
        return Teachers(clients[DEFAULT], prompts)
    return Teachers(Router(clients, settings.routes(teacher), route_by=teacher.route_by), prompts)


def _prompts_of(config: DictConfig, tokenizer: Any) -> TeacherPrompt | None:
    """None where the teacher sees the student's prompts."""
    teacher = config.teacher
    if teacher.system_prompt is None and teacher.prompt_column is None and teacher.chat_template is None:
        return None
    model = config.actor_rollout_ref.model
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model.path)
    if model.get("custom_chat_template") is not None:
        tokenizer.chat_template = model.custom_chat_template  # as verl does for the student
    return TeacherPrompt(
        tokenizer,
        system_prompt=teacher.system_prompt,
        prompt_column=teacher.prompt_column,
        chat_template=None if teacher.chat_template is None else read_template(teacher.chat_template),
        template_arguments=config.data.get("apply_chat_template_kwargs"),
    )
