"""Make the gsm8k recipe's two parquet files, from the hub or from local JSON lines.

run_opd.sh calls `python recipe/gsm8k/prepare.py --out DIR`; verl's RLHFDataset and reward manager read the files. The
models are not touched: prepared.json names them, and whoever loads them fetches them.

    DIR/train.parquet, DIR/val.parquet   data_source, prompt, ability, reward_model, extra_info
    DIR/prepared.json                    paths and the names of the models; written last

Refuses: rows without a question, an answer without `#### number` (the line number is named), a folder that it did not
make. A training question that is also a validation question is left out of training, and counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# EDIT: the data set and the models. Student and teacher must share their tokenizer.
DATASET, DATASET_CONFIG = "openai/gsm8k", "main"
STUDENT = "Qwen/Qwen3-0.6B"
TEACHER = "Qwen/Qwen3-4B"
# EDIT: what follows the question. It asks for the form that verl's own score expects; reward.py takes others as well.
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

NUMBER = re.compile(r"-?\d+(\.\d+)?")


class BadRow(ValueError):
    """A row that cannot be used; the message says why, the caller adds where it stands."""


def log(message: str) -> None:
    print(f"prepare gsm8k: {message}", file=sys.stderr, flush=True)


def to_row(example: dict[str, Any], *, index: int, split: str) -> dict[str, Any]:
    """One GSM8K example in verl's columns; the ground truth is the plain number after the last `####`."""
    question, answer = (example.get(key) if isinstance(example, dict) else None for key in ("question", "answer"))
    if not (isinstance(question, str) and question.strip() and isinstance(answer, str)):
        raise BadRow("it needs the text fields 'question' and 'answer'")
    _, marker, number = answer.rpartition("####")
    if not marker:
        raise BadRow("the answer has no '####' before its number")
    number = number.strip().replace(",", "").replace("$", "")
    if not NUMBER.fullmatch(number):
        raise BadRow(f"{number[:40]!r} after '####' is not a number")
    return {
        "data_source": "gsm8k",
        "prompt": [{"role": "user", "content": f"{question.strip()} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number},
        "extra_info": {"index": index, "split": split},
    }


def read_lines(path: Path, *, split: str) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; blank lines are skipped."""
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line_number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    rows.append(to_row(json.loads(line), index=len(rows), split=split))
                except json.JSONDecodeError as e:
                    raise SystemExit(f"{path}:{line_number}: not JSON ({e.msg})") from None
                except BadRow as e:
                    raise SystemExit(f"{path}:{line_number}: {e}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise SystemExit(f"cannot read {path}: {e}") from None
    if not rows:
        raise SystemExit(f"{path} has no rows")
    return rows


def read_hub() -> dict[str, list[dict[str, Any]]]:
    """Rows of the hub's data set; its `test` split is the validation set."""
    import datasets  # here, since local files need neither it nor a network

    log(f"reading {DATASET} from the hub")
    try:
        splits = datasets.load_dataset(DATASET, DATASET_CONFIG)
    except Exception as e:  # broad: without a network or a token, each layer below raises its own kind of error
        raise SystemExit(
            f"cannot read {DATASET} from the hub ({type(e).__name__}: {e}); give --train-file and --val-file instead"
        ) from None
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, split in (("train", "train"), ("val", "test")):
        rows[name] = []
        for index, example in enumerate(splits[split]):
            try:
                rows[name].append(to_row(example, index=index, split=name))
            except BadRow as e:
                raise SystemExit(f"{DATASET}, {split} split, row {index}: {e}") from None
    return rows


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fill `folder` and return the counts; the caller gives it its final name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if args.train_file:
        rows = {"train": read_lines(args.train_file, split="train"), "val": read_lines(args.val_file, split="val")}
    else:
        rows = read_hub()
    held_out = {row["prompt"][0]["content"] for row in rows["val"]}
    train = [row for row in rows["train"] if row["prompt"][0]["content"] not in held_out]
    num_shared = len(rows["train"]) - len(train)
    if num_shared:
        log(f"{num_shared} training questions are also in the validation set: left out of training")
    if not train:
        raise SystemExit("no training question is left that is not in the validation set")
    rows["train"] = train
    for split, limit in (("train", args.train_rows), ("val", args.val_rows)):
        if limit and limit < len(rows[split]):
            rows[split] = random.Random(args.seed).sample(rows[split], limit)
        pq.write_table(pa.Table.from_pylist(rows[split]), folder / f"{split}.parquet")
        log(f"{split}: {len(rows[split])} rows")
    return {"train_rows": len(rows["train"]), "val_rows": len(rows["val"])}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the gsm8k recipe's parquet files; cached.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="which rows --train-rows and --val-rows keep")
    parser.add_argument("--train-file", type=Path, help="JSON lines with question and answer, instead of the hub")
    parser.add_argument("--val-file", type=Path, help="the same for validation")
    parser.add_argument("--train-rows", type=int, default=0, help="keep at most that many training rows; 0: all")
    parser.add_argument("--val-rows", type=int, default=0, help="keep at most that many validation rows; 0: all")
    parser.add_argument("--student", default=STUDENT, help=f"hub id or folder (default {STUDENT})")
    parser.add_argument("--teacher", default=TEACHER, help=f"hub id or folder (default {TEACHER})")
    parser.add_argument("--plan", action="store_true", help="print what prepared.json will name; make nothing")
    args = parser.parse_args(argv)
    if bool(args.train_file) != bool(args.val_file):
        parser.error("--train-file and --val-file go together")
    for name in ("train_rows", "val_rows"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must be 0 (all) or more, not {getattr(args, name)}")
    return args


def plan_of(args: argparse.Namespace) -> dict[str, Any]:
    """The part of prepared.json that is known before anything is made."""
    out = args.out.resolve()
    inputs = {name: value for name, value in vars(args).items() if name not in ("out", "plan")}
    for name in ("train_file", "val_file"):
        path = inputs[name]
        if path:
            try:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as e:
                raise SystemExit(f"cannot read {path}: {e}") from None
            inputs[name] = [str(path.resolve()), digest]
    # prepared.json holds absolute paths, so a moved folder is made again
    inputs |= {"out": str(out), "prepare_py_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    return {
        "recipe": "gsm8k",
        "seed": args.seed,
        "student": args.student,
        "teacher": args.teacher,
        "train": str(out / "train.parquet"),
        "val": str(out / "val.parquet"),
        # Not measured here: verl validates the student before training, and the teacher never answers a question.
        "teacher_accuracy": None,
        "student_accuracy": None,
        "inputs": inputs,
    }


# ---- the frame around `prepare`: made whole or not at all; every recipe has its own copy ----


def is_up_to_date(plan: dict[str, Any], out: Path) -> bool:
    """Whether `out` was made from the same inputs and its files are still there."""
    try:
        prepared = json.loads((out / "prepared.json").read_text())
    except (OSError, ValueError):
        return False
    return (
        isinstance(prepared, dict)
        and prepared.get("inputs") == plan["inputs"]
        and all(os.path.exists(plan[key]) for key in ("train", "val"))
    )


def check_replaceable(out: Path) -> None:
    if out.exists() and not (out.is_dir() and ((out / "prepared.json").is_file() or not any(out.iterdir()))):
        raise SystemExit(f"{out} holds files that prepare.py did not make; give another --out")


def put_in_place(made: Path, out: Path, *, scratch: Path) -> None:
    """Rename the finished folder to `out`; an older one leaves through `scratch`."""
    check_replaceable(out)
    if out.exists():
        os.rename(out, scratch / "old")
    os.rename(made, out)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    out = args.out.resolve()
    plan = plan_of(args)
    if args.plan:
        print(json.dumps(plan, indent=2))
        return
    if is_up_to_date(plan, out):
        log(f"{out} is up to date, nothing to do")
        return
    check_replaceable(out)

    started_s = time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs for a plain kill, too
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.tmp-"))
    try:
        made = scratch / "made"
        made.mkdir()
        counts = prepare(made, args)
        prepared = {**plan, **counts, "seconds": round(time.monotonic() - started_s, 1)}
        (made / "prepared.json").write_text(json.dumps(prepared, indent=2) + "\n")
        put_in_place(made, out, scratch=scratch)
    except KeyboardInterrupt:
        log("interrupted, nothing was left behind")
        raise SystemExit(130) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    log(f"wrote {out} in {prepared['seconds']} s")


if __name__ == "__main__":
    main()
