"""Layout documents in a directory that ranks share with a sidecar or a persister, named by their digest.

A message names a document by its digest, and the receiver reads it. The ranks write the layouts that they
save or restore with, and the other side writes those of the restore point. The trainer can change every file
of the directory, so a document counts only if its size is bounded and its digest matches.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from holdfast_core.errors import CorruptionError, HoldfastError, NotFoundError, UnavailableError
from holdfast_core.format.canonical import MAX_DOCUMENT_BYTES
from holdfast_core.format.digest import digest_of, hex_of
from holdfast_core.ids import Digest
from holdfast_core.shm.shared_files import opened_directory, read_regular, replace_file


class LayoutFiles:
    """Layout documents in one directory. A document appears atomically. Calls block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._written: set[Digest] = set()

    def ensure(self, document: bytes, digest: Digest) -> None:
        """Write the document unless it is there. Raises UnavailableError."""
        path = self.directory / _name(digest)
        if digest in self._written and path.exists():
            return
        # A document that is there already is not written again, so that a full volume does not fail the
        # later ones of several ranks that need the same document.
        with suppress(HoldfastError):
            self.read(digest)
            self._written.add(digest)
            return
        try:
            self._write(path.name, document)
        except OSError as error:
            raise UnavailableError(f"writing layout {path}: {error}") from error
        self._written.add(digest)

    def read(self, digest: Digest) -> bytes:
        """Return a document.

        Raises:
            NotFoundError: It is not in the directory.
            FormatError: It is too large, or is no regular file.
            CorruptionError: It has another digest.
            UnavailableError: It cannot be read.
        """
        path = self.directory / _name(digest)
        try:
            with opened_directory(self.directory) as directory:
                document = read_regular(directory, path.name, MAX_DOCUMENT_BYTES)
        except FileNotFoundError as error:
            raise NotFoundError(f"layout {path} does not exist") from error
        except OSError as error:
            raise UnavailableError(f"reading layout {path}: {error}") from error
        found = digest_of(document)
        if found != digest:
            raise CorruptionError(f"layout {path}: the document's digest is {found}")
        return document

    def _write(self, name: str, document: bytes) -> None:
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with opened_directory(self.directory.parent) as above, suppress(FileExistsError):
            os.mkdir(self.directory.name, 0o700, dir_fd=above)
            with opened_directory(self.directory) as created:
                # The other side may have another uid and the same group. The mode is set through the
                # descriptor, and only if the directory was created here: by now the trainer could have
                # replaced the path by a link to a directory of the sidecar.
                os.fchmod(created, 0o2770)
        with opened_directory(self.directory) as directory:
            replace_file(directory, name, document, mode=0o660)


def _name(digest: Digest) -> str:
    return f"{hex_of(digest)}.json"
