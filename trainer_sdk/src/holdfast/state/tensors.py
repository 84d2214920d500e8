"""Tensors and arrays as flat bytes: their safetensors dtypes, and views into a buffer for copying.

This module hides the differences between torch and numpy. torch is not imported for a state without
tensors.

Plain tensors may say which box of a larger tensor they hold, by the four attributes of torch's
CheckpointableTensor protocol (torch.distributed.checkpoint). The attributes count and not the class, which
older releases of torch do not have. A tensor may hold padding around its box, which is neither saved nor
loaded.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.state.loadable import require_array, require_tensor
from holdfast_core.errors import UnsupportedStateError

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@dataclass(frozen=True, slots=True)
class HeldBox:
    """The box that a tensor holds."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Start of the box in the whole tensor. Zeros for an empty box."""
    local_offsets: tuple[int, ...]
    """Start of the box in the tensor that holds it."""
    lengths: tuple[int, ...]

    def within(self, tensor: Any) -> Any:
        """Return the box as a view of the tensor that holds it, or that tensor if it holds nothing else."""
        if self.lengths == tuple(tensor.shape):
            return tensor
        where = zip(self.local_offsets, self.lengths, strict=True)
        return tensor[tuple(slice(start, start + length) for start, length in where)]


def box_attributes(tensor: Any) -> tuple[Any, ...] | None:
    """Return the values of the four attributes, or None for a tensor without them."""
    if getattr(tensor, ATTRIBUTES[0], None) is None:
        return None
    found = tuple(getattr(tensor, name, None) for name in ATTRIBUTES)
    return None if None in found else found


def held_box(tensor: Any, path: str) -> HeldBox | None:
    """Return the box that a tensor says it holds, or None if it has no such attributes.

    Raises UnsupportedStateError that names the path of a tensor whose attributes do not describe one box
    within the whole tensor and within the tensor itself.
    """
    found = box_attributes(tensor)
    if found is None:
        return None
    shape, *parts = found
    try:
        counts = {len(part) for part in parts}
        if counts != {1}:
            raise UnsupportedStateError(
                f"{path}: global_offsets, local_offsets and local_sizes describe {sorted(counts)} boxes, "
                "expected 1 each: put each box into the state as a tensor of its own, and an empty part as "
                "one box with a size of 0"
            )
        whole, start, held, lengths = (_numbers(one) for one in (shape, *(p[0] for p in parts)))
    except TypeError as error:
        raise UnsupportedStateError(
            f"{path}: {', '.join(ATTRIBUTES)} are {found}: expected a tuple of whole numbers, and tuples "
            f"with one tuple of whole numbers each ({error})"
        ) from error
    _expect_within(start, lengths, whole, f"{path}: the box of global_offsets", "global_shape")
    _expect_within(
        held,
        lengths,
        tuple(tensor.shape),
        f"{path}: the box of local_offsets",
        "the tensor's shape",
    )
    return HeldBox(whole, start if math.prod(lengths) else (0,) * len(whole), held, lengths)


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(map(operator.index, value))


def _expect_within(
    start: tuple[int, ...], lengths: tuple[int, ...], outer: tuple[int, ...], what: str, of: str
) -> None:
    fits = len(start) == len(lengths) == len(outer) and all(
        low >= 0 and length >= 0 and low + length <= size
        for low, length, size in zip(start, lengths, outer, strict=True)
    )
    if not fits:
        raise UnsupportedStateError(
            f"{what} starts at {list(start)} and has the sizes {list(lengths)}: expected a box within "
            f"{of} {list(outer)}"
        )


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
_OWN_NAMES = {stored: own for own, stored in _NAMES.items()}
RAW = "U8"
"""Stored dtype of types that safetensors does not have (complex128, float8_e4m3fnuz). Their bytes add one
dimension."""


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


def uses_gpu() -> bool:
    """Return whether this process has used a GPU. If not, no tensor of a state can be on one."""
    torch = torch_module()
    return torch is not None and bool(torch.cuda.is_initialized())


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # a call of `torch_module` would take as long as the rest
    return torch is not None and isinstance(value, torch.Tensor)


def is_distributed(value: object) -> bool:
    """Return whether `value` is a DTensor, of which this rank stores the local part."""
    return is_tensor(value) and hasattr(value, "to_local") and hasattr(value, "device_mesh")


def dtype_name(value: Any) -> str:
    """Return the name of the dtype, such as float32, which is the same for torch and numpy."""
    return str(value.dtype).removeprefix("torch.")


def local_part(value: Any) -> Any:
    """Return the tensor whose bytes this rank stores. It shares memory with `value`.

    Raises UnsupportedStateError for a tensor with attributes that describe no box.
    """
    if is_distributed(value):
        return value.to_local()
    box = held_box(value, "tensor") if is_tensor(value) else None
    return value if box is None else box.within(value)


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
    whole = None
    if is_tensor(value):
        require_tensor(value, path, in_place=in_place)
        if is_distributed(value):
            (global_shape, offsets), whole, local = placement(value, path), value, value.to_local()
            require_tensor(local, path, in_place=in_place)
        else:
            global_shape, offsets, local = _held_part(value, path)
        local = local.detach()
        size = local.element_size()
        byte_count = local.numel() * size
    else:
        require_array(value, path, in_place=in_place)
        global_shape, offsets, local = tuple(value.shape), (0,) * value.ndim, value
        byte_count = local.nbytes
        size = local.itemsize
        extra["array"] = True
    kind = dtype_name(local)
    stored = _NAMES.get(kind)
    if stored is None:
        extra["dtype"] = kind
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
    return torch_view(_aligned(stored, kind.itemsize), kind, shape)


def _aligned(stored: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    return stored.copy() if stored.ctypes.data % size else stored


def bytes_of(contiguous: Any) -> Any:
    """Return the bytes of a contiguous tensor, as a one-dimensional uint8 tensor over its memory.

    A contiguous tensor of one element may have any stride, as that of `tensor[::4]`, with which torch refuses
    a view as bytes.
    """
    import torch

    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def own_name(stored_dtype: str) -> str:
    """Return the dtype's name in torch and numpy, for example float32 for F32."""
    own = _OWN_NAMES.get(stored_dtype)
    if own is None:
        raise UnsupportedStateError(f"dtype {stored_dtype!r} is not supported by this version")
    return own


def is_in_host_memory(leaves: Iterable[Leaf]) -> bool:
    """Return whether no tensor is on a device."""
    return all(not is_tensor(x.source) or x.source.device.type == "cpu" for x in leaves)


def is_writable(leaf: Leaf) -> bool:
    """Return whether a restore may write the leaf's bytes into the memory of its source.

    It may not where the leaf is private, is not one contiguous range of writable host memory, or is not
    aligned, so that `view_stored` would copy it.
    """
    source = leaf.source
    if leaf.is_private or leaf.byte_count == 0:
        return False
    if not is_tensor(source):
        plain = source.flags.c_contiguous and source.flags.writeable
        return bool(plain and source.ctypes.data % source.itemsize == 0)
    import torch

    return bool(
        type(source) is torch.Tensor
        and source.device.type == "cpu"
        and source.is_contiguous()
        and not source.is_conj()
        and not source.is_neg()
        and source.data_ptr() % source.element_size() == 0
    )


def memory_of(leaf: Leaf) -> np.ndarray[Any, Any]:
    """Return the memory of a writable leaf as a uint8 array; see `is_writable`."""
    source = leaf.source
    if not is_tensor(source):
        return np.asarray(source).reshape(-1).view(np.uint8)
    found: np.ndarray[Any, Any] = bytes_of(source).numpy()
    return found


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
        if source.is_contiguous():
            return start, start + leaf.byte_count
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
        copy_all_in([(current, saved)])
    else:
        np.copyto(current, saved if isinstance(saved, np.ndarray) else saved.numpy())


def copy_all_in(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Copy saved tensors or arrays into existing tensors; see `copy_in`."""
    import torch

    written: list[Any] = []
    for current, saved in pairs:
        target = local_part(current)
        source = saved if is_tensor(saved) else torch.from_numpy(saved)
        if _is_same_memory(target, source):
            if not target.is_inference():
                written.append(target)
            continue
        # torch allows writes to a tensor of inference mode only in inference mode.
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(source)
    # Their bytes were written without torch, so that the counts of writes must be raised here.
    if written:
        torch.autograd.graph.increment_version(written)


def _is_same_memory(target: Any, source: Any) -> bool:
    return bool(
        target.is_cpu
        and source.is_cpu
        and target.data_ptr() == source.data_ptr() != 0
        and target.is_contiguous()
        and source.is_contiguous()
    )


def clone(saved: Any) -> Any:
    """Return a copy in new memory, for a view into a slot."""
    return saved.clone() if is_tensor(saved) else saved.copy()


def describe(value: Any) -> str:
    return f"{dtype_name(value)} {list(value.shape)}"


def is_alike(one: Any, other: Any) -> bool:
    """Return whether two tensors or arrays have the same dtype and shape, as `describe` shows them."""
    if type(one) is type(other) and (one.dtype, one.shape) == (other.dtype, other.shape):
        return True  # many times faster than the text
    return describe(one) == describe(other)


def torch_view(target: np.ndarray[Any, Any], dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(target).view(dtype).view(shape)


def placement(value: Any, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the global shape and the offsets of this rank's part, which are zeros for an empty part.

    Raises UnsupportedStateError for a DTensor whose parts are not rectangular boxes of the whole, and for a
    tensor with attributes that describe no box.
    """
    shape = tuple(value.shape)
    if not is_distributed(value):
        return _held_part(value, path)[:2] if is_tensor(value) else (shape, (0,) * len(shape))
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


def _held_part(value: Any, path: str) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """Return the global shape, the offsets and the elements of the part that a plain tensor holds."""
    box = held_box(value, path)
    if box is None:
        shape = tuple(value.shape)
        return shape, (0,) * len(shape), value
    return box.global_shape, box.offsets, box.within(value)


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
