"""A result has one form for each format, and progress is a line where there is no terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
import yaml

from holdfast_cli.errors import CommandError, Exit, NotFound, StateError, UsageError, exit_of
from holdfast_cli.output import Cell, Column, Format, Result, Table, rendered, say
from holdfast_cli.progress import ByteProgress, progress_line
from holdfast_core import errors


@dataclass(frozen=True)
class Row:
    step: int
    at: datetime
    place: Path


DOCUMENT = [Row(10, datetime(2026, 5, 4, tzinfo=UTC), Path("/a"))]
TABLE = Table(
    ["NAME", Column("SIZE", right=True), Column("NODE", wide=True)],
    [("a", 7, "n-1"), (Cell("longer", "red"), None, "n-2")],
)
RESULT = Result(DOCUMENT, ["head", TABLE])


def test_a_table_is_aligned_and_its_wide_columns_are_left_out() -> None:
    assert click.unstyle(rendered(RESULT, Format.TABLE)).splitlines() == [
        "head",
        "NAME    SIZE",
        "a          7",
        "longer     -",
    ]
    assert click.unstyle(rendered(RESULT, Format.WIDE)).splitlines() == [
        "head",
        "NAME    SIZE  NODE",
        "a          7  n-1",
        "longer     -  n-2",
    ]


def test_a_styled_cell_has_the_width_of_its_text() -> None:
    assert "\x1b[31mlonger\x1b[0m     -" in rendered(RESULT, Format.TABLE)


def test_no_text_moves_the_cursor_or_changes_the_title(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b]0;title\x07\r\u202eb\udcff\tc"
    harmless = "a\\x1b]0;title\\x07\\r\\u202eb\\udcff\tc"
    table = Table(["NAME"], [(hostile,), (Cell(hostile + "\nd", "red"),)], headings=False)
    result = Result(None, [f"{hostile}\nd", Cell(hostile), table])
    text = click.unstyle(rendered(result, Format.TABLE))
    assert text.splitlines() == [harmless, "d", harmless, harmless, harmless + "\\nd"]
    say(f"{hostile}\nd")
    assert capsys.readouterr().err == f"{harmless}\nd\n"


def test_json_and_yaml_have_the_same_document() -> None:
    expected = [{"step": 10, "at": "2026-05-04T00:00:00Z", "place": "/a"}]
    assert json.loads(rendered(RESULT, Format.JSON)) == expected
    assert yaml.safe_load(rendered(RESULT, Format.YAML)) == expected


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("x"), Exit.FAILED),
        (UsageError("x"), Exit.USAGE),
        (NotFound("x"), Exit.MISSING),
        (StateError("x"), Exit.FORBIDDEN),
        (errors.ConfigError("x"), Exit.USAGE),
        (errors.ForbiddenByStateError("x"), Exit.FORBIDDEN),
        (errors.NotFoundError("x"), Exit.MISSING),
        (errors.CorruptionError("x"), Exit.DAMAGED),
        (errors.UnknownVersionError("x"), Exit.FORBIDDEN),
        (errors.UnavailableError("x"), Exit.FAILED),
        (errors.AccessDeniedError("x"), Exit.FAILED),
    ],
)
def test_each_error_has_the_exit_code_of_its_meaning(
    error: errors.HoldfastError, code: Exit
) -> None:
    assert exit_of(error) is code


def test_progress_without_a_terminal_is_a_line_at_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 4.0, 12.0, 13.0])
    with ByteProgress("reading", now=times.__next__) as progress:
        for _ in range(3):
            progress.advance(1 << 30, 8 << 30)
    assert capsys.readouterr().err == "reading: 25% of 8.0 GiB, 170.7 MiB/s, 36 s left\n"


def test_progress_without_a_known_end_has_no_estimate() -> None:
    assert progress_line("listing", 1 << 20, None, 2.0) == "listing: 1.0 MiB, 512.0 KiB/s"
