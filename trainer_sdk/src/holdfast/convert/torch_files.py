"""Reads and writes files of torch: checkpoints of torch.distributed.checkpoint (DCP), and torch.save.

This is the only module that writes a pickle. It works in one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.convert.selection import Exported
from holdfast.reading.checkpoint import LazyTensor
from holdfast_core.errors import ConfigError, CorruptionError, FormatError, HoldfastError, TierError
from holdfast_core.node.files import disk_error, disk_errors

_GLOBAL = re.compile(r"Unsupported global: GLOBAL (\S+)")


@contextmanager
def torch_errors(operation: str, otherwise: type[HoldfastError]) -> Iterator[None]:
    """Convert what torch raises in the context.

    DCP wraps each error, also Ctrl-C, in a CheckpointException, which is not an Exception. torch's writer of
    zip files raises a RuntimeError in the place of the OSError of a full disk.

    Args:
        operation: Names the operation and the path.
        otherwise: The error where no OSError and no HoldfastError is the cause.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:
        causes = _causes(error)
        for cause in causes:
            if isinstance(cause, HoldfastError | KeyboardInterrupt):
                raise cause from None
            if isinstance(cause, OSError):
                named = f" ({cause.filename})" if cause.filename else ""
                raise disk_error(cause, f"{operation}{named}") from error
        raise otherwise(f"{operation}: {type(causes[0]).__name__}: {causes[0]}") from error


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error that DCP has wrapped, or the error itself, and then the errors before it."""
    from torch.distributed.checkpoint.api import CheckpointException

    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in found:
        if isinstance(one, CheckpointException) and one.failures:
            one = next(iter(one.failures.values()))[0]
            continue
        found.append(one)
        one = one.__cause__ or one.__context__
    return found


def write_dcp(folder: Path, state: Any, dtype: str | None) -> None:
    """Write a nested state, whose tensors are read one at a time while they are written.

    Args:
        folder: An empty directory.
        state: Nested values with a LazyTensor in the place of each tensor.
        dtype: Type to convert floating-point tensors to, or None.
    """
    import torch
    from torch.distributed import checkpoint as untyped
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    dcp: Any = untyped  # its stubs do not export its names

    tensors: dict[int, Exported] = {}

    def placeholder(value: LazyTensor) -> Any:
        exported = Exported.of(value, dtype)
        empty = torch.empty(value.shape, dtype=exported.torch_dtype, device="meta")
        tensors[id(empty)] = exported
        kept.append(empty)
        return empty

    kept: list[Any] = []

    class Planner(DefaultSavePlanner):
        """Reads a tensor when the writer asks for it."""

        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            exported = tensors.get(id(found))
            return found if exported is None else exported.read()

    with torch_errors(f"writing {folder}", TierError):
        dcp.save(
            with_tensors(state, placeholder, lambda tensor: Exported.of(tensor, dtype).read()),
            # torch keeps all tensors of a file in memory until the file is written.
            storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=1),
            planner=Planner(),
            no_dist=True,
        )


def read_dcp(source: Path, entry: str) -> dict[str, Any]:
    """Return the tensors below `entry` of a DCP checkpoint, or all of them if none is below it.

    They are read into memory. DCP's metadata are a pickle, which this loads: read only checkpoints that you
    trust. Raises ConfigError where there is no DCP checkpoint, FormatError where it has no tensors,
    CorruptionError and TierError where it cannot be read.
    """
    import torch
    from torch.distributed import checkpoint as untyped
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    dcp: Any = untyped  # its stubs do not export its names

    if not (source / ".metadata").is_file():
        raise ConfigError(f"{source}: expected a DCP checkpoint, found no file .metadata in it")
    reader = dcp.FileSystemReader(source)
    with torch_errors(f"reading {source / '.metadata'}", CorruptionError):
        metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    prefix = f"{entry}."
    below = {name: value for name, value in tensors.items() if name.startswith(prefix)}
    wanted = below or tensors
    if not wanted:
        raise FormatError(f"{source}: the DCP checkpoint has no tensors")
    with torch_errors(f"reading {source}", CorruptionError):
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): value for name, value in wanted.items()}


def with_tensors(value: Any, convert: Any, convert_in_tuple: Any) -> Any:
    """Return nested values with a converted tensor in the place of each LazyTensor, in plain containers.

    Subclasses of dict become dicts, and numpy scalars become numbers, so that readers that unpickle nothing
    but plain values can load them.

    Args:
        value: Nested values.
        convert: Called with a LazyTensor that is in dicts and lists only.
        convert_in_tuple: Called with a LazyTensor below a tuple, which DCP saves as one value.
    """
    import numpy as np

    if isinstance(value, LazyTensor):
        return convert(value)
    if isinstance(value, dict):
        items = value.items()
        return {key: with_tensors(item, convert, convert_in_tuple) for key, item in items}
    if isinstance(value, list):
        return [with_tensors(item, convert, convert_in_tuple) for item in value]
    if isinstance(value, tuple):
        inner = convert_in_tuple
        return tuple(with_tensors(item, inner, inner) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    return value


def write_torch(path: Path, state: Any, dtype: str | None) -> None:
    """Write nested values with torch.save. All tensors are in memory at the same time.

    `torch.load(path, weights_only=True)` reads the file.

    Args:
        path: A new file.
        state: Nested values with a LazyTensor in the place of each tensor.
        dtype: Type to convert floating-point tensors to, or None.
    """
    import torch

    def read(tensor: LazyTensor) -> Any:
        return Exported.of(tensor, dtype).read()

    whole = with_tensors(state, read, read)
    # To a path, torch writes without Python, and the reason of an error would be lost.
    with torch_errors(f"writing {path}", TierError), open(path, "xb") as file:
        torch.save(whole, file)


def read_torch(source: Path, entry: str) -> dict[str, Any]:
    """Return the tensors of a file of torch.save: a dict of tensors, alone or under the key `entry`.

    The bytes are read when they are used, where the file can be mapped. Nothing but plain values is
    unpickled. Raises ConfigError, and FormatError also for a dict in which only some of the tensors are
    direct values: the others would be missing.
    """
    import torch

    if not source.is_file():
        raise ConfigError(f"{source}: expected a file of torch.save, found no such file")
    try:
        root = _load(torch, source)
    except HoldfastError:
        raise
    except Exception as error:  # the type depends on the bytes that torch finds
        raise FormatError(
            f"{source}: expected a file of torch.save with a dict of tensors, found {_found(error)}"
        ) from error
    found = root[entry] if isinstance(root, Mapping) and entry in root else root
    entries = found.items() if isinstance(found, Mapping) else ()
    tensors = {str(name): value for name, value in entries if isinstance(value, torch.Tensor)}
    if not tensors or _count(torch, found) > len(tensors):
        keys = ", ".join(map(str, root)) if isinstance(root, Mapping) else type(root).__name__
        raise FormatError(
            f"{source}: expected a dict of tensors, or one under the key {entry!r}: choose the key with "
            f"--entry; found {keys[:300]}"
        )
    return tensors


def _found(error: Exception) -> str:
    """Return what a file contains that torch refused. Its own text advises options of `torch.load`."""
    text = str(error)
    if "TorchScript" in text:
        return (
            "an archive of TorchScript: write its tensors with "
            "torch.save(torch.jit.load(path).state_dict(), other)"
        )
    if unpickled := _GLOBAL.search(text):
        return (
            f"an object of {unpickled[1]}, which is not unpickled because that could run any code: load the "
            "file where you trust it, and write its tensors with torch.save(model.state_dict(), other)"
        )
    reason = text.partition("\n")[0]
    return f"a file that torch.load cannot read ({type(error).__name__}: {reason})"


def _count(torch: Any, value: Any) -> int:
    """Return the number of tensors in nested values."""
    if isinstance(value, Mapping):
        return sum(_count(torch, item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_count(torch, item) for item in value)
    return int(isinstance(value, torch.Tensor))


def _load(torch: Any, source: Path) -> Any:
    with disk_errors(f"reading {source}"):
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
        return torch.load(
            source, map_location="cpu", weights_only=True
        )  # the format before torch 1.6
