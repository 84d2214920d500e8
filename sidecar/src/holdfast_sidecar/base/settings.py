"""Settings of the sidecar: the pod contract, time-outs and bounds. The environment is read here only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from holdfast_core.contract import (
    LAYOUTS_DIR,
    NODE_DIR,
    SHARED_DIR,
    SLOTS_DIR,
    SOCKET_NAME,
    SidecarContract,
    StoreVerb,
)

TERMINATION_LOG = "HOLDFAST_TERMINATION_LOG"
DEFAULT_TERMINATION_LOG = "/dev/termination-log"
PORTS_FILE = "ports.json"
"""File with the ports that this sidecar listens on. It is in the node volume, which the trainer cannot
write to."""
HOOKS_SOCKET = "hooks.sock"
"""Socket that the pod's preStop hook connects to. It is in the node volume, which the trainer cannot
access."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The contract of this pod, and all time-outs and bounds with their units in the names."""

    contract: SidecarContract
    disk_threads: int = 2
    fetch_threads: int = 2
    store_threads: int = 2
    end_seconds: float = 5.0
    """How long a seal waits for the launcher to end its ranks."""
    settle_seconds: float = 30.0
    """How long a seal waits for writes under way, from the first SEAL of the round on. The inventory does
    not list shards that are not written by then."""
    seal_seconds: float = 45.0
    """How long a seal waits for writes under way and for held slots together, from the first SEAL of the
    round on. Repeated SEALs do not extend it. Together with `end_seconds` it must be less than the time
    that the operator waits for a holder (HOLDERS_SECONDS, 60 s)."""
    disk_quiet_seconds: float = 60.0
    """A write without progress for this long is reported as a hanging disk. A block is 16 MiB."""
    room_seconds: float = 5.0
    """How long a save waits on a full node volume for older steps to be deleted before it fails."""
    launcher_grace_seconds: float = 1.0
    """Time for the launcher to reconnect before its ranks are reported dead."""
    call_seconds: float = 15.0
    """Total time-out of one control request to another sidecar."""
    report_interval_seconds: float = 0.5
    """Minimum time between two reports, unless a rank has died."""
    heartbeat_seconds: float = 5.0
    """Time after which a report is sent without a change, to detect a coordinator that restarted."""
    backoff_first_seconds: float = 0.2
    backoff_last_seconds: float = 10.0
    restore_patience_seconds: float = 60.0
    """How long a restore waits for a source that is busy or restarting before it is reported. A report may
    cause a new round, in which all ranks would ask the same sources again."""
    scrub_pass_seconds: float = 12 * 3600.0
    """Time in which a scrub pass reads the whole node tier. Each shard is therefore read again within
    twice this time."""
    scrub_rest_seconds: float = 300.0
    """Minimum time before the first scrub pass and between two passes. Also the period in which the fetch
    of quarantined data is retried between passes."""
    no_commit_intervals: int = 3
    """Number of save intervals without a commit after which the job's status reports it."""
    no_commit_seconds: float = 60.0
    """Minimum time without a commit before it is reported, since a disk may be slower than many short
    intervals."""
    finish_give_up_seconds: float = 600.0
    """How long a finished job waits for its uploads. After that it gives them up and reports a Failure."""
    release_seconds: float = 20.0
    """How long the coordinator waits for the other members to acknowledge that they are released, before
    it releases its own pod."""
    flush_seconds: float = 25.0
    """Bound of the flush after SIGTERM. The preStop hook has its own bound (`pre-stop --timeout`)."""

    @classmethod
    def from_env(cls) -> Self:
        return cls(SidecarContract.from_env())

    @property
    def shared(self) -> Path:
        return Path(self.contract.shared_dir)

    @property
    def socket_path(self) -> Path:
        return self.shared / SOCKET_NAME

    @property
    def slots_dir(self) -> Path:
        return self.shared / SLOTS_DIR

    @property
    def layouts_dir(self) -> Path:
        return self.shared / LAYOUTS_DIR

    @property
    def staged_dir(self) -> Path:
        """Folder of the notes of staged slots, by which a restarted sidecar finishes their saves."""
        return self.shared / "staged"

    @property
    def node_dir(self) -> Path:
        return Path(self.contract.node_dir)


def termination_log() -> Path:
    """Return the file in which a pod that probes a store or drills writes its result for the kubelet."""
    return Path(os.environ.get(TERMINATION_LOG, DEFAULT_TERMINATION_LOG))


def shared_dir() -> Path:
    """Return the folder of the sidecar's socket, for the startup probe, which needs no other setting."""
    return Path(os.environ.get("HOLDFAST_SHARED_DIR", SHARED_DIR))


def node_dir() -> Path:
    """Return the folder of the node tier, for the preStop hook, which needs no other setting."""
    return Path(os.environ.get("HOLDFAST_NODE_DIR", NODE_DIR))


def request_environment(verb: StoreVerb) -> str:
    """Return the request, as JSON, of a pod that runs one command on a store."""
    return os.environ.get(verb.variable, "")


def store_environment() -> tuple[str, str]:
    """Return the StoreConfig as JSON and the folder of the keys, for a pod that only uses a store."""
    return os.environ.get("HOLDFAST_STORE", ""), os.environ.get("HOLDFAST_STORE_DIR", "")
