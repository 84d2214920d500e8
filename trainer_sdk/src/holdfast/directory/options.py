"""Options of a DirectoryService, and their encoding as an argument of the persister."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import Policy

UPLOAD_SECONDS = 600.0
"""Time that the last checkpoint may wait for its upload. A sidecar waits as long."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    root: Path
    slots_dir: Path
    layouts_dir: Path
    world_size: int
    own_ranks: range
    policy: Policy
    round: RestartRound | None = None
    """Restart round. None: choose a new round and reserve it (on rank 0)."""
    restore: CheckpointId | None = None
    """The checkpoint that rank 0 chose, or None if there is none."""
    choose_restore: bool = True
    """Whether to choose the restore point. If False, it is `restore`, which may be None."""
    rejected: tuple[CheckpointId, ...] = ()
    """Checkpoints that must not be chosen."""
    step: Step | None = None
    """The only step that may be chosen. None: the newest one is chosen."""
    run_id: str = "standalone"
    """Identity of the run, which is written into records and manifests. All ranks have the same."""
    device: int | None = None
    """Device number of the folder's file system when the run first opened it."""
    spare_slots_dir: Path | None = None
    """Directory for slots that do not fit into `slots_dir`."""
    read_only: bool = False
    """Whether the folder cannot be written, so that it serves restores only."""
    store: str | None = None
    """URL of the object store that the folder uploads to, or None."""
    store_keep_last: int = 3
    """Number of checkpoints to keep in the store."""
    writer: Path | None = None
    """File to claim until all that was staged is durable, see holdfast.directory.processes."""

    @property
    def leads(self) -> bool:
        """Whether the process serves rank 0, which commits and deletes checkpoints."""
        return 0 in self.own_ranks


def format_options(
    *,
    root: Path,
    slots_dir: Path,
    layouts_dir: Path,
    rank: Rank,
    world_size: int,
    policy: Policy,
    round_: RestartRound | None,
    restore: CheckpointId | None,
    rejected: Sequence[CheckpointId],
    step: Step | None,
    run_id: str,
    device: int | None,
    spare_slots_dir: Path | None,
    read_only: bool,
    store: str | None,
    store_keep_last: int,
    writer: Path,
) -> str:
    """Encode the options as the persister's argument, which `parse_options` decodes."""
    return json.dumps(
        {
            "root": str(root),
            "slotsDir": str(slots_dir),
            "layoutsDir": str(layouts_dir),
            "rank": rank,
            "worldSize": world_size,
            "intervalSteps": policy.interval_steps,
            "slots": policy.slots,
            "keepLast": policy.keep_last,
            "round": round_,
            "restore": None if restore is None else [restore.step, restore.round],
            "rejected": [[c.step, c.round] for c in rejected],
            "step": step,
            "runId": run_id,
            "device": device,
            "spareSlotsDir": None if spare_slots_dir is None else str(spare_slots_dir),
            "readOnly": read_only,
            "store": store,
            "storeKeepLast": store_keep_last,
            "writer": str(writer),
        }
    )


def parse_options(text: str) -> ServiceOptions:
    """Decode the result of `format_options` for a process that serves one rank."""
    value: dict[str, Any] = json.loads(text)
    rank = int(value["rank"])
    round_ = value["round"]
    return ServiceOptions(
        root=Path(value["root"]),
        slots_dir=Path(value["slotsDir"]),
        layouts_dir=Path(value["layoutsDir"]),
        world_size=int(value["worldSize"]),
        own_ranks=range(rank, rank + 1),
        policy=Policy(
            interval_steps=int(value["intervalSteps"]),
            slots=int(value["slots"]),
            keep_last=int(value["keepLast"]),
            peer_copies=0,
        ),
        round=None if round_ is None else RestartRound(round_),
        restore=_checkpoint(value["restore"]),
        choose_restore=round_ is None,
        rejected=tuple(c for c in map(_checkpoint, value["rejected"]) if c is not None),
        step=None if value["step"] is None else Step(value["step"]),
        run_id=str(value["runId"]),
        device=value["device"],
        spare_slots_dir=None if value["spareSlotsDir"] is None else Path(value["spareSlotsDir"]),
        read_only=bool(value["readOnly"]),
        store=value["store"],
        store_keep_last=int(value["storeKeepLast"]),
        writer=Path(value["writer"]),
    )


def _checkpoint(pair: list[int] | None) -> CheckpointId | None:
    return None if pair is None else CheckpointId(Step(pair[0]), RestartRound(pair[1]))
