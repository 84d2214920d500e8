"""Reads and writes safetensors files in the layout of Hugging Face, without the library.

A file is the length of its header as little-endian u64, the header as JSON, and the tensors' bytes. See
https://github.com/huggingface/safetensors. Larger models have several files and an index.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from holdfast.convert.selection import PartMaker
from holdfast.state.tensors import own_name, view_stored
from holdfast_core.errors import ConfigError, CorruptionError, FormatError
from holdfast_core.format.canonical import (
    expect_ints,
    expect_map,
    expect_object,
    expect_range,
    expect_text,
    unique_keys,
)
from holdfast_core.format.payload import MAX_HEADER_BYTES, METADATA_NAME
from holdfast_core.format.rank_layout import element_bytes, tensor_bytes
from holdfast_core.ids import ByteRange
from holdfast_core.node.files import disk_errors

MAX_FILE_BYTES = 5 * 10**9
"""Most bytes of tensors in one file, as Hugging Face writes them. A larger tensor has a file of its own."""
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH = struct.Struct("<Q")
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


class Writable(Protocol):
    """A tensor that can be written."""

    @property
    def stored_dtype(self) -> str:
        """Type in safetensors. Raises UnsupportedStateError if safetensors does not have it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def parts(self) -> Iterator[PartMaker]:
        """Yield the makers of the consecutive parts of its bytes."""
        ...


W = TypeVar("W", bound=Writable)
RunParts = Callable[[Iterator[PartMaker]], Iterable[memoryview]]
"""Makes parts, and returns them in the same order."""


Progress = Callable[[int, int], object]
"""Receives the bytes that were written since its last call, and the bytes of the whole output."""


def _one_by_one(parts: Iterator[PartMaker]) -> Iterator[memoryview]:
    return (part() for part in parts)


def write_model(
    folder: Path,
    tensors: Mapping[str, W],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    run: RunParts = _one_by_one,
    progress: Progress = lambda written, total: None,
) -> None:
    """Write the tensors into files of at most `max_file_bytes`, and an index if there are several.

    The memory is that of one part of a tensor, or of the parts that `run` makes at a time. Raises
    UnsupportedStateError for a type that safetensors does not have.
    """
    sizes = {
        name: tensor_bytes(tensor.stored_dtype, tensor.shape, name)
        for name, tensor in tensors.items()
    }
    total = sum(sizes.values())
    groups: list[dict[str, W]] = [{}]
    size = 0
    for name in sorted(tensors):
        if groups[-1] and size + sizes[name] > max_file_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensors[name]
        size += sizes[name]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = (
            _SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        )
        _write_file(folder / file, group, run, lambda written: progress(written, total))
        sys.audit("holdfast.export.file_written")
        weight_map |= dict.fromkeys(group, file)
    if len(groups) > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        with disk_errors(f"writing {folder / INDEX}"):
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read_model(source: Path) -> dict[str, Any]:
    """Return the tensors of a file, or of a folder with an index or with files, as views of the files.

    The bytes are read when they are used. Raises ConfigError where there are no such files, CorruptionError
    and FormatError where they contradict their headers or the index.
    """
    if source.is_file():
        return _read_file(source)
    index = source / INDEX
    if index.is_file():
        return _read_indexed(source, index)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{source}: expected a safetensors file, or a folder with such files")
    # Without the index it is not known whether all files are there.
    if any(_SHARD.fullmatch(path.name) for path in files):
        raise ConfigError(f"{source}: found {files[0].name}, but no {INDEX}")
    tensors: dict[str, Any] = {}
    for path in files:
        found = _read_file(path)
        if twice := sorted(tensors.keys() & found.keys()):
            raise FormatError(f"{path}: tensor {twice[0]!r} is also in another file of the folder")
        tensors |= found
    return tensors


def _read_indexed(source: Path, index: Path) -> dict[str, Any]:
    with disk_errors(f"reading {index}"):
        try:
            root = json.loads(index.read_bytes())
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{index}: expected JSON: {error}") from error
    weight_map = expect_map(expect_map(root, str(index)).get("weight_map"), f"{index}: weight_map")
    tensors: dict[str, Any] = {}
    files = sorted(
        {expect_text(file, f"{index}: weight_map", limit=255) for file in weight_map.values()}
    )
    for file in files:
        if "/" in file or file.startswith("."):
            raise FormatError(f"{index}: expected the name of a file in the folder, found {file!r}")
        found = _read_file(source / file)
        listed = {name for name, where in weight_map.items() if where == file}
        if missing := sorted(listed - found.keys()):
            raise CorruptionError(
                f"{source / file}: tensor {missing[0]!r} of {index.name} is not in it"
            )
        tensors |= {name: found[name] for name in listed}
    return tensors


def _write_file(
    path: Path, tensors: Mapping[str, W], run: RunParts, written: Callable[[int], object]
) -> None:
    header: dict[str, Any] = {METADATA_NAME: {"format": "pt"}}
    # Larger elements come first, so that each tensor begins at a multiple of its element size.
    order = sorted(
        tensors, key=lambda name: (-element_bytes(tensors[name].stored_dtype, name), name)
    )
    position = 0
    for name in order:
        tensor = tensors[name]
        stop = position + tensor_bytes(tensor.stored_dtype, tensor.shape, name)
        header[name] = {
            "dtype": tensor.stored_dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with disk_errors(f"writing {path}"), open(path, "xb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for part in run(part for name in order for part in tensors[name].parts()):
            file.write(part)
            written(part.nbytes)


def _read_file(path: Path) -> dict[str, Any]:
    with disk_errors(f"reading {path}"):
        size = path.stat().st_size
        with open(path, "rb") as file:
            first = file.read(_LENGTH.size)
            length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else size
            if length > MAX_HEADER_BYTES or _LENGTH.size + length > size:
                raise CorruptionError(
                    f"{path}: a header of {length} bytes in a file of {size} bytes: it is cut off or not "
                    "a safetensors file"
                )
            text = file.read(length)
    try:
        root = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path}: expected a JSON header: {error}") from error
    metadata = expect_map(root, str(path)).pop(METADATA_NAME, {})
    for key, value in expect_map(metadata, f"{path}: {METADATA_NAME}").items():
        expect_text(value, f"{path}: {METADATA_NAME}: {key[:200]!r}", limit=MAX_HEADER_BYTES)
    start = _LENGTH.size + length
    # Copy-on-write, so that torch gets memory that it may write. The file is never changed.
    memory = np.memmap(path, np.uint8, mode="c") if size > start else np.empty(0, np.uint8)
    tensors: dict[str, Any] = {}
    places: list[tuple[ByteRange, str]] = []
    for name, value in root.items():
        what = f"{path}: tensor {name[:200]!r}"
        entry = expect_object(value, what, _FIELDS)
        dtype = expect_text(entry["dtype"], what, limit=40)
        element_bytes(dtype, what)
        shape = expect_ints(entry["shape"], what)
        place = expect_range(entry["data_offsets"], what)
        if place.length_bytes != tensor_bytes(dtype, shape, what) or start + place.stop > size:
            raise CorruptionError(
                f"{what}: bytes {list(place)} of {size - start} for {dtype} {list(shape)}: the file is cut "
                "off or damaged"
            )
        places.append((place, name))
        stored = np.asarray(memory[start + place.start : start + place.stop])
        tensors[name] = view_stored(stored, own_name(dtype), shape, array=False)
    _expect_no_gaps(path, places, size - start)
    return tensors


def _expect_no_gaps(path: Path, places: list[tuple[ByteRange, str]], size: int) -> None:
    """Raise CorruptionError unless the tensors follow each other, as safetensors requires.

    Where tensors may overlap, a small file becomes a checkpoint of any size.
    """
    position = 0
    for place, name in sorted(places, key=lambda one: (one[0].start, one[0].stop)):
        if place.start != position:
            raise CorruptionError(
                f"{path}: tensor {name[:200]!r} begins at byte {place.start} of the data, expected "
                f"{position}: safetensors allows neither gaps nor overlaps"
            )
        position = place.stop
    if position != size:
        raise CorruptionError(
            f"{path}: {size} bytes of data, of which the tensors have {position}: safetensors allows no "
            "other bytes"
        )
