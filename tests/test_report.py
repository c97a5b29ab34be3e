"""What a run's last line says: the evaluation before and after, and what turned the KL into gradient."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from test_config import composed

from opd.report import parse_args, result, table


def reported(folder: Path, *overrides: str, kl: float | None = 0.25) -> dict:
    OmegaConf.save(composed(*overrides), folder / "config.yaml", resolve=True)
    measured = [{"accuracy": 0.51239, "kl": kl}, {"accuracy": 1.0, "kl": kl}]
    (folder / "evaluation.json").write_text(json.dumps(measured))
    arguments = ["--run-dir", str(folder), "--recipe", "digits", "--checkpoint", "checkpoint", "--steps", "2"]
    return result(parse_args([*arguments, "--teacher-accuracy", "null", "--seconds", "61"]))


@pytest.mark.parametrize(
    "overrides, kl_type",
    [
        ([], "k3+"),
        (["actor_rollout_ref.actor.kl_loss_type=k2"], "k2"),
        (["teacher.loss=policy_gradient"], "policy_gradient"),
        (["teacher.loss=jsd_topk"], "jsd_topk"),
    ],
)
def test_an_estimator_is_named_only_where_it_was_the_loss(tmp_path, overrides, kl_type):
    assert reported(tmp_path, *overrides)["kl_type"] == kl_type


def test_what_was_not_measured_is_no_number(tmp_path):
    r = reported(tmp_path, kl=None)
    assert (r["accuracy_before"], r["kl_before"], r["teacher_accuracy"]) == (0.5124, None, None)
    assert table(r).splitlines()[2].split()[-2:] == ["-", "-"]
    assert reported(tmp_path, kl=0.0)["kl_after"] == 0.0
