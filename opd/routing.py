"""Several teachers in one run, each for the rows that a column of the data sends to it.

    teacher.teachers     math: tcp://a:1          code: tcp://b:1,tcp://c:1      a name, and one teacher's replicas
    teacher.route_by     data_source
    teacher.routes       gsm8k: math              mbpp: code              mixed: {math: 0.75, code: 0.25}

A row with several teachers gets ref_log_prob = sum_i w_i log p_i. With x_i = log p_i - log q (q: the student), and with
weights that add up to 1, its x is sum_i w_i x_i. A gradient that is linear in x (k2, k3+, k1+, the policy gradient) is
then exactly the weighted sum of the gradients towards each teacher, that of sum_i w_i KL(q || p_i). (The reported value
of k3+ is not that sum.) It is not so for k3 (exp x), for abs (the sign of x), and for the top-k losses, where each
teacher has its own k tokens; opd/config_checks.py refuses several teachers for one row there.

Not covered: who a value belongs to within a row; all tokens of a row have the same teachers.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from opd import kl
from opd.client import Scores, Stats, TeacherClient
from opd.errors import ConfigError, RowError, RowsFailed, TeacherError
from opd.wire import ModelInfo, clip

logger = logging.getLogger(__name__)

DEFAULT = "default"  # the name of the teacher at teacher.address
Route: TypeAlias = dict[str, float]  # teacher: weight
_T = TypeVar("_T")


def read_routes(routes: Mapping[str, Any], teachers: Collection[str]) -> dict[str, Route]:
    """`teacher.routes` as weights of each teacher, by the value of the column.

    Args:
        routes: column value: a teacher's name, or {name: weight}.
        teachers: the names that there are.

    Raises:
        ConfigError: a name that is none, or weights that are not positive or do not add up to 1.
    """
    found: dict[str, Route] = {}
    for value, names in routes.items():
        route = {names: 1.0} if isinstance(names, str) else dict(names) if isinstance(names, Mapping) else {}
        unknown = sorted(set(route) - set(teachers))
        if unknown or not route:
            raise ConfigError(
                f"teacher.routes[{value!r}] is {names!r}: a teacher's name or {{name: weight}} was expected, "
                f"with names out of {', '.join(sorted(teachers))}"
            )
        weights = list(route.values())
        if not all(isinstance(w, int | float) and w > 0 for w in weights) or abs(sum(weights) - 1.0) > 1e-6:
            raise ConfigError(f"teacher.routes[{value!r}] has the weights {weights}: they must be > 0 and add up to 1")
        found[str(value)] = {name: float(weight) for name, weight in route.items()}
    return found


class Part(NamedTuple):
    """What one teacher said about its rows of a batch."""

    rows: list[int]  # their indices in the batch
    logprobs: list[np.ndarray | None]  # float32 [N_i] of each
    seconds: float
    vocab_size: int


class Routed(NamedTuple):
    """A batch's values, and who gave which."""

    scores: Scores
    parts: dict[str, Part]  # by teacher; one for each, with or without rows


class Router:
    """Several teachers in place of one TeacherClient. Use it as a context manager, or call `close`.

    Args:
        clients: by the teacher's name; all of them are the router's to close.
        routes: which of them a row goes to, by its value in the column `route_by`.
    """

    def __init__(self, clients: Mapping[str, TeacherClient], routes: Mapping[str, Route], *, route_by: str):
        self.clients = dict(clients)
        self.routes = dict(routes)
        self.route_by = route_by
        self._models: dict[str, ModelInfo] = {}

    def wait_until_ready(self, timeout_s: float = 600.0) -> dict[str, ModelInfo]:
        """Wait until all teachers have loaded, at the same time; raises as TeacherClient.wait_until_ready."""

        def wait(client: TeacherClient) -> Callable[[], ModelInfo]:
            return lambda: client.wait_until_ready(timeout_s)

        self._models = _at_once({name: wait(client) for name, client in self.clients.items()})
        return self._models

    def check_values(self, values: Sequence[Any], where: str) -> None:
        """Refuse values of the column that have no route.

        Raises:
            ConfigError: names the value, how often it is there, and the routes that there are.
        """
        unknown = [str(value) for value in values if str(value) not in self.routes]
        if unknown:
            raise ConfigError(
                f"{where}: {len(unknown)} of {len(values)} rows have a {self.route_by} without a teacher, the first "
                f"{clip(unknown[0])!r}; teacher.routes has {', '.join(map(repr, self.routes))}"
            )

    def score(
        self,
        rows: Sequence[np.ndarray],
        starts: Sequence[int] | np.ndarray,
        *,
        values: Sequence[Any],
        topk: int = 0,
        candidates: Sequence[np.ndarray] | None = None,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        return_row_errors: bool = False,
        prefetched: bool = False,
    ) -> Routed:
        """Ask each row's teachers, all teachers at the same time and under one deadline.

        Args:
            values: of the column `route_by`, one for each row.
            rows and the others: as TeacherClient.score.

        Returns:
            A row that any of its teachers could not score has no value: the mean would be another one without it.

        Raises:
            TeacherError: a row whose value has no route, or several teachers for a row with topk or candidates; and as
                TeacherClient.score, of whichever teacher fails first.
        """
        routes, mine = self._share_out(values, len(rows), alone=bool(topk) or candidates is not None)

        def ask(name: str) -> Callable[[], tuple[Scores, float]]:
            def call() -> tuple[Scores, float]:
                began = time.monotonic()
                scores = self.clients[name].score(
                    [rows[row] for row in mine[name]],
                    [int(starts[row]) for row in mine[name]],
                    topk=topk,
                    candidates=None if candidates is None else [candidates[row] for row in mine[name]],
                    temperature=temperature,
                    timeout_s=timeout_s,
                    return_row_errors=True,
                    prefetched=prefetched,
                )
                return scores, time.monotonic() - began

            return call

        answers = _at_once({name: ask(name) for name in self.clients if mine[name]})
        scores = _merge({name: answer for name, (answer, _) in answers.items()}, mine, routes)
        if scores.row_errors and not return_row_errors:
            raise RowsFailed(scores.row_errors, len(rows))
        parts = {}
        for name, client_rows in mine.items():
            logprobs, seconds = (answers[name][0].logprobs, answers[name][1]) if name in answers else ([], 0.0)
            parts[name] = Part(client_rows, logprobs, seconds, self._models[name].vocab_size)
        return Routed(scores, parts)

    def prefetch(
        self,
        rows: Sequence[np.ndarray],
        starts: Sequence[int] | np.ndarray,
        *,
        values: Sequence[Any],
        topk: int = 0,
        temperature: float = 1.0,
    ) -> tuple[int, int]:
        """Ask each row's teachers ahead, as TeacherClient.prefetch; all arguments as in the `score` to come.

        Returns:
            How many questions the teachers took, and how many there were; a row is one to each of its teachers.

        Raises:
            TeacherError: as score.
        """
        _, mine = self._share_out(values, len(rows), alone=bool(topk))

        def ask(name: str) -> Callable[[], int]:
            return lambda: self.clients[name].prefetch(
                [rows[row] for row in mine[name]],
                [int(starts[row]) for row in mine[name]],
                topk=topk,
                temperature=temperature,
            )

        taken = _at_once({name: ask(name) for name in self.clients if mine[name]})
        return sum(taken.values()), sum(map(len, mine.values()))

    def _share_out(
        self, values: Sequence[Any], num_rows: int, *, alone: bool
    ) -> tuple[list[Route], dict[str, list[int]]]:
        """The route of each row, and the rows of each teacher."""
        routes = self._routes_of(values, num_rows, alone=alone)
        return routes, {name: [row for row, route in enumerate(routes) if name in route] for name in self.clients}

    def _routes_of(self, values: Sequence[Any], num_rows: int, *, alone: bool) -> list[Route]:
        if len(values) != num_rows:
            raise ValueError(f"{len(values)} values of {self.route_by} for {num_rows} rows")
        routes = []
        for row, value in enumerate(values):
            route = self.routes.get(str(value))
            if route is None:
                raise TeacherError(
                    f"row {row} has {self.route_by}={clip(str(value))!r}, which has no teacher; "
                    f"teacher.routes has {', '.join(map(repr, self.routes))}"
                )
            if alone and len(route) > 1:
                raise TeacherError(f"row {row} has the teachers {', '.join(route)}: their top-k cannot be averaged")
            routes.append(route)
        return routes

    def close(self) -> None:
        for client in self.clients.values():
            client.close()

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def metrics(parts: Mapping[str, Part], student_BR: np.ndarray, counts_BR: np.ndarray) -> dict[str, float]:
    """What each teacher said, by itself: the mean of a row's teachers would hide one that is broken.

    Args:
        student_BR: the student's log-probs.
        counts_BR: bool; tokens that the loss counts.

    Raises:
        TeacherError: a teacher that says the same about every token.
    """
    found: dict[str, float] = {}
    for name, part in parts.items():
        scored = [(row, values) for row, values in zip(part.rows, part.logprobs, strict=True) if values is not None]
        teacher = [values[counts_BR[row, : len(values)]] for row, values in scored]
        student = [student_BR[row, : len(values)][counts_BR[row, : len(values)]] for row, values in scored]
        found[f"opd/{name}/rows"] = float(len(part.rows))
        found[f"opd/{name}/teacher_seconds"] = part.seconds
        if not scored:
            continue
        teacher_T, student_T = np.concatenate(teacher), np.concatenate(student)
        try:
            kl.refuse_collapsed(teacher_T, student_T, part.vocab_size)
        except TeacherError as e:
            raise TeacherError(f"teacher {name!r}: {e}") from None
        estimates = kl.estimates(student_T, teacher_T)
        found |= {f"opd/{name}/reverse_kl_k1": v for key, v in estimates.items() if key == "opd/reverse_kl_k1"}
    return found


def _merge(answers: Mapping[str, Scores], mine: Mapping[str, list[int]], routes: list[Route]) -> Scores:
    """The teachers' answers in the order of the batch, rows with several teachers averaged."""
    num_rows = len(routes)
    failed: dict[int, RowError] = {}
    logprobs: list[np.ndarray | None] = [None] * num_rows
    topk_ids: list[np.ndarray | None] = [None] * num_rows
    topk_logprobs: list[np.ndarray | None] = [None] * num_rows
    candidate_logprobs: list[np.ndarray | None] = [None] * num_rows
    for name, scores in answers.items():
        for error in scores.row_errors:
            row = mine[name][error.row]
            failed.setdefault(row, RowError(row, error.code, f"teacher {name!r}: {error.message}"))
        for index, row in enumerate(mine[name]):
            values = scores.logprobs[index]
            if values is None:
                continue
            weight = routes[row][name]
            if weight == 1.0:
                logprobs[row] = values
            else:
                before = logprobs[row]
                weighted = weight * values.astype(np.float64)
                logprobs[row] = weighted if before is None else before + weighted
            if scores.topk_ids is not None and scores.topk_logprobs is not None:
                topk_ids[row], topk_logprobs[row] = scores.topk_ids[index], scores.topk_logprobs[index]
            if scores.candidate_logprobs is not None:
                candidate_logprobs[row] = scores.candidate_logprobs[index]
    for row in failed:
        logprobs[row] = topk_ids[row] = topk_logprobs[row] = candidate_logprobs[row] = None
    has_topk = any(scores.topk_ids is not None for scores in answers.values())
    has_candidates = any(scores.candidate_logprobs is not None for scores in answers.values())
    return Scores(
        logprobs=[None if values is None else values.astype(np.float32) for values in logprobs],
        topk_ids=topk_ids if has_topk else None,
        topk_logprobs=topk_logprobs if has_topk else None,
        candidate_logprobs=candidate_logprobs if has_candidates else None,
        row_errors=[failed[row] for row in sorted(failed)],
        stats=_sum_stats([scores.stats for scores in answers.values()]),
    )


def _sum_stats(stats: list[Stats]) -> Stats:
    """Counts are added; of what happens at the same time, the longest counts."""
    if not stats:
        return Stats()
    total = Stats(**{f.name: sum(getattr(s, f.name) for s in stats) for f in fields(Stats)})
    return replace(total, seconds=max(s.seconds for s in stats), queue_ms=max(s.queue_ms for s in stats))


def _at_once(calls: Mapping[str, Callable[[], _T]]) -> dict[str, _T]:
    """Make one call for each teacher, each in a thread of its own; the first error is raised when it comes.

    Daemon threads: after an error or Ctrl-C nobody waits for the other teachers, who have their own deadlines.
    """
    done: queue.SimpleQueue[tuple[str, _T | None, BaseException | None]] = queue.SimpleQueue()

    def run(name: str, call: Callable[[], _T]) -> None:
        try:
            done.put((name, call(), None))
        except BaseException as e:  # whatever it is, it belongs to the thread that waits
            done.put((name, None, e))

    for name, call in calls.items():
        threading.Thread(target=run, args=(name, call), name=f"teacher-{name}", daemon=True).start()
    answers: dict[str, Any] = {}
    for _ in calls:
        name, answer, error = done.get()
        if error is not None:
            logger.error("teacher %r failed", name)
            raise error
        answers[name] = answer
    return answers


def check_names(teachers: Collection[str]) -> None:
    """Names become parts of metrics' names.

    Raises:
        ConfigError: one that cannot.
    """
    for name in teachers:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ConfigError(f"teacher.teachers has the name {name!r}; use letters, digits, _ and -")
