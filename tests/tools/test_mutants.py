"""The gate of mutants: a mutant that no test finds fails it, and so does one that no longer fits the code."""

from __future__ import annotations

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until
from tools.mutants.__main__ import ROOT, run
from tools.mutants.listed import MUTANTS
from tools.mutants.model import Kind, Mutant, StaleMutantError
from tools.mutants.runs import Runs, Verdict

CODE = """def add(a: int, b: int) -> int:
    return a + b


def double(a: int) -> int:
    return a + a
"""
TESTS = """import subprocess, sys
from sums.plain import add, double


def test_add():
    assert add(1, 2) == 3


def test_double_in_a_process():
    code = "from sums.plain import double; print(double(3))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "6"
"""


@dataclass(frozen=True, slots=True)
class Project:
    """A repository with one package, and a mutant of it."""

    root: Path
    mutant: Mutant

    def test(self, text: str) -> None:
        (self.root / "tests/test_plain.py").write_text(text)

    def files(self) -> dict[str, str]:
        """Return all files but compiled ones, with their texts."""
        return {
            str(path.relative_to(self.root)): path.read_text()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "project"
    package = root / "member/src/sums"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plain.py").write_text(CODE)
    (root / "tests").mkdir()
    mutant = Mutant(
        name="sums/minus",
        kind=Kind.COMPARISON,
        file="member/src/sums/plain.py",
        original="return a + b",
        replacement="return a - b",
        loses="Every sum is wrong.",
        tests=("tests/test_plain.py",),
    )
    found = Project(root, mutant)
    found.test(TESTS)
    return found


def test_a_mutant_that_the_tests_find_passes_and_the_checkout_stays_as_it_is(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    before = project.files()
    assert run(project.root, (project.mutant,), 2) == 0
    shown = capsys.readouterr().out
    assert re.search(r"sums/minus +killed +\d+\.\d s +test_add", shown)
    assert "1 killed, 0 survived" in shown
    assert project.files() == before


def test_a_mutant_that_survives_fails_with_its_diff_and_what_a_user_would_lose(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.test("from sums.plain import add\n\n\ndef test_add():\n    assert add(2, 0) == 2\n")
    assert run(project.root, (project.mutant,), 2) == 1
    shown = capsys.readouterr().out
    assert "SURVIVED" in shown
    assert "-    return a + b\n+    return a - b\n" in shown
    assert "Every sum is wrong." in shown
    assert "0 killed, 1 survived" in shown


def test_processes_that_a_test_starts_run_the_mutant(project: Project) -> None:
    mutant = replace(
        project.mutant, original="return a + a", replacement="return a", name="sums/single"
    )
    assert run(project.root, (mutant,), 1) == 0


def test_an_installed_package_is_not_imported_in_place_of_the_mutant(tmp_path: Path) -> None:
    """The checkout is installed, and its folders are on `sys.path` in every process."""
    file = "cli/src/holdfast_cli/__init__.py"
    text = (ROOT / file).read_text()
    test = tmp_path / "test_installed.py"
    test.write_text(
        "import subprocess, sys\n\n\ndef test_child():\n"
        "    code = 'import holdfast_cli; assert not hasattr(holdfast_cli, \"MUTANT\")'\n"
        "    subprocess.check_call([sys.executable, '-c', code])\n"
    )
    mutant = Mutant(
        name="cli/marked",
        kind=Kind.CHANGED_CONSTANT,
        file=file,
        original=text,
        replacement=f"{text}\nMUTANT = True\n",
        loses="Nothing.",
        tests=(str(test),),
    )
    assert run(ROOT, (mutant,), 1) == 0


def test_tests_that_import_another_copy_of_the_module_do_not_count(
    project: Project, tmp_path: Path
) -> None:
    source = project.root / "member/src"
    result = Runs(project.root).run(
        project.mutant.tests, source, "sums.plain", tmp_path, HANG_SECONDS
    )
    assert result.verdict is Verdict.SURVIVED, "the copy is the one that is imported"
    other = tmp_path / "other"
    other.mkdir()
    project.test(f"import sys\nsys.path.insert(0, {str(source)!r})\n{TESTS}")
    result = Runs(project.root).run(
        project.mutant.tests, other, "sums.plain", tmp_path, HANG_SECONDS
    )
    assert result.verdict is Verdict.NOT_RUN
    assert f"expected a file below {other}" in result.output


@pytest.mark.parametrize(
    ("original", "count"),
    [
        pytest.param("return a * b", 0, id="the code has changed"),
        pytest.param("return a", 2, id="two places"),
    ],
)
def test_a_mutant_whose_text_does_not_occur_once_is_refused_by_name(
    project: Project, original: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = replace(project.mutant, original=original)
    with pytest.raises(StaleMutantError):
        stale.mutated(project.root)
    assert run(project.root, (project.mutant, stale), 2) == 2
    error = capsys.readouterr().err
    assert f"mutant sums/minus: its original text occurs {count} times" in error
    assert "member/src/sums/plain.py" in error


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("def test_add():\n    assert False\n", id="fails"),
        pytest.param("import nothing_of_this_name\n", id="cannot be imported"),
        pytest.param("", id="has no test"),
    ],
)
def test_tests_that_do_not_pass_without_a_mutant_stop_the_gate(
    project: Project, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    project.test(text)
    assert run(project.root, (project.mutant,), 2) == 2
    assert "member/src: the tests must pass without a mutant" in capsys.readouterr().err


def test_a_mutant_that_cannot_be_imported_is_no_success(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any test would "find" it, which shows nothing about the tests."""
    broken = replace(project.mutant, replacement="return a +")
    assert run(project.root, (broken,), 2) == 2
    assert "mutant sums/minus: its tests did not run" in capsys.readouterr().err


HANGS = """import os, pathlib, subprocess, sys


def test_hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    started = pathlib.Path(os.environ["MUTANTS_FOLDER"]).parent / "started"
    started.with_suffix(".new").write_text(str(child.pid))
    started.with_suffix(".new").rename(started)
    child.wait()
"""


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between open and read
        return False


def started_by(project: Project) -> Path:
    """Return the file with the process that `HANGS` has started."""
    return project.root / "member/started"


def test_a_mutant_that_hangs_is_killed_with_what_its_tests_have_started(
    project: Project, tmp_path: Path
) -> None:
    project.test(HANGS)
    source = project.root / "member/src"
    result = Runs(project.root).run(project.mutant.tests, source, "sums.plain", tmp_path, 4.0)
    assert result.verdict is Verdict.TIME_LIMIT
    assert str(result.verdict) == "killed (time limit)"
    started = started_by(project)
    # A process ends a moment after the signal.
    until(lambda: not started.exists() or not is_running(int(started.read_text())), "its end")


def test_an_interrupt_ends_all_runs_with_what_they_have_started(
    project: Project, tmp_path: Path
) -> None:
    project.test(HANGS)
    source, runs = project.root / "member/src", Runs(project.root)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            runs.run, project.mutant.tests, source, "sums.plain", tmp_path, 600.0
        )
        started = started_by(project)
        until(started.exists, "the test has started its process")
        runs.stop()
        assert running.result(HANG_SECONDS).verdict is Verdict.NOT_RUN
    pid = int(started.read_text())
    until(lambda: not is_running(pid), "the process has ended")
    with pytest.raises(InterruptedError):
        runs.run(project.mutant.tests, source, "sums.plain", tmp_path, 600.0)


# --------------------------------------------------------------------------- the list


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_fits_the_code_and_its_tests_exist(mutant: Mutant) -> None:
    text = mutant.mutated(ROOT)
    before = ast.dump(ast.parse((ROOT / mutant.file).read_text()))
    assert ast.dump(ast.parse(text)) != before, "the mistake is in the code, not in a comment"
    assert mutant.loses.endswith(".")
    for test in mutant.tests:
        file, *names = test.split("::")
        found = (ROOT / file).read_text()
        assert all(f" {name.partition('[')[0]}(" in found for name in names[:1]), test


def test_the_list_covers_every_place_with_names_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 60
    places = {name.partition("/")[0] for name in names}
    assert places == {"decide", "coordinator", "node", "store", "folder", "state"}
    assert {mutant.kind for mutant in MUTANTS} == set(Kind)
