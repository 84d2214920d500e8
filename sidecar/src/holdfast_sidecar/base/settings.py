"""What the sidecar is told (the pod contract) and how long it waits for what; nothing is read here
but the contract's environment.
"""

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
)

TERMINATION_LOG = "HOLDFAST_TERMINATION_LOG"
DEFAULT_TERMINATION_LOG = "/dev/termination-log"
PORTS_FILE = "ports.json"
"""In the node volume, where the trainer cannot replace it: the ports that this sidecar listens on."""
HOOKS_SOCKET = "hooks.sock"
"""In the node volume: what the pod's preStop hook connects to. The trainer cannot reach it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The contract of this pod and every time-out and bound, with its unit in the name."""

    contract: SidecarContract
    disk_threads: int = 2
    copy_threads: int = 2
    store_threads: int = 2
    end_seconds: float = 5.0
    """How long a seal waits for the launcher to end its ranks."""
    settle_seconds: float = 30.0
    """How long a seal waits for writes in flight; what is not written by then is not listed."""
    seal_seconds: float = 45.0
    """Likewise, with what waits in memory, from the first SEAL of a round on, however often it is
    repeated. With `end_seconds` less than the operator waits for a holder (HOLDERS_SECONDS)."""
    disk_quiet_seconds: float = 60.0
    """A write that takes no bytes for so long is reported: the disk hangs. A block is 16 MiB."""
    room_seconds: float = 5.0
    """How long a save waits on a full node volume for older steps to be deleted before it fails."""
    launcher_grace_seconds: float = 1.0
    """Between the launcher's end of file and its ranks being reported dead."""
    call_seconds: float = 15.0
    """Total time-out of one control request to another sidecar."""
    report_interval_seconds: float = 0.5
    heartbeat_seconds: float = 5.0
    """A report is sent this often without a change: it finds a coordinator that restarted."""
    backoff_first_seconds: float = 0.2
    backoff_last_seconds: float = 10.0
    restore_patience_seconds: float = 60.0
    """How long a rank's restore waits for a source that is busy or restarting before anybody hears
    of it: a new round would ask the same sources again, all ranks at once."""
    scrub_pass_seconds: float = 12 * 3600.0
    """Everything on the node tier is read again in this time, so that no shard waits for more than
    twice as long."""
    scrub_rest_seconds: float = 300.0
    """Between the start, or the end of a pass, and the next one at the earliest."""
    no_commit_intervals: int = 3
    """Intervals of saves without a commit after which the status of the job reports it."""
    no_commit_seconds: float = 60.0
    """It does so after this time at the earliest: a disk may be slower than many short intervals."""
    finish_give_up_seconds: float = 600.0
    """How long a finished job waits for uploads before it gives them up with a Failure."""
    release_seconds: float = 20.0
    """How long the coordinator's own pod stays up to release the others."""
    flush_seconds: float = 25.0
    """Bound of pre-stop and of the flush after SIGTERM."""

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
        """What was staged and is not durable yet: lets a restarted sidecar finish it."""
        return self.shared / "staged"

    @property
    def node_dir(self) -> Path:
        return Path(self.contract.node_dir)


def termination_log() -> Path:
    """Where a probe pod leaves its answer for the kubelet."""
    return Path(os.environ.get(TERMINATION_LOG, DEFAULT_TERMINATION_LOG))


def shared_dir() -> Path:
    """For the startup probe, which needs no more of the contract than the socket's folder."""
    return Path(os.environ.get("HOLDFAST_SHARED_DIR", SHARED_DIR))


def node_dir() -> Path:
    """For the preStop hook, which needs no more of the contract than this folder."""
    return Path(os.environ.get("HOLDFAST_NODE_DIR", NODE_DIR))


def inherited() -> dict[str, str]:
    """This process's environment, for a child (testing)."""
    return dict(os.environ)


def store_environment() -> tuple[str, str]:
    """(StoreConfig as JSON, folder of the keys) for a pod that only probes a store."""
    return os.environ.get("HOLDFAST_STORE", ""), os.environ.get("HOLDFAST_STORE_DIR", "")
