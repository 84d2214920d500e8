"""Keys in the certificate Secret of a round. Names of objects are in holdfast_core.names."""

from __future__ import annotations


def certificate_items(pod: str) -> tuple[tuple[str, str], ...]:
    """Return pairs (key in the Secret, file name in contract.CERTS_DIR) that this pod mounts.

    They are the CA's certificate, and the certificate and key of the pod's leaf.
    """
    return (("ca.crt", "ca.crt"), (f"{pod}.crt", "tls.crt"), (f"{pod}.key", "tls.key"))
