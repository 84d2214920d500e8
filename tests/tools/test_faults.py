"""The page of faults shows the marks of tests: one row for each fault, below the heading of its part."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import faults


def put(root: Path, name: str, text: str) -> None:
    path = root / "tests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def rows(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(("## ", "| "))]


def test_a_fault_of_several_tests_has_one_row_below_the_first_part(tmp_path: Path) -> None:
    mark = '@pytest.mark.fault("The disk is full")\n'
    put(tmp_path, "sidecar/test_a.py", f"{mark}async def test_waits() -> None: ...\n")
    put(tmp_path, "core/node/test_b.py", f"{mark}def test_fails() -> None: ...\n")
    assert rows(faults.page(tmp_path)) == [
        "## A node's disk",
        "| what happens | tests |",
        "| The disk is full | `core/node/test_b.py::test_fails`, `sidecar/test_a.py::test_waits` |",
    ]


def test_a_test_may_have_several_marks_and_a_text_several_lines(tmp_path: Path) -> None:
    put(
        tmp_path,
        "cli/test_a.py",
        '@pytest.mark.fault("A reply is `a|b`")\n'
        "@pytest.mark.fault(\n"
        '    "A reply "\n'
        '    "is cut"\n'
        ")\n"
        "class TestReplies: ...\n",
    )
    assert [mark.fault for mark in faults.marks(tmp_path / "tests")] == [
        "A reply is `a|b`",
        "A reply is cut",
    ]
    assert "| A reply is `a\\|b` | `cli/test_a.py::TestReplies` |" in faults.page(tmp_path)


def test_a_mark_that_the_page_cannot_show_is_named(tmp_path: Path) -> None:
    put(tmp_path, "cli/test_a.py", "@pytest.mark.fault(WHAT)\ndef test_x() -> None: ...\n")
    with pytest.raises(ValueError, match=r"cli/test_a\.py:1: .* takes one literal text"):
        faults.page(tmp_path)


def test_a_folder_without_a_heading_is_named(tmp_path: Path) -> None:
    put(tmp_path, "new/test_a.py", '@pytest.mark.fault("x")\ndef test_x() -> None: ...\n')
    with pytest.raises(ValueError, match=r"new/test_a\.py: name its folder in PARTS"):
        faults.page(tmp_path)
