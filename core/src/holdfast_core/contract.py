"""Environment, paths and ports that the operator, which renders pods, agrees on with their containers.

`PodContract` is the environment of the trainer container, `SidecarContract` that of the sidecar. Both
begin with the fields of `WorkerContract`. The operator renders them with `to_env`; the container parses them
with `from_env`. The sidecar's settings also read single variables for processes that need no more: probes,
hooks and pods that probe a store.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from holdfast_core.errors import ConfigError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Worker

T = TypeVar("T")

PREFIX = "HOLDFAST_"

SHARED_DIR = "/holdfast/shared"
"""tmpfs volume that trainer and sidecar share. It holds the socket, the slots, the rank layouts and
the launcher's round file."""

NODE_DIR = "/holdfast/node"
"""Volume of the node tier, mode 0700. Only the sidecar mounts it."""

NODE_VOLUME = "holdfast-node"
"""Name of that volume in the pod."""

CERTS_VOLUME = "holdfast-certs"
"""Name of the volume with the pod's certificate."""

CERTS_DIR = "/holdfast/certs"
"""ca.crt, tls.crt and tls.key of this pod, mounted as single items from the Secret of its birth round."""

STORE_DIR = "/holdfast/store"
"""The store's keys and optionally ca.crt, mounted from its Secrets: accessKey, secretKey and optionally
sessionToken for S3, accountKey or sasToken for Azure, serviceAccount.json for Google."""

WEB_TOKEN_FILE = "webToken"
"""File in STORE_DIR with the service account's token that the store's web identity accepts."""

SOCKET_NAME = "holdfast.sock"
SLOTS_DIR = "slots"
LAYOUTS_DIR = "layouts"
LAUNCHER_ROUND_FILE = "launcher-round.json"

DEFAULT_MTBF_SECONDS = 6 * 3600.0
"""Mean time between failures that an automatic interval between saves expects if the user names none."""

CONTROL_PORT = 7070
"""HTTPS with mutual TLS, for messages from the operator and from other sidecars."""
BULK_PORT = 7071
"""Framed shard transfers between sidecars, with mutual TLS."""
METRICS_PORT = 7072
"""Plain HTTP for /healthz and /metrics, because kubelet and Prometheus have no client certificate."""

TRAINER_CONTAINER = "trainer"
SIDECAR_CONTAINER = "holdfast-sidecar"


_ENDPOINT = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([1-9][0-9]{0,4}))?")


def is_endpoint(text: object) -> bool:
    """Return whether `text` is `host`, `host:port` or `[v6]:port`, or a `file://` directory."""
    if not isinstance(text, str):
        return False
    if text.startswith("file://"):
        return True
    match = _ENDPOINT.fullmatch(text)
    return match is not None and int(match.group(2) or 1) < 65536


def parse_endpoint(endpoint: str, advice: str) -> tuple[str, bool]:
    """Return host and port of the server of a store, and whether it is reached by TLS.

    Args:
        endpoint: URL of the server without a path.
        advice: End of the message for any other text: what to correct.

    Raises:
        ConfigError: It is no such URL.
    """
    parts = urlsplit(endpoint)
    if (
        parts.scheme not in ("http", "https")
        or parts.path.strip("/")
        or not is_endpoint(parts.netloc)
    ):
        raise ConfigError(
            f"the endpoint of the store is {endpoint!r}: expected https://host or http://host:port{advice}"
        )
    return parts.netloc, parts.scheme == "https"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Configuration of the object tier without its credentials, passed as JSON in one variable."""

    endpoint: str
    """`host` or `host:port` without a scheme, or `file://` and a directory. See `is_endpoint`."""
    secure: bool
    bucket: str
    prefix: str
    region: str
    part_size_mib: int = 32
    max_concurrency: int = 4
    conditional_put: bool = True
    """False if the probe found that the server ignores If-None-Match."""
    account: str = ""
    """Account of Azure Blob Storage, in which `bucket` is a container. "" for any other store."""
    client_id: str = ""
    """Client of the web identity by which the store is used. "": it is used by keys."""
    tenant_id: str = ""
    authority: str = ""
    """Issuer of the web identity's tokens. "" for Azure's public cloud."""
    google: Literal["", "key", "identity"] = ""
    """How a bucket of Google Cloud Storage is used: by a key file, or by the identity for which the metadata
    server gives tokens. "" for any other store."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        config = _parsed(cls, text, "store configuration is not valid")
        if not is_endpoint(config.endpoint):
            kind = "azure" if config.account else "google" if config.google else "s3"
            field = f"{kind}.endpoint"
            raise ConfigError(
                f"store configuration: {field} is {config.endpoint!r}, expected host:port with "
                f"a port of 1 to 65535, without scheme, user and path: correct spec.{field} of "
                "the CheckpointStore"
            )
        return config


MAX_DRILL_RANKS = 4096
"""Largest number of ranks for which a drill assembles the state. Each rank takes at least one request."""


def drill_world_size(saved: int) -> int:
    """Return the number of ranks for which a drill assembles the state of `saved` ranks by default."""
    return 2 if saved == 1 else min(saved // 2, MAX_DRILL_RANKS)


class DrillExit(IntEnum):
    """Exit codes of the programs that drill. 2 is a wrong command line."""

    INTACT = 0
    NOT_READ = 1
    """Nothing is known: the store is down, or it has no such checkpoint."""
    DAMAGED = 3
    NOT_RESTORABLE = 4


MAX_LISTED_JOBS = 24
MAX_LISTED_NAMESPACES = 12
"""Jobs and namespaces in the report of a listing of a store, which is a termination message."""
MIN_GRACE_SECONDS = 3600
"""Shortest age of an orphan that is deleted without a coordinator's knowledge (store.rules.QUIET)."""


class StoreVerb(StrEnum):
    """What a short-lived pod with the keys of a store does (operator/model/command_pods.py)."""

    PROBE = "probe"
    DELETE = "delete"
    DRILL = "drill"
    USAGE = "usage"
    LIST = "list"

    @property
    def command(self) -> str:
        """Return the command of the program `holdfast-sidecar`."""
        return f"{self}-store" if self in (StoreVerb.PROBE, StoreVerb.LIST) else str(self)

    @property
    def variable(self) -> str:
        """Return the variable with the request of the pod, a StoreRequest as JSON."""
        return f"{PREFIX}{self.upper()}"


class StoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the pod of one verb is to do in the store, passed as JSON in one variable."""

    verb: ClassVar[StoreVerb]

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the variable; "" has no field. Raises ConfigError."""
        return _parsed(cls, text or "{}", f"{cls.verb.variable} is not valid")


def _parsed(kind: type[T], text: str, problem: str) -> T:
    """Parse JSON into a value of this type. Raises ConfigError, whose text begins with the problem."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{problem}: {error}") from error


class DrillContract(StoreRequest, frozen=True):
    """Which checkpoint a drill reads."""

    verb = StoreVerb.DRILL
    namespace: str
    """Namespace of the job, as in the keys of the objects."""
    job_uid: JobUid
    step: int | None = None
    """None: the newest step, by round and step."""
    round: int | None = None
    """None: the newest round that has the step."""
    manifest: str | None = None
    """Digest of the manifest, if it is known. With step and round: a missing manifest is damage."""
    world_size: int | None = None
    """Number of ranks for which the state is assembled. None: it is not assembled."""


class DeleteContract(StoreRequest, frozen=True):
    """Which checkpoints of a job are deleted in the store."""

    verb = StoreVerb.DELETE
    namespace: str
    """Namespace of the job, as in the keys of the objects."""
    job_uid: JobUid
    checkpoints: tuple[CheckpointId, ...] = ()
    """Checkpoints that are deleted. Absent ones are ignored."""
    keep: tuple[CheckpointId, ...] | None = None
    """If given, all other checkpoints of the job that have a manifest are deleted, too."""
    ended: bool = False
    """No process of the job writes any more: objects that no checkpoint needs are deleted as well."""


class ListContract(StoreRequest, frozen=True):
    """Which checkpoints a list of the store has."""

    verb = StoreVerb.LIST
    namespace: str
    """Namespace of the jobs, as in the keys of the objects."""
    job: str | None = None
    """Name or uid of a job. None: every job of the namespace."""
    request: str = ""
    """What tells this request from others, so that the one who asks finds its pod."""
    asked_at: str = ""
    """When it was made (UTC, RFC 3339). The one who asks may be killed before it takes the request back."""


class UsageContract(StoreRequest, frozen=True):
    """What a pod that lists a store may delete."""

    verb = StoreVerb.USAGE
    sweep_after_seconds: Annotated[int, Meta(ge=MIN_GRACE_SECONDS)] | None = None
    """Age from which orphans are deleted. None: nothing is deleted. An upload that is just ending may be as
    old as the bound."""
    running: tuple[JobUid, ...] = ()
    """Jobs with a coordinator, which sweeps what is theirs."""
    ended: tuple[JobUid, ...] = ()
    """Jobs that upload nothing more."""


@dataclass(frozen=True, slots=True)
class WorkerContract:
    """Environment that both containers of a worker have."""

    job_uid: JobUid
    job: str
    namespace: str
    worker: Worker
    birth_round: RestartRound
    procs_per_worker: int
    shared_dir: str

    def to_env(self) -> dict[str, str]:
        return {f"{PREFIX}{name.upper()}": str(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class PodContract(WorkerContract):
    """Environment of the trainer container."""

    slots: int = 2
    stop_seconds: int = 10
    """Time from SIGTERM after which the launcher kills its ranks, if its command line names none."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self | None:
        """Return the contract, or None outside of a pod, where HOLDFAST_JOB_UID is not set.

        Raises ConfigError if HOLDFAST_JOB_UID is set and another variable is missing or wrong.
        """
        source = os.environ if env is None else env
        if f"{PREFIX}JOB_UID" not in source:
            return None
        return _read(cls, source)


@dataclass(frozen=True, slots=True)
class SidecarContract(WorkerContract):
    """Environment of the sidecar container."""

    pod_name: str
    pod_ip: str
    node_dir: str
    node_capacity_bytes: int
    """Size of the node volume, of which the sidecar uses at most 85 %. 0 means the size of the file
    system."""
    certs_dir: str
    store_dir: str
    store: str
    """StoreConfig as JSON, or "" if the job has no object tier."""
    control_port: int = CONTROL_PORT
    bulk_port: int = BULK_PORT
    metrics_port: int = METRICS_PORT

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        return _read(cls, os.environ if env is None else env)

    def store_config(self) -> StoreConfig | None:
        return StoreConfig.from_json(self.store) if self.store else None


def _read(cls: type[T], env: Mapping[str, str]) -> T:
    """Return the contract that these variables have. Raises ConfigError."""
    kind: Any = cls
    variables = {field: f"{PREFIX}{field.name.upper()}" for field in fields(kind)}
    for field, name in variables.items():
        if name not in env and field.default is MISSING:
            raise ConfigError(
                f"environment variable {name} is not set: expected by {cls.__name__}; "
                "the operator sets it in the pods that it renders"
            )
    given = {field.name: env[name] for field, name in variables.items() if name in env}
    try:
        return msgspec.convert(given, cls, strict=False)
    except msgspec.ValidationError as error:
        text, _, at = str(error).rpartition(" - at `$.")
        name = f"{PREFIX}{at.rstrip('`').upper()}"
        raise ConfigError(f"{name}={env.get(name)!r}: {text}") from error
