"""The contract between the operator, which renders pods, and what runs in them: environment, paths, ports.

One dataclass for the trainer container, one for the sidecar; each has `to_env` and `from_env` and a
round-trip test. Nothing else reads these variables.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from holdfast_core.errors import ConfigError
from holdfast_core.ids import JobUid, RestartRound, Worker

PREFIX = "HOLDFAST_"

SHARED_DIR = "/holdfast/shared"
"""tmpfs volume of trainer and sidecar: the socket, the slots, the launcher's round file."""

NODE_DIR = "/holdfast/node"
"""The node tier: the sidecar's alone, mode 0700."""

CERTS_DIR = "/holdfast/certs"
"""ca.crt, tls.crt, tls.key of this pod (mounted from the round's Secret by items)."""

STORE_DIR = "/holdfast/store"
"""accessKey, secretKey and optionally sessionToken, ca.crt: mounted from the store's Secret."""

SOCKET_NAME = "holdfast.sock"
SLOTS_DIR = "slots"
LAYOUTS_DIR = "layouts"
LAUNCHER_ROUND_FILE = "launcher-round.json"

CONTROL_PORT = 7070
"""HTTPS with mutual TLS: operator -> sidecar and sidecar -> sidecar words."""
BULK_PORT = 7071
"""Framed bytes between sidecars (mutual TLS)."""
METRICS_PORT = 7072
"""Plain HTTP: /healthz and /metrics (kubelet and Prometheus have no client certificate)."""

TRAINER_CONTAINER = "trainer"
SIDECAR_CONTAINER = "holdfast-sidecar"


def peer_dns_name(pod: str, job_uid: str) -> str:
    """The dNSName in a pod's certificate, and the server name that its callers verify."""
    return f"{pod}.{job_uid}.holdfast"


def operator_dns_name(job_uid: str) -> str:
    """The dNSName in the operator's client certificate for one job."""
    return f"operator.{job_uid}.holdfast"


_ENDPOINT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([1-9][0-9]{0,4}))?")


def is_endpoint(text: object) -> bool:
    """Whether it is `host`, `host:port` or `[v6]:port`, or names the directory of a folder's store."""
    if not isinstance(text, str):
        return False
    if text.startswith("file://"):
        return True
    match = _ENDPOINT.fullmatch(text)
    return match is not None and int(match.group(2) or 1) < 65536


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where the object tier lives; everything but the keys. Travels as JSON in one variable."""

    endpoint: str
    """host:port, without a scheme."""
    secure: bool
    bucket: str
    prefix: str
    region: str
    part_size_mib: int = 32
    max_concurrency: int = 4
    conditional_put: bool = True
    """False where the probe saw that the server ignores If-None-Match."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            data = json.loads(text)
            known = {f.name for f in fields(cls)}
            config = cls(**{k: v for k, v in data.items() if k in known})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"store configuration is not valid: {error}") from error
        if not is_endpoint(config.endpoint):
            raise ConfigError(
                f"store configuration: s3.endpoint is {config.endpoint!r}, expected host:port with "
                "a port of 1 to 65535, without scheme, user and path: correct spec.s3.endpoint of "
                "the CheckpointStore"
            )
        return config


@dataclass(frozen=True, slots=True)
class PodContract:
    """Environment of the trainer container."""

    job_uid: JobUid
    job: str
    namespace: str
    worker: Worker
    birth_round: RestartRound
    procs_per_worker: int
    shared_dir: str
    slots: int = 2

    def to_env(self) -> dict[str, str]:
        return {f"{PREFIX}{name.upper()}": str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self | None:
        """None outside of a pod (no HOLDFAST_JOB_UID); ConfigError if only a part is there."""
        source = os.environ if env is None else env
        if f"{PREFIX}JOB_UID" not in source:
            return None
        return cls(**_read(cls, source))


@dataclass(frozen=True, slots=True)
class SidecarContract:
    """Environment of the sidecar container."""

    job_uid: JobUid
    job: str
    namespace: str
    worker: Worker
    birth_round: RestartRound
    procs_per_worker: int
    shared_dir: str
    pod_name: str
    pod_ip: str
    node_dir: str
    node_capacity_bytes: int
    """sizeLimit of the node volume; the sidecar keeps to 85 % of it. 0: the file system's size."""
    certs_dir: str
    store_dir: str
    store: str
    """StoreConfig as JSON, or "" where the job has no object tier."""
    control_port: int = CONTROL_PORT
    bulk_port: int = BULK_PORT
    metrics_port: int = METRICS_PORT

    def to_env(self) -> dict[str, str]:
        return {f"{PREFIX}{name.upper()}": str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        return cls(**_read(cls, os.environ if env is None else env))

    def store_config(self) -> StoreConfig | None:
        return StoreConfig.from_json(self.store) if self.store else None


_INT_FIELDS = frozenset(
    {
        "worker",
        "birth_round",
        "procs_per_worker",
        "slots",
        "node_capacity_bytes",
        "control_port",
        "bulk_port",
        "metrics_port",
    }
)


def _read(cls: type[Any], env: Mapping[str, str]) -> dict[str, Any]:
    from dataclasses import MISSING

    values: dict[str, Any] = {}
    for field in fields(cls):
        name = f"{PREFIX}{field.name.upper()}"
        raw = env.get(name)
        if raw is None:
            if field.default is MISSING:
                raise ConfigError(
                    f"environment variable {name} is not set: expected by {cls.__name__}; "
                    "the operator sets it in the pods that it renders"
                )
            continue
        if field.name in _INT_FIELDS:
            try:
                values[field.name] = int(raw)
            except ValueError as error:
                raise ConfigError(f"{name}={raw!r}: expected a whole number") from error
        else:
            values[field.name] = raw
    return values
