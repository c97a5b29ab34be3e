"""A real teacher server in its own process, for every test that needs one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A suite that a shell started in the background inherits SIGINT ignored, and so would everything that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
CHILD_ENV = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0, what: str = "the condition") -> None:
    """Poll a condition; the test fails with `what` when it stays false."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {timeout_s} s"
        time.sleep(0.01)


class ServerProcess:
    """`python -m opd.teacher_server` on a free loopback port; stdout and stderr go to `log`."""

    def __init__(self, log: Path, *args: str):
        self.log = log
        command = [sys.executable, "-m", "opd.teacher_server", "--bind", "tcp://127.0.0.1:0", *args]
        with log.open("wb") as out:
            self.popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=CHILD_ENV, cwd=ROOT)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout_s: float = 90.0) -> str:
        """Wait until the log has a match; returns its first group, or all of it."""

        def found() -> object:
            assert self.popen.poll() is None or re.search(pattern, self.text()), f"the server ended:\n{self.text()}"
            return re.search(pattern, self.text())

        wait_until(found, timeout_s, f"{pattern!r} in the server's log")
        match = re.search(pattern, self.text())
        assert match is not None
        return match[match.re.groups and 1]

    @property
    def address(self) -> str:
        return self.wait_for(r"listening at (tcp://\S+),")

    def wait_ready(self) -> str:
        """Wait until the model is loaded; returns the address."""
        self.wait_for("teacher ready")
        return self.address

    def worker_pid(self) -> int:
        """The pid of the worker that was started last."""
        self.wait_for(r"worker \d+ starts")
        return int(re.findall(r"worker (\d+) starts", self.text())[-1])

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.popen.wait(timeout_s)

    def end(self) -> None:
        """However the test went: nothing of this server is left."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(5)
                return
            self.popen.kill()  # its worker dies with it
            self.popen.wait(5)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The digits recipe's models and data, for whole runs (digits_run.py)."""
    import digits_run

    return digits_run.prepare(tmp_path_factory.mktemp("digits") / "prepared")


@pytest.fixture
def start_teacher(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers by their command line; does not wait for anything."""
    servers: list[ServerProcess] = []

    def start(*args: str) -> ServerProcess:
        servers.append(ServerProcess(tmp_path / f"server{len(servers)}.log", *args))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def teacher_server(start_teacher: Callable[..., ServerProcess]) -> Callable[..., ServerProcess]:
    """Start a ready oracle teacher: `teacher_server(seed=1, kill_id=900, args=["--max-tokens", "64"])`."""

    def start(*, args: tuple[str, ...] | list[str] = (), **settings: object) -> ServerProcess:
        model = "oracle:" + ",".join(f"{key}={value}" for key, value in settings.items())
        server = start_teacher("--backend", "oracle", "--model", model.removesuffix(":"), *args)
        server.wait_ready()
        return server

    return start
