"""Reads and writes files of torch.save. This is the only place that writes a pickle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.convert.dcp_files import with_tensors
from holdfast.convert.selection import Exported
from holdfast.convert.torch_errors import torch_errors
from holdfast.reading.tensor import LazyTensor
from holdfast_core.errors import ConfigError, FormatError, HoldfastError, TierError
from holdfast_core.node.files import disk_errors

_GLOBAL = re.compile(r"Unsupported global: GLOBAL (\S+)")


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
