"""A renewed certificate is used only if it belongs to this pod and its key and is signed by the job's CA."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.support.crash.crash import report_of
from tests.support.crash.traced import can_trace
from tests.support.servers.pki import Authority
from tests.support.shards.builders import JOB_UID
from tests.support.sidecar.contracts import contract_with

from holdfast_core.contract import SidecarContract, peer_dns_name
from holdfast_core.errors import FormatError
from holdfast_core.messages.schema import Certificate
from holdfast_sidecar.base.rounds import OPERATOR, Caller
from holdfast_sidecar.wire.certificates import Certificates
from holdfast_sidecar.wire.server import caller_of

NAME = peer_dns_name("gpt-0-r0", JOB_UID)


def contract(tmp_path: Path, authority: Authority) -> SidecarContract:
    (tmp_path / "node").mkdir()
    authority.write_leaf(tmp_path / "certs", NAME)
    return contract_with(node_dir=str(tmp_path / "node"), certs_dir=str(tmp_path / "certs"))


async def served_certificate(certificates: Certificates) -> bytes:
    """Return the DER encoding of the leaf that a new connection receives."""
    server = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=certificates.server
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=certificates.client, server_hostname=NAME
        )
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return bytes(found)


def test_a_renewal_is_used_for_new_connections_and_after_a_restart(tmp_path: Path) -> None:
    authority = Authority()
    pod = contract(tmp_path, authority)
    certificates = Certificates(pod)
    before = asyncio.run(served_certificate(certificates))
    leaf, key = authority.leaf(NAME, lifetime=timedelta(hours=5))
    certificates.renew(Certificate(leaf.decode(), key.decode()))
    renewed = asyncio.run(served_certificate(certificates))
    assert renewed == ssl.PEM_cert_to_DER_cert(leaf.decode()) != before
    again = Certificates(pod)
    assert asyncio.run(served_certificate(again)) == renewed


def test_a_certificate_of_another_pod_key_or_authority_is_refused(tmp_path: Path) -> None:
    authority = Authority()
    certificates = Certificates(contract(tmp_path, authority))
    before = asyncio.run(served_certificate(certificates))
    leaf, key = authority.leaf(NAME)
    _, other_key = authority.leaf(NAME)
    stranger, stranger_key = Authority().leaf(NAME)
    other_pod, other_pod_key = authority.leaf(peer_dns_name("gpt-1-r0", JOB_UID))
    good = Certificate(leaf.decode(), key.decode())
    for bad in (
        replace(good, key=other_key.decode()),
        Certificate(stranger.decode(), stranger_key.decode()),
        Certificate(other_pod.decode(), other_pod_key.decode()),
        replace(good, certificate="no PEM"),
        replace(good, key=""),
    ):
        with pytest.raises(FormatError, match="certificate refused"):
            certificates.renew(bad)
    assert asyncio.run(served_certificate(certificates)) == before


def test_a_certificate_that_tls_cannot_use_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """OpenSSL refuses the key as too small, although the certificate is signed for this pod."""
    authority = Authority()
    pod = contract(tmp_path, authority)
    certificates = Certificates(pod)
    before = asyncio.run(served_certificate(certificates))
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    leaf, key = authority.leaf(NAME, key=weak)
    with pytest.raises(FormatError, match="certificate refused"):
        certificates.renew(Certificate(leaf.decode(), key.decode()))
    assert asyncio.run(served_certificate(certificates)) == before
    again = Certificates(pod)
    assert asyncio.run(served_certificate(again)) == before


@pytest.mark.skipif(can_trace() is not None, reason=str(can_trace()))
def test_no_power_cut_loses_a_renewal_that_was_acknowledged() -> None:
    """Each state that the node volume may have after a power cut is checked."""
    found = report_of(Path(__file__).with_name("certificate_crash_programs.py"))
    assert found.problems == ()
    assert found.tried > 5


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("operator.job-1.holdfast",), OPERATOR),
        (("gpt-0-r0.job-1.holdfast",), Caller("gpt-0-r0")),
        (("gpt-0-r0.job-2.holdfast",), None),
        (("operator.job-2.holdfast",), None),
        ((".job-1.holdfast",), None),
        (("job-1.holdfast",), None),
        ((), None),
    ],
)
def test_the_caller_is_read_from_the_names_of_the_certificate(
    names: tuple[str, ...], expected: Caller | None
) -> None:
    assert caller_of(names, "job-1") == expected
