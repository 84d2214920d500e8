"""Options of a DirectoryService, and their encoding as an argument of the persister."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast_core.ids import CheckpointId, RestartRound, Step
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


def format_options(options: ServiceOptions) -> str:
    """Encode the options as the persister's argument, which `parse_options` decodes."""
    # The module `json` accepts paths that are not valid UTF-8, and msgspec's encoder does not.
    return json.dumps(msgspec.to_builtins(options, enc_hook=_plain))


def parse_options(text: str) -> ServiceOptions:
    """Decode the result of `format_options`."""
    return msgspec.convert(json.loads(text), ServiceOptions, dec_hook=_typed)


def _plain(value: Any) -> Any:
    return [value.start, value.stop] if isinstance(value, range) else str(value)


def _typed(kind: type, value: Any) -> Any:
    return range(*value) if kind is range else kind(value)
