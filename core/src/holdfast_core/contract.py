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
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, Self

from holdfast_core.errors import ConfigError
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step, Worker

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
"""accessKey, secretKey and optionally sessionToken and ca.crt, mounted from the store's Secrets."""

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


MAX_DRILL_RANKS = 4096
"""Largest number of ranks for which a drill assembles the state. Each rank takes at least one request."""


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


@dataclass(frozen=True, slots=True)
class DrillContract:
    """Which checkpoint a drill reads, passed as JSON in one variable."""

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

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the variable. Raises ConfigError."""
        try:
            data = json.loads(text)
            contract = cls(**data)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"HOLDFAST_DRILL is not valid: {error}") from error
        for name, value in asdict(contract).items():
            expected = str if name in ("namespace", "job_uid", "manifest") else int
            is_optional = name not in ("namespace", "job_uid")
            if not (value is None and is_optional) and type(value) is not expected:
                raise ConfigError(
                    f"HOLDFAST_DRILL: {name} is {value!r}, expected {expected.__name__}"
                )
        return contract


@dataclass(frozen=True, slots=True)
class DeleteContract:
    """Which checkpoints of a job are deleted in the store, passed as JSON in one variable."""

    namespace: str
    """Namespace of the job, as in the keys of the objects."""
    job_uid: JobUid
    checkpoints: tuple[CheckpointId, ...] = ()
    """Checkpoints that are deleted. Absent ones are ignored."""
    keep: tuple[CheckpointId, ...] | None = None
    """If given, all other checkpoints of the job that have a manifest are deleted, too."""
    ended: bool = False
    """No process of the job writes any more: objects that no checkpoint needs are deleted as well."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the variable. Raises ConfigError."""
        try:
            data = json.loads(text)
            namespace, uid = data.pop("namespace"), data.pop("job_uid")
            listed, keep, ended = data.pop("checkpoints"), data.pop("keep"), data.pop("ended")
            if (
                data
                or not all(isinstance(v, str) for v in (namespace, uid))
                or type(ended) is not bool
            ):
                raise ValueError(f"found {text[:200]}")
            kept = None if keep is None else tuple(map(_checkpoint_id, keep))
            return cls(namespace, JobUid(uid), tuple(map(_checkpoint_id, listed)), kept, ended)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"HOLDFAST_DELETE is not valid: {error}") from error


def _checkpoint_id(data: Mapping[str, object]) -> CheckpointId:
    """Parse step and round. A wrong one would delete another checkpoint."""
    step, round_ = data["step"], data["round"]
    if type(step) is not int or type(round_) is not int or len(data) != 2:
        raise ValueError(f"expected step and round, found {data}")
    return CheckpointId(Step(step), RestartRound(round_))


@dataclass(frozen=True, slots=True)
class ListContract:
    """Which checkpoints a list of the store has, passed as JSON in one variable."""

    namespace: str
    """Namespace of the jobs, as in the keys of the objects."""
    job: str | None = None
    """Name or uid of a job. None: every job of the namespace."""
    request: str = ""
    """What tells this request from others, so that the one who asks finds its pod."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the variable. Raises ConfigError."""
        try:
            contract = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"HOLDFAST_LIST is not valid: {error}") from error
        texts = (contract.namespace, contract.job or "", contract.request)
        if any(type(text) is not str for text in texts):
            raise ConfigError("HOLDFAST_LIST: namespace, job and request must be texts")
        return contract


@dataclass(frozen=True, slots=True)
class UsageContract:
    """What a pod that lists a store may delete, passed as JSON in one variable."""

    sweep_after_seconds: int | None = None
    """Age from which orphans are deleted. None: nothing is deleted."""
    running: tuple[JobUid, ...] = ()
    """Jobs with a coordinator, which sweeps what is theirs."""
    ended: tuple[JobUid, ...] = ()
    """Jobs that upload nothing more."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the variable; "" is the default. Raises ConfigError."""
        try:
            data = {"sweep_after_seconds": None, **json.loads(text or "{}")}
            after = data.pop("sweep_after_seconds")
            uids = {name: tuple(map(JobUid, found)) for name, found in data.items()}
            contract = cls(after, **uids)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"HOLDFAST_USAGE is not valid: {error}") from error
        if after is not None and (type(after) is not int or after < MIN_GRACE_SECONDS):
            raise ConfigError(
                f"HOLDFAST_USAGE: sweep_after_seconds is {after!r}, expected an integer of at least "
                f"{MIN_GRACE_SECONDS}: an upload that is just ending may be as old"
            )
        return contract


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
        return cls(**_read(cls, source))


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
        return cls(**_read(cls, os.environ if env is None else env))

    def store_config(self) -> StoreConfig | None:
        return StoreConfig.from_json(self.store) if self.store else None


_INT_FIELDS = frozenset(
    {
        "worker",
        "birth_round",
        "procs_per_worker",
        "slots",
        "stop_seconds",
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
        try:
            values[field.name] = int(raw) if field.name in _INT_FIELDS else raw
        except ValueError as error:
            raise ConfigError(f"{name}={raw!r}: expected a whole number") from error
    return values
