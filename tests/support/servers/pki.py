"""A certificate authority for tests.

It issues ECDSA P-256 leaves that are valid for an hour unless the caller chooses another lifetime.
"""

from __future__ import annotations

import ipaddress
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast_core.clock import SystemClock

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
_PEM = serialization.Encoding.PEM


class Authority:
    """Certificate authority whose key exists only in this object."""

    def __init__(
        self, name: str = "holdfast-test-ca", *, lifetime: timedelta = timedelta(hours=1)
    ) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._certificate = (
            _builder(self._name, self._name, self._key, lifetime)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate_pem(self) -> bytes:
        return self._certificate.public_bytes(_PEM)

    @property
    def key_pem(self) -> bytes:
        return _key_pem(self._key)

    def leaf(
        self,
        *names: str,
        lifetime: timedelta = timedelta(hours=1),
        key: PrivateKey | None = None,
    ) -> tuple[bytes, bytes]:
        """Return a certificate and its key as PEM, valid for servers and clients.

        Args:
            names: DNS names and IP addresses of the holder.
            lifetime: How long it is valid.
            key: The key of the holder. None makes a new one.
        """
        key = key or ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name("holdfast-test"), self._name, key, lifetime)
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([_alternative_name(name) for name in names]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(_PEM), _key_pem(key)

    def write_leaf(self, directory: Path, dns_name: str) -> Path:
        """Write ca.crt, tls.crt and tls.key into `directory`, which is created if needed, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = self.leaf(dns_name)
        (directory / "ca.crt").write_bytes(self.certificate_pem)
        (directory / "tls.crt").write_bytes(certificate)
        (directory / "tls.key").write_bytes(key)
        return directory


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PrivateKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = SystemClock().utc_now()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + lifetime)
    )


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )
