"""Exports a checkpoint to a folder or a file of another tool."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.convert.dcp_files import write_dcp
from holdfast.convert.output import complete_file, complete_folder
from holdfast.convert.safetensors_files import write_model
from holdfast.convert.selection import entry_of
from holdfast.convert.torch_file import write_torch
from holdfast.reading.checkpoint import SavedCheckpoint
from holdfast.reading.opening import open_checkpoints
from holdfast_core.errors import ConfigError
from holdfast_core.node.files import disk_errors

Format = Literal["hf", "dcp", "torch"]
DEFAULT_ENTRY = "model"
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json"
)  # fmt: skip
"""Endings of files with weights, or with the names of such files."""


@dataclass(frozen=True, slots=True)
class Export:
    """What to export, and where to."""

    source: str
    """Folder of checkpoints: a path or a URL."""
    format: Format
    target: Path
    step: int | None = None
    """None: the checkpoint that a restore would choose."""
    entry: str | None = None
    """Entry of the state. None: "model" for hf, the whole state of rank 0 for the other formats."""
    dtype: str | None = None
    """Type to convert floating-point tensors to. None: as saved."""
    config_from: Path | None = None
    """Folder with config.json, tokenizer and other files to copy, for hf."""


def export(wanted: Export) -> int:
    """Write the export and return the step. The output appears completely or not at all.

    Raises ConfigError for a target that exists, NotFoundError, CorruptionError, and errors of the disk.
    """
    if wanted.config_from is not None:
        if wanted.format != "hf":
            raise ConfigError(f"--config-from: it has no effect with --format {wanted.format}")
        if not (wanted.config_from / "config.json").is_file():
            raise ConfigError(f"--config-from {wanted.config_from}: expected a config.json in it")
    with open_checkpoints(wanted.source) as folder, folder.at(wanted.step) as saved:
        if wanted.format == "hf":
            tensors = entry_of(saved, wanted.entry or DEFAULT_ENTRY, wanted.dtype)
            with complete_folder(wanted.target) as partial:
                write_model(partial, tensors)
                if wanted.config_from is not None:
                    _copy_config(wanted.config_from, partial)
        elif wanted.format == "dcp":
            state = _state(saved, wanted.entry)
            with complete_folder(wanted.target) as partial:
                write_dcp(partial, state, wanted.dtype)
        else:
            state = _state(saved, wanted.entry)
            with complete_file(wanted.target) as path:
                write_torch(path, state, wanted.dtype)
        return saved.step


def _state(saved: SavedCheckpoint, entry: str | None) -> object:
    """Return the nested state of rank 0, or one entry of it."""
    state = saved.objects()
    if entry is None:
        return state
    if entry not in state:
        raise ConfigError(
            f"step {saved.step} has no entry {entry!r}: choose one of {', '.join(sorted(state))}"
        )
    return state[entry]


def _copy_config(source: Path, target: Path) -> None:
    with disk_errors(f"copying the configuration from {source}"):
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, target / path.name)
