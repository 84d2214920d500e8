"""Documents with their digest: the document, a newline, its BLAKE3 digest and a newline.

A document that decides about checkpoints, such as which run may upload, is stored like this, so that damage
is told from other contents.
"""

from __future__ import annotations

from holdfast_core.errors import CorruptionError, FormatError
from holdfast_core.format.digest import digest_of, parse_digest

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
