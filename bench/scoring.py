"""What sharing prompts and tiling the output head buy: the transformers scorer against a padded forward.

Three ways to score 8 responses to one prompt with the same random Llama (42M parameters, vocabulary 32,000):
  baseline  one padded forward of all rows, log-softmax of all logits, then the values of the responses;
  ours      opd.scoring.hf;
  floor     what cannot be left out: the body over the prompt once and over the responses, and one plain matmul of the
            response rows with the output head. Two ways to batch it are run, and the faster one counts.

With one thread, times are CPU seconds of this process, which other work on the machine disturbs least; with more, wall
clock. Rounds interleave all sides, and ratios are of medians. Memory is the peak resident set of a process of its own
above what the loaded, warmed-up model takes.

    python bench/scoring.py --rounds 3 --threads 1
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from opd.errors import RowError
from opd.scoring.hf import load
from opd.scoring.scorer import LoadOptions, Row, RowScores

VOCAB, NUM_ROWS = 32_000, 8
SHAPES = {"p512": (512, 256), "p1024": (1024, 128)}  # prompt, response
SIDES = ("baseline", "ours", "floor, rows together", "floor, row by row")


def make_model(folder: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def make_rows(prompt: int, response: int, num_rows: int = NUM_ROWS) -> list[Row]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, prompt)
    rows = [np.concatenate([shared, rng.integers(0, VOCAB, response)]) for _ in range(num_rows)]
    return [Row(ids.astype(np.int32), prompt) for ids in rows]


@torch.inference_mode()
def run_baseline(model: Any, rows: list[Row]) -> np.ndarray:
    ids = torch.tensor(np.array([row.ids for row in rows]), dtype=torch.int64)
    log_softmax = torch.log_softmax(model(ids, use_cache=False).logits[:, :-1].float(), dim=-1)
    return log_softmax.gather(2, ids[:, 1:, None])[:, rows[0].start - 1 :, 0].numpy()


@torch.inference_mode()
def run_floor(model: Any, rows: list[Row], *, together: bool) -> None:
    ids = torch.tensor(np.array([row.ids for row in rows]), dtype=torch.int64)
    start = rows[0].start
    cache = transformers.DynamicCache(config=model.config)
    last = model.model(ids[:1, :start], past_key_values=cache, use_cache=True).last_hidden_state[0, -1:]
    hidden = [last.expand(len(rows), -1)]
    if together:
        cache.batch_repeat_interleave(len(rows))
        hidden.append(model.model(ids[:, start:-1], past_key_values=cache).last_hidden_state.flatten(0, 1))
    else:
        for row in range(len(rows)):
            hidden.append(model.model(ids[row : row + 1, start:-1], past_key_values=cache).last_hidden_state[0])
            cache.crop(start)
    for some in torch.cat(hidden).split(512):
        torch.nn.functional.linear(some, model.lm_head.weight)


def build(side: str, folder: str, dtype: str) -> Callable[[list[Row]], Any]:
    if side == "ours":
        scorer = load(LoadOptions(model=folder, dtype=dtype, device="cpu"))

        def run(rows: list[Row]) -> np.ndarray:
            results = scorer.score(rows)
            assert not any(isinstance(result, RowError) for result in results), results
            return np.array([result.logprobs for result in results if isinstance(result, RowScores)])

        return run
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if side == "baseline":
        return lambda rows: run_baseline(model, rows)
    return lambda rows: run_floor(model, rows, together=side == "floor, rows together")


def peak_memory_mb(side: str, shape: str, folder: str, args: argparse.Namespace) -> float:
    """Run one side once in a process of its own."""
    command = [sys.executable, __file__, "--child", side, shape, folder]
    command += ["--dtype", args.dtype, "--threads", str(args.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def child(side: str, shape: str, folder: str, dtype: str) -> None:
    run = build(side, folder, dtype)
    run(make_rows(64, 16, 2))
    rows = make_rows(*SHAPES[shape])
    ctypes.CDLL(None).malloc_trim(0)  # what loading freed must not hide what scoring takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory_kb("VmRSS")
    run(rows)
    print((memory_kb("VmHWM") - before) / 1024)


def memory_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def measure(args: argparse.Namespace, folder: str) -> dict[str, dict[str, Any]]:
    clock = time.process_time if args.threads == 1 else time.perf_counter
    runs = {side: build(side, folder, args.dtype) for side in SIDES}
    for run in runs.values():
        run(make_rows(64, 16, 2))
    measured: dict[str, dict[str, Any]] = {}
    for shape, (prompt, response) in SHAPES.items():
        rows = make_rows(prompt, response)
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        values = {}
        for _ in range(args.rounds):
            for side, run in runs.items():
                began = clock()
                values[side] = run(rows)
                seconds[side].append(clock() - began)
        measured[shape] = {side: median(times) for side, times in seconds.items()}
        measured[shape]["difference"] = float(np.abs(values["ours"] - values["baseline"]).max())
        for side in ("baseline", "ours"):
            measured[shape][f"{side} MB"] = peak_memory_mb(side, shape, folder, args)
    return measured


def report(args: argparse.Namespace, measured: dict[str, dict[str, Any]]) -> None:
    clock = "CPU s" if args.threads == 1 else "wall s"
    print(f"{'':24}" + "".join(f"{f'P={p} R={r}':>16}" for p, r in SHAPES.values()))
    for key, unit in [(side, clock) for side in SIDES] + [("baseline MB", "extra"), ("ours MB", "extra")]:
        print(f"{key + ' (' + unit + ')':30}" + "".join(f"{measured[s][key]:>10.2f}{'':6}" for s in SHAPES))
    floor = {s: min(measured[s][side] for side in SIDES[2:]) for s in SHAPES}
    result = {
        "bench": "scoring",
        "ratio_p512": round(measured["p512"]["baseline"] / measured["p512"]["ours"], 2),
        "ratio_p1024": round(measured["p1024"]["baseline"] / measured["p1024"]["ours"], 2),
        "over_floor": round(max(measured[s]["ours"] / floor[s] for s in SHAPES), 3),
        "memory_ratio": round(max(measured[s]["ours MB"] / measured[s]["baseline MB"] for s in SHAPES), 4),
        "max_difference": max(measured[s]["difference"] for s in SHAPES),
        "seconds": {s: {side: round(measured[s][side], 3) for side in SIDES} for s in SHAPES},
        "extra_mb": {s: {side: round(measured[s][f"{side} MB"], 1) for side in SIDES[:2]} for s in SHAPES},
        "clock": clock,
        "rounds": args.rounds,
        "threads": args.threads,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cores": os.cpu_count(),
        "machine": processor(),
    }
    print(json.dumps(result))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of each shape (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default float32")
    parser.add_argument("--child", nargs=3, metavar=("SIDE", "SHAPE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    if args.child:
        side, shape, folder = args.child
        child(side, shape, folder, args.dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        report(args, measure(args, folder))


if __name__ == "__main__":
    main()
