"""Canonical JSON: one value has exactly one spelling, so that digests of documents mean something.

Keys sorted by code point, no whitespace, UTF-8 unescaped, integers exact, NaN and infinities
refused. Reading is strict: duplicate keys, NaN, a byte-order mark and too much depth are FormatErrors.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from holdfast_core.errors import FormatError

MAX_DOCUMENT_BYTES = 64 << 20
"""Of a layout or manifest."""


def dumps_canonical(value: Any) -> bytes:
    """The one spelling of a JSON value. Raises FormatError for what JSON cannot say exactly."""
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        data = text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"canonical JSON: cannot be written: {error}") from error
    _check_keys(value)
    return data


def loads_strict(data: bytes, what: str, *, limit_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Parse JSON of any spelling; `what` names the document in errors."""
    if len(data) > limit_bytes:
        raise FormatError(f"{what}: {len(data)} bytes, at most {limit_bytes} are accepted")
    try:
        text = data.decode()
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not valid JSON: {error}") from error


def loads_canonical(data: bytes, what: str, *, limit_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Parse JSON and refuse every spelling but the canonical one."""
    value = loads_strict(data, what, limit_bytes=limit_bytes)
    if dumps_canonical(value) != data:
        raise FormatError(f"{what}: not in canonical form (sorted keys, no whitespace)")
    return value


def _check_keys(value: Any) -> None:
    """json.dumps turns 1 and True into text. It has proved that the value is no cycle."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise FormatError(f"canonical JSON: key {key!r} is no string")
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r}")
            seen.add(key)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
