"""The transport with servers that misbehave below HTTP: what is sent, what is detected."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.support.clock import ManualClock
from tests.support.hang import HANG_SECONDS
from tests.support.servers.ports import closed_port

from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.store.s3.http import (
    Body,
    CertificateError,
    HttpPool,
    Timeouts,
    body_length,
    split_endpoint,
)
from holdfast_core.tiers.objects import FileRange

SHORT = Timeouts(connect_seconds=2, idle_seconds=0.3)
"""For servers that are silent. A busy machine may be silent for as long, in tests that expect a reply."""
PATIENT = Timeouts(connect_seconds=HANG_SECONDS, idle_seconds=HANG_SECONDS)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.contextmanager
def server(
    *scripts: Callable[[socket.socket], object], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Run a server that accepts one connection for each script, in order, and closes it at the script's
    end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for script in scripts:
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        connection.settimeout(HANG_SECONDS)
                        if tls is not None:
                            with tls.wrap_socket(connection, server_side=True) as secure:
                                script(secure)
                        else:
                            script(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def read_request(connection: socket.socket) -> bytes:
    """Read the head, and the body whose size Content-Length gives."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    while len(body) < length and (piece := connection.recv(1 << 20)):
        body += piece
    return head + b"\r\n\r\n" + body


def reply(*answers: bytes) -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        for answer in answers:
            read_request(connection)
            connection.sendall(answer)

    return script


def put(pool: HttpPool, body: Body | None) -> tuple[int, bytes]:
    length = body_length(body)
    headers = {"Host": pool.name, "Content-Length": str(length)}
    with pool.request("PUT", "/x", headers, body) as answer:
        return answer.status, answer.read(1 << 20)


def pool_of(endpoint: str, timeouts: Timeouts = PATIENT) -> HttpPool:
    return HttpPool(endpoint, secure=False, timeouts=timeouts)


def test_a_connection_is_used_again() -> None:
    with server(reply(OK, OK)) as endpoint:
        pool = pool_of(endpoint)
        assert [put(pool, b"a"), put(pool, b"b")] == [(200, b"ok"), (200, b"ok")]


def test_a_reply_that_is_closed_twice_gives_its_connection_back_once() -> None:
    with server(reply(OK, OK), reply(OK)) as endpoint:
        pool = pool_of(endpoint)
        headers = {"Host": pool.name, "Content-Length": "0"}
        first = pool.request("GET", "/x", headers)
        first.read(10)
        first.close()
        first.close()
        second, third = (pool.request("GET", "/x", headers) for _ in range(2))
        assert (second.read(10), third.read(10)) == (b"ok", b"ok")
        second.close()
        third.close()


def greet(connection: socket.socket) -> None:
    connection.sendall(b"!")


def test_an_idle_connection_that_the_server_closed_is_not_used() -> None:
    with server(reply(OK), greet, reply(OK)) as endpoint:
        pool = pool_of(endpoint)
        assert put(pool, b"a") == (200, b"ok")
        with socket.create_connection(
            split_endpoint(endpoint, secure=False), timeout=HANG_SECONDS
        ) as other:
            assert other.recv(1) == b"!"  # the server has closed the first connection before
        assert put(pool, b"b") == (200, b"ok")


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_the_body_arrives_whole(tmp_path: Path, kind: str) -> None:
    data = os.urandom(3_000_017)
    got: list[bytes] = []

    def script(connection: socket.socket) -> None:
        got.append(read_request(connection))
        connection.sendall(OK)

    path = tmp_path / "f"
    path.write_bytes(b"before" + data + b"after")
    with path.open("rb") as file, server(script) as endpoint:
        body: Body = data if kind == "bytes" else FileRange(file.fileno(), 6, len(data))
        assert put(pool_of(endpoint), body) == (200, b"ok")
    assert got[0].partition(b"\r\n\r\n")[2] == data


def test_pieces_are_sent_one_after_the_other_and_counted(tmp_path: Path) -> None:
    got: list[bytes] = []
    sent: list[int] = []

    def script(connection: socket.socket) -> None:
        got.append(read_request(connection))
        connection.sendall(OK)

    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    with path.open("rb") as file, server(script) as endpoint:
        pieces = (FileRange(file.fileno(), 7, 3), FileRange(file.fileno(), 1, 2), b"index")
        pool = HttpPool(endpoint, secure=False, timeouts=PATIENT, sent=sent.append)
        assert put(pool, pieces) == (200, b"ok")
    assert got[0].partition(b"\r\n\r\n")[2] == b"78912index"
    assert b"Content-Length: 10" in got[0]
    assert sum(sent) == 10


def early_refusal(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\n\r\ndenied")


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_reply_before_the_body_was_read_is_received(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(32 << 20))
    with path.open("rb") as file, server(early_refusal) as endpoint:
        body: Body = bytes(32 << 20) if kind == "bytes" else FileRange(file.fileno(), 0, 32 << 20)
        assert put(pool_of(endpoint), body) == (403, b"denied")


def nothing(connection: socket.socket) -> None:
    read_request(connection)


def silence(connection: socket.socket) -> None:
    read_request(connection)
    with contextlib.suppress(OSError):
        connection.recv(1)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (nothing, "without response"),
        (silence, "no reply in time"),
        (reply(b"SSH-2.0-OpenSSH_9\r\n"), "status line of the reply is not of HTTP"),
        (reply(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort"), "after 5 of 9 bytes"),
        (reply(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"), "reading"),
        (reply(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n"), "header line"),
        (reply(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n"), "headers"),
        (
            reply(b"HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\n" + bytes(2000000)),
            "more than",
        ),
    ],
    ids=["eof", "silence", "not-http", "cut", "cut-chunk", "long-header", "headers", "too-long"],
)
def test_a_broken_reply_is_an_unavailable_error(
    script: Callable[[socket.socket], object], text: str
) -> None:
    with server(script) as endpoint:
        with pytest.raises(UnavailableError, match=text) as caught:
            put(pool_of(endpoint, SHORT if script is silence else PATIENT), b"x")
    assert endpoint in str(caught.value)


def drip(data: bytes, pause_seconds: float) -> Callable[[socket.socket], None]:
    def script(connection: socket.socket) -> None:
        read_request(connection)
        for byte in data:
            connection.sendall(bytes([byte]))
            threading.Event().wait(pause_seconds)

    return script


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK" + b" " * 1000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 90,
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 300,
    ],
    ids=["status", "headers", "body", "chunks"],
)
def test_a_reply_below_the_minimum_rate_is_aborted(answer: bytes) -> None:
    """No silence is as long as the time-out, but the whole reply would take a minute."""
    with server(drip(answer, 0.05)) as endpoint:
        timeouts = Timeouts(connect_seconds=2, idle_seconds=10, grace_seconds=0.5)
        pool = HttpPool(endpoint, secure=False, timeouts=timeouts)
        with pytest.raises(UnavailableError, match=r"reading the reply: only \d+ bytes in"):
            put(pool, b"x")


def test_a_slow_reply_above_the_minimum_rate_is_read() -> None:
    """The reply takes a minute by the clock, with ten seconds of grace: each 400,000 bytes allow six more."""
    body = os.urandom(4_000_000)
    clock = ManualClock()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n"
    with server(reply(head + body)) as endpoint:
        timeouts = Timeouts(connect_seconds=2, idle_seconds=30, grace_seconds=10)
        pool = HttpPool(endpoint, secure=False, timeouts=timeouts, clock=clock)
        headers = {"Host": pool.name, "Content-Length": "0"}
        data = bytearray(len(body))
        with pool.request("GET", "/x", headers) as answer:
            for start in range(0, len(data), 400_000):
                clock.advance(6)
                rest = memoryview(data)[start : start + 400_000]
                while rest:
                    rest = rest[answer.read_into(rest) :]
        assert data == body


@pytest.mark.fault("The store refuses connections, or its name has no address")
def test_a_refused_connection_and_an_unknown_host_are_unavailable_errors() -> None:
    with closed_port() as port, pytest.raises(UnavailableError, match="refused"):
        put(pool_of(f"127.0.0.1:{port}"), b"x")
    with pytest.raises(UnavailableError, match=r"no-such-host\.invalid"):
        put(pool_of("no-such-host.invalid:9000"), b"x")


def test_a_file_that_became_shorter_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    with path.open("rb") as file, server(silence) as endpoint:
        with pytest.raises(CorruptionError):
            put(pool_of(endpoint), FileRange(file.fileno(), 0, 10))


@pytest.mark.fault("The disk does not return a shard while it is uploaded (EIO)")
def test_a_file_that_cannot_be_read_is_no_fault_of_the_store(tmp_path: Path) -> None:
    with (tmp_path / "f").open("wb") as file, server(silence) as endpoint:
        file.write(b"0123456789")
        with pytest.raises(UnreadableError, match="reading a shard file"):
            put(pool_of(endpoint), FileRange(file.fileno(), 0, 10))


@pytest.mark.parametrize(
    ("endpoint", "secure", "expected"),
    [
        ("s3.example.org", True, ("s3.example.org", 443)),
        ("s3.example.org", False, ("s3.example.org", 80)),
        ("minio:9000", False, ("minio", 9000)),
        ("[::1]:9000", False, ("::1", 9000)),
    ],
)
def test_an_endpoint_is_split_into_host_and_port(
    endpoint: str, secure: bool, expected: tuple[str, int]
) -> None:
    assert split_endpoint(endpoint, secure=secure) == expected


@pytest.mark.parametrize(
    "endpoint",
    ["http://minio:9000", "", ":9000", "minio:", "minio:99999", "minio:９０００", "a/b:1", "u@h:1"],
)
def test_an_invalid_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        split_endpoint(endpoint, secure=False)


def certificate(directory: Path, *, days: int) -> tuple[ssl.SSLContext, str]:
    """Create a self-signed certificate of 127.0.0.1 that expires in `days`. Return the server's context
    and the CA file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
    end = datetime.now(UTC) + timedelta(days=days)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=30))
        .not_valid_after(end)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .sign(key, hashes.SHA256())
    )
    public, private = directory / "tls.crt", directory / "tls.key"
    public.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(public, private)
    return context, str(public)


def test_a_server_of_the_given_authority_is_trusted(tmp_path: Path) -> None:
    context, ca_file = certificate(tmp_path, days=1)
    data = os.urandom(2_500_001)
    got: list[bytes] = []

    def script(connection: socket.socket) -> None:
        got.append(read_request(connection))
        connection.sendall(OK)

    path = tmp_path / "f"
    path.write_bytes(data)
    with path.open("rb") as file, server(script, tls=context) as endpoint:
        pool = HttpPool(endpoint, secure=True, ca_file=ca_file, timeouts=PATIENT)
        assert put(pool, FileRange(file.fileno(), 0, len(data))) == (200, b"ok")
    assert got[0].partition(b"\r\n\r\n")[2] == data


@pytest.mark.fault("The certificate of the store has expired")
def test_an_expired_certificate_is_not_retried(tmp_path: Path) -> None:
    context, ca_file = certificate(tmp_path, days=-1)
    with server(nothing, tls=context) as endpoint:
        pool = HttpPool(endpoint, secure=True, ca_file=ca_file, timeouts=PATIENT)
        with pytest.raises(CertificateError, match="expired") as caught:
            put(pool, b"x")
    assert not caught.value.retryable


def test_an_unknown_authority_is_refused(tmp_path: Path) -> None:
    context, _ = certificate(tmp_path, days=1)
    with server(nothing, tls=context) as endpoint:
        with pytest.raises(CertificateError, match="check the CA certificate"):
            put(HttpPool(endpoint, secure=True, timeouts=PATIENT), b"x")


def test_a_missing_ca_file_is_a_configuration_error(tmp_path: Path) -> None:
    pool = HttpPool("127.0.0.1:1", secure=True, ca_file=str(tmp_path / "none"), timeouts=PATIENT)
    with pytest.raises(ConfigError, match="CA certificate"):
        put(pool, b"x")
