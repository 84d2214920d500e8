"""Exports a checkpoint to a folder or a file of another tool.

The output appears completely or not at all. It is written to `<target>.holdfast-partial`, made durable, and
renamed. A later export to the same target removes what an interrupted one has left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.convert.safetensors_files import Progress, write_model
from holdfast.convert.selection import entry_of
from holdfast.convert.torch_files import write_dcp, write_torch
from holdfast.reading.checkpoint import SavedCheckpoint
from holdfast.reading.opening import open_checkpoints
from holdfast_core.errors import ConfigError, ForbiddenByStateError
from holdfast_core.node.files import disk_errors, fsync_directory

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


def export(wanted: Export, progress: Progress = lambda written, total: None) -> int:
    """Write the export and return the step. The output appears completely or not at all.

    `progress` hears of the parts of hf; the libraries of the other formats write at their end.

    Raises ConfigError for a target that exists, NotFoundError, CorruptionError, and errors of the disk.
    """
    if wanted.config_from is not None and wanted.format != "hf":
        raise ConfigError(f"--config-from: it has no effect with --format {wanted.format}")
    expect_config(wanted.config_from)
    with open_checkpoints(wanted.source) as folder, folder.at(wanted.step) as saved:
        if wanted.format == "hf":
            tensors = entry_of(saved, wanted.entry or DEFAULT_ENTRY, wanted.dtype)
            with complete_folder(wanted.target) as partial:
                write_model(partial, tensors, progress=progress)
                copy_config(wanted.config_from, partial)
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


def expect_config(source: Path | None) -> None:
    """Raise ConfigError if a folder for `copy_config` has no configuration."""
    if source is not None and not (source / "config.json").is_file():
        raise ConfigError(f"--config-from {source}: expected a config.json in it")


def copy_config(source: Path | None, target: Path) -> None:
    """Copy the configuration, the tokenizer and all other files without weights, if there is a source."""
    if source is None:
        return
    with disk_errors(f"copying the configuration from {source}"):
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, target / path.name)


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `target` if the body succeeds.

    Raises ConfigError if `target` exists and is not an empty directory that can be replaced, or if another
    process writes it.
    """
    _expect_free(target)
    with _partial(target) as partial:
        yield partial
        with disk_errors(f"making {partial} durable"):
            for path in partial.rglob("*"):
                _fsync(path)
            fsync_directory(partial)
            sys.audit("holdfast.export.before_rename")
            _expect_free(target)
            partial.rename(target)
            fsync_directory(target.parent)


@contextmanager
def complete_file(target: Path) -> Iterator[Path]:
    """Yield the path of a new file that becomes `target` if the body succeeds. See `complete_folder`."""
    if os.path.lexists(target):
        raise ForbiddenByStateError(f"{target} exists already: remove it or choose another output")
    with _partial(target) as partial:
        path = partial / target.name
        yield path
        with disk_errors(f"making {path} durable"):
            _fsync(path)
            sys.audit("holdfast.export.before_rename")
            os.link(path, target)  # which fails if the target exists now
            fsync_directory(target.parent)


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """Yield an empty, locked directory beside the target. Remove it at the end, unless it was renamed."""
    partial = target.with_name(f"{target.name}.holdfast-partial")
    with disk_errors(f"creating {partial}"):
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_own = _is_at(partial, descriptor)  # not if its owner has renamed or removed it
        except BlockingIOError:
            is_own = False
        if not is_own:
            raise ForbiddenByStateError(
                f"{target}: another process writes it ({partial} is locked)"
            )
        with disk_errors(f"emptying {partial}"):
            for path in partial.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        try:
            yield partial
        finally:
            if _is_at(partial, descriptor):
                shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` is the directory of the descriptor."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _expect_free(target: Path) -> None:
    # A rename at the end of a long export would fail.
    if target.is_symlink() or os.path.ismount(target):
        raise ForbiddenByStateError(
            f"{target} is a link or a mount point, which cannot be replaced: choose a folder below it"
        )
    try:
        is_free = not any(target.iterdir())
    except FileNotFoundError:
        is_free = True
    except NotADirectoryError:
        is_free = False
    if not is_free:
        raise ForbiddenByStateError(
            f"{target} exists already and is not an empty folder: remove it or choose another output"
        )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
