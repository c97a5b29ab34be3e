"""Print one line per training step from a run's metrics.jsonl: `python -m opd.progress RUN_DIR`. Ctrl-C ends it.

verl's console logger prints some hundred numbers a step; these are the ones to watch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = {  # heading -> metric, first one that is there
    "reward": ("critic/score/mean",),
    "reverse KL": ("actor/opd/reverse_kl_k1", "opd/reverse_kl_k1"),
    "length": ("response_length/mean",),
    "grad norm": ("actor/grad_norm",),
    "teacher s": ("actor/opd/teacher_seconds", "opd/teacher_seconds"),
    "step s": ("timing_s/step",),
}


def line(record: dict[str, Any]) -> str | None:
    """One step as a table row; None for a record that is no training step. A metric that is missing reads `-`."""
    data = record["data"]
    if "training/global_step" not in data:
        return None
    cells = [f"{record['step']:>5}"]
    for names in COLUMNS.values():
        value = next((data[n] for n in names if n in data), None)
        cells.append(f"{'-' if value is None else format(value, '.4g'):>10}")
    return " ".join(cells)


def follow(path: Path) -> Iterator[dict[str, Any]]:
    """Records as they are appended, for ever; a file that an earlier part of the run left is not read."""
    start_s = time.time()
    while not path.exists() or path.stat().st_mtime < start_s:
        time.sleep(0.5)
    with path.open() as f:
        partial = ""
        while True:
            partial += f.readline()
            if partial.endswith("\n"):
                yield json.loads(partial)
                partial = ""
            else:
                time.sleep(0.5)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    print(" ".join([f"{'step':>5}"] + [f"{name:>10}" for name in COLUMNS]), flush=True)
    try:
        for record in follow(Path(sys.argv[1]) / "metrics.jsonl"):
            if text := line(record):
                print(text, flush=True)
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
