"""coefficient.jsonl beside a run's checkpoints: an adaptive coefficient, step by step, so that a resumed run goes on.

    {"step":7,"coef":1.02,"kl":0.31,"next":1.0404}      step 7 was trained with 1.02, and step 8 is with 1.0404

A run that resumes from the checkpoint of step 7 begins with step 8 and takes `next` of line 7. The lines after it, of
steps that are done again, stay: the last line of a step counts. The other schedules depend on the step alone and need
no file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from opd.errors import ConfigError
from opd.loss.schedule import Coefficient
from opd.teacher_record import resumed_from

FILE = "coefficient.jsonl"
logger = logging.getLogger(__name__)


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step; several of them where a trainer asks the teacher several times in a step."""

    step: int
    coef: float  # that it was trained with
    kl: float | None  # nats per token, measured in it; None: there was no token
    next: float  # the coefficient after it


class CoefficientRecord:
    """Writes the coefficient of each step, and gives a resumed run the one that it had to have.

    Args:
        settings: the `trainer` block of the configuration.

    Raises:
        ConfigError: the file of the run that is resumed cannot be read.
    """

    def __init__(self, settings: Any):
        self.path = Path(settings.default_local_dir) / FILE
        resumed = resumed_from(settings)
        self.resumed = None if resumed is None else resumed / FILE
        self._lines: list[Line] = []
        keep = b""
        if self.resumed is not None:
            keep, self._lines = _read(self.resumed)
        if self.resumed is None or self.resumed.resolve() != self.path.resolve():
            keep = b""  # what is there is another run's
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        self._file.truncate(len(keep))  # without half a line: the next one would be glued to it

    def take_up(self, coefficient: Coefficient, step: int) -> None:
        """Before the first step of this process: set the coefficient to the one that this step had to have."""
        if self.resumed is None:
            return
        line = next((line for line in reversed(self._lines) if line.step == step - 1), None)
        if line is None:
            logger.warning(
                "%s has no line of step %d: the adaptive coefficient starts again, from kl_loss_coef=%g",
                self.resumed,
                step - 1,
                coefficient.start,
            )
            return
        coefficient.resume(line.next)
        logger.info("the adaptive coefficient goes on with %g at step %d", line.next, step)

    def write(self, line: Line) -> None:
        """One line, before the checkpoint of its step."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def open_record(settings: Any, coefficient: Coefficient) -> CoefficientRecord | None:
    """A record where one is needed; settings as CoefficientRecord."""
    return CoefficientRecord(settings) if coefficient.kind == "adaptive" else None


def _read(path: Path) -> tuple[bytes, list[Line]]:
    """What is whole of a file, and its lines; nothing if it is not there."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b"", []
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e}")
    whole = data[: data.rfind(b"\n") + 1]  # a crash may have left half a line behind it
    lines = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            lines.append(msgspec.json.decode(line, type=Line))
        except msgspec.DecodeError as e:
            raise ConfigError(
                f"{path}, line {number}: {e}; restore it, or delete the file to resume with kl_loss_coef anew"
            )
    return whole, lines
