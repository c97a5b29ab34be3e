"""Asks the teacher about a response as soon as it is finished, while others are still being generated.

The processes that run verl's agent loops call `PrefetchThread.add` (opd/agent_loop.py); a thread of its own sends what
came within a moment as one `prefetch`. The teacher scores the rows when nobody waits for it and keeps the values; the
trainer's `score` of the same ids then finds them (opd/reference.py), and waits only for what is not done yet. Who is
asked, and with which prompt, is found out by the code that the trainer asks through (opd/teachers.py).

All of it is best effort: a row that gets lost here is scored when the trainer asks for it, as without any of this.

Not covered: prompts shared by several rows. A teacher computes a prompt once per batch, and rows that finish one by one
come in small batches: it may compute more than for the whole batch at once, at a time when nobody waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from opd.align import Rows
from opd.errors import OPDError
from opd.teachers import Teachers

logger = logging.getLogger(__name__)

GATHER_S = 0.05  # rows that finish within this time travel together
CLOSE_S = 5.0  # a prefetch under way ends by itself after 2 s


class Finished(NamedTuple):
    """A row as the agent loop leaves it."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    data_columns: dict[str, Any]


class PrefetchThread:
    """Sends rows that are finished ahead of the trainer. Use it as a context manager, or call `close`.

    Args:
        teachers: those of the trainer; the thread's to close.
        topk, temperature: as in the `score` to come; another value of either is another question.
    """

    def __init__(self, teachers: Teachers, *, topk: int = 0, temperature: float = 1.0):
        self.taken = 0  # questions that teachers said they would answer; a row is one to each of its teachers
        self._teachers = teachers
        self._topk, self._temperature = topk, temperature
        self._rows: list[Finished] = []
        self._wake = threading.Condition()
        self._closed = False
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="opd-prefetch", daemon=True)
        self._thread.start()

    def add(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], data_columns: Mapping[str, Any] | None = None
    ) -> None:
        """Hand over a finished row; returns at once, whatever the teacher does.

        Args:
            prompt_ids, response_ids: exactly the ids that the trainer will ask about, tool tokens included. Not to be
                changed afterwards.
            data_columns: the row's values of the data; those are kept that say who is asked what.
        """
        if not len(prompt_ids) or not len(response_ids):
            return  # nothing to score
        given = data_columns or {}
        kept = {name: given[name] for name in self._teachers.data_columns if name in given}
        with self._wake:
            if not self._closed:
                self._rows.append(Finished(prompt_ids, response_ids, kept))
                self._wake.notify()

    def close(self) -> None:
        """End the thread; rows that were not sent yet are dropped."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(CLOSE_S)

    def __enter__(self) -> PrefetchThread:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with self._teachers:
                while rows := self._next():
                    self._send(rows)
        finally:
            with self._wake:
                self._closed = True  # nobody takes rows any more, so none must pile up
                self._rows.clear()

    def _next(self) -> list[Finished]:
        """What came within a moment after the first row; empty when it is time to end."""
        with self._wake:
            self._wake.wait_for(lambda: self._rows or self._closed)
            self._wake.wait_for(lambda: self._closed, GATHER_S)
            rows, self._rows = self._rows, []
            return [] if self._closed else rows

    def _send(self, rows: list[Finished]) -> None:
        names = [name for name in self._teachers.data_columns if all(name in row.data_columns for row in rows)]
        columns = {name: [row.data_columns[name] for row in rows] for name in names}
        try:
            batch = Rows(
                [np.array([*row.prompt_ids, *row.response_ids], dtype=np.int32) for row in rows],
                np.array([len(row.prompt_ids) for row in rows]),
                np.array([len(row.response_ids) for row in rows]),
            )
            taken, asked = self._teachers.prefetch(batch, columns, topk=self._topk, temperature=self._temperature)
        except (OPDError, ValueError, OverflowError) as e:  # the trainer will ask too, and raise what has to be raised
            self._complain(f"{len(rows)} rows were not prefetched: {e}")
            return
        self.taken += taken
        if taken < asked:
            self._complain(f"teachers took {taken} of {asked} rows to prefetch")

    def _complain(self, what: str) -> None:
        """Once; the metric opd/cached_rows says how it goes on."""
        if not self._complained:
            self._complained = True
            logger.warning("%s; such rows are scored after the rollout (said once)", what)
