"""Typed access to parsed JSON values for the parsers of documents.

Each function returns the value, or raises FormatError with `path`, the value's place in the document.
"""

from __future__ import annotations

from typing import Any

from holdfast_core.errors import FormatError, UnknownVersionError
from holdfast_core.format.digest import parse_digest
from holdfast_core.ids import (
    MAX_ROUND,
    MAX_STEP,
    ByteRange,
    CheckpointId,
    Digest,
    RestartRound,
    Step,
)

MAX_INT = (1 << 63) - 1


def expect_object(value: Any, path: str, fields: frozenset[str]) -> dict[str, Any]:
    """Return an object that has exactly these fields."""
    found = expect_map(value, path)
    if found.keys() != fields:
        missing = sorted(fields - found.keys())
        unknown = sorted(found.keys() - fields)[:5]
        raise FormatError(f"{path}: fields missing {missing}, fields unknown {unknown}")
    return found


def expect_document(
    value: Any, path: str, fields: frozenset[str], *, version: int
) -> dict[str, Any]:
    """Return an object that has exactly these fields, `formatVersion` among them.

    The version is checked first, because a newer version may have other fields.
    """
    if isinstance(value, dict) and "formatVersion" in value:
        expect_version(value["formatVersion"], f"{path}.formatVersion", version)
    return expect_object(value, path, fields)


def expect_map(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def expect_list(value: Any, path: str, *, limit: int) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{path}: expected a list, found {type(value).__name__}")
    if len(value) > limit:
        raise FormatError(f"{path}: {len(value)} entries, at most {limit} are accepted")
    return value


def expect_int(value: Any, path: str, *, low: int = 0, high: int = MAX_INT) -> int:
    if type(value) is not int:
        raise FormatError(f"{path}: expected a whole number, found {type(value).__name__}")
    if not low <= value <= high:
        raise FormatError(f"{path}: {value} is not within {low}..{high}")
    return value


def expect_text(value: Any, path: str, *, limit: int = 4096) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{path}: expected text, found {type(value).__name__}")
    if len(value) > limit or "\0" in value:
        raise FormatError(f"{path}: text of {len(value)} characters, at most {limit} without NUL")
    return value


def expect_ints(value: Any, path: str, *, limit: int = 64) -> tuple[int, ...]:
    items = expect_list(value, path, limit=limit)
    return tuple(expect_int(item, f"{path}[{i}]") for i, item in enumerate(items))


def expect_range(value: Any, path: str) -> ByteRange:
    """Return the byte range of a list `[start, stop]` with start <= stop."""
    numbers = expect_ints(value, path, limit=2)
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise FormatError(f"{path}: {list(numbers)} is not a byte range [start, stop)")
    return ByteRange(numbers[0], numbers[1])


def expect_checkpoint(entry: dict[str, Any], path: str) -> CheckpointId:
    """Return the checkpoint of an object with the fields `step` and `restartRound`."""
    return CheckpointId(
        Step(expect_int(entry["step"], f"{path}.step", high=MAX_STEP)),
        RestartRound(expect_int(entry["restartRound"], f"{path}.restartRound", high=MAX_ROUND)),
    )


def expect_digest(value: Any, path: str) -> Digest:
    return parse_digest(value, path)


def expect_version(value: Any, path: str, supported: int) -> None:
    version = expect_int(value, path, high=1 << 31)
    if version != supported:
        raise UnknownVersionError(
            f"{path}: version {version} is not supported (this release reads {supported}): a newer "
            "release of Holdfast wrote it; restore with that release or a later one"
        )
