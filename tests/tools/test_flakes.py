"""The repetition of test files under load: what it counts as a failure, and that its load ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.trainer.launched import is_alive, until
from tools.flakes import ROOT, busy, main, result_of

SUMMARY = """\
FAILED tests/core/test_a.py::test_one[x-1] - AssertionError: not within 60 s
ERROR tests/core/test_b.py - ImportError: no module
2 failed, 13 passed, 1 error in 4.20s
"""


def test_failed_tests_and_files_are_named() -> None:
    run = result_of(SUMMARY, 1, 4.2)
    assert run.failed == ("tests/core/test_a.py::test_one[x-1]", "tests/core/test_b.py")
    assert run.passed == 13


@pytest.mark.parametrize(
    ("output", "code"),
    [("no tests ran in 0.01s\n", 5), ("", -signal.SIGKILL)],
    ids=["no tests", "pytest was killed"],
)
def test_a_run_without_a_verdict_has_failed(output: str, code: int) -> None:
    assert result_of(output, code, 1.0).failed == (f"pytest itself, exit status {code}",)


def test_a_test_that_fails_sometimes_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test of this run fails in its second run of three."""
    counter = tmp_path / "counter"
    test = tmp_path / "test_sometimes.py"
    test.write_text(
        "from pathlib import Path\n"
        "def test_it():\n"
        f"    with Path({str(counter)!r}).open('a') as file:\n"
        "        file.write('x')\n"
        f"    assert Path({str(counter)!r}).read_text() != 'xx'\n"
    )
    logs = tmp_path / "logs"
    options = ["--times", "3", "--load", "1", "--logs", str(logs)]
    assert main([*options, str(test)]) == 1
    out = capsys.readouterr().out
    assert "failed in 1 of 3 runs" in out
    assert "test_sometimes.py::test_it" in out
    assert "assert" in (logs / "run-2.log").read_text()
    assert main([*options, str(test)]) == 0


def test_the_load_ends_with_its_block() -> None:
    with busy(2) as processes:
        assert all(is_alive(process.pid) for process in processes)
    assert not any(is_alive(process.pid) for process in processes)


def test_the_load_ends_when_the_tool_is_killed() -> None:
    program = (
        "import time\n"
        "from tools.flakes import busy\n"
        "with busy(1) as processes:\n"
        "    print(processes[0].pid, flush=True)\n"
        "    time.sleep(3600)\n"
    )
    tool = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with tool:
        pid = int(tool.stdout.readline())
        assert is_alive(pid)
        os.kill(tool.pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), "the end of the busy process")
