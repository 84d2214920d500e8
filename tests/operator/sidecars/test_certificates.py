"""TLS itself verifies the chains, and both sides check the names."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from holdfast_core.net import load_leaf, operator_dns_name, peer_dns_name
from holdfast_operator.sidecars.certificates import (
    KeyPair,
    client_context,
    new_authority,
    new_leaf,
    secret_data,
)

UID = "6f1c2d3e-0000-4000-8000-000000000001"


def server_context(authority: KeyPair, leaf: KeyPair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.certificate)
    load_leaf(context, leaf.certificate, leaf.key)
    return context


async def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str
) -> tuple[tuple[str, str], ...]:
    """Perform a handshake. Return the names that the server sees in the client's certificate."""
    seen: asyncio.Future[tuple[tuple[str, str], ...]] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(writer.get_extra_info("peercert")["subjectAltName"])
        writer.write(b"x")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server)
    port = listener.sockets[0].getsockname()[1]
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client, server_hostname=name
        )
        assert await reader.read(1) == b"x"
        writer.close()
        return await seen
    finally:
        listener.close()


def test_mutual_tls_between_operator_and_pod() -> None:
    authority = new_authority(UID)
    pod = new_leaf(authority, peer_dns_name("gpt-0-r0", UID))
    operator = new_leaf(authority, operator_dns_name(UID))
    names = asyncio.run(
        handshake(
            server_context(authority, pod),
            client_context(authority, operator),
            peer_dns_name("gpt-0-r0", UID),
        )
    )
    assert names == (("DNS", f"operator.{UID}.holdfast"),)


@pytest.mark.fault("A certificate is stolen")
@pytest.mark.parametrize("case", ["another pod's name", "another job's authority"])
def test_wrong_peer_is_refused(case: str) -> None:
    authority, other = new_authority(UID), new_authority("other")
    pod = new_leaf(authority, peer_dns_name("gpt-0-r0", UID))
    asked = "gpt-1-r0" if case == "another pod's name" else "gpt-0-r0"
    trusted = other if case == "another job's authority" else authority
    operator = client_context(trusted, new_leaf(trusted, operator_dns_name(UID)))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        asyncio.run(handshake(server_context(authority, pod), operator, peer_dns_name(asked, UID)))


@pytest.mark.fault("A certificate is stolen")
def test_a_certificate_names_its_usage() -> None:
    authority = new_authority(UID)
    leaf = x509.load_pem_x509_certificate(new_leaf(authority, "a.b.holdfast").certificate.encode())
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a.b.holdfast"]
    constraints = leaf.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca


def test_no_clock_shows_a_time_at_which_a_certificate_is_expired_or_not_valid_yet() -> None:
    """A job may train for years without a new pod, and nobody sends its pods new certificates."""
    authority = new_authority(UID)
    leaf = new_leaf(authority, peer_dns_name("gpt-0-r0", UID))
    for text in (authority.certificate, leaf.certificate):
        found = x509.load_pem_x509_certificate(text.encode())
        assert found.not_valid_before_utc == datetime(1970, 1, 1, tzinfo=UTC)
        assert found.not_valid_after_utc == datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_secret_of_a_round_has_what_the_pods_mount() -> None:
    authority = new_authority(UID)
    data = secret_data(authority, UID, ("j-0-r2", "j-3-r2"))
    assert sorted(data) == ["ca.crt", "j-0-r2.crt", "j-0-r2.key", "j-3-r2.crt", "j-3-r2.key"]
    assert data["ca.crt"] == authority.certificate
    assert authority.key not in data.values()
