"""Compare finished runs: `python -m opd.compare --out DIR RUN_DIR...` writes DIR/comparison.md and DIR/comparison.png.

The table has one line for each run, from its result.json; the plot has accuracy, steps with a reward, reverse KL and
response length over steps, from its metrics.jsonl. A run is called by the name of its folder.

Not covered: runs of different tasks; nothing here would notice.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from opd.errors import ConfigError

Point = tuple[int, float]  # step, value


class Run(NamedTuple):
    """What is kept of a run."""

    name: str
    result: dict[str, Any]
    records: list[dict[str, Any]]  # verl's file logger: {"step": ..., "data": {...}}

    def series(self, *names: str) -> list[Point]:
        """The first of these metrics that a record has, for every record that has one."""
        points = []
        for record in self.records:
            value = next((record["data"][name] for name in names if name in record["data"]), None)
            if value is not None:
                points.append((record["step"], float(value)))
        return points


def read_run(folder: Path) -> Run:
    """Read a finished run, the parts before an interruption included.

    Raises:
        ConfigError: it has no result.json, so it did not finish.
    """
    if not (folder / "result.json").is_file():
        raise ConfigError(f"{folder} has no result.json: it is no finished run; call run_opd.sh with RUN_DIR={folder}")
    parts = sorted(folder.glob("metrics.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))
    records = {}
    for path in [*parts, folder / "metrics.jsonl"]:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            records[record["step"]] = record  # a resumed run repeats the steps after its checkpoint
    return Run(
        folder.name, json.loads((folder / "result.json").read_text()), [records[step] for step in sorted(records)]
    )


def accuracy(run: Run) -> list[Point]:
    """Greedy, on held-out prompts, wherever the run validated."""
    return run.series(*sorted({name for r in run.records for name in r["data"] if name.startswith("val-core/")}))


def rewarded_steps(run: Run) -> list[Point]:
    """How many steps so far had a response with a reward other than 0."""
    best, worst = run.series("critic/score/max"), run.series("critic/score/min")
    some = [high != 0 or low != 0 for (_, high), (_, low) in zip(best, worst, strict=True)]
    return [(step, float(count)) for (step, _), count in zip(best, accumulate(some), strict=True)]


def reverse_kl(run: Run) -> list[Point]:
    return run.series("actor/opd/reverse_kl_k1", "opd/reverse_kl_k1")


def response_length(run: Run) -> list[Point]:
    return run.series("response_length/mean")


PANELS: dict[str, Callable[[Run], list[Point]]] = {
    "accuracy (greedy, held-out)": accuracy,
    "steps with a reward other than 0, so far": rewarded_steps,
    "KL(student || teacher), nats/token": reverse_kl,
    "response length, tokens": response_length,
}


def table(runs: list[Run]) -> str:
    """Markdown, one line for each run, `-` where something was not measured."""
    head = ["run", "steps", "accuracy before", "accuracy after", "KL before", "KL after", "rewarded steps", "length"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for run in runs:
        r, rewarded, length = run.result, rewarded_steps(run), response_length(run)
        cells = [run.name, str(r["steps"])]
        cells += [
            "-" if r[key] is None else f"{r[key]:.3f}"
            for key in ("accuracy_before", "accuracy_after", "kl_before", "kl_after")
        ]
        cells += [f"{rewarded[-1][1]:.0f}" if rewarded else "-", f"{length[-1][1]:.2f}" if length else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(runs: list[Run], path: Path) -> None:
    """One panel for each of PANELS, one line for each run."""
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2).flat
    for axis, (title, series) in zip(axes, PANELS.items(), strict=True):
        for run in runs:
            points = series(run)
            axis.plot(*zip(*points, strict=True), label=run.name, marker="o" if len(points) < 10 else None)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m opd.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="a finished run of run_opd.sh")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the table and the plot go")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        runs = [read_run(folder) for folder in args.runs]
    except ConfigError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "comparison.md").write_text(table(runs) + "\n")
    plot(runs, args.out / "comparison.png")
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
