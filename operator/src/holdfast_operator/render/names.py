"""Keys of the certificate Secret of a round. Names of objects are in holdfast_core.names."""

from __future__ import annotations


def certificate_items(pod: str) -> tuple[tuple[str, str], ...]:
    """(key in the Secret, file in contract.CERTS_DIR) that this pod mounts: its leaf and the CA."""
    return (("ca.crt", "ca.crt"), (f"{pod}.crt", "tls.crt"), (f"{pod}.key", "tls.key"))
