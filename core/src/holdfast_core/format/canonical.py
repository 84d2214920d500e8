"""Canonical JSON: each value has exactly one encoding, so that equal documents have equal digests.

Keys are sorted by code point, there is no whitespace, text is unescaped UTF-8, integers are exact, and
NaN and infinities are refused. The parser is strict: duplicate keys, NaN, infinities, a byte-order mark
and too deep nesting raise FormatError.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from holdfast_core.errors import FormatError

MAX_DOCUMENT_BYTES = 64 << 20
"""Maximum length of a layout or manifest."""


def dumps_canonical(value: Any) -> bytes:
    """Encode a JSON value canonically. Raises FormatError if JSON cannot represent it exactly."""
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
    """Parse JSON that need not be canonical. `what` names the document in errors.

    Raises FormatError if the document is longer than `limit_bytes` or is not strict JSON.
    """
    if len(data) > limit_bytes:
        raise FormatError(f"{what}: {len(data)} bytes, at most {limit_bytes} are accepted")
    try:
        text = data.decode()
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: not valid JSON: {error}") from error


def loads_canonical(data: bytes, what: str, *, limit_bytes: int = MAX_DOCUMENT_BYTES) -> Any:
    """Parse canonical JSON. Raises FormatError like `loads_strict`, and if it is not canonical."""
    value = loads_strict(data, what, limit_bytes=limit_bytes)
    if dumps_canonical(value) != data:
        raise FormatError(f"{what}: not in canonical form (sorted keys, no whitespace)")
    return value


def _check_keys(value: Any) -> None:
    """Raise FormatError for a key that is not a string: json.dumps would convert 1 and True to text.

    The value has no cycles: json.dumps has checked that before.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise FormatError(f"canonical JSON: key {key!r} is not a string")
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
