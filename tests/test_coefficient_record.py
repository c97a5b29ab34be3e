"""An adaptive coefficient over interruptions: files by hand, and a reference with a real server resumed at a step."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_reference import IDS, MASK, OLD, RESPONSE_MASK

from opd.client import TeacherClient
from opd.coefficient_record import FILE, CoefficientRecord, Line, open_record
from opd.config import TeacherConfig
from opd.errors import ConfigError
from opd.loss.schedule import Coefficient
from opd.loss.settings import LOSS, LossSettings, TeacherLoss
from opd.reference import TeacherReference
from opd.teacher_record import TRACKER


def settings(folder, **changes) -> SimpleNamespace:
    """The keys of verl's `trainer` block that are read."""
    return SimpleNamespace(
        **{"default_local_dir": str(folder), "resume_mode": "auto", "resume_from_path": None} | changes
    )


def checkpoint(folder, step: int) -> None:
    """As verl leaves it."""
    (folder / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
    (folder / TRACKER).write_text(str(step))


def adaptive() -> Coefficient:
    return Coefficient("adaptive", 1.0, target_kl=0.1)


def taken_up(where: SimpleNamespace, step: int) -> float:
    record, coefficient = CoefficientRecord(where), adaptive()
    record.take_up(coefficient, step)
    record.close()
    return coefficient.at(step)


def written(folder, *lines: Line) -> None:
    record = CoefficientRecord(settings(folder))
    for line in lines:
        record.write(line)
    record.close()


LINES = [Line(1, 1.0, 5.0, 1.02), Line(2, 1.02, None, 1.02), Line(3, 1.02, 0.01, 0.9996)]


def test_a_line_is_as_the_module_shows_it(tmp_path):
    written(tmp_path, *LINES[:2])
    assert (tmp_path / FILE).read_text() == (
        '{"step":1,"coef":1.0,"kl":5.0,"next":1.02}\n{"step":2,"coef":1.02,"kl":null,"next":1.02}\n'
    )


def test_a_resumed_run_has_the_coefficient_after_the_step_of_its_checkpoint(tmp_path):
    written(tmp_path, *LINES)
    checkpoint(tmp_path, 2)
    assert taken_up(settings(tmp_path), 3) == 1.02
    checkpoint(tmp_path, 3)
    assert taken_up(settings(tmp_path), 4) == 0.9996


def test_a_step_that_was_done_again_has_its_last_line(tmp_path):
    written(tmp_path, *LINES)
    checkpoint(tmp_path, 1)
    written(tmp_path, Line(2, 1.02, 3.0, 1.5), Line(3, 1.5, 3.0, 1.6))  # resumed: goes on in the same file
    checkpoint(tmp_path, 3)
    assert taken_up(settings(tmp_path), 4) == 1.6
    assert len((tmp_path / FILE).read_text().splitlines()) == 5


@pytest.mark.parametrize("half", [b'{"step":4,"coef":1.', b'{"step":4,"coef":1.0,"kl":1.0,"next":9.0}', b"\x00\x00"])
def test_half_a_line_at_the_end_is_let_go(tmp_path, half):
    written(tmp_path, *LINES)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole + half)
    checkpoint(tmp_path, 3)
    assert taken_up(settings(tmp_path), 4) == 0.9996
    written(tmp_path, Line(4, 0.9996, 0.1, 0.9996))
    assert (tmp_path / FILE).read_bytes() == whole + b'{"step":4,"coef":0.9996,"kl":0.1,"next":0.9996}\n'


def test_a_fresh_run_neither_uses_nor_keeps_what_another_left(tmp_path):
    written(tmp_path, *LINES)  # and no checkpoint: the run starts from scratch
    assert taken_up(settings(tmp_path), 3) == 1.0
    assert (tmp_path / FILE).read_bytes() == b""
    written(tmp_path, *LINES)
    checkpoint(tmp_path, 3)
    assert taken_up(settings(tmp_path, resume_mode="disable"), 1) == 1.0
    assert (tmp_path / FILE).read_bytes() == b""


def test_a_run_resumed_from_another_folder_reads_there_and_writes_here(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    written(old, *LINES)
    written(new, Line(2, 7.0, 7.0, 7.0))
    checkpoint(old, 2)
    where = settings(new, resume_mode="resume_path", resume_from_path=f"{old}/global_step_2")
    record, coefficient = CoefficientRecord(where), adaptive()
    record.take_up(coefficient, 3)
    record.write(Line(3, 1.02, 0.1, 1.02))
    record.close()
    assert coefficient.at(3) == 1.02
    assert (new / FILE).read_text().count("\n") == 1 and (old / FILE).read_text().count("\n") == 3


def test_without_the_line_it_starts_again_and_says_so(tmp_path, caplog):
    checkpoint(tmp_path, 5)
    assert taken_up(settings(tmp_path), 6) == 1.0
    assert "has no line of step 5: the adaptive coefficient starts again, from kl_loss_coef=1" in caplog.text


def test_a_broken_line_in_the_middle_is_refused(tmp_path):
    (tmp_path / FILE).write_text('{"step":1,"coef":1.0,"kl":5.0,"next":1.02}\n{"step":2}\n')
    checkpoint(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"coefficient.jsonl, line 2: .* delete the file"):
        CoefficientRecord(settings(tmp_path))


def test_only_an_adaptive_coefficient_has_a_file(tmp_path):
    assert open_record(settings(tmp_path), Coefficient("cosine", 1.0, steps=5)) is None
    assert list(tmp_path.iterdir()) == []
    assert open_record(settings(tmp_path), adaptive()) is not None


def test_a_run_that_is_interrupted_has_the_coefficients_of_one_that_is_not(teacher_server, tmp_path):
    """Both trainers ask a TeacherReference for each step's values; the checkpoint of step 2 is resumed after step 3."""
    server = teacher_server(vocab=10)

    def run(folder, steps) -> list[float]:
        loss = TeacherLoss(LossSettings(), Coefficient("adaptive", 1.0, target_kl=1.0), "k3+")
        with TeacherClient(server.address) as client:
            reference = TeacherReference(client, TeacherConfig(), loss=loss)
            reference.record = open_record(settings(folder), loss.coefficient)
            batch = {"input_ids_BS": IDS, "attention_mask_BS": MASK, "response_mask_BR": RESPONSE_MASK}
            # the student says something else at every step, so each moves the coefficient by another factor
            got = [
                reference.values(**batch, old_log_probs_BR=OLD - np.float32(step / 2), step=step).columns[LOSS][0, 1]
                for step in steps
            ]
            reference.record.close()
        return got

    whole = run(tmp_path / "whole", range(1, 6))
    assert len(set(whole)) == 5
    parts = run(tmp_path / "parts", range(1, 4))
    checkpoint(tmp_path / "parts", 2)
    parts[2:] = run(tmp_path / "parts", range(3, 6))
    assert parts == whole
