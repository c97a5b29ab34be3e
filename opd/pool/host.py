"""The actor that holds one teacher server process on a node of the Ray cluster.

It starts the process, looks after its output and stops it, and decides nothing: when to start again is for
replica.py. The process dies with the actor, and the actor with the pool, however each of them ends.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ray

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 20


class Place(NamedTuple):
    node_id: str
    ip: str
    pid: int  # of the actor


class Host:
    """See the module. Used through ray.remote, one call at a time: the process is the child of the actor's main
    thread, and the kernel's death signal follows that thread."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen[str] | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._reader: threading.Thread | None = None

    def place(self) -> Place:
        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    def start(self, arguments: Sequence[str]) -> None:
        """Start `opd.teacher_server` with these arguments; Ray has set the visible GPUs of this process."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "opd.pool.child", str(os.getpid()), *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=(self._popen,), daemon=True)
        self._reader.start()

    def _read(self, popen: subprocess.Popen[str]) -> None:
        """Pass its output on, which Ray brings to the pool, and keep the last lines for an error."""
        assert popen.stdout is not None
        for line in popen.stdout:
            self._lines.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)

    def poll(self) -> tuple[int | None, str]:
        """The exit code, None while it runs, and the last thing it said."""
        assert self._popen is not None
        code = self._popen.poll()
        if code is not None and self._reader is not None:
            self._reader.join(2.0)
        return code, self._lines[-1] if self._lines else ""

    def stop(self, grace_s: float) -> None:
        """Let it drain, and end it if that takes longer."""
        if self._popen is None:
            return
        self._popen.terminate()
        try:
            self._popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()  # its worker dies with it
            self._popen.wait()
