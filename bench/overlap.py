"""How much of the teacher's time a step still waits for when rows are scored while others are being generated.

The teacher is a timed oracle behind a real server, as slow as the rollout: all rows together take it as long as the
rollout lasts. The rollout is simulated: all rows are generated side by side at one speed, so a row is finished when its
length says so; lengths are log-normal with a long tail, cut off at the longest response. On one side rows go through
opd/overlap.py as they finish, on the other side not; both then ask for all rows as the trainer does, and what that call
takes is exposed. Every value is checked. Each round has new rows of the same lengths, the sides take turns, and figures
are medians.

`floor_ratio` is what a teacher that loses no time at all would still expose with these arrivals.

Not covered: prompts that a teacher computes once for several rows (the oracle's time is per id), old log-probs, which
the trainer computes between the rollout and the teacher and during which more is hidden, and the teacher's slowing of
a rollout on the same device.

    python bench/overlap.py --rounds 3
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import print_result, servers

from opd.client import Scores, TeacherClient
from opd.overlap import PrefetchThread
from opd.scoring.oracle import oracle_logprobs
from opd.teachers import Teachers

PROMPTS, PER_PROMPT, PROMPT, LONGEST, VOCAB = 64, 8, 200, 2048, 1000
MEDIAN, SIGMA = 300, 0.8  # of the responses' lengths
BATCH_TOKENS = 8192  # of the server: a row waits for at most one batch that is under way


def make_lengths() -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, PROMPTS * PER_PROMPT)
    return np.clip(drawn, 8, LONGEST).astype(int)


def make_rows(lengths: np.ndarray, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    prompts = np.repeat(rng.integers(0, VOCAB, (PROMPTS, PROMPT), dtype=np.int32), PER_PROMPT, axis=0)
    return [
        np.concatenate([prompt, rng.integers(0, VOCAB, length, dtype=np.int32)])
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def floor(lengths: np.ndarray) -> float:
    """Exposed share of the teacher's time if it started each row the moment that it arrives, without any loss."""
    arrivals = np.sort(lengths)
    work = (arrivals + PROMPT) / (arrivals + PROMPT).sum()
    done = 0.0
    for at, needs in zip(arrivals / arrivals[-1], work, strict=True):
        done = max(done, at) + needs
    return done - 1.0


def roll_out(rows: list[np.ndarray], lengths: np.ndarray, seconds: float, thread: PrefetchThread) -> None:
    """Let time pass, and hand over each row when it is finished."""
    began = time.perf_counter()
    for index in np.argsort(lengths, kind="stable"):
        time.sleep(max(0.0, began + seconds * lengths[index] / lengths.max() - time.perf_counter()))
        thread.add(rows[index][:PROMPT].tolist(), rows[index][PROMPT:].tolist())


def exposed(client: TeacherClient, rows: list[np.ndarray], *, prefetched: bool) -> tuple[float, Scores]:
    began = time.perf_counter()
    scores = client.score(rows, [PROMPT] * len(rows), timeout_s=600.0, prefetched=prefetched)
    seconds = time.perf_counter() - began
    for row, got in zip(rows, scores.logprobs, strict=True):
        want = oracle_logprobs(row, PROMPT, vocab=VOCAB)
        assert got is not None and np.allclose(got, want, rtol=0, atol=1e-5), "wrong values"
    return seconds, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each side, taking turns (default 3)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a rollout, and of the teacher (default 6)")
    args = parser.parse_args()
    lengths = make_lengths()
    tokens = int((lengths + PROMPT).sum())
    us = 1e6 * args.seconds / tokens
    arguments = ["--backend", "oracle", "--model", f"oracle:vocab={VOCAB},us_per_token={us}"]
    arguments += ["--max-tokens", str(BATCH_TOKENS), "--cache-mb", "64"]
    waited: dict[str, list[float]] = {"after": [], "overlapped": []}
    spent: dict[str, list[float]] = {"after": [], "overlapped": []}
    cached: list[int] = []
    with servers(1, *arguments) as (addresses, _), TeacherClient(addresses) as client:
        client.wait_until_ready(60.0)
        with PrefetchThread(Teachers(TeacherClient(addresses))) as thread:
            for number in range(args.rounds):
                rows = make_rows(lengths, 2 * number)
                seconds, scores = exposed(client, rows, prefetched=False)
                waited["after"].append(seconds)
                spent["after"].append(scores.stats.score_ms / 1000)
                rows = make_rows(lengths, 2 * number + 1)
                roll_out(rows, lengths, args.seconds, thread)
                seconds, scores = exposed(client, rows, prefetched=True)
                waited["overlapped"].append(seconds)
                spent["overlapped"].append(scores.stats.score_ms / 1000)
                cached.append(scores.stats.cached)
    ratio = median(a / b for a, b in zip(waited["overlapped"], waited["after"], strict=True))
    print(f"{'':12}{'rollout s':>12}{'teacher s':>12}{'exposed s':>12}")
    for side in waited:
        print(f"{side:12}{args.seconds:>12.2f}{median(spent[side]):>12.2f}{median(waited[side]):>12.3f}")
    print(f"{len(lengths)} rows, {tokens} tokens; {median(cached):.0f} rows were scored before they were asked for")
    print_result(
        "overlap",
        exposed_ratio=round(ratio, 4),
        floor_ratio=round(floor(lengths), 4),
        exposed_s={side: round(median(values), 3) for side, values in waited.items()},
        teacher_s={side: round(median(values), 3) for side, values in spent.items()},
        cached_rows=int(median(cached)),
        rows=len(lengths),
        tokens=tokens,
        rollout_s=args.seconds,
        rounds=args.rounds,
    )


if __name__ == "__main__":
    main()
