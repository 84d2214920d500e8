"""Documents in canonical JSON, and the two checksums of the format: CRC32C of chunks, and BLAKE3.

Each value has exactly one canonical encoding, so that equal documents have equal digests. Keys are sorted
by code point, there is no whitespace, text is unescaped UTF-8, integers are exact, and NaN and infinities
are refused. The parser is strict: duplicate keys, NaN, infinities, a byte-order mark and too deep nesting
raise FormatError.

Layouts and manifests are large and contain no floats. They have a type each and are encoded and decoded by
msgspec, which is about twenty times faster than the standard library (ADR 0021). All other values are
encoded by the standard library, because msgspec spells some floats differently. Their parsers use the
`expect_` functions, which return the value, or raise FormatError with `path`, the value's place in the
document.

A document that decides about checkpoints, such as which run may upload, is sealed: a newline, its BLAKE3
digest and a newline follow it, so that damage is told from other contents. BLAKE3 is also the digest of
chunks and payloads.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, NoReturn, TypeVar

import crc32c as _crc32c
import msgspec
from blake3 import blake3

from holdfast_core.errors import CorruptionError, FormatError, UnknownVersionError
from holdfast_core.ids import (
    MAX_INT,
    MAX_ROUND,
    MAX_STEP,
    ByteRange,
    CheckpointId,
    Digest,
    RestartRound,
    Step,
)

PREFIX = "b3:"
_DIGEST = re.compile(r"b3:[0-9a-f]{64}\Z")
_POLYNOMIAL = 0x82F63B78

Buffer = bytes | bytearray | memoryview


def crc32c(data: Buffer, value: int = 0) -> int:
    """Return the CRC32C (Castagnoli) of `data`, continued from `value`.

    Releases the GIL for large buffers.
    """
    return int(_crc32c.crc32c(data, value))


def append_crc(crc_a: int, crc_b: int, length_b: int) -> int:
    """Return the CRC32C of A followed by B, from their CRCs and the length of B in bytes.

    The map for each of the last 16 lengths is cached, so calls with few different lengths are fast.
    """
    if length_b < 0:
        raise ValueError(f"length {length_b} is negative")
    shifted = 0
    columns = _shift_map(length_b)
    while crc_a:
        low = crc_a & -crc_a
        shifted ^= columns[low.bit_length() - 1]
        crc_a ^= low
    return shifted ^ crc_b


@functools.lru_cache(maxsize=16)
def _shift_map(length_bytes: int) -> tuple[int, ...]:
    # Appending zero bytes is a linear map of the CRC over GF(2), so 32 columns define it. Bit 31 is the
    # polynomial 1, and each lower bit is x times the bit above it.
    columns = [_append_zeros(1 << 31, length_bytes)]
    for _ in range(31):
        last = columns[-1]
        columns.append(last >> 1 ^ (_POLYNOMIAL if last & 1 else 0))
    return tuple(reversed(columns))


def _append_zeros(crc: int, length_bytes: int) -> int:
    """Return the CRC after `length_bytes` zero bytes, by repeated squaring of the map of one zero bit."""
    square = [_POLYNOMIAL, *(1 << bit for bit in range(31))]
    for _ in range(3):
        square = [_times(square, column) for column in square]
    remaining = length_bytes
    while remaining:
        if remaining & 1:
            crc = _times(square, crc)
        remaining >>= 1
        if remaining:
            square = [_times(square, column) for column in square]
    return crc


def _times(matrix: list[int], vector: int) -> int:
    total = 0
    row = 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


def digest_of(data: Buffer) -> Digest:
    """Return the BLAKE3 of a buffer."""
    return Digest(PREFIX + blake3(data).hexdigest())


def chunk_digest(data: Buffer) -> bytes:
    """Return the BLAKE3 of a chunk as 32 bytes."""
    return bytes(blake3(data).digest())


class Blake3:
    """BLAKE3 of a stream of buffers."""

    __slots__ = ("_hasher",)

    def __init__(self) -> None:
        self._hasher = blake3()

    def update(self, data: Buffer) -> None:
        self._hasher.update(data)

    def digest(self) -> Digest:
        return Digest(PREFIX + self._hasher.hexdigest())

    def raw(self) -> bytes:
        """Return the digest as 32 bytes."""
        return bytes(self._hasher.digest())


def parse_digest(text: object, what: str) -> Digest:
    """Check that `text` is `b3:` and 64 lower-case hex characters. Raises FormatError.

    `what` names the value in the error.
    """
    if not isinstance(text, str) or _DIGEST.match(text) is None:
        shown = text if isinstance(text, str) and len(text) <= 80 else type(text).__name__
        raise FormatError(f"{what}: {shown!r} is not a digest, expected b3: and 64 hex characters")
    return Digest(text)


def hex_of(digest: Digest) -> str:
    """Return the 64 hex characters of a digest, for keys and file names. Raises FormatError."""
    return parse_digest(digest, "digest")[len(PREFIX) :]


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


MAX_DOCUMENT_BYTES = 64 << 20
"""Maximum length of a layout or manifest."""

_ENCODER = msgspec.json.Encoder(order="sorted")
_MAX_REASON = 200
"""Most characters of a reason, which may quote the wrong value."""

T = TypeVar("T")
S = TypeVar("S", bound="TypedDocument")


class TypedDocument(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename="camel",
    tag_field="formatVersion",
    tag=1,
):
    """Base of the documents that have a type. No field of such a document may be a float.

    The `tag` of a type is the format version of its documents.
    """


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


SEAL_BYTES = len("\n") + len("b3:") + 64 + len("\n")


def sealed(document: bytes) -> bytes:
    """Return the bytes to store."""
    return document + f"\n{digest_of(document)}\n".encode()


def unsealed(data: bytes, what: str) -> bytes:
    """Return the document without its digest. `what` names it in errors. Raises CorruptionError."""
    document, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
    try:
        stored = parse_digest(seal[1:-1].decode(), what)
    except (FormatError, ValueError) as error:
        raise CorruptionError(f"{what}: expected a digest at the end: {error}") from error
    if seal[:1] + seal[-1:] != b"\n\n" or digest_of(document) != stored:
        raise CorruptionError(f"{what}: the document is {digest_of(document)}, expected {stored}")
    return document
