"""This pod's certificate: the mounted one, or a newer one that the operator has sent.

A new certificate is accepted only if the job's CA has signed it for this pod and its key matches. It is kept
on the node volume, because the mount is read-only, so that a restarted sidecar still has it.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from holdfast_core.contract import SidecarContract, peer_dns_name
from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.messages.schema import Certificate
from holdfast_core.net.tls import TlsFiles, client_context, load_leaf, server_context
from holdfast_core.node.files import fsync_directory
from holdfast_sidecar.base import logs

_RENEWED = "certificate.pem"


class Certificates:
    """The TLS contexts of this process. A renewal changes them in place, for new connections."""

    def __init__(self, contract: SidecarContract) -> None:
        """Load the mounted certificate, or the kept one if it is newer. Blocking.

        Raises:
            ConfigError: The mounted files are not usable.
        """
        self._name = peer_dns_name(contract.pod_name, contract.job_uid)
        self._files = TlsFiles.in_directory(Path(contract.certs_dir))
        self._renewed = Path(contract.node_dir) / _RENEWED
        self.server = server_context(self._files)
        self.client = client_context(self._files)
        if self._renewed.exists() and self._is_newer():
            try:
                for context in (self.server, self.client):
                    context.load_cert_chain(self._renewed, self._renewed)
            except (OSError, ssl.SSLError) as error:
                logs.warning("the renewed certificate cannot be used", error=str(error))

    def renew(self, message: Certificate) -> None:
        """Use a new certificate for new connections, and keep it on the node volume. Blocking.

        An error of the node volume is only logged.

        Raises:
            FormatError: The certificate is refused.
            UnavailableError: The process lacks memory or descriptors to load it.
        """
        self._check(message)
        try:
            # A context that cannot use the key may lose its present certificate, so another one tries it.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.server, self.client):
                load_leaf(context, message.certificate, message.key)
        except ssl.SSLError as error:
            raise FormatError(f"certificate refused: TLS cannot use it: {error}") from error
        except OSError as error:
            raise UnavailableError(f"the new certificate was not loaded: {error}") from error
        try:
            self._keep(message)
        except OSError as error:
            # A full or broken disk must not prevent the renewal. After a restart the sidecar presents its
            # older certificate, and the operator renews it again.
            logs.warning("writing the renewed certificate to the node failed", error=str(error))
        logs.info("certificate renewed")

    def _keep(self, message: Certificate) -> None:
        temporary = self._renewed.with_suffix(".tmp")
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with os.fdopen(descriptor, "w") as file:
            file.write(message.key.rstrip() + "\n" + message.certificate.rstrip() + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._renewed)
        fsync_directory(self._renewed.parent)

    def _is_newer(self) -> bool:
        try:
            kept = x509.load_pem_x509_certificate(self._renewed.read_bytes())
            mounted = x509.load_pem_x509_certificate(self._files.certificate.read_bytes())
        except (OSError, ValueError):
            return False
        return kept.not_valid_after_utc > mounted.not_valid_after_utc

    def _check(self, message: Certificate) -> None:
        try:
            leaf = x509.load_pem_x509_certificate(message.certificate.encode())
            key = serialization.load_pem_private_key(message.key.encode(), None)
            authority = x509.load_pem_x509_certificate(self._files.ca.read_bytes())
            leaf.verify_directly_issued_by(authority)
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
            raise FormatError(f"certificate refused: {error or type(error).__name__}") from error
        if key.public_key() != leaf.public_key():
            raise FormatError("certificate refused: the key does not belong to the certificate")
        found = names.get_values_for_type(x509.DNSName)
        if self._name not in found:
            raise FormatError(f"certificate refused: it is for {found}, expected {self._name}")
