"""Mutual TLS 1.3 between the pods of a job: contexts from a directory of certificates.

Both sides always present a leaf of the job's CA. Callers connect to an address and verify the
dNSName that the member list gives (contract.peer_dns_name); the server reads the caller's name from
its certificate and asks its member list.

A pod verifies chain and name, and not the validity period (ADR 0041): only the operator can renew a
leaf, so an operator that is away for long, or a node whose clock is wrong, would otherwise end saves
and lock the operator out for good. What a leaf is good for is decided by the member list.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from holdfast_core.errors import AccessDeniedError, ConfigError

_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL's x509_vfy.h, for which Python's ssl module has no name."""
OUT_OF_TIME = frozenset({9, 10})
"""verify_code of ssl.SSLCertVerificationError for a certificate outside of its validity period:
X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def in_directory(cls, directory: Path) -> Self:
        """ca.crt, tls.crt, tls.key: the names of a Kubernetes TLS Secret."""
        return cls(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")


def ignore_validity_period(context: ssl.SSLContext) -> None:
    """Accept the peer's chain before and after its validity period. All else is still verified."""
    context.verify_flags = ssl.VerifyFlags(context.verify_flags | _NO_CHECK_TIME)


def load_leaf(context: ssl.SSLContext, certificate_pem: str, key_pem: str) -> None:
    """Load a certificate and its key from memory. The standard library takes paths only, so the text
    lies in anonymous memory for the moment, never on a disk. Raises ssl.SSLError, OSError."""
    with ExitStack() as stack:
        certificate = stack.enter_context(_in_memory(certificate_pem))
        key = stack.enter_context(_in_memory(key_pem))
        context.load_cert_chain(certificate, key)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Asks every client for a certificate of the same CA. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # No session tickets: no client resumes, and one may take "readable" for "the server spoke".
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


def _load(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    ignore_validity_period(context)
    try:
        context.load_verify_locations(cafile=str(files.ca))
        context.load_cert_chain(str(files.certificate), str(files.key))
    except OSError as error:
        raise ConfigError(
            f"certificates {files.ca}, {files.certificate}, {files.key}: cannot be loaded: {error}"
        ) from error
    return context


@contextmanager
def _in_memory(text: str) -> Iterator[str]:
    descriptor = os.memfd_create("holdfast", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
