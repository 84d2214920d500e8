"""The table of phases, and what a person reads when a phase fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools import phases

PROGRAM = Path(phases.__file__)


def run(folder: Path, *commands: str) -> tuple[int, list[str]]:
    """Run the program in the folder. Returns its exit status and its lines, with TIME for each time."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_PHASES")}
    done = subprocess.run(
        [sys.executable, PROGRAM, *commands], cwd=folder, env=env, capture_output=True, text=True
    )
    return done.returncode, re.sub(r"\b\d+:\d\d\b", "TIME", done.stdout).splitlines()


def script(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return f"sh {name}"


def test_phases_run_in_order_and_the_table_comes_last(tmp_path):
    one, two = script(tmp_path, "one", "echo first"), script(tmp_path, "two", "echo second")
    status, lines = run(tmp_path, one, two)
    assert status == 0
    assert lines[:4] == ["==> sh one", "first", "==> sh two", "second"]
    table = [" ".join(line.split()) for line in lines[5:]]
    assert table == ["phase time result", "sh one TIME passed", "sh two TIME passed", "total TIME"]


def test_times_are_minutes_and_seconds():
    assert [phases.clock(seconds) for seconds in (0.4, 59.6, 61, 3600)] == [
        "0:00",
        "1:00",
        "1:01",
        "60:00",
    ]


def test_a_failed_phase_ends_the_run_with_three_lines(tmp_path):
    bad = script(tmp_path, "bad", "echo 'FAILED tests/a.py::test_b - assert 1 == 2'; exit 3")
    never = script(tmp_path, "never", "echo unreachable")
    status, lines = run(tmp_path, bad, never)
    assert status == 3
    assert "unreachable" not in lines
    assert lines[-3:] == [
        "failed:  sh bad, exit status 3, after TIME",
        "because: FAILED tests/a.py::test_b - assert 1 == 2",
        "next:    read build/phases/sh-bad.log, then run `sh bad` again",
    ]


def test_a_phase_with_phases_shows_them_below_its_row(tmp_path):
    good = script(tmp_path, "good", "echo fine")
    bad = script(tmp_path, "bad", "echo 'x.py:1: error: no such name'; exit 1")
    outer = script(tmp_path, "outer", f"exec {sys.executable} {PROGRAM} '{good}' '{bad}'")
    status, lines = run(tmp_path, good, outer)
    assert status == 1
    begin = lines.index(next(line for line in lines if line.startswith("phase ")))
    rows = [line.split("  ")[0:2] for line in lines[begin + 1 : begin + 5]]
    assert [row[0] or "  " + row[1] for row in rows] == [
        "sh good",
        "sh outer",
        "  sh good",
        "  sh bad",
    ]
    assert sum("phase " in line for line in lines) == 1, "only the outermost prints a table"
    assert lines[-3:-1] == [
        "failed:  sh bad, exit status 1, after TIME",
        "because: x.py:1: error: no such name",
    ]


def test_a_phase_that_a_signal_ends_has_failed(tmp_path):
    status, lines = run(tmp_path, script(tmp_path, "killed", "kill -KILL $$"))
    assert status == 137
    assert lines[-2] == "because: it printed nothing"


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            "E   assert 1\nFAILED tests/a.py::b - assert 1\n1 failed\n",
            "FAILED tests/a.py::b - assert 1",
        ),
        ("missing: root\nmake: *** [x] Error 1\n", "missing: root"),
        ("compiling\nlast words\nmake: *** [Makefile:3: x] Error 1\n", "last words"),
        ("a.py:3:1: F821 Undefined name\nFound 1 error.\n", "a.py:3:1: F821 Undefined name"),
        ("testbed: step 'load' failed\n", "testbed: step 'load' failed"),
    ],
)
def test_the_first_failure_is_found_in_the_output(output, line):
    assert phases.first_failure(output) == line
