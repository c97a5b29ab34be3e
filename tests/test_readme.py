"""The README is true: every command, path, flag, knob and key that it names exists."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest
import yaml
from conftest import CHILD_ENV, ROOT

from opd.config import TeacherConfig

README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]


def test_every_path_exists():
    paths = set(re.findall(r"`((?:opd|recipe|tests|bench|docs)/[\w./]*)`", README))
    paths |= set(re.findall(r"\b((?:opd|recipe|bench)/[\w./]+|run_opd\.sh)", section("Where things are")))
    assert len(paths) > 10
    missing = [path for path in sorted(paths) if not (ROOT / path).exists()]
    assert not missing


def test_the_two_commands_exist_and_ci_calls_the_second():
    assert (ROOT / "run_opd.sh").is_file()
    assert re.search(r"^test:", (ROOT / "Makefile").read_text(), re.M)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_table_of_knobs_is_the_scripts():
    table = re.findall(r"`([A-Z_]+)`", " ".join(first_cells(section("Knobs"))))
    block = re.search(r"# --- knobs.*?\n(.*?)\n# ---", (ROOT / "run_opd.sh").read_text(), re.S)
    assert block is not None
    assert table == re.findall(r"^([A-Z_]+)=", block[1], re.M)


def test_the_table_of_the_teacher_block_has_its_keys_and_defaults():
    rows = re.findall(r"^\| `teacher\.(\w+)` \| `?([\w.{}]+)`? \|", section("Knobs"), re.M)
    default = TeacherConfig()
    assert [name for name, _ in rows] == [f.name for f in fields(TeacherConfig) if f.name != "address"]
    for name, text in rows:
        assert yaml.safe_load(text) == getattr(default, name), name


def test_every_flag_of_the_teacher_is_in_a_help():
    shown = "".join(
        subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, env=CHILD_ENV, timeout=60
        ).stdout
        for module in ("opd.teacher_server", "opd.teacher_pool")
    )
    flags = set(re.findall(r"(--[a-z][\w-]+)", section("The teacher"))) | {"--max-len"}
    assert flags - {"--help"}
    assert not [flag for flag in flags if flag not in shown]


def test_every_sentence_of_a_failure_is_one_that_the_code_says():
    sources = [*(ROOT / "opd").rglob("*.py"), ROOT / "run_opd.sh"]
    # f-strings are split over lines: join adjacent literals before looking
    text = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sources)
    says = [cell.strip().strip("`") for cell in first_cells(section("When it fails"))]
    assert len(says) > 5
    assert not [sentence for sentence in says if sentence not in text]


def test_every_logged_name_is_a_metric():
    names = set(re.findall(r"`(\w+)`", section("What the run logs").split("`actor/opd/`:")[1])) - {"k3"}
    code = "".join((ROOT / "opd" / name).read_text() for name in ("kl.py", "reference.py"))
    assert names == set(re.findall(r'"opd/(\w+)"', code))


@pytest.mark.parametrize(
    "path", ["README.md", "CHANGELOG.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("recipe/*/README.md"))]
)
def test_no_placeholder_is_left(path):
    assert not re.search(r"@@|<measured|TODO", (ROOT / path).read_text())


def test_the_documents_link_to_files_that_exist():
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipe/*/README.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path}: {target}"
