"""Layout documents in the shared directory.

A message names a document by its digest, and the receiver reads it.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast_core.errors import CorruptionError, NotFoundError
from holdfast_core.format.digest import digest_of, hex_of
from holdfast_core.ids import Digest


class LayoutFiles:
    """Layout documents in one directory. A document is written once and appears atomically."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._written: set[str] = set()

    def ensure(self, document: bytes, digest: Digest) -> None:
        """Write the document unless this process has already written it. Raises OSError."""
        name = f"{hex_of(digest)}.json"
        path = self.directory / name
        if name in self._written and path.exists():
            return
        if not self.directory.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            self.directory.chmod(0o2770)  # the other side may have another uid and the same group
        temporary = self.directory / f".{name}.{os.getpid()}.tmp"
        temporary.write_bytes(document)
        temporary.chmod(0o660)
        temporary.replace(path)
        self._written.add(name)

    def read(self, digest: Digest) -> bytes:
        """Return the document that the other side wrote. Raises NotFoundError, CorruptionError."""
        path = self.directory / f"{hex_of(digest)}.json"
        try:
            document = path.read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(f"layout {path} does not exist") from error
        if digest_of(document) != digest:
            raise CorruptionError(
                f"layout {path}: the digest of the document is "
                f"{digest_of(document)}, which is not its name"
            )
        return document
