"""Credentials of a store from the files of a mounted Secret, which may be replaced at any time.

The kubelet replaces the files of a mounted Secret by swapping one symbolic link. Keys of two versions of
the Secret must never be used together. Keys are never in a log, an error message or a repr.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from holdfast_core.errors import ConfigError

CA_FILE = "ca.crt"
_MAX_FILE_BYTES = 64 << 10
_ATTEMPTS = 5

T = TypeVar("T")


class SecretFiles(Generic[T]):
    """Credentials from files of a directory. In a pod this is contract.STORE_DIR. Safe for many threads.

    `retrieve` reads the files again only if the inode, the mtime or the size of one has changed.
    """

    def __init__(
        self,
        directory: str | Path,
        names: tuple[str, ...],
        parse: Callable[[Mapping[str, str]], T | None],
        expected: str,
        *,
        is_document: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            directory: Directory of the files.
            names: Names of the files. One that does not exist counts as an empty one.
            parse: Makes credentials of the texts by name. None: some are missing.
            expected: Which files there must be, for the error message.
            is_document: The files are documents, with spaces and lines, instead of keys.
        """
        self._directory = Path(directory)
        self._names = names
        self._parse = parse
        self._expected = expected
        self._is_document = is_document
        self._lock = threading.Lock()
        self._cached: tuple[_Signature, T] | None = None

    @property
    def ca_file(self) -> str | None:
        """Path of the store's CA certificate; None if the directory has none."""
        path = self._directory / CA_FILE
        return str(path) if path.exists() else None

    def retrieve(self) -> T:
        """Return the current credentials, possibly from the cache. Raises ConfigError."""
        return self._load(force=False)

    def refresh(self) -> T:
        """Return the current credentials without the cache. Raises ConfigError."""
        return self._load(force=True)

    def _load(self, *, force: bool) -> T:
        with self._lock:
            for _ in range(_ATTEMPTS):
                before = self._signature()
                if not force and self._cached is not None and self._cached[0] == before:
                    return self._cached[1]
                found = self._parse({name: self._text(name) for name in self._names})
                # The files did not change while they were read, so all belong to one version of the Secret.
                if found is not None and self._signature() == before:
                    self._cached = (before, found)
                    return found
            raise ConfigError(
                f"credentials in {self._directory}: expected {self._expected}, found "
                f"{self._describe()}; check the Secret of the CheckpointStore"
            )

    def _signature(self) -> _Signature:
        found: list[tuple[int, int, int] | None] = []
        for name in self._names:
            try:
                info = (self._directory / name).stat()
            except OSError:
                found.append(None)
            else:
                found.append((info.st_ino, info.st_mtime_ns, info.st_size))
        return tuple(found)

    def _text(self, name: str) -> str:
        try:
            with (self._directory / name).open("rb") as file:
                text = file.read(_MAX_FILE_BYTES).decode("utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"credentials file {self._directory / name}: {type(error).__name__}"
            ) from error
        is_key = text.isascii() and text.isprintable() and " " not in text
        if not is_key and not self._is_document:
            # The HTTP library would refuse such a header with an error message that contains the key.
            raise ConfigError(
                f"credentials file {self._directory / name}: expected one key of printable ASCII "
                "characters without spaces; check the Secret of the CheckpointStore"
            )
        return text

    def _describe(self) -> str:
        try:
            names = sorted(p.name for p in self._directory.iterdir() if not p.name.startswith(".."))
        except OSError as error:
            return f"no readable directory ({error.strerror})"
        return ", ".join(names) or "an empty directory"


_Signature = tuple[tuple[int, int, int] | None, ...]
