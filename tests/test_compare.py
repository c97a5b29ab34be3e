"""Runs that are compared keep their own numbers, interrupted ones included."""

import json

import pytest

from opd import compare


def write_run(folder, *, accuracy: float, parts: list[list[tuple[int, float]]]) -> None:
    """A finished run; each part is what one start of it logged: (step, mean reward)."""
    folder.mkdir()
    result = {"steps": 3, "accuracy_before": 0.25, "accuracy_after": accuracy, "kl_before": 1.5, "kl_after": 0.5}
    (folder / "result.json").write_text(json.dumps(result))
    for number, part in enumerate(parts, 1):
        name = "metrics.jsonl" if number == len(parts) else f"metrics.{number}.jsonl"
        lines = [
            {
                "step": step,
                "data": {
                    "training/global_step": step,
                    "critic/score/max": 1.0 if reward else 0.0,
                    "critic/score/min": 0.0,
                    "actor/opd/reverse_kl_k1": 1.0 / step,
                    "response_length/mean": 6.0 + step,
                    "val-core/digits/acc/mean@1": reward,
                },
            }
            for step, reward in part
        ]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_resumed_run_is_one_series_and_what_it_repeated_counts_once(tmp_path):
    write_run(tmp_path / "a", accuracy=0.75, parts=[[(1, 0.0), (2, 0.1)], [(2, 0.5), (3, 0.0)]])
    run = compare.read_run(tmp_path / "a")
    assert compare.accuracy(run) == [(1, 0.0), (2, 0.5), (3, 0.0)]
    assert compare.rewarded_steps(run) == [(1, 0.0), (2, 1.0), (3, 1.0)]
    assert compare.reverse_kl(run) == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert compare.response_length(run)[-1] == (3, 9.0)


def test_it_writes_a_table_and_a_plot(tmp_path, capsys):
    write_run(tmp_path / "kl-0", accuracy=0.5, parts=[[(1, 0.0), (2, 0.0), (3, 0.0)]])
    write_run(tmp_path / "kl-1", accuracy=0.975, parts=[[(1, 0.0), (2, 0.5), (3, 1.0)]])
    assert compare.main(["--out", str(tmp_path / "out"), str(tmp_path / "kl-0"), str(tmp_path / "kl-1")]) == 0
    lines = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert lines[2] == "| kl-0 | 3 | 0.250 | 0.500 | 1.500 | 0.500 | 0 | 9.00 |"
    assert lines[3] == "| kl-1 | 3 | 0.250 | 0.975 | 1.500 | 0.500 | 2 | 9.00 |"
    assert capsys.readouterr().out.splitlines() == lines
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_an_unfinished_run_is_named(tmp_path, capsys):
    (tmp_path / "half").mkdir()
    assert compare.main(["--out", str(tmp_path / "out"), str(tmp_path / "half")]) == 1
    assert "half has no result.json" in capsys.readouterr().err
