"""Deterministic names of everything that a job owns. The same job and round give the same name, so
a create that was repeated, or made by two operators, meets itself."""

from __future__ import annotations

from holdfast_core.ids import CheckpointId, RestartRound, Worker


def pod_name(job: str, worker: Worker, birth_round: RestartRound) -> str:
    return f"{job}-{worker}-r{birth_round}"


def service_name(job: str) -> str:
    """The headless Service of the gang, also the pods' subdomain."""
    return f"{job}-gang"


def certificates_secret_name(job: str, birth_round: RestartRound) -> str:
    """Secret with the leaves of the pods that are born in that round."""
    return f"{job}-certs-r{birth_round}"


def checkpoint_name(job: str, checkpoint: CheckpointId) -> str:
    return f"{job}-{checkpoint}"


def certificate_items(pod: str) -> tuple[tuple[str, str], ...]:
    """(key in the Secret, file in contract.CERTS_DIR) that this pod mounts: its leaf and the CA."""
    return (("ca.crt", "ca.crt"), (f"{pod}.crt", "tls.crt"), (f"{pod}.key", "tls.key"))
