"""teacher.json beside a run's checkpoints: which teachers it has, so that a resumed run goes on with the same ones.

The handshake of a resumed run checks its teacher as that of a new one does, and any teacher that fits the student
passes. Only this file knows which one the checkpoints were trained with.

Not covered: a teacher behind `--backend http`, whose fingerprint is made of the name that its server gives, not of its
weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from opd.errors import ConfigError, TeacherMismatch
from opd.wire import ModelInfo

FILE = "teacher.json"
TRACKER = "latest_checkpointed_iteration.txt"  # verl's: which checkpoint it resumes from
logger = logging.getLogger(__name__)


class Recorded(msgspec.Struct, frozen=True):
    """One teacher, as ModelInfo has it."""

    name: str
    model: str
    tokenizer: str

    def __str__(self) -> str:
        return f"{self.name!r} (model {self.model}, tokenizer {self.tokenizer})"

    def same_as(self, other: Recorded) -> bool:
        """Whatever folder they were loaded from."""
        return (self.model, self.tokenizer) == (other.model, other.tokenizer)


def keep_teachers(settings: Any, models: Mapping[str, ModelInfo]) -> None:
    """Refuse to resume with other teachers than before, then write down those of this run.

    Args:
        settings: the `trainer` block of the configuration.
        models: of each teacher by its name, as the handshake left them.

    Raises:
        TeacherMismatch: another model or tokenizer than the checkpoints were trained with, or a teacher more or less.
        ConfigError: the file of the run that is resumed cannot be read.
    """
    now = {name: Recorded(m.name, m.model, m.tokenizer) for name, m in sorted(models.items())}
    resumed = resumed_from(settings)
    if resumed is not None:
        _compare(resumed / FILE, now)
    path = Path(settings.default_local_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{FILE}.{os.getpid()}")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(now), indent=2) + b"\n")
    new.replace(path)  # never half a file


def resumed_from(settings: Any) -> Path | None:
    """The folder with the checkpoint that verl will load; None when it starts from scratch."""
    if settings.resume_mode == "disable":
        return None
    if settings.resume_mode == "resume_path":
        return Path(settings.resume_from_path).parent
    folder = Path(settings.default_local_dir)
    return folder if (folder / TRACKER).is_file() else None


def _compare(path: Path, now: Mapping[str, Recorded]) -> None:
    try:
        before = msgspec.json.decode(path.read_bytes(), type=dict[str, Recorded])
    except FileNotFoundError:
        logger.warning(
            "no %s: which teacher these checkpoints were trained with is not known; from here on it is %s",
            path,
            ", ".join(map(str, now.values())),
        )
        return
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{path} cannot be read: {e}; restore it, or delete it to resume without comparing teachers")
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is None or new is None or not old.same_as(new):
            which = f"teacher {name}" if len(before.keys() | now.keys()) > 1 else "teacher"
            raise TeacherMismatch(
                f"the run in {path.parent} had {_words(which, old)}, and would be resumed with {_words(which, new)}; "
                "start the old teacher again, or begin a new run, in another RUN_DIR, with the actor/huggingface "
                "folder of a checkpoint as STUDENT"
            )


def _words(which: str, teacher: Recorded | None) -> str:
    return f"no {which}" if teacher is None else f"the {which} {teacher}"
