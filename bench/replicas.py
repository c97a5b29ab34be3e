"""How throughput grows with teachers: one batch, scored by 1, 2, 4 and 8 replicas of a timed teacher.

Each replica is a server of its own with a worker that sleeps for a fixed time per token, so that two cores are enough
to see what the client and the servers add: cutting the batch, keeping every replica busy, the wait for the last one.
The batch is the same for all counts, so the ideal is 1/N of the time. `efficiency_N` is the throughput with N replicas
over N times the throughput of one; medians of wall-clock time, rounds interleaved. Every value is checked.

    python bench/replicas.py --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import print_result, servers

from opd.client import TeacherClient
from opd.scoring.oracle import oracle_logprobs

COUNTS = (1, 2, 4, 8)
PROMPTS, PER_PROMPT, PROMPT, RESPONSE, VOCAB = 64, 8, 32, 96, 1000


def make_batch() -> tuple[list[np.ndarray], list[int]]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(PROMPTS):
        prompt = rng.integers(0, VOCAB, PROMPT)
        rows += [np.concatenate([prompt, rng.integers(0, VOCAB, RESPONSE)]) for _ in range(PER_PROMPT)]
    return [row.astype(np.int32) for row in rows], [PROMPT] * len(rows)


def measure(rounds: int, us_per_token: float) -> dict[int, list[float]]:
    """Seconds of each round, by number of replicas."""
    rows, starts = make_batch()
    expected = [oracle_logprobs(row, PROMPT, vocab=VOCAB) for row in rows]
    seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
    arguments = ["--backend", "oracle", "--model", f"oracle:vocab={VOCAB},us_per_token={us_per_token}"]
    with contextlib.ExitStack() as stack:
        addresses, _ = stack.enter_context(servers(max(COUNTS), *arguments))
        clients = {count: stack.enter_context(TeacherClient(addresses[:count])) for count in COUNTS}
        for client in clients.values():
            client.wait_until_ready(60.0)
            client.score(rows[:16], starts[:16], timeout_s=60.0)
        for _ in range(rounds):
            for count, client in clients.items():
                began = time.perf_counter()
                scores = client.score(rows, starts, timeout_s=600.0)
                seconds[count].append(time.perf_counter() - began)
                for got, want in zip(scores.logprobs, expected, strict=True):
                    assert got is not None and np.allclose(got, want, rtol=0, atol=1e-5), "wrong values"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--us-per-token", type=float, default=200.0, help="of a replica (default 200)")
    args = parser.parse_args()
    seconds = {count: median(times) for count, times in measure(args.rounds, args.us_per_token).items()}
    tokens = PROMPTS * PER_PROMPT * (PROMPT + RESPONSE)
    efficiency = {count: seconds[1] / (count * took) for count, took in seconds.items()}
    print(f"{'replicas':>8}{'seconds':>12}{'tokens/s':>12}{'of linear':>12}")
    for count, took in seconds.items():
        print(f"{count:>8}{took:>12.3f}{tokens / took:>12.0f}{efficiency[count]:>12.3f}")
    print_result(
        "replicas",
        **{f"efficiency_{count}": round(value, 3) for count, value in efficiency.items() if count > 1},
        seconds={str(count): round(took, 3) for count, took in seconds.items()},
        rounds=args.rounds,
        tokens=tokens,
        us_per_token=args.us_per_token,
    )


if __name__ == "__main__":
    main()
