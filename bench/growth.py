"""How the cost of scoring grows: from 8 rows of 128 tokens to 64 times the rows, and to 16 times the length.

A random Llama (6M parameters in linear layers) with transformers behind opd.teacher_server, asked by TeacherClient.
Half of each row is prompt, and no two rows share one. Counted are the FLOPs that cannot be left out: linear layers on
all tokens, causal attention, and the head on the scored rows. `worst_batch` and `worst_length` are the largest over
the smallest time per counted FLOP along each series; 1 would be exactly proportional. Medians; rounds interleave all
sizes. With one thread, times are CPU seconds of client, front and worker together, which other work on the machine
disturbs least, and `*_wall` is the same for wall-clock time; with more threads all are wall clock.

Memory: 8 and 512 rows of 128 tokens with their top 64, from a table (instant_scorer.py). `front_mb` and `client_mb`
are what the peak of each process grows by from the small to the large batch, `arrays_mb` is what the arrays of the
large one take, and `*_leak_mb` what is added after ten more large batches.

    python bench/growth.py --rounds 3 --threads 1
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cpu_s, make_llama, memory_mb, print_result, reset_peak, servers
from instant_scorer import MAX_TOPK
from instant_scorer import VOCAB as TABLE_VOCAB

from opd.client import TeacherClient

VOCAB, HIDDEN, LAYERS = 4000, 512, 2
INTERMEDIATE = HIDDEN * 11 // 4
ROWS, LENGTH, TOPK = 8, 128, 64
BATCHES = [(ROWS * factor, LENGTH) for factor in (1, 4, 16, 64)]
LENGTHS = [(ROWS, LENGTH * factor) for factor in (1, 2, 4, 8, 16)]
Size = tuple[int, int]  # rows, tokens in each


def flops(size: Size) -> float:
    """What one call has to compute. The last token of a row is only a target."""
    rows, length = size
    inputs, scored = length - 1, length - length // 2
    linear = 2 * LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE) * inputs
    attention = 4 * LAYERS * HIDDEN * inputs * (inputs + 1) / 2  # a query and a sum over the positions up to its own
    return rows * (linear + attention + 2 * HIDDEN * VOCAB * scored)


def make_rows(size: Size, seed: int, low: int = 0, high: int = VOCAB) -> tuple[list[np.ndarray], list[int]]:
    rows = np.random.default_rng(seed).integers(low, high, size).astype(np.int32)
    return list(rows), [size[1] // 2] * size[0]


def measure_time(args: argparse.Namespace, folder: str) -> dict[Size, tuple[float, float]]:
    """Wall and CPU seconds of a call, by size."""
    sizes = list(dict.fromkeys(BATCHES + LENGTHS))
    seconds: dict[Size, list[tuple[float, float]]] = {size: [] for size in sizes}
    with (
        servers(1, "--model", folder, "--device", "cpu", threads=args.threads) as (addresses, (server,)),
        TeacherClient(addresses) as client,
    ):
        client.wait_until_ready(120.0)
        pids = (os.getpid(), server.popen.pid, server.worker_pid())
        for warm_up in LENGTHS:
            client.score(*make_rows((1, warm_up[1]), 1), timeout_s=600.0)
        for number in range(args.rounds):
            for size in sizes:
                rows, starts = make_rows(size, number)
                # a short call is repeated: CPU time comes in steps of 10 ms
                repeats = 4 if size == (ROWS, LENGTH) else 1
                cpu, began = sum(map(cpu_s, pids)), time.perf_counter()
                for _ in range(repeats):
                    client.score(rows, starts, timeout_s=600.0)
                took = time.perf_counter() - began, sum(map(cpu_s, pids)) - cpu
                seconds[size].append((took[0] / repeats, took[1] / repeats))
    return {size: (median(w for w, _ in times), median(c for _, c in times)) for size, times in seconds.items()}


def measure_memory() -> dict[str, float]:
    """MB of the front and of this process."""
    batches = {rows: make_rows((rows, LENGTH), 0, MAX_TOPK, TABLE_VOCAB) for rows in (ROWS, ROWS * 64)}
    arguments = ["--backend", "instant_scorer", "--model", "table", "--max-topk", str(TOPK)]
    with servers(1, *arguments) as (addresses, (server,)), TeacherClient(addresses) as client:
        client.wait_until_ready(60.0)
        pids = {"client": os.getpid(), "front": server.popen.pid}

        def peaks(rows: int, calls: int) -> dict[str, float]:
            gc.collect()
            for pid in pids.values():
                reset_peak(pid)
            for _ in range(calls):
                client.score(*batches[rows], topk=TOPK, timeout_s=60.0)
            return {name: memory_mb(pid, "VmHWM") for name, pid in pids.items()}

        peaks(ROWS, 3)
        small, large, again = peaks(ROWS, 3), peaks(ROWS * 64, 2), peaks(ROWS * 64, 10)
    values = ROWS * 64 * (LENGTH - LENGTH // 2)
    arrays = (ROWS * 64 * (4 * LENGTH + 8) + values * (4 + 8 * TOPK)) / 2**20
    print(
        f"\n{'peak RSS, MB':>24}{'8 rows':>10}{'512 rows':>10}{'10 more':>10}   (arrays of 512 rows: {arrays:.1f} MB)"
    )
    result = {"arrays_mb": arrays}
    for name in pids:
        print(f"{name:>24}{small[name]:>10.1f}{large[name]:>10.1f}{again[name]:>10.1f}")
        result |= {f"{name}_mb": large[name] - small[name], f"{name}_leak_mb": again[name] - large[name]}
    return {name: round(value, 1) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of all sizes (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the teacher's worker (default 1)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_llama(folder, vocab=VOCAB, hidden=HIDDEN, layers=LAYERS)
        seconds = measure_time(args, folder)
    print(f"{'rows':>8}{'tokens':>8}{'GFLOP':>10}{'wall s':>10}{'CPU s':>10}{'ps per FLOP':>14}")
    clock = "CPU s" if args.threads == 1 else "wall s"
    rates: dict[Size, tuple[float, float]] = {}
    for size, (wall, cpu) in seconds.items():
        work = flops(size)
        rates[size] = wall / work, (cpu if args.threads == 1 else wall) / work
        print(f"{size[0]:>8}{size[1]:>8}{work / 1e9:>10.1f}{wall:>10.3f}{cpu:>10.3f}{1e12 * rates[size][1]:>14.2f}")

    def worst(series: list[Size], column: int) -> float:
        found = [rates[size][column] for size in series]
        return round(max(found) / min(found), 3)

    print_result(
        "growth",
        worst_batch=worst(BATCHES, 1),
        worst_length=worst(LENGTHS, 1),
        worst_batch_wall=worst(BATCHES, 0),
        worst_length_wall=worst(LENGTHS, 0),
        **measure_memory(),
        clock=clock,
        seconds={f"{rows}x{length}": [round(s, 3) for s in seconds[rows, length]] for rows, length in seconds},
        rounds=args.rounds,
        threads=args.threads,
    )


if __name__ == "__main__":
    main()
