from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from tests.support.servers.pki import Authority

from holdfast_core.errors import AccessDeniedError, ConfigError
from holdfast_core.net import (
    TlsFiles,
    client_context,
    peer_name,
    server_context,
)

NAME = "gpt-0-r0.uid.holdfast"


def shake(
    server: ssl.SSLContext, client: ssl.SSLContext, hostname: str = NAME
) -> tuple[str, str, str | None]:
    """Perform a handshake. Return the names that server and client saw, and the TLS version.

    Raises the error of the client.
    """
    left, right = socket.socketpair()
    seen: list[str] = []

    def serve() -> None:
        try:
            with left, server.wrap_socket(left, server_side=True) as sock:
                seen.append(peer_name(sock))
                sock.sendall(b"!")
        except OSError:
            return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with right, client.wrap_socket(right, server_hostname=hostname) as sock:
            assert sock.recv(1) == b"!"
            return seen[0], peer_name(sock), sock.version()
    finally:
        thread.join()


@pytest.fixture
def authority() -> Authority:
    return Authority()


def files(authority: Authority, directory: Path, name: str) -> TlsFiles:
    return TlsFiles.in_directory(authority.write_leaf(directory, name))


def test_both_sides_know_each_other(tmp_path: Path, authority: Authority) -> None:
    server = server_context(files(authority, tmp_path / "s", NAME))
    client = client_context(files(authority, tmp_path / "c", "gpt-1-r0.uid.holdfast"))
    assert shake(server, client) == ("gpt-1-r0.uid.holdfast", NAME, "TLSv1.3")


def test_another_pod_of_the_job_is_not_taken_for_this_one(
    tmp_path: Path, authority: Authority
) -> None:
    both = files(authority, tmp_path, "gpt-2-r0.uid.holdfast")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server_context(both), client_context(both))


def test_another_authority_is_refused_by_either_side(tmp_path: Path, authority: Authority) -> None:
    ours = files(authority, tmp_path / "ours", NAME)
    theirs = files(Authority(), tmp_path / "theirs", NAME)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server_context(theirs), client_context(ours))
    certificate_of_theirs = TlsFiles(ours.ca, theirs.certificate, theirs.key)
    with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
        shake(server_context(ours), client_context(certificate_of_theirs))


def test_without_a_certificate_there_is_no_connection(tmp_path: Path, authority: Authority) -> None:
    ours = files(authority, tmp_path, NAME)
    bare = ssl.create_default_context(cafile=str(ours.ca))
    with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
        shake(server_context(ours), bare)


def test_older_versions_are_refused(tmp_path: Path, authority: Authority) -> None:
    ours = files(authority, tmp_path, NAME)
    old = client_context(ours)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shake(server_context(ours), old)


@pytest.mark.parametrize(
    "certificate",
    [
        {},
        {"subjectAltName": ()},
        {"subjectAltName": (("DNS", "a"), ("DNS", "b"))},
        {"subjectAltName": (("IP Address", "127.0.0.1"),)},
    ],
)
def test_a_peer_has_exactly_one_name(certificate: dict[str, object]) -> None:
    with pytest.raises(AccessDeniedError, match="exactly one"):
        peer_name(certificate)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        server_context(TlsFiles.in_directory(tmp_path))
