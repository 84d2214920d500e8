"""Keys of the object store, read from files that may change while the process runs.

The kubelet replaces the files of a mounted Secret by swapping one symbolic link. Keys of two versions of
the Secret must never be used together. Keys are never in a log, an error message or a repr.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from minio.credentials.credentials import Credentials

from holdfast_core.errors import ConfigError

ACCESS_KEY_FILE = "accessKey"
SECRET_KEY_FILE = "secretKey"
SESSION_TOKEN_FILE = "sessionToken"
CA_FILE = "ca.crt"
_MAX_FILE_BYTES = 64 << 10
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Keys:
    """One consistent set of credentials."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def for_signer(self) -> Credentials:
        return Credentials(self.access_key, self.secret_key, self.session_token)

    def secrets(self) -> tuple[str, ...]:
        """Return the strings that must never appear in a log, a condition or an error."""
        return tuple(s for s in (self.access_key, self.secret_key, self.session_token) if s)


class CredentialsProvider(Protocol):
    """Source of a client's keys. Safe for use by many threads."""

    def retrieve(self) -> Keys:
        """Return the current keys, possibly from a cache. Raises ConfigError."""
        ...

    def refresh(self) -> Keys:
        """Return the current keys without the cache. The client calls it when the store refused a key.

        Raises ConfigError.
        """
        ...


class FileCredentials:
    """Credentials from the files accessKey, secretKey and, if present, sessionToken of a directory.

    In a pod this is contract.STORE_DIR. `retrieve` reads the files again only if the inode, the mtime or
    the size of one has changed.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._lock = threading.Lock()
        self._cached: tuple[_Signature, Keys] | None = None

    @property
    def ca_file(self) -> str | None:
        """Path of the store's CA certificate; None if the directory has none."""
        path = self._directory / CA_FILE
        return str(path) if path.exists() else None

    def retrieve(self) -> Keys:
        return self._load(force=False)

    def refresh(self) -> Keys:
        return self._load(force=True)

    def _load(self, *, force: bool) -> Keys:
        with self._lock:
            for _ in range(_ATTEMPTS):
                before = self._signature()
                if not force and self._cached is not None and self._cached[0] == before:
                    return self._cached[1]
                keys = self._read()
                # The files did not change while they were read, so all belong to one version of the Secret.
                if keys is not None and self._signature() == before:
                    self._cached = (before, keys)
                    return keys
            raise ConfigError(
                f"credentials in {self._directory}: expected files {ACCESS_KEY_FILE} and "
                f"{SECRET_KEY_FILE} with one key each, found {self._describe()}; check the Secret "
                "of the CheckpointStore"
            )

    def _signature(self) -> _Signature:
        found: list[tuple[int, int, int] | None] = []
        for name in (ACCESS_KEY_FILE, SECRET_KEY_FILE, SESSION_TOKEN_FILE):
            try:
                info = (self._directory / name).stat()
            except OSError:
                found.append(None)
            else:
                found.append((info.st_ino, info.st_mtime_ns, info.st_size))
        return tuple(found)

    def _read(self) -> Keys | None:
        access, secret = self._text(ACCESS_KEY_FILE), self._text(SECRET_KEY_FILE)
        if not access or not secret:
            return None
        return Keys(access, secret, self._text(SESSION_TOKEN_FILE) or None)

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
        if not (text.isascii() and text.isprintable()) or " " in text:
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
