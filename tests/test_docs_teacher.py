"""docs/teacher.md is true: its flags, states, metrics, codes and commands exist, and its program runs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from conftest import CHILD_ENV, ROOT, ServerProcess

from opd import teacher_server, top
from opd.serving.counts import Counts
from opd.serving.metrics import registry_of
from opd.wire import Limits, Reply, ServerInfo, State

TEXT = (ROOT / "docs" / "teacher.md").read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "opd").rglob("*.py")}


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_flag_is_one_of_the_program_it_is_given_to() -> None:
    flags = {
        "opd.teacher_server": teacher_server.build_parser().format_help(),
        "opd.top": top.build_parser().format_help(),
    }
    # the pool's parser would import Ray; what it does not know goes to the server
    flags["opd.teacher_pool"] = SOURCES[ROOT / "opd" / "teacher_pool.py"] + flags["opd.teacher_server"]
    commands = re.findall(r"^python -m (\S+)(.*)$", TEXT, re.M)
    assert {module for module, _ in commands} == set(flags)
    for module, arguments in commands:
        assert not [flag for flag in re.findall(r"--[a-z][\w-]+", arguments) if flag not in flags[module]]
    known = "".join(flags.values())
    assert not [flag for flag in re.findall(r"`(--[a-z][\w-]+)`", TEXT) if flag not in known]


def test_the_states_are_the_protocols() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\d+) \|$", section("Watch"), re.M)
    assert sorted(state for state, _ in rows) == sorted(get_args(State))
    assert [state for state, code in rows if code == "200"] == ["ready"]


def test_every_metric_exists() -> None:
    counts = Counts()
    counts.reply(Reply(id=b"", status="error", boot="", code="x", row_errors=[(0, "y", "")]))
    counters = counts.counters(queued_requests=0, undeliverable=0, dropped=0)
    info = ServerInfo(state="ready", detail="", version="", limits=Limits(), counters=counters)
    metrics = list(registry_of(counts, lambda: info).collect())
    exist = {metric.name for metric in metrics} | {sample.name for metric in metrics for sample in metric.samples}
    used = set(re.findall(r"opd_teacher_\w*[a-z]", TEXT)) - {"opd_teacher"}
    assert len(used) > 8 and not used - exist


def test_every_code_is_one_that_the_server_says() -> None:
    codes = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", section("When it complains"), re.M)))
    text = "".join(SOURCES.values())
    assert len(codes) > 8
    assert not [code for code in codes if f'"{code}"' not in text]


def test_the_commands_that_watch_work(teacher_server: Callable[..., ServerProcess]) -> None:
    server = teacher_server(args=["--metrics-port", "0"])
    url = server.wait_for(r"metrics at (http://\S+)/metrics")
    for command in re.findall(r"^(?:python -m opd\.top --once.*|curl .*)$", section("Watch"), re.M):
        command = command.replace("tcp://127.0.0.1:15555", server.address).replace("http://127.0.0.1:9100", url)
        arguments = command.split()
        if arguments[0] == "python":
            arguments[0] = sys.executable
        else:
            arguments = [sys.executable, "-c", f"import urllib.request as u; u.urlopen({arguments[1]!r})"]
        done = subprocess.run(arguments, capture_output=True, text=True, env=CHILD_ENV, timeout=30)
        assert done.returncode == 0, (command, done.stderr)


def test_the_program_that_puts_it_to_sleep_runs(
    teacher_server: Callable[..., ServerProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = teacher_server()
    program = re.findall(r"```python\n(.*?)```", TEXT, re.S)[0].replace("tcp://127.0.0.1:15555", server.address)
    (tmp_path / "program.py").write_text(program)
    runpy.run_path(str(tmp_path / "program.py"))["socket"].close(linger=0)
    asleep, awake = capsys.readouterr().out.split()
    assert asleep in ("draining", "sleeping") and awake in ("loading", "ready")
