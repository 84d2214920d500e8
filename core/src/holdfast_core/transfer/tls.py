"""Mutual TLS 1.3 between the pods of a job: contexts from a directory of certificates.

Both sides always present a leaf of the job's CA. Callers connect to an address and verify the
dNSName that the member list gives (contract.peer_dns_name); the server reads the caller's name from
its certificate and asks its member list.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from holdfast_core.errors import AccessDeniedError, ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def in_directory(cls, directory: Path) -> Self:
        """ca.crt, tls.crt, tls.key: the names of a Kubernetes TLS Secret."""
        return cls(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Asks every client for a certificate of the same CA. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # No session tickets: nobody resumes, and a client may take "readable" for "the server spoke".
    context.num_tickets = 0
    return _load(context, files)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Verifies the server's chain and its dNSName. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = True
    return _load(context, files)


def peer_name(peer: ssl.SSLSocket | ssl.SSLObject | Mapping[str, Any]) -> str:
    """The one dNSName of the peer's verified certificate (or of what getpeercert gave).
    Raises AccessDeniedError if there is none or more than one."""
    certificate: Any = peer if isinstance(peer, Mapping) else peer.getpeercert()
    entries = (certificate or {}).get("subjectAltName", ())
    names = [value for kind, value in entries if kind == "DNS"]
    if len(names) != 1:
        raise AccessDeniedError(
            f"certificate of the peer names {names}: expected exactly one dNSName"
        )
    return str(names[0])


class TlsContexts:
    """Both contexts of a pod, renewed in place: new handshakes use the new leaf, connections that
    are open go on with the old one."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._server: ssl.SSLContext | None = None
        self._client: ssl.SSLContext | None = None
        self._loaded: tuple[bytes, ...] = ()

    def load(self) -> None:
        """Read the files for the first time. Raises ConfigError."""
        with self._lock:
            self._loaded = _contents(self._files)
            self._server = server_context(self._files)
            self._client = client_context(self._files)

    @property
    def server(self) -> ssl.SSLContext:
        return _loaded(self._server, self._files)

    @property
    def client(self) -> ssl.SSLContext:
        return _loaded(self._client, self._files)

    def reload_if_changed(self) -> bool:
        """True where the files differ from what was loaded and are in use now. Raises ConfigError
        for a leaf that does not load; the old one then stays."""
        with self._lock:
            found = _contents(self._files)
            if found == self._loaded:
                return False
            # Loaded into fresh contexts first: half a pair must not break the ones in use.
            server_context(self._files)
            for context in (self._server, self._client):
                if context is not None:
                    _load(context, self._files)
            self._loaded = found
            return True


def _load(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=str(files.ca))
        context.load_cert_chain(str(files.certificate), str(files.key))
    except OSError as error:
        raise ConfigError(
            f"certificates {files.ca}, {files.certificate}, {files.key}: cannot be loaded: {error}"
        ) from error
    return context


def _contents(files: TlsFiles) -> tuple[bytes, ...]:
    try:
        return tuple(path.read_bytes() for path in (files.ca, files.certificate, files.key))
    except OSError as error:
        raise ConfigError(f"certificates: cannot be read: {error}") from error


def _loaded(context: ssl.SSLContext | None, files: TlsFiles) -> ssl.SSLContext:
    if context is None:
        raise ConfigError(f"certificates {files.certificate}: not loaded; call load() first")
    return context
