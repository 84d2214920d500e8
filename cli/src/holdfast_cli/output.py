"""Prints what a verb returns: as a table, a wide table, JSON or YAML.

Results go to stdout, and messages to stderr. Only a terminal gets colours.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import PurePath
from typing import Literal

import click

from holdfast_cli.errors import Exit

Style = Literal["", "dim", "bold", "red", "green", "yellow"]
_GAP = "  "
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


class Format(StrEnum):
    """Values of `--output`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class Cell:
    """A text in a style."""

    text: str
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    """Its heading, which the table may omit."""
    wide: bool = False
    """Whether only `-o wide` shows it."""
    right: bool = False
    """Whether the cells are aligned at the right, as numbers are."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings. A cell that is None is shown as "-". No row is wrapped or cut."""

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[object]]
    headings: bool = True


Line = str | Cell | Table


@dataclass(frozen=True, slots=True)
class Result:
    """What a verb returns."""

    document: object
    """What JSON and YAML show: dicts, lists, dataclasses, times and plain values."""
    text: Sequence[Line] = ()
    """What the two tables show, from top to bottom."""
    exit: Exit = Exit.SUCCESS


def show(result: Result, format: Format) -> None:
    """Print a result to stdout."""
    click.echo(rendered(result, format), nl=False)


def say(message: str) -> None:
    """Print a message to stderr."""
    click.echo(visible(message), err=True)


def visible(text: str) -> str:
    """Return text that moves no cursor, changes no title and can be written. Names may be hostile.

    Line feeds and tabs stay.
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def rendered(result: Result, format: Format) -> str:
    """Return what `show` prints, with the codes of the styles."""
    match format:
        case Format.JSON:
            return json.dumps(_plain(result.document), indent=1) + "\n"
        case Format.YAML:
            import yaml  # only here, because it takes longer to import than most verbs to run

            text: str = yaml.safe_dump(_plain(result.document), sort_keys=False, allow_unicode=True)
            return text
        case Format.TABLE | Format.WIDE:
            lines = [_lines(line, is_wide=format is Format.WIDE) for line in result.text]
            return "".join(f"{text}\n" for text in lines)


def _plain(value: object) -> object:
    """Return the value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None  # JSON has no other numbers
    if isinstance(value, (str, PurePath)):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _lines(line: Line, *, is_wide: bool) -> str:
    match line:
        case str():
            return visible(line)
        case Cell():
            return _styled(Cell(visible(line.text), line.style))
        case Table():
            return _table(line, is_wide=is_wide)


def _table(table: Table, *, is_wide: bool) -> str:
    columns = [Column(one) if isinstance(one, str) else one for one in table.columns]
    shown = [index for index, column in enumerate(columns) if is_wide or not column.wide]
    rows = [[_cell(row[index]) for index in shown] for row in table.rows]
    if table.headings:
        rows.insert(0, [Cell(columns[index].name) for index in shown])
    widths = [max((len(row[n].text) for row in rows), default=0) for n in range(len(shown))]
    lines = []
    for row in rows:
        cells = []
        for n, cell in enumerate(row):
            is_right, is_last = columns[shown[n]].right, n == len(row) - 1
            width = 0 if is_last and not is_right else widths[n]
            text = cell.text.rjust(width) if is_right else cell.text.ljust(width)
            cells.append(_styled(Cell(text, cell.style)))
        lines.append(_GAP.join(cells).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> Cell:
    cell = value if isinstance(value, Cell) else Cell("-" if value is None else str(value))
    return Cell(visible(cell.text).replace("\n", "\\n"), cell.style)


def _styled(cell: Cell) -> str:
    match cell.style:
        case "":
            return cell.text
        case "dim":
            return click.style(cell.text, dim=True)
        case "bold":
            return click.style(cell.text, bold=True)
        case colour:
            return click.style(cell.text, fg=colour)
