"""Reads and writes checkpoints of torch.distributed.checkpoint (DCP), in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.convert.selection import Exported
from holdfast.convert.torch_errors import torch_errors
from holdfast.reading.tensor import LazyTensor
from holdfast_core.errors import ConfigError, CorruptionError, FormatError, TierError


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
