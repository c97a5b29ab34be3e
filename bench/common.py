"""What the benchmarks share: a teacher server of their own, memory of a process, and the last line.

Not covered: statistics. Each bench says what it takes the median of.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench")]), "OMP_WAIT_POLICY": "PASSIVE"}


class Server:
    """`python -m opd.teacher_server` on a free loopback port, ready when this is."""

    def __init__(self, *args: str, threads: int = 1, log_level: str = "warning"):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the server runs
        command = [sys.executable, "-m", "opd.teacher_server", "--bind", "tcp://127.0.0.1:0", "--log-level", log_level]
        self.popen = subprocess.Popen(
            [*command, "--cache-mb", "0", *args],  # the benches ask for the same rows again and again
            env={**ENV, "OMP_NUM_THREADS": str(threads)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_ready(self, timeout_s: float = 120.0) -> str:
        """The address, once the model is loaded."""
        end = time.monotonic() + timeout_s
        while "teacher ready" not in self._text():
            if self.popen.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the teacher server did not start:\n{self._text()}")
            time.sleep(0.05)
        found = re.search(r"listening at (tcp://\S+),", self._text())
        assert found is not None
        return found[1]

    def worker_pid(self) -> int:
        return int(Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()[0])

    def stop(self) -> None:
        self.popen.terminate()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self._log.close()

    def _text(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")


@contextlib.contextmanager
def servers(count: int, *args: str, **options: Any) -> Iterator[tuple[list[str], list[Server]]]:
    """Start several at once; gives their addresses, and stops them in any case."""
    started: list[Server] = []
    try:
        started += [Server(*args, **options) for _ in range(count)]
        yield [server.wait_ready() for server in started], started
    finally:
        for server in started:
            server.popen.terminate()
        for server in started:
            server.stop()


def memory_mb(pid: int | str = "self", name: str = "VmRSS") -> float:
    """Resident memory of a process, or with VmHWM its peak since reset_peak()."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def reset_peak(pid: int | str = "self") -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int | str = "self") -> float:
    """CPU seconds of a process so far, all threads; in steps of 10 ms except for our own."""
    if pid == "self":
        return time.process_time()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_llama(folder: str, *, vocab: int, hidden: int = 256, layers: int = 8, max_length: int = 4096) -> None:
    """Save a random Llama without a tokenizer; the same one for the same arguments."""
    import torch  # most benches need neither
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def print_result(bench: str, **result: Any) -> None:
    """The last line of a bench."""
    print(json.dumps({"bench": bench, **result, "cores": os.cpu_count(), "machine": processor()}), flush=True)
