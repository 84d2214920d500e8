"""Checks that tensors and arrays can be loaded again into the objects from which they were saved.

A value that can be copied out of a state cannot always be copied back. Such a value is refused at the
first save, with its path, because a failure at the restore would come too late.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from holdfast_core.errors import UnsupportedStateError


def require_tensor(value: Any, path: str, *, in_place: bool) -> None:
    """Check that a tensor of the state can be saved and loaded.

    The check uses only attributes that lazy and nested tensors have.

    Args:
        value: A torch.Tensor. For a DTensor the caller checks both the whole and its local part.
        path: Path in the state.
        in_place: Whether loading copies into this tensor. If not, an object's own load_state_dict loads it.

    Raises:
        UnsupportedStateError: The tensor is not supported. The error names the path and a remedy.
    """
    reason = _tensor_reason(value, in_place=in_place)
    if reason is not None:
        raise UnsupportedStateError(f"{path}: {reason}")


def require_array(value: np.ndarray[Any, Any], path: str, *, in_place: bool) -> None:
    """Check that a numpy array of the state can be saved and loaded; see `require_tensor`."""
    reason = _array_reason(value, in_place=in_place)
    if reason is not None:
        raise UnsupportedStateError(f"{path}: {reason}")


def _tensor_reason(value: Any, *, in_place: bool) -> str | None:
    import torch

    kind = type(value)
    if torch.nn.parameter.is_lazy(value):
        return (
            f"{kind.__name__} has no shape yet: run one forward pass (holdfast.warm_up) before the "
            "first save or restore"
        )
    if value.is_nested:
        return (
            "a nested tensor cannot be saved: save its values() and offsets(), or a padded tensor"
        )
    if _dispatches(kind):
        return (
            f"{kind.__module__}.{kind.__qualname__} is a tensor subclass with its own code "
            "(__torch_dispatch__), so its bytes cannot be read: save the plain tensors that it "
            "contains"
        )
    if value.layout is not torch.strided or value.is_quantized:
        return (
            f"a {value.layout} tensor of {value.dtype}: only dense, unquantised tensors can be saved; "
            "convert it with to_dense() or dequantize()"
        )
    if value.is_meta:
        return "a meta tensor has no data to save"
    if not _is_copied(value.dtype):
        return (
            f"a tensor of {value.dtype}: torch cannot copy this type; save a view of its bytes as "
            "torch.uint8"
        )
    if hasattr(value, "device_mesh"):
        return None  # the caller checks its local part
    if not _has_memory(value):
        return (
            "the memory of this tensor was freed (storage().resize_, or parameters that are "
            "sharded now): save it while its memory is allocated"
        )
    if in_place and _overlaps(value):
        return (
            "an expanded tensor, whose elements share memory, cannot be loaded into: save "
            "tensor.clone() or tensor.contiguous(), and register that as the parameter or buffer"
        )
    return None


def _array_reason(value: np.ndarray[Any, Any], *, in_place: bool) -> str | None:
    kind = type(value)
    if isinstance(value, np.ma.MaskedArray):
        return (
            "a numpy masked array: save its data and its mask (numpy.ma.getmaskarray) as two arrays"
        )
    if kind is not np.ndarray and kind is not np.memmap:
        return (
            f"{kind.__module__}.{kind.__qualname__} is a subclass of numpy.ndarray and would come back "
            "as a plain array: save numpy.asarray(value)"
        )
    if not _is_number(value.dtype):
        return f"a numpy array of dtype {value.dtype}: only numbers and booleans can be saved"
    if not value.dtype.isnative:
        return (
            f"a numpy array of dtype {value.dtype.str}, whose byte order is not this machine's, would "
            'come back in another type: save value.astype(value.dtype.newbyteorder("="))'
        )
    if in_place and value.size and not value.flags.writeable:
        return "a read-only numpy array cannot be loaded into: save a copy of it"
    return None


def _is_number(dtype: np.dtype[Any]) -> bool:
    """Return whether it is a dtype of numbers or booleans, or one that a package adds (bfloat16)."""
    if dtype.kind in "biufc":
        return True
    try:
        return dtype.kind == "V" and dtype.names is None and np.dtype(dtype.name) == dtype
    except TypeError:
        return False


def _dispatches(kind: type[Any]) -> bool:
    """Return whether operations on this class run Python code. DTensor is supported and excluded."""
    import torch

    plain = getattr(torch.Tensor, "__torch_dispatch__", None)
    return getattr(kind, "__torch_dispatch__", plain) is not plain and not hasattr(
        kind, "device_mesh"
    )


def _has_memory(value: Any) -> bool:
    """Return whether the storage holds all elements. A copy of freed elements would cause SIGSEGV."""
    if value.numel() == 0:
        return True
    if value.is_contiguous():
        last = value.numel() - 1
    else:
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    needed = (value.storage_offset() + last + 1) * value.element_size()
    return bool(value.untyped_storage().nbytes() >= needed)


def _overlaps(value: Any) -> bool:
    """Return whether elements certainly share memory, so that `copy_` would refuse to write."""
    import torch

    return bool(not value.is_contiguous() and torch._debug_has_internal_overlap(value) == 1)


@functools.cache
def _is_copied(dtype: Any) -> bool:
    """Return whether torch can copy the dtype. It cannot copy some dtypes below one byte."""
    import torch

    try:
        one = torch.empty(1, dtype=dtype, device="cpu")
        one.copy_(torch.empty(1, dtype=dtype, device="cpu"))
        one.view(torch.uint8)
    except (RuntimeError, NotImplementedError):
        return False
    return True
