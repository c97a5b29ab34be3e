"""What the server and the client add to the model's own time: one batch through both, and the scorer called directly.

32 rows of 64 prompt and 192 response tokens (4 prompts), a random Llama of 6M parameters, transformers on the CPU.
  direct   opd.scoring.hf in this process;
  service  opd.teacher_server in processes of its own, and TeacherClient.score.

`ratio` is of medians of wall-clock time, rounds interleaved. On a machine with other work on it, look at the other two:
`ratio_cpu` compares CPU seconds (those of client, front and worker together), and `ratio_in_call` is a call's wall
clock over what the worker says that scoring took within it. Values of both sides have to agree.

    python bench/overhead.py --rounds 7 --threads 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cpu_s, make_llama, print_result, servers

from opd.client import TeacherClient
from opd.scoring.hf import load
from opd.scoring.scorer import LoadOptions, Row

PROMPTS, PER_PROMPT, PROMPT, RESPONSE, VOCAB = 4, 8, 64, 192, 8000


def make_rows() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(PROMPTS):
        prompt = rng.integers(0, VOCAB, PROMPT)
        rows += [np.concatenate([prompt, rng.integers(0, VOCAB, RESPONSE)]) for _ in range(PER_PROMPT)]
    return [row.astype(np.int32) for row in rows]


def measure(folder: str, args: argparse.Namespace) -> dict[str, list[float]]:
    rows = make_rows()
    starts = [PROMPT] * len(rows)
    scorer = load(LoadOptions(model=folder, device="cpu"))
    direct_rows = [Row(row, PROMPT) for row in rows]
    measured: dict[str, list[float]] = {"direct": [], "service": [], "direct cpu": [], "service cpu": [], "scoring": []}
    with (
        servers(1, "--model", folder, "--device", "cpu", threads=args.threads) as (addresses, (server,)),
        TeacherClient(addresses) as client,
    ):
        client.wait_until_ready(120.0)
        pids: Sequence[int | str] = ("self", server.popen.pid, server.worker_pid())
        for number in range(args.rounds + 1):
            cpu, began = cpu_s("self"), time.perf_counter()
            results = scorer.score(direct_rows)
            direct, direct_cpu = time.perf_counter() - began, cpu_s("self") - cpu
            cpu, began = sum(map(cpu_s, pids)), time.perf_counter()
            scores = client.score(rows, starts, timeout_s=600.0)
            service, service_cpu = time.perf_counter() - began, sum(map(cpu_s, pids)) - cpu
            for mine, theirs in zip(results, scores.logprobs, strict=True):
                assert theirs is not None and np.allclose(mine.logprobs, theirs, rtol=0, atol=1e-4), "values differ"
            if number:  # the first round warms up
                values = (direct, service, direct_cpu, service_cpu, scores.stats.score_ms / 1000)
                for name, value in zip(measured, values, strict=True):
                    measured[name].append(value)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, on both sides (default 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        make_llama(folder, vocab=VOCAB)
        measured = measure(folder, args)
    seconds = {name: median(values) for name, values in measured.items()}
    in_call = median(a / b for a, b in zip(measured["service"], measured["scoring"], strict=True))
    print(f"{'':10}{'wall s':>10}{'CPU s':>10}")
    for side in ("direct", "service"):
        print(f"{side:10}{seconds[side]:>10.3f}{seconds[f'{side} cpu']:>10.3f}")
    print_result(
        "overhead",
        ratio=round(seconds["service"] / seconds["direct"], 4),
        ratio_cpu=round(seconds["service cpu"] / seconds["direct cpu"], 4),
        ratio_in_call=round(in_call, 4),
        seconds={name: round(value, 4) for name, value in seconds.items()},
        rounds=args.rounds,
        threads=args.threads,
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


if __name__ == "__main__":
    main()
