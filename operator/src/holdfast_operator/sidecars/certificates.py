"""One certificate authority per job, and the leaf certificates that its pods and the operator present.

1. The authority's private key is in a Secret of the operator's own namespace, never in a tenant's.
2. The pods that are created in one round read their leaves from one immutable Secret in the job's namespace.
3. A certificate does not expire (ADR 0003). A leaf is of use as long as its pod is a member of the round, and
   an authority exists as long as its job.
4. An authority is created only when the leaves of a round are issued, and only if the API server has the job
   both before and after the creation, so that a late call for a deleted job leaves none behind. `sweep`
   deletes the authorities that remain where an operator died between these steps.

The operator's own leaf for a job is kept in memory only. Keys are never logged.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast_core import logs
from holdfast_core.api import Gang
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import JobUid
from holdfast_core.net import load_leaf, operator_dns_name, peer_dns_name
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model import labels
from holdfast_operator.model.render import certificate_items, render_secret

NOT_BEFORE = datetime(1970, 1, 1, tzinfo=UTC)
NOT_AFTER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Validity period of authorities and leaves: every time that a clock can show, until the value for "no
well-defined expiration date" (RFC 5280, 4.1.2.5). An expired certificate, or one that a wrong clock made
valid in the future, would lock the operator out of a running job."""
_CA_LABEL = "holdfast.dev/certificate-authority"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Certificate and private key of a job's authority, a pod or the operator, as PEM."""

    certificate: str
    key: str = field(repr=False)


def new_authority(job_uid: str) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"holdfast {job_uid}"[:64])])
    certificate = _certificate(key, name, name, signs_certificates=True).sign(key, hashes.SHA256())
    return KeyPair(_pem(certificate), _key_pem(key))


def new_leaf(authority: KeyPair, dns_name: str) -> KeyPair:
    """Return a leaf for one dNSName, usable as client and as server. Raises HoldfastError."""
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    issuer_key = serialization.load_pem_private_key(authority.key.encode(), None)
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey):
        raise HoldfastError("the key of the job's authority is not an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    certificate = (
        _certificate(key, x509.Name([]), issuer.subject, signs_certificates=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        # Critical: the subject is empty (RFC 5280, 4.2.1.6).
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=True)
        .add_extension(issued_by, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    return KeyPair(_pem(certificate), _key_pem(key))


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: x509.Name,
    *,
    signs_certificates: bool,
) -> x509.CertificateBuilder:
    """Return what authorities and leaves have in common."""
    constraints = x509.BasicConstraints(signs_certificates, 0 if signs_certificates else None)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(constraints, critical=True)
        .add_extension(_usage(signs_certificates=signs_certificates), critical=True)
        .add_extension(own, critical=False)
    )


def secret_data(authority: KeyPair, job_uid: str, pods: Iterable[str]) -> dict[str, str]:
    """Return the data of a Secret with these pods' leaves. render.objects.certificate_items has its keys."""
    data: dict[str, str] = {}
    for pod in pods:
        leaf = new_leaf(authority, peer_dns_name(pod, job_uid))
        files = {"ca.crt": authority.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}
        data.update({key: files[path] for key, path in certificate_items(pod)})
    return data


def client_context(authority: KeyPair, leaf: KeyPair) -> ssl.SSLContext:
    """Return a TLS 1.3 context in which the job's authority alone authenticates both sides."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.certificate)
    load_leaf(context, leaf.certificate, leaf.key)
    return context


class JobGoneError(HoldfastError):
    """Error of a request for the authority of a job that does not exist any more."""


def ca_secret_name(job_uid: str) -> str:
    return f"holdfast-ca-{job_uid}"


class Certificates:
    """Authorities by uid of the job, kept as Secrets in the operator's namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._authorities: dict[str, KeyPair] = {}
        self._clients: dict[str, ssl.SSLContext] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def round_data(self, job: Gang, pods: Iterable[str]) -> dict[str, str]:
        """Return the data of the Secret with the leaves of these pods.

        The first call for a job creates its authority. Raises JobGoneError, ApiError or HoldfastError.
        """
        async with self._lock(job.uid):
            authority = await self._known(job.uid)
            if authority is None:
                authority = await self._create(job)
                self._authorities[job.uid] = authority
        return await asyncio.to_thread(secret_data, authority, job.uid, tuple(pods))

    async def client(self, job_uid: JobUid) -> ssl.SSLContext:
        """Return the TLS context for calls to the job's sidecars. Raises HoldfastError."""
        known = self._clients.get(job_uid)
        if known is None:
            authority = await self._authority(job_uid)
            leaf = await asyncio.to_thread(new_leaf, authority, operator_dns_name(job_uid))
            known = self._clients[job_uid] = client_context(authority, leaf)
        return known

    async def forget(self, job_uid: JobUid) -> None:
        """Delete the authority of a job that is gone. Raises ApiError."""
        async with self._lock(job_uid):
            await self._cluster.delete(labels.SECRET, self._namespace, ca_secret_name(job_uid))
            self._authorities.pop(job_uid, None)
            self._clients.pop(job_uid, None)
        self._locks.pop(job_uid, None)

    async def sweep(self, living: Set[str]) -> None:
        """Delete the authorities of jobs that were deleted while no operator ran, or during a creation.

        A job that is not in `living` is first looked up on the API server, because the operator's watch may
        be late. An error for one job does not stop the sweep of the others.

        Args:
            living: Uids of jobs that are known to exist.

        Raises:
            ApiError: The LIST failed, or the last error of a single job, raised after all others.
        """
        failed: ApiError | None = None
        found = await self._cluster.secret_labels(self._namespace, f"{_CA_LABEL}=true")
        for name, held in found.items():
            uid = JobUid(held.get(labels.JOB_UID, ""))
            namespace, job = (
                held.get(labels.JOB_NAMESPACE),
                held.get(labels.JOB_NAME),
            )
            if uid in living or namespace is None or job is None or name != ca_secret_name(uid):
                continue
            try:
                if not await self._cluster.job_exists(namespace, job, uid):
                    logs.info(
                        f"deleting Secret {name}, because job {namespace}/{job} no longer exists"
                    )
                    await self.forget(uid)
            except ApiError as error:
                failed = error
        if failed is not None:
            raise failed

    async def _authority(self, job_uid: JobUid) -> KeyPair:
        """Return the existing authority of a job. Raises HoldfastError if there is none."""
        async with self._lock(job_uid):
            known = await self._known(job_uid)
        if known is None:
            self._locks.pop(job_uid, None)
            raise HoldfastError(
                f"Secret {self._namespace}/{ca_secret_name(job_uid)} with the authority of job "
                f"{job_uid} does not exist: the job or the Secret was deleted. If only the Secret "
                "was deleted, the operator cannot call the job's sidecars: delete the job's pods, "
                "so that they are created again"
            )
        return known

    def _lock(self, job_uid: JobUid) -> asyncio.Lock:
        return self._locks.setdefault(job_uid, asyncio.Lock())

    async def _known(self, job_uid: JobUid) -> KeyPair | None:
        known = self._authorities.get(job_uid)
        if known is None:
            known = await self._read(job_uid)
            if known is not None:
                self._authorities[job_uid] = known
        return known

    async def _read(self, job_uid: JobUid) -> KeyPair | None:
        name = ca_secret_name(job_uid)
        data = await self._cluster.get_secret(self._namespace, name)
        if data is None:
            return None
        if "ca.crt" not in data or "ca.key" not in data:
            raise HoldfastError(
                f"Secret {self._namespace}/{name} has keys {sorted(data)}, expected ca.crt and "
                "ca.key: delete it together with the job"
            )
        return KeyPair(data["ca.crt"], data["ca.key"])

    async def _create(self, job: Gang) -> KeyPair:
        """Create the job's authority, if the job exists both before and after the creation.

        The end of the job is what causes the deletion of its authority. A Secret that is created after the
        end of its job would stay, so it is deleted again. Raises JobGoneError and ApiError.
        """
        await self._require(job)
        authority = await self._create_secret(job)
        try:
            await self._require(job)
        except JobGoneError:
            await self._cluster.delete(labels.SECRET, self._namespace, ca_secret_name(job.uid))
            raise
        return authority

    async def _require(self, job: Gang) -> None:
        if not await self._cluster.job_exists(job.namespace, job.name, job.uid):
            raise JobGoneError(
                f"job {job.namespace}/{job.name} (uid {job.uid}) was deleted: no authority is created"
            )

    async def _create_secret(self, job: Gang) -> KeyPair:
        name = ca_secret_name(job.uid)
        fresh = await asyncio.to_thread(new_authority, job.uid)
        metadata = {
            "name": name,
            "namespace": self._namespace,
            "labels": {
                labels.MANAGED_BY: labels.MANAGED_BY_VALUE,
                labels.JOB_NAMESPACE: job.namespace,
                labels.JOB_NAME: job.name,
                labels.JOB_UID: job.uid,
                _CA_LABEL: "true",
            },
        }
        data = {"ca.crt": fresh.certificate, "ca.key": fresh.key}
        created = await self._cluster.create_secret(render_secret(metadata), data)
        if not created.existed:
            return fresh
        found = await self._read(job.uid)  # another operator created it first, so its key is used
        if found is None:
            raise HoldfastError(f"Secret {self._namespace}/{name} existed and was then deleted")
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
