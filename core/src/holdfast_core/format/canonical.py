"""Canonical JSON: each value has exactly one encoding, so that equal documents have equal digests.

Keys are sorted by code point, there is no whitespace, text is unescaped UTF-8, integers are exact, and
NaN and infinities are refused. The parser is strict: duplicate keys, NaN, infinities, a byte-order mark
and too deep nesting raise FormatError.

Layouts and manifests are large and contain no floats. They have a type each and are encoded and decoded by
msgspec, which is about twenty times faster than the standard library (ADR 0028). All other values are
encoded by the standard library, because msgspec spells some floats differently.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

import msgspec

from holdfast_core.errors import FormatError
from holdfast_core.format.checks import expect_version

MAX_DOCUMENT_BYTES = 64 << 20
"""Maximum length of a layout or manifest."""

_ENCODER = msgspec.json.Encoder(order="sorted")
_MAX_REASON = 200
"""Most characters of a reason, which may quote the wrong value."""

T = TypeVar("T")
S = TypeVar("S", bound="TypedDocument")


class TypedDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Base of the documents that have a type. No field of such a document may be a float."""

    format_version: int


class _AnyVersion(msgspec.Struct, rename="camel"):
    """The version of a document whose other fields are not known."""

    format_version: Any = None


def encode_document(document: TypedDocument, what: str) -> bytes:
    """Encode a document canonically. `what` names it in errors.

    Raises FormatError for text that is not Unicode, and if the document is too long.
    """
    data = _encode(document, what)
    expect_length(data, what)
    return data


def decode_document(decoder: msgspec.json.Decoder[S], data: bytes, what: str, version: int) -> S:
    """Parse a canonical document.

    Args:
        decoder: Decoder of the document's type.
        data: The document.
        what: Name of the document in errors.
        version: The version that this release reads.

    Raises:
        UnknownVersionError: The document has another version. It is compared first, because a newer version
            may have other fields.
        FormatError: The document is too long, not of the type, or in another spelling than the canonical
            one. The message has the path of the wrong value.
    """
    expect_length(data, what)
    try:
        document = decode_typed(decoder, data, what)
    except FormatError:
        _check_version(data, what, version)
        raise
    if document.format_version != version:
        _check_version(data, what, version)
    if _encode(document, what) != data:
        raise FormatError(
            f"{what}: not in canonical form (sorted keys, no whitespace, no duplicate keys)"
        )
    return document


def expect_length(data: bytes, what: str, limit_bytes: int = MAX_DOCUMENT_BYTES) -> None:
    if len(data) > limit_bytes:
        raise FormatError(f"{what}: {len(data)} bytes, at most {limit_bytes} are accepted")


def encode_typed(encoder: msgspec.json.Encoder, value: Any, what: str) -> bytes:
    """Encode a value of a type. Raises FormatError, which names `what`, for text that is not Unicode."""
    try:
        return encoder.encode(value)
    except (UnicodeError, msgspec.MsgspecError) as error:
        raise FormatError(f"{what}: cannot be written: {error}") from error


def decode_typed(decoder: msgspec.json.Decoder[T], data: bytes, what: str) -> T:
    """Parse JSON into a value of a type.

    Raises FormatError, which names `what` and the path of the wrong value, if the data are of another type.
    """
    try:
        return decoder.decode(data)
    except (UnicodeError, msgspec.MsgspecError, RecursionError) as error:
        text, at, path = str(error).rpartition(" - at `$")
        if not at:
            text, path = path, ""
        raise FormatError(f"{what}{path.rstrip('`')}: {text[:_MAX_REASON]}") from error


def _encode(document: TypedDocument, what: str) -> bytes:
    """Encode a document whose fields may be dicts of very many names.

    The names are sorted here. msgspec's own sort takes seconds for some orders of 30,000 names, such as
    sorted names with a smaller one behind them, because its time grows with the square of their number.
    """
    names = {
        field: dict(sorted(value.items()))
        for field in document.__struct_fields__
        if isinstance(value := getattr(document, field), dict)
    }
    return encode_typed(_ENCODER, msgspec.structs.replace(document, **names), what)


def _check_version(data: bytes, what: str, version: int) -> None:
    """Raise UnknownVersionError if the document is an object with another version."""
    try:
        found = msgspec.json.decode(data, type=_AnyVersion).format_version
    except (UnicodeError, msgspec.MsgspecError, RecursionError):
        return  # the document is no object, which the caller reports
    if found is not None:
        expect_version(found, f"{what}.formatVersion", version)


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
    expect_length(data, what, limit_bytes)
    try:
        text = data.decode()
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_no_constant)
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


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of these pairs, as `object_pairs_hook` of json. Raises ValueError for a repeated key."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
