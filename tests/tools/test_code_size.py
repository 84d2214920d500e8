"""The limits of code lines: what counts as a line, and which packages have a limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.code_size import LIMITS, Size, above, code_lines, size_of

ROOT = Path(__file__).resolve().parents[2]

COUNTED = '''"""Docstring of the module
in two lines."""

# a comment
import os  # a comment behind code

NAMES = (
    "one",

    "two",
)
"""Docstring below a field."""


def f() -> str:
    """Docstring."""
    return """a text
    of two lines"""
'''


def test_empty_lines_comments_and_docstrings_do_not_count() -> None:
    """The import, four lines of the tuple, the `def`, and the two lines of the text count."""
    assert code_lines(COUNTED) == 8


def test_every_package_that_ships_has_a_limit() -> None:
    assert set(LIMITS) == {source.parent.name for source in ROOT.glob("*/src")}


@pytest.mark.parametrize(("lines", "fails"), [(10, False), (11, True)])
def test_a_package_above_its_limit_is_named(
    lines: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "core", 10)
    found = list(above([Size("core", 1, lines)]))
    assert bool(found) is fails
    assert all("core has 11 lines of code, and its limit is 10" in problem for problem in found)


def test_no_limit_leaves_room_for_a_whole_feature() -> None:
    """Otherwise a package could grow without a decision."""
    assert all(size.limit - size.lines < 300 for size in map(size_of, LIMITS))
