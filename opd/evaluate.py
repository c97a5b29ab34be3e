"""Measure students against the task and the teacher: `python -m opd.evaluate --config FILE --models DIR --out FILE`.

Per model, on held-out prompts: greedy accuracy by the recipe's own reward, and the reverse KL to the teacher on
responses that this very model samples at temperature 1 (on-policy). The teacher is that of the training: of several the
one, or the weighted mean, that a prompt's column asks for, and with a prompt of its own where it has one. A response
that the teacher cannot score ends it, or with teacher.on_row_error=neutral is left out of the KL and counted, as in
training. Writes one JSON list, one object per model.

Shapes: B prompts of one batch, P prompt columns, S all columns, V vocabulary.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from opd import kl
from opd.align import Rows
from opd.errors import ConfigError, OPDError
from opd.routing import Router
from opd.teacher_prompt import RAW_PROMPT
from opd.teachers import Teachers, teachers_of

logger = logging.getLogger(__name__)
Sampled = tuple[list[int], list[int]]  # prompt ids, response ids


def load_reward(path: Path, name: str) -> Callable[..., Any]:
    """The recipe's reward function, from its file."""
    spec = importlib.util.spec_from_file_location("recipe_reward", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"no reward file {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def load_model(folder: str, *, dtype: torch.dtype) -> Any:
    """A student, with its EOS and nothing else of what its folder says about generating.

    Raises:
        ConfigError: weights that are missing from its files, which transformers would make up.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    model, info = loaded
    if info["missing_keys"]:
        raise ConfigError(
            f"{folder} lacks {len(info['missing_keys'])} of the model's weights, like {min(info['missing_keys'])}: it "
            "would be measured with random ones. If it is a LoRA student's, merge its adapter with peft first"
        )
    # min-p, repeated n-grams, suppressed tokens ...: each would be another distribution than the one that is measured
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return model


class Evaluation:
    """Held-out rows, their reward and the teacher, ready for one model after the other."""

    def __init__(self, args: argparse.Namespace, config: Any, teachers: Teachers):
        self.args = args
        self.teachers = teachers
        self.timeout_s = config.teacher.timeout_s
        self.neutral_allowed = config.teacher.on_row_error == "neutral"
        reward = config.reward.custom_reward_function
        self.reward = load_reward(Path(reward.path), reward.name)
        self.prompt_key = config.data.prompt_key
        self.rows = pd.read_parquet(config.data.val_files).to_dict("records")[: args.limit]
        self.taught_rows = self._taught_rows()
        self.max_response_length = config.data.max_response_length
        self.template_kwargs: dict[str, Any] = dict(config.data.apply_chat_template_kwargs)
        self.chat_template = config.actor_rollout_ref.model.get("custom_chat_template")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def measure(self, folder: str) -> dict[str, Any]:
        """Accuracy and KL of one model."""
        start_s = time.monotonic()
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template  # as in training
        model: Any = load_model(folder, dtype=torch.bfloat16 if self.device == "cuda" else torch.float32)
        model = model.to(self.device).eval()
        greedy = self._generate(model, tokenizer, self.rows, do_sample=False)
        accuracy = np.mean([self._score(tokenizer, row, ids) for row, (_, ids) in zip(self.rows, greedy, strict=True)])
        torch.manual_seed(self.args.seed)
        result = {"model": folder, "accuracy": float(accuracy), "prompts": len(self.rows)}
        result |= self._kl(model, tokenizer)
        logger.info("%s: %s (%.1f s)", folder, result, time.monotonic() - start_s)
        return result

    def _kl(self, model: Any, tokenizer: Any) -> dict[str, Any]:
        rows = self.taught_rows * self.args.samples
        if not rows:
            return {"kl": None, "kl_k3": None, "kl_prompts": 0}
        sampled = self._generate(model, tokenizer, rows, do_sample=True)
        teacher = self._teachers(sampled, rows)
        scored = [pair for pair, values in zip(sampled, teacher, strict=True) if values is not None]
        if len(scored) < len(sampled):
            logger.warning("the teacher could not score %d of %d responses", len(sampled) - len(scored), len(sampled))
        student_T = np.concatenate([np.zeros(0, np.float32), *self._students(model, scored)])
        teacher_T = np.concatenate([np.zeros(0, np.float32), *(values for values in teacher if values is not None)])
        estimates = kl.estimates(student_T, teacher_T)
        return {
            "kl": estimates.get("opd/reverse_kl_k1"),
            "kl_k3": estimates.get("opd/reverse_kl_k3"),
            "kl_prompts": len(self.taught_rows),
            "kl_neutral": len(sampled) - len(scored),
            "kl_tokens": len(student_T),
            "mean_response_length": sum(len(response) for _, response in sampled) / len(sampled),
        }

    def _taught_rows(self) -> list[dict]:
        """Those that a teacher can be asked about; training looked at the columns of its own data only."""
        lacking = [name for name in self._columns().values() if any(name not in row for row in self.rows)]
        if lacking:
            logger.warning("no KL is measured: the held-out data has no column %r, which the teacher needs", lacking[0])
            return []
        client = self.teachers.client
        if not isinstance(client, Router):
            return self.rows
        rows = [row for row in self.rows if str(row[client.route_by]) in client.routes]
        if len(rows) < len(self.rows):
            logger.warning(
                "the KL is measured on %d of %d prompts: the others have a %s without a teacher",
                len(rows),
                len(self.rows),
                client.route_by,
            )
        return rows

    def _columns(self) -> dict[str, str]:
        """What a question needs of the data, and what the file calls it."""
        return {name: self.prompt_key if name == RAW_PROMPT else name for name in self.teachers.data_columns}

    @torch.inference_mode()
    def _generate(
        self, model: Any, tokenizer: Any, rows: list[dict], **kwargs: Any
    ) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, response ids with the EOS if there is one) per row."""
        out: list[Sampled] = []
        eos = model.generation_config.eos_token_id
        stops = {eos} if isinstance(eos, int) else set(eos or [])
        if kwargs["do_sample"]:
            kwargs |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # transformers' own top_k is 50
        else:
            kwargs |= {"temperature": None, "top_k": None, "top_p": None}
        for begin in range(0, len(rows), self.args.batch_size):
            batch = rows[begin : begin + self.args.batch_size]
            prompts = [
                tokenizer.apply_chat_template(
                    list(row[self.prompt_key]),
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                    **self.template_kwargs,
                )
                for row in batch
            ]
            padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt").to(self.device)
            sequences_BS = model.generate(
                **padded,
                max_new_tokens=self.max_response_length,
                pad_token_id=tokenizer.pad_token_id,
                repetition_penalty=1.0,
                **kwargs,
            )
            width = padded["input_ids"].shape[1]
            for prompt, ids in zip(prompts, sequences_BS[:, width:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
                out.append((prompt, ids[:end]))
        return out

    def _score(self, tokenizer: Any, row: dict, response: list[int]) -> float:
        answer = self.reward(
            data_source=row["data_source"],
            solution_str=tokenizer.decode(response, skip_special_tokens=True),
            ground_truth=row["reward_model"]["ground_truth"],
            extra_info=row.get("extra_info"),
        )
        value: Any = answer.get("acc", answer["score"]) if isinstance(answer, dict) else answer
        return float(value)

    def _teachers(self, sampled: list[Sampled], data: list[dict]) -> list[np.ndarray | None]:
        """The teacher's log-probs of each response; None where it could not score one and that is allowed."""
        rows = [np.array(prompt + response, dtype=np.int32) for prompt, response in sampled]
        starts = np.array([len(prompt) for prompt, _ in sampled])
        columns = {name: [row[column] for row in data] for name, column in self._columns().items()}
        batch = Rows(rows, starts, np.array([len(response) for _, response in sampled]))
        routed = self.teachers.score(batch, columns, timeout_s=self.timeout_s, return_row_errors=self.neutral_allowed)
        return routed.scores.logprobs

    @torch.inference_mode()
    def _students(self, model: Any, sampled: list[Sampled]) -> list[np.ndarray]:
        """The student's own of each response."""
        student: list[np.ndarray] = []
        for begin in range(0, len(sampled), self.args.batch_size):
            chunk = sampled[begin : begin + self.args.batch_size]
            width = max(len(prompt) + len(response) for prompt, response in chunk)
            ids_BS = np.zeros((len(chunk), width), dtype=np.int64)  # right-padded: causal rows never look there
            for i, (prompt, response) in enumerate(chunk):
                ids_BS[i, : len(prompt) + len(response)] = prompt + response
            ids = torch.from_numpy(ids_BS).to(self.device)
            logits_BSV = model(input_ids=ids).logits[:, :-1].float()
            logprobs_BS = logits_BSV.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu().numpy()
            # column i - 1 holds log p(ids[i] | ids[:i])
            student += [
                logprobs_BS[i, len(prompt) - 1 : len(prompt) + len(response) - 1]
                for i, (prompt, response) in enumerate(chunk)
            ]
        return student


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m opd.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="config.yaml of a run: data, reward, teacher")
    parser.add_argument("--models", nargs="+", required=True, metavar="DIR", help="students, as Hugging Face folders")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON list, one object per model")
    parser.add_argument("--samples", type=int, default=4, help="sampled responses per prompt, for the KL (default 4)")
    parser.add_argument("--limit", type=int, default=256, help="held-out prompts to use at most (default 256)")
    parser.add_argument("--batch-size", type=int, default=256, help="sequences per forward (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        config: Any = OmegaConf.load(args.config)
        with teachers_of(config) as teachers:
            teachers.wait_until_ready(config.teacher.ready_timeout_s)
            evaluation = Evaluation(args, config, teachers)
            args.out.write_text(json.dumps([evaluation.measure(folder) for folder in args.models], indent=1))
    except OPDError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
