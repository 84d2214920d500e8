"""A certificate authority for each job, and the leaves that its pods and this operator show.

1. The authority's key lies in a Secret of the operator's own namespace, never in a tenant's.
2. The pods that are born in a round find their leaves in one immutable Secret of the job's namespace.
3. A leaf lives LEAF_LIFE; at two thirds of it the operator sends a new one to the sidecar. A sidecar
   that shows a leaf outside of its validity period gets a new one as well: the operator may have been
   away for any time. For that call alone the period is not verified; chain and name always are.
4. An authority does not expire: its life is that of its job. One is created only when the leaves of a
   round are issued, and only for a job that the API server has before and after it: a call that comes
   late for a job that was deleted creates none. `sweep` deletes what an operator left that died in
   between.
The operator's own leaf for a job lives in memory. Keys are never logged.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast_core.clock import Clock
from holdfast_core.contract import operator_dns_name, peer_dns_name
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid
from holdfast_core.messages.schema import Certificate
from holdfast_core.net.tls import ignore_validity_period, load_leaf
from holdfast_operator.base import logs
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model import labels
from holdfast_operator.model.job import JobView
from holdfast_operator.render.names import certificate_items

LEAF_LIFE = timedelta(hours=24)
RENEW_AT = 2 / 3
CA_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
CA_NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""No well-defined expiration date (RFC 5280, 4.1.2.5). An authority that expired, or that was made by
a clock that was ahead, would lock the operator out of a job that runs."""
_BACKDATE = timedelta(minutes=5)
"""Nodes whose clocks are a little behind must accept a fresh leaf."""
_CA_LABEL = "holdfast.dev/certificate-authority"


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate and private key, PEM."""

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Certificate and private key, PEM."""

    certificate: str
    key: str = field(repr=False)


def new_authority(job_uid: str) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"holdfast {job_uid}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(CA_NOT_BEFORE)
        .not_valid_after(CA_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(_pem(certificate), _key_pem(key))


def new_leaf(authority: Authority, dns_name: str, now: datetime) -> Leaf:
    """A leaf for one dNSName, good as client and as server."""
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    issuer_key = serialization.load_pem_private_key(authority.key.encode(), None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise HoldfastError("the key of the job's authority is not an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(now + LEAF_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
            ),
            critical=False,
        )
        # Critical: the subject is empty (RFC 5280, 4.2.1.6).
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return Leaf(_pem(certificate), _key_pem(key))


def secret_data(
    authority: Authority, job_uid: str, pods: Iterable[str], now: datetime
) -> dict[str, str]:
    """Keys and texts of the Secret of a round: see render.names.certificate_items."""
    data: dict[str, str] = {}
    for pod in pods:
        leaf = new_leaf(authority, peer_dns_name(pod, job_uid), now)
        files = {"ca.crt": authority.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}
        data.update({key: files[path] for key, path in certificate_items(pod)})
    return data


def client_context(authority: Authority, leaf: Leaf) -> ssl.SSLContext:
    """TLS 1.3 with both sides authenticated by the job's authority alone. Refuses a leaf outside of
    its validity period."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.certificate)
    load_leaf(context, leaf.certificate, leaf.key)
    return context


def renewal_context(authority: Authority, leaf: Leaf) -> ssl.SSLContext:
    """As `client_context`, and accepts an expired leaf: only to send a new one."""
    context = client_context(authority, leaf)
    ignore_validity_period(context)
    return context


class JobGoneError(HoldfastError):
    """The job that an authority was wanted for does not exist any more."""


def ca_secret_name(job_uid: str) -> str:
    return f"holdfast-ca-{job_uid}"


@dataclass(frozen=True, slots=True)
class _Client:
    context: ssl.SSLContext
    renewal: ssl.SSLContext
    renew_at: datetime


class Certificates:
    """Authorities by job, read from the operator's namespace or created there at first use."""

    def __init__(self, cluster: Cluster, namespace: str, clock: Clock) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._clock = clock
        self._authorities: dict[str, Authority] = {}
        self._clients: dict[str, _Client] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def round_data(self, job: JobView, pods: Iterable[str]) -> dict[str, str]:
        """Contents of the Secret with the leaves of these pods; the job's first one creates its
        authority."""
        async with self._lock(job.uid):
            authority = await self._known(job.uid)
            if authority is None:
                authority = await self._create(job)
                self._authorities[job.uid] = authority
        now = self._clock.utc_now()
        return await asyncio.to_thread(secret_data, authority, job.uid, tuple(pods), now)

    async def renewed(self, job_uid: JobUid, pod: str) -> Certificate:
        """A new leaf for a pod, as the sidecar takes it."""
        authority = await self._authority(job_uid)
        leaf = await asyncio.to_thread(
            new_leaf, authority, peer_dns_name(pod, job_uid), self._clock.utc_now()
        )
        return Certificate(leaf.certificate, leaf.key)

    async def client(self, job_uid: JobUid) -> ssl.SSLContext:
        """What the operator shows to the job's sidecars; another object after each renewal."""
        return (await self._client(job_uid)).context

    async def renewal_client(self, job_uid: JobUid) -> ssl.SSLContext:
        """As `client`, for a sidecar whose leaf may have expired: only to send it a new one."""
        return (await self._client(job_uid)).renewal

    async def _client(self, job_uid: JobUid) -> _Client:
        known = self._clients.get(job_uid)
        now = self._clock.utc_now()
        if known is not None and now < known.renew_at:
            return known
        authority = await self._authority(job_uid)
        leaf = await asyncio.to_thread(new_leaf, authority, operator_dns_name(job_uid), now)
        client = _Client(
            client_context(authority, leaf),
            renewal_context(authority, leaf),
            now + LEAF_LIFE * RENEW_AT,
        )
        self._clients[job_uid] = client
        return client

    async def forget(self, job_uid: JobUid) -> None:
        """The job is gone: its authority goes too. Raises ApiError."""
        async with self._lock(job_uid):
            await self._cluster.delete_secret(self._namespace, ca_secret_name(job_uid))
            self._authorities.pop(job_uid, None)
            self._clients.pop(job_uid, None)
        self._locks.pop(job_uid, None)

    async def sweep(self, living: Set[str]) -> None:
        """Delete authorities of jobs that vanished while no operator ran, or while one was being
        created. What is known to live is spared; the others are looked for on the server first, as
        this operator's watch may be behind. One that cannot be looked for does not keep the others.
        Raises ApiError."""
        failed: ApiError | None = None
        found = await self._cluster.secret_labels(self._namespace, f"{_CA_LABEL}=true")
        for name, marks in found.items():
            uid = JobUid(marks.get(labels.JOB_UID, ""))
            namespace, job = marks.get(labels.JOB_NAMESPACE), marks.get(labels.JOB_NAME)
            if uid in living or namespace is None or job is None or name != ca_secret_name(uid):
                continue
            try:
                if not await self._cluster.job_exists(namespace, job, uid):
                    logs.info(f"deleting Secret {name}: job {namespace}/{job} is gone")
                    await self.forget(uid)
            except ApiError as error:
                failed = error
        if failed is not None:
            raise failed

    async def _authority(self, job_uid: JobUid) -> Authority:
        """Of a job whose pods were given leaves; creates none."""
        async with self._lock(job_uid):
            known = await self._known(job_uid)
        if known is None:
            self._locks.pop(job_uid, None)
            raise HoldfastError(
                f"Secret {self._namespace}/{ca_secret_name(job_uid)} with the authority of job "
                f"{job_uid} is not there: the job was deleted, or the Secret was. In the second case "
                "its sidecars cannot be called; delete its pods, so that they are created anew"
            )
        return known

    def _lock(self, job_uid: JobUid) -> asyncio.Lock:
        return self._locks.setdefault(job_uid, asyncio.Lock())

    async def _known(self, job_uid: JobUid) -> Authority | None:
        known = self._authorities.get(job_uid)
        if known is None:
            known = await self._read(job_uid)
            if known is not None:
                self._authorities[job_uid] = known
        return known

    async def _read(self, job_uid: JobUid) -> Authority | None:
        name = ca_secret_name(job_uid)
        data = await self._cluster.get_secret(self._namespace, name)
        if data is None:
            return None
        if "ca.crt" not in data or "ca.key" not in data:
            raise HoldfastError(
                f"Secret {self._namespace}/{name} has keys {sorted(data)}, expected ca.crt and "
                "ca.key: delete it together with the job"
            )
        return Authority(data["ca.crt"], data["ca.key"])

    async def _create(self, job: JobView) -> Authority:
        """Nothing but the job says when its authority may be deleted, so it must exist when the
        Secret does: it is looked for afterwards as well, because it may go meanwhile."""
        await self._require(job)
        authority = await self._create_secret(job)
        try:
            await self._require(job)
        except JobGoneError:
            await self._cluster.delete_secret(self._namespace, ca_secret_name(job.uid))
            raise
        return authority

    async def _require(self, job: JobView) -> None:
        if not await self._cluster.job_exists(job.namespace, job.name, job.uid):
            raise JobGoneError(
                f"job {job.namespace}/{job.name} (uid {job.uid}) was deleted: no authority is created"
            )

    async def _create_secret(self, job: JobView) -> Authority:
        name = ca_secret_name(job.uid)
        fresh = await asyncio.to_thread(new_authority, job.uid)
        metadata = {
            "labels": {
                labels.MANAGED_BY: labels.MANAGED_BY_VALUE,
                labels.JOB_NAMESPACE: job.namespace,
                labels.JOB_NAME: job.name,
                labels.JOB_UID: job.uid,
                _CA_LABEL: "true",
            }
        }
        data = {"ca.crt": fresh.certificate, "ca.key": fresh.key}
        created = await self._cluster.create_secret(self._namespace, name, data, metadata)
        if not created.existed:
            return fresh
        found = await self._read(job.uid)  # another operator was faster: its authority counts
        if found is None:
            raise HoldfastError(f"Secret {self._namespace}/{name} was there and is gone again")
        return found


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
