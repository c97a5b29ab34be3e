"""A resumed run keeps its teacher: through the main entry, up to where Ray would start."""

import test_teacher_prompt
from conftest import ROOT
from fake_teacher import FakeTeacher

import opd.cpu  # noqa: F401  before verl
from opd import main_opd
from opd.fingerprint import tokenizer_fingerprint
from opd.teacher_record import FILE, TRACKER

student, tokenizer = test_teacher_prompt.student, test_teacher_prompt.tokenizer  # fixtures


def test_a_run_is_resumed_with_the_teacher_it_had_and_with_no_other(student, tokenizer, monkeypatch, capsys, caplog):
    """Until there is a checkpoint any teacher will do, and so it will for another run."""
    started = []
    monkeypatch.setattr(main_opd, "run", lambda config, *, cpu: started.append(config.teacher.address))
    fingerprint = tokenizer_fingerprint(tokenizer)

    def train(teacher: FakeTeacher, *overrides: str) -> str:
        """What it said on stderr; "" when it went on to train."""
        before = len(started)
        code = main_opd.main(
            [
                f"--recipe={ROOT / 'recipe' / 'digits'}",
                "--device=cpu",
                f"--run-dir={student / 'run'}",
                f"data.train_files={student}/train.parquet",
                f"data.val_files={student}/train.parquet",
                f"actor_rollout_ref.model.path={student}/student",
                "reward.custom_reward_function.path=reward.py",
                f"teacher.address={teacher.address}",
                *overrides,
            ]
        )
        said = capsys.readouterr().err
        assert len(started) - before == (code == 0) == (said == "")
        return said

    checkpoints = student / "run" / "checkpoints"
    with (
        FakeTeacher(tokenizer=fingerprint, model="model-1") as one,
        FakeTeacher(tokenizer=fingerprint, model="model-2") as two,
    ):
        assert train(two) == ""
        assert train(one) == ""  # there was nothing to resume
        (checkpoints / "global_step_7").mkdir()
        (checkpoints / TRACKER).write_text("7")  # as verl leaves it
        assert train(one) == ""
        assert train(two) == (
            f"error: the run in {checkpoints} had the teacher 'fake' (model model-1, tokenizer {fingerprint}), and "
            f"would be resumed with the teacher 'fake' (model model-2, tokenizer {fingerprint}); start the old teacher "
            "again, or begin a new run, in another RUN_DIR, with the actor/huggingface folder of a checkpoint as "
            "STUDENT\n"
        )
        several = [f"+teacher.teachers.math={two.address}", "+teacher.routes.sums=math"]
        said = train(one, *several, "+teacher.routes.other=default")
        assert "had no teacher math, and would be resumed with the teacher math 'fake' (model model-2" in said
        assert train(one) == ""  # a refused one has not taken its place
        path = f"trainer.resume_from_path={checkpoints}/global_step_7"
        elsewhere = f"trainer.default_local_dir={student}/elsewhere"
        assert "had the teacher 'fake' (model model-1" in train(two, "trainer.resume_mode=resume_path", path, elsewhere)
        assert train(two, elsewhere) == ""
        (checkpoints / FILE).write_text("{")
        assert f"error: {checkpoints / FILE} cannot be read" in train(one)
        (checkpoints / FILE).unlink()
        assert train(two) == "" and "is not known; from here on it is 'fake' (model model-2" in caplog.text
        assert "model-1" in train(one)
        assert train(one, "trainer.resume_mode=disable") == ""
