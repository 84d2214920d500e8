"""What a DirectoryService is told at its start, and how that travels to the process that runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast_core.ids import CheckpointId, Rank, RestartRound, Step
from holdfast_core.messages.schema import Policy


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    root: Path
    slots_dir: Path
    layouts_dir: Path
    world_size: int
    own_ranks: range
    policy: Policy
    round: RestartRound | None = None
    """None: choose a new one and record it (rank 0)."""
    restore: CheckpointId | None = None
    """The checkpoint that rank 0 chose."""
    choose_restore: bool = True
    """False: `restore` says it, also where it is None."""
    rejected: tuple[CheckpointId, ...] = ()
    run_id: str = "standalone"
    """Of the run that this process writes for; in its records and manifests. The same for all ranks."""
    device: int | None = None
    """Of the file system on which the run opened the folder first."""
    spare_slots_dir: Path | None = None
    """Where slots lie for which `slots_dir` has no room."""
    read_only: bool = False
    """The folder cannot be written: restore from it only."""
    writer: Path | None = None
    """To be claimed until all is written: see holdfast.directory.processes."""


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
    run_id: str,
    device: int | None,
    spare_slots_dir: Path | None,
    read_only: bool,
    writer: Path,
) -> str:
    """The persister's one argument: what `parse_options` reads back."""
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
            "runId": run_id,
            "device": device,
            "spareSlotsDir": None if spare_slots_dir is None else str(spare_slots_dir),
            "readOnly": read_only,
            "writer": str(writer),
        }
    )


def parse_options(text: str) -> ServiceOptions:
    """What `format_options` wrote, for the process that serves one rank."""
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
        run_id=str(value["runId"]),
        device=value["device"],
        spare_slots_dir=None if value["spareSlotsDir"] is None else Path(value["spareSlotsDir"]),
        read_only=bool(value["readOnly"]),
        writer=Path(value["writer"]),
    )


def _checkpoint(pair: list[int] | None) -> CheckpointId | None:
    return None if pair is None else CheckpointId(Step(pair[0]), RestartRound(pair[1]))
