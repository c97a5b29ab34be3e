"""Many single calls become few batched ones: the server and the agent loops both wait for company."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

# The rows of one step arrive over a second or so, each by its own call. A batch starts when no row came for this
# long: starting with the first would run a batch of one, and every batch pays the full price of each decode step.
QUIET_S = 0.02

Item = TypeVar("Item")
Result = TypeVar("Result")


class Collector(Generic[Item, Result]):
    """Awaiting `collector(item)` gives the item's result; `run` sees the items in batches, one batch at a time."""

    def __init__(self, run: Callable[[list[Item]], Awaitable[list[Result]]], *, max_items: int) -> None:
        self._run = run
        self._max_items = max_items
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._last_arrival_s = 0.0
        self._runner: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Result:
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        self._last_arrival_s = time.monotonic()
        if self._runner is None:
            self._runner = asyncio.create_task(self._run_until_empty())
        return await done

    async def _run_until_empty(self) -> None:
        try:
            while self._waiting:
                await self._until_quiet()
                batch, self._waiting = self._waiting[: self._max_items], self._waiting[self._max_items :]
                await self._run_batch(batch)
        finally:
            self._runner = None

    async def _until_quiet(self) -> None:
        while len(self._waiting) < self._max_items:
            quiet_s = time.monotonic() - self._last_arrival_s
            if quiet_s >= QUIET_S:
                return
            await asyncio.sleep(QUIET_S - quiet_s)

    async def _run_batch(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._run([item for item, _ in batch])
        except BaseException as error:
            # Whatever went wrong, everybody who waits must hear of it, or the trainer waits for ever.
            for _, done in batch:
                if not done.done():
                    done.set_exception(
                        RuntimeError(f"a batch of {len(batch)} rows failed: {type(error).__name__}: {error}")
                    )
            if not isinstance(error, Exception):
                raise
            return
        for (_, done), result in zip(batch, results, strict=True):
            if not done.done():
                done.set_result(result)
