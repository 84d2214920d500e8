"""TLS contexts for mutual TLS 1.3 between the pods of a job.

Both sides always present a leaf certificate of the job's CA. A client connects to an address and verifies
the dNSName that the member list gives (`peer_dns_name`). A server reads the client's name from its
certificate and looks it up in its member list.

The certificates of a job do not expire (ADR 0003). The member list decides what the owner of a leaf may do.
"""

from __future__ import annotations

import os
import ssl
from asyncio import BaseTransport, sslproto
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from holdfast_core.errors import AccessDeniedError, ConfigError

READ_BYTES = 16 << 10
"""Read buffer of a TLS connection, see `use_small_read_buffers`."""
LARGE_READ_BYTES = 256 << 10
"""Read buffer of a TLS connection after `use_large_read_buffer`."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def in_directory(cls, directory: Path) -> Self:
        """Return the paths of a mounted Kubernetes TLS Secret: ca.crt, tls.crt and tls.key."""
        return cls(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")


def peer_dns_name(pod: str, job_uid: str) -> str:
    """Return the dNSName of a pod's certificate. Clients verify it as the server name."""
    return f"{pod}.{job_uid}.holdfast"


def operator_dns_name(job_uid: str) -> str:
    """Return the dNSName of the operator's client certificate for one job."""
    return f"operator.{job_uid}.holdfast"


def use_small_read_buffers() -> None:
    """Give each TLS connection of asyncio that is opened from now on a read buffer of READ_BYTES.

    By default asyncio fills 256 KiB with zeros for each connection. A process with a thousand long polls
    would need 250 MiB for that alone. A TLS record has at most 16 KiB.
    """
    sslproto.SSLProtocol.max_size = READ_BYTES


def use_large_read_buffer(transport: BaseTransport | None) -> None:
    """Give this TLS connection of asyncio a read buffer of LARGE_READ_BYTES for what arrives from now on.

    asyncio reads from a connection once in a turn of the event loop, and at most one buffer. Where a turn
    takes 100 ms, a small buffer lets 160 KiB through in a second. Connections without TLS are left as they
    are.
    """
    # asyncio offers no public way to the protocol of a transport. It makes the buffer longer by itself.
    protocol = getattr(transport, "_ssl_protocol", None)
    if protocol is not None:
        protocol.max_size = LARGE_READ_BYTES


def load_leaf(context: ssl.SSLContext, certificate_pem: str, key_pem: str) -> None:
    """Load a certificate and its key into the context. Raises ssl.SSLError, OSError.

    The standard library accepts paths only, so the texts are written to anonymous memory files meanwhile,
    never to a disk.
    """
    with ExitStack() as stack:
        certificate = stack.enter_context(_in_memory(certificate_pem))
        key = stack.enter_context(_in_memory(key_pem))
        context.load_cert_chain(certificate, key)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a server context that requires a client certificate of the same CA. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # No client resumes a session, and a client that polls its socket would take a session ticket for a
    # reply of the server.
    context.num_tickets = 0
    return _load(context, files)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a client context that verifies the server's chain and dNSName. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = True
    return _load(context, files)


def peer_name(peer: ssl.SSLSocket | ssl.SSLObject | Mapping[str, Any]) -> str:
    """Return the only dNSName of the peer's verified certificate.

    Args:
        peer: A socket after its handshake, or what getpeercert() has returned.

    Raises:
        AccessDeniedError: The certificate has no dNSName or more than one.
    """
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
