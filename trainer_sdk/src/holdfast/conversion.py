"""The import of weights of another tool into a folder of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.base.options import Folder
from holdfast.checkpointer import Checkpointer
from holdfast.convert.exporting import DEFAULT_ENTRY, Format
from holdfast.convert.safetensors_files import read_model
from holdfast.convert.torch_files import read_dcp, read_torch
from holdfast_core.errors import ForbiddenByStateError, FormatError


@dataclass(frozen=True, slots=True)
class Import:
    """What to import, and where to."""

    source: Path
    format: Format
    folder: str
    """Folder of checkpoints: a path or a file URL."""
    entry: str = DEFAULT_ENTRY
    """Entry of the state that gets the tensors."""


def import_weights(wanted: Import) -> int:
    """Save the tensors as step 0 and return their number.

    The save needs one copy of the tensors in shared memory. After an interruption the folder has no
    checkpoint, and the import can be repeated.

    Raises ConfigError where the folder has checkpoints, and what the reader of the format raises.
    """
    with Checkpointer(
        Folder(wanted.folder, slots=1),
        interval_steps=0,
        on_save_error="raise",
    ) as ckpt:
        if found := ckpt.list():
            raise ForbiddenByStateError(
                f"{wanted.folder} has checkpoints already, the newest of step {found[-1].step}: import into "
                "a new folder"
            )
        tensors = _read(wanted)
        if not tensors:
            raise FormatError(f"{wanted.source} has no tensors")
        ckpt.save(0, {wanted.entry: dict(sorted(tensors.items()))}).wait()
        return len(tensors)


def _read(wanted: Import) -> dict[str, object]:
    if wanted.format == "hf":
        return read_model(wanted.source)
    if wanted.format == "dcp":
        return read_dcp(wanted.source, wanted.entry)
    return read_torch(wanted.source, wanted.entry)
