"""Tensors and arrays as flat bytes: their safetensors dtypes, and views into a buffer for copying.

This module hides the differences between torch and numpy. torch is not imported for a state without
tensors.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast.state.loadable import require_array, require_tensor
from holdfast_core.errors import UnsupportedStateError

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
}
RAW = "U8"
"""Stored dtype of types that safetensors does not have (complex128). Their bytes add one dimension."""


@dataclass(slots=True, eq=False)
class Leaf:
    """One tensor or array of a state: its name, how it is stored, and where its data is now.

    It is not changed after it was made. A frozen class takes three times as long to make.
    """

    name: str
    dtype: str
    """safetensors dtype of the stored bytes."""
    shape: tuple[int, ...]
    """Stored shape of this rank's part."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Start of this rank's part in the global tensor."""
    byte_count: int
    is_raw: bool
    """Whether it is stored as bytes, because safetensors does not have its type."""
    source: Any
    """torch.Tensor (possibly on a device) or numpy.ndarray. It usually shares memory with the training."""
    owner: Any | None = None
    """The optimizer to whose state it belongs."""
    whole: Any | None = None
    """The DTensor of which `source` is this rank's part."""
    is_private: bool = False
    """Whether a restore must not write it in place. Loading replaces it, or it belongs to an object that is
    neither a module nor an optimizer, so that other references to its memory are unknown."""

    def at(self, source: Any, whole: Any | None, owner: Any | None) -> Leaf:
        """Return this leaf with its data in another place."""
        return Leaf(
            self.name,
            self.dtype,
            self.shape,
            self.global_shape,
            self.offsets,
            self.byte_count,
            self.is_raw,
            source,
            owner,
            whole,
            self.is_private,
        )

    @property
    def writes(self) -> int:
        """Number of in-place writes that torch has counted.

        Views of the tensor share the count, but tensors made by `.data` do not. Raises RuntimeError for
        tensors of inference mode, which have no count.
        """
        # torch counts a write to a DTensor at the DTensor and not at its local part.
        return int((self.source if self.whole is None else self.whole)._version)


def torch_module() -> Any | None:
    """Return torch if it has been imported, otherwise None. Then no tensor can be in a state."""
    return sys.modules.get("torch")


def is_tensor(value: object) -> bool:
    torch = torch_module()
    return torch is not None and isinstance(value, torch.Tensor)


def is_distributed(value: object) -> bool:
    """Return whether `value` is a DTensor, of which this rank stores the local part."""
    return is_tensor(value) and hasattr(value, "to_local") and hasattr(value, "device_mesh")


def dtype_name(value: Any) -> str:
    """Return the name of the dtype, such as float32, which is the same for torch and numpy."""
    return str(value.dtype).removeprefix("torch.")


def local_part(value: Any) -> Any:
    """Return the tensor whose bytes this rank stores. It shares memory with `value`."""
    return value.to_local() if is_distributed(value) else value


def make_leaf(
    name: str,
    value: Any,
    path: str,
    owner: Any | None = None,
    *,
    is_private: bool = False,
    in_place: bool = True,
) -> tuple[Leaf, dict[str, Any]]:
    """Return a leaf, and the fields of its reference other than the name.

    Args:
        name: Unique name of the leaf.
        value: The tensor or array.
        path: Path in the state, for error messages.
        owner: The optimizer to whose state it belongs.
        is_private: See `Leaf.is_private`.
        in_place: Whether loading copies into `value`. False where an object's own code loads it.

    Raises:
        UnsupportedStateError: The value cannot be saved.
    """
    extra: dict[str, Any] = {}
    if is_tensor(value):
        require_tensor(value, path, in_place=in_place)
    else:
        require_array(value, path, in_place=in_place)
    global_shape, offsets = placement(value, path)
    local = local_part(value)
    whole = None if local is value else value
    if is_tensor(local):
        if whole is not None:
            require_tensor(local, path, in_place=in_place)
        local = local.detach()
        byte_count = local.numel() * local.element_size()
    else:
        if not local.dtype.isnative:
            local = local.astype(local.dtype.newbyteorder("="))
        byte_count = local.nbytes
        extra["array"] = True
    kind = dtype_name(local)
    stored = _NAMES.get(kind)
    if stored is None:
        extra["dtype"] = kind
        size = local.element_size() if is_tensor(local) else local.itemsize
        leaf = Leaf(
            name,
            RAW,
            (*local.shape, size),
            (*global_shape, size),
            (*offsets, 0),
            byte_count,
            True,
            local,
            owner,
            whole,
            is_private,
        )
    else:
        leaf = Leaf(
            name,
            stored,
            tuple(local.shape),
            global_shape,
            offsets,
            byte_count,
            False,
            local,
            owner,
            whole,
            is_private,
        )
    return leaf, extra


def place_of(leaf: Leaf, target: np.ndarray[Any, Any]) -> Any:
    """Return the memory of a leaf's stored bytes as a tensor or array into which `copy_jobs` copies.

    Args:
        leaf: The leaf.
        target: uint8 array of `leaf.byte_count` elements.
    """
    if leaf.is_raw or leaf.byte_count == 0:
        # The target may not be aligned to the element size, so that only bytes can be copied.
        return target
    if not is_tensor(leaf.source):
        return target.view(leaf.source.dtype).reshape(leaf.source.shape)
    import torch

    # A save in inference mode would make a tensor that no other thread, and no later save, may write.
    with torch.inference_mode(mode=False):
        return _torch_view(target, leaf.source.dtype, tuple(leaf.source.shape))


def copy_jobs(
    pairs: Iterable[tuple[Leaf, Any]], piece_bytes: int, batch_bytes: int
) -> list[tuple[int, Callable[[], object]]]:
    """Return calls that together copy the leaves' current bytes, each with its byte count.

    Large contiguous tensors in host memory are split and small tensors are batched, so that two threads can
    share the work.

    Args:
        pairs: Each leaf with its memory; see `place_of`.
        piece_bytes: Largest size of a piece of a split tensor.
        batch_bytes: Largest size of a batch of two tensors or more.
    """
    jobs: list[tuple[int, Callable[[], object]]] = []
    batch = _Batch()
    for leaf, place in pairs:
        source, size = leaf.source, leaf.byte_count
        if size == 0:
            continue
        if leaf.is_raw:
            jobs.append((size, partial(_copy_raw, place, source)))
        elif not is_tensor(source):
            jobs.append((size, partial(np.copyto, place, source)))
        elif size > piece_bytes and source.device.type == "cpu" and source.is_contiguous():
            count = max(1, piece_bytes // source.element_size())
            pieces = zip(place.view(-1).split(count), source.view(-1).split(count), strict=True)
            jobs += ((p.numel() * p.element_size(), partial(p.copy_, q)) for p, q in pieces)
        else:
            if batch.size_bytes + size > batch_bytes and batch.places:
                jobs.append(batch.job())
                batch = _Batch()
            batch.add(place, source, size)
    if batch.places:
        jobs.append(batch.job())
    return jobs


class _Batch:
    """Small tensors that one call copies. A call for each of thousands costs more than their bytes."""

    def __init__(self) -> None:
        self.places: list[Any] = []
        self._sources: list[Any] = []
        self.size_bytes = 0

    def add(self, place: Any, source: Any, size_bytes: int) -> None:
        self.places.append(place)
        self._sources.append(source)
        self.size_bytes += size_bytes

    def job(self) -> tuple[int, Callable[[], object]]:
        import torch

        return self.size_bytes, partial(torch._foreach_copy_, self.places, self._sources)


def copy_from_device(leaf: Leaf, target: np.ndarray[Any, Any], *, non_blocking: bool) -> None:
    """Write a tensor's bytes into `target`, on the current stream of its device.

    Args:
        leaf: A leaf whose source is a tensor.
        target: uint8 array of `leaf.byte_count` elements.
        non_blocking: Return before the stream has done the copy. This requires a page-locked `target`.
    """
    import torch

    source, dtype = leaf.source, leaf.source.dtype
    if leaf.is_raw:
        source, dtype = _plain(source).view(-1).view(torch.uint8), torch.uint8
    _torch_view(target, dtype, tuple(source.shape)).copy_(source, non_blocking=non_blocking)


def view_stored(
    stored: np.ndarray[Any, Any],
    dtype: str,
    shape: tuple[int, ...],
    *,
    array: bool,
) -> Any:
    """Return a tensor, or an array with `array`, over stored bytes. Unaligned bytes are copied.

    Args:
        stored: uint8 array of the bytes.
        dtype: Name of the dtype in torch and numpy, such as float32.
        shape: Shape of the result.
        array: Return a numpy array instead of a tensor.
    """
    if array:
        kind = np.dtype(dtype)
        if stored.size == 0:
            return np.empty(shape, dtype=kind)
        return _aligned(stored, kind.itemsize).view(kind).reshape(shape)
    import torch

    kind = getattr(torch, dtype)
    if stored.size == 0:
        return torch.empty(shape, dtype=kind)
    return _torch_view(_aligned(stored, kind.itemsize), kind, shape)


def _aligned(stored: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    return stored.copy() if stored.ctypes.data % size else stored


def flat_bytes(leaf: Leaf) -> Any:
    """Return the leaf's stored bytes as a one-dimensional uint8 tensor or array.

    It shares memory with the leaf where that is one contiguous range of plain values, and is a copy
    otherwise.
    """
    source = leaf.source
    if not is_tensor(source):
        return np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    import torch

    return _plain(source).view(-1).view(torch.uint8)


def copy_flat(target: np.ndarray[Any, Any], flat: Any) -> None:
    """Copy a range of `flat_bytes` into `target`, from a device too. Return when the copy is done."""
    if is_tensor(flat):
        import torch

        torch.from_numpy(target).copy_(flat)
    else:
        target[:] = flat


def _copy_raw(target: np.ndarray[Any, Any], source: Any) -> None:
    if is_tensor(source):
        import torch

        target[:] = _plain(source.cpu()).view(-1).view(torch.uint8).numpy()
    else:
        target[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)


def _plain(source: Any) -> Any:
    """Return a contiguous tensor of the values. The bytes of a conjugate or negative view are different."""
    return source.resolve_conj().resolve_neg().contiguous()


def own_name(stored_dtype: str) -> str:
    """Return the dtype's name in torch and numpy, for example float32 for F32."""
    for own, name in _NAMES.items():
        if name == stored_dtype:
            return own
    raise UnsupportedStateError(f"dtype {stored_dtype!r} is not supported by this version")


def is_in_host_memory(leaves: Iterable[Leaf]) -> bool:
    """Return whether no tensor is on a device."""
    return all(not is_tensor(x.source) or x.source.device.type == "cpu" for x in leaves)


def memory_of(leaf: Leaf) -> np.ndarray[Any, Any] | None:
    """Return the leaf's memory as a writable uint8 array.

    Returns None where the leaf is private, is not one contiguous range of writable host memory, or is
    not aligned.
    """
    source = leaf.source
    if leaf.is_private or leaf.byte_count == 0:
        return None
    if not is_tensor(source):
        if not (source.flags.c_contiguous and source.flags.writeable):
            return None
        return _whole_elements(np.asarray(source).reshape(-1).view(np.uint8), source.itemsize)
    import torch

    plain = type(source) is torch.Tensor and not source.is_conj() and not source.is_neg()
    if not plain or source.device.type != "cpu" or not source.is_contiguous():
        return None
    return _whole_elements(source.view(-1).view(torch.uint8).numpy(), source.element_size())


def _whole_elements(memory: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any] | None:
    """Return `memory`, or None if it is not aligned, so that `view_stored` would copy it."""
    return None if memory.ctypes.data % size else memory


def extent_of(leaf: Leaf) -> tuple[int, int] | None:
    """Return the addresses of the leaf's first byte and of the byte after its last one.

    The leaf may not use all bytes in between. Returns None where the addresses are unknown.
    """
    source = leaf.source
    if leaf.byte_count == 0:
        return None
    size: int = source.itemsize
    if is_tensor(source):
        try:
            start = source.data_ptr()
        except RuntimeError:  # a subclass without memory of its own
            return None
        strides = [step * size for step in source.stride()]
    else:
        start, strides = source.ctypes.data, source.strides
    ends = [(count - 1) * step for count, step in zip(source.shape, strides, strict=True)]
    return start + sum(min(end, 0) for end in ends), start + sum(max(end, 0) for end in ends) + size


def copy_in(current: Any, saved: Any) -> None:
    """Copy a saved tensor or array into an existing one of the same shape. Both may be the same memory.

    The copy is complete when this returns, also on a device, so that the slot of `saved` may be reused.
    """
    if is_tensor(current):
        import torch

        target = local_part(current)
        source = saved if is_tensor(saved) else torch.from_numpy(saved)
        if _is_same_memory(target, source):
            # The bytes were written without torch, so that the count of writes must be raised here.
            if not target.is_inference():
                torch.autograd.graph.increment_version(target)
            return
        # torch allows writes to a tensor of inference mode only in inference mode.
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(source)
    else:
        np.copyto(current, saved if isinstance(saved, np.ndarray) else saved.numpy())


def _is_same_memory(target: Any, source: Any) -> bool:
    return bool(
        target.device.type == "cpu"
        and source.device.type == "cpu"
        and target.data_ptr() == source.data_ptr() != 0
        and target.is_contiguous()
        and source.is_contiguous()
    )


def clone(saved: Any) -> Any:
    """Return a copy in new memory, for a view into a slot."""
    return saved.clone() if is_tensor(saved) else saved.copy()


def describe(value: Any) -> str:
    return f"{dtype_name(value)} {list(value.shape)}"


def _torch_view(target: np.ndarray[Any, Any], dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(target).view(dtype).view(shape)


def placement(value: Any, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the global shape and the offsets of this rank's part, which are zeros for an empty part.

    Raises UnsupportedStateError for a DTensor whose parts are not rectangular boxes of the whole.
    """
    shape = tuple(value.shape)
    if not is_distributed(value):
        return shape, (0,) * len(shape)
    if any(one.is_partial() for one in value.placements):
        raise UnsupportedStateError(
            f"{path}: a DTensor of placements {value.placements} holds sums that were not reduced: "
            "call full_tensor() or redistribute() before saving it"
        )
    found = tuple(value.to_local().shape)
    offsets, lengths = _cut(shape, value.placements, value.device_mesh)
    if lengths != found:
        raise UnsupportedStateError(
            f"{path}: a DTensor of shape {list(shape)} and placements {value.placements} holds "
            f"{list(found)} on this rank, expected {list(lengths)}: so the positions of its parts "
            "are unknown"
        )
    return shape, offsets if math.prod(lengths) else (0,) * len(shape)


def _cut(
    shape: tuple[int, ...], placements: Any, mesh: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and lengths of this rank's part.

    torch does not compute this correctly for uneven parts of a dimension that tensor parallelism cut
    before `fully_shard` did. In that case the mesh dimension of `fully_shard` comes first but was cut
    last ("strided").
    """
    offsets, lengths = [0] * len(shape), list(shape)
    where = mesh.get_coordinate()
    axes = [axis for axis, one in enumerate(placements) if getattr(one, "dim", None) is not None]
    strided = [axis for axis in axes if getattr(placements[axis], "split_factor", 1) > 1]
    plain = [axis for axis in axes if axis not in strided]
    for axis in (*plain, *reversed(strided)):
        dimension, index = placements[axis].dim, where[axis]
        piece = -(-lengths[dimension] // mesh.size(axis))
        start = min(index * piece, lengths[dimension])
        offsets[dimension] += start
        lengths[dimension] = min(piece, lengths[dimension] - start)
    return tuple(offsets), tuple(lengths)
