"""Make everything the digits recipe needs: a tokenizer, a teacher, a half-trained student, two parquet files.

run_opd.sh calls `python recipe/digits/prepare.py --out DIR`; verl, the teacher server and the trainer read what is left
in DIR. The task is to reverse a string of six digits, one token per character: `482913=` -> `319284<eos>`.
Both models are trained here from nothing, on strings that are never used for validation; the student is stopped early.

    DIR/teacher, DIR/student   Hugging Face folders (float32 Llama; the same tokenizer in both)
    DIR/train.parquet          prompts for the on-policy steps
    DIR/val.parquet            held-out prompts, in no training set of either model
    DIR/prepared.json          paths, seed and measured accuracies; written last

Shapes: N rows, L = LENGTH digits, T = 2 L + 2 tokens of a whole row (digits, mark, digits reversed, end).

Refuses to replace a folder that it did not make. Needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# torch and transformers are imported where they are used: a cached call answers without loading them.

# EDIT: the task. A copy of this recipe changes these lines, `answer`, and the same rule in reward.py.
LENGTH = 6
DIGITS = "0123456789"
MARK = "="  # end of the question; the chat template appends it

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# pad and eos differ, so a printed batch shows where a response ended, and a model that emits padding is seen to do so.
VOCAB = [PAD, EOS, UNK, MARK, *DIGITS]

# Every message is its bare characters and the question ends with the mark: nothing that the models did not train on.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + MARK + "{% endif %}"
)

# EDIT: the models. Heads are 32 wide, so that GPU kernels take them as well.
TEACHER = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
STUDENT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LEARNING_RATE = 3e-3
ROWS_PER_STEP = 256
WARMUP_STEPS = 50
# A student makes mistakes, and a teacher that never saw one is a bad judge of what follows it. So both learn to go on
# rightly after wrong digits, and never to be quite certain: on-policy, the signal is only as good as that.
WRONG_DIGITS = 0.15
LABEL_SMOOTHING = 0.02


def answer(question: str) -> str:
    return question[::-1]


def log(message: str) -> None:
    print(f"prepare digits: {message}", file=sys.stderr, flush=True)


def build_tokenizer():
    """One token per character; any other character becomes <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def to_text(number: int) -> str:
    return f"{number:0{LENGTH}d}"


def rows_of(numbers_N):
    """Whole rows of token ids [N, T] for an integer tensor [N]; the first L + 1 columns are the prompt."""
    import torch

    powers_L = 10 ** torch.arange(LENGTH - 1, -1, -1)
    digits_NL = (numbers_N[:, None] // powers_L) % 10 + VOCAB.index(DIGITS[0])
    mark_N1 = torch.full((len(numbers_N), 1), VOCAB.index(MARK))
    eos_N1 = torch.full((len(numbers_N), 1), VOCAB.index(EOS))
    return torch.cat([digits_NL, mark_N1, digits_NL.flip(1), eos_N1], dim=1)  # EDIT: flip is `answer` on token ids


def build_model(shape: dict[str, int], *, seed: int):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        intermediate_size=2 * shape["hidden_size"],
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCAB.index(EOS),
        pad_token_id=VOCAB.index(PAD),
        **shape,
    )
    return LlamaForCausalLM(config).float()


def with_mistakes(input_NT, generator):
    """The same rows with some of the response's digits replaced by random ones; the prompt stays."""
    import torch

    response_NR = input_NT[:, LENGTH + 1 :]
    first = VOCAB.index(DIGITS[0])
    random_NR = torch.randint(first, first + len(DIGITS), response_NR.shape, generator=generator)
    wrong_NR = torch.rand(response_NR.shape, generator=generator) < WRONG_DIGITS
    return torch.cat([input_NT[:, : LENGTH + 1], torch.where(wrong_NR, random_NR, response_NR)], dim=1)


def train(model, numbers, *, name: str, steps: int, full_steps: int, seed: int) -> None:
    """Supervised training of the response tokens, on ROWS_PER_STEP strings a step drawn from `numbers`.

    The learning rate falls to zero over the second half of `full_steps`; fewer `steps` than that is stopping early.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.0, min(1.0, (step + 1) / WARMUP_STEPS, 2 * (1 - step / full_steps)))
    )
    started = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        rows_NT = rows_of(numbers[torch.randint(len(numbers), (ROWS_PER_STEP,), generator=generator)])
        targets_NT = rows_NT[:, LENGTH + 1 :]
        logits_NTV = model(input_ids=with_mistakes(rows_NT[:, :-1], generator), use_cache=False).logits[:, LENGTH:]
        loss = torch.nn.functional.cross_entropy(
            logits_NTV.flatten(0, 1), targets_NT.flatten(), label_smoothing=LABEL_SMOOTHING
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            log(f"{name}: step {step}/{steps}, loss {loss.item():.4f}, {time.monotonic() - started:.1f} s")
    model.eval()


def greedy_accuracy(model, numbers) -> float:
    """Share of strings whose whole response, end token included, is right under greedy decoding."""
    import torch

    rows_NT = rows_of(numbers)
    ids = rows_NT[:, : LENGTH + 1]
    with torch.inference_mode():
        for _ in range(LENGTH + 1):
            next_N = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
            ids = torch.cat([ids, next_N[:, None]], dim=1)
    return (ids == rows_NT).all(dim=1).float().mean().item()


def save_model(model, tokenizer, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_parquet(numbers: list[int], *, split: str, path: Path) -> None:
    """One row per prompt, in the columns that verl's RLHFDataset and reward manager read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for index, number in enumerate(numbers):
        question = to_text(number)
        rows.append(
            {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": question}],
                "ability": "copy",
                "reward_model": {"style": "rule", "ground_truth": answer(question)},
                "extra_info": {"index": index, "split": split},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fill `folder` and return the accuracies; the caller gives it its final name."""
    # Read when torch loads: threads that spin while they wait all but stop each other on a machine shared with others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(min(4, torch.get_num_threads()))  # more only wait for each other on models of this size
    numbers = random.Random(args.seed).sample(range(10**LENGTH), args.val_prompts + args.train_prompts)
    val_numbers, train_numbers = numbers[: args.val_prompts], numbers[args.val_prompts :]
    is_free = torch.ones(10**LENGTH, dtype=torch.bool)
    is_free[val_numbers] = False
    free_numbers = is_free.nonzero().flatten()  # all strings but the held-out ones

    write_parquet(train_numbers, split="train", path=folder / "train.parquet")
    write_parquet(val_numbers, split="val", path=folder / "val.parquet")

    tokenizer = build_tokenizer()
    accuracy = {}
    for name, shape, steps, seed in (
        ("teacher", TEACHER, args.teacher_steps, args.seed),
        ("student", STUDENT, args.student_steps, args.seed + 1),
    ):
        model = build_model(shape, seed=seed)
        train(model, free_numbers, name=name, steps=steps, full_steps=args.teacher_steps, seed=seed)
        accuracy[f"{name}_accuracy"] = round(greedy_accuracy(model, torch.tensor(val_numbers)), 4)
        log(f"{name}: {accuracy[f'{name}_accuracy']:.1%} of {len(val_numbers)} held-out strings right, greedy")
        save_model(model, tokenizer, folder / name)
    return accuracy


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the digits recipe's models and data; cached, about a minute.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="data, initial weights and order of training")
    parser.add_argument("--teacher-steps", type=int, default=140, help="optimiser steps of the teacher")
    parser.add_argument("--student-steps", type=int, default=90, help="optimiser steps of the student; fewer: weaker")
    parser.add_argument("--train-prompts", type=int, default=16384, help="prompts for the on-policy steps")
    parser.add_argument("--val-prompts", type=int, default=512, help="held-out prompts")
    parser.add_argument("--plan", action="store_true", help="print what prepared.json will name; make nothing")
    args = parser.parse_args(argv)
    for name in ("teacher_steps", "student_steps", "train_prompts", "val_prompts"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.student_steps > args.teacher_steps:
        parser.error(f"--student-steps {args.student_steps} exceeds --teacher-steps {args.teacher_steps}")
    if args.train_prompts + args.val_prompts > 10**LENGTH:
        parser.error(f"there are only {10**LENGTH} strings of {LENGTH} digits")
    return args


def plan_of(args: argparse.Namespace) -> dict[str, Any]:
    """The part of prepared.json that is known before anything is made."""
    out = args.out.resolve()
    inputs = {name: value for name, value in vars(args).items() if name not in ("out", "plan")}
    # prepared.json holds absolute paths, so a moved folder is made again
    inputs |= {"out": str(out), "prepare_py_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}
    return {
        "recipe": "digits",
        "seed": args.seed,
        "student": str(out / "student"),
        "teacher": str(out / "teacher"),
        "train": str(out / "train.parquet"),
        "val": str(out / "val.parquet"),
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
        and all(os.path.exists(plan[key]) for key in ("student", "teacher", "train", "val"))
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
        accuracy = prepare(made, args)
        prepared = {**plan, **accuracy, "seconds": round(time.monotonic() - started_s, 1)}
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
