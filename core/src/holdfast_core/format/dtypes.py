"""Element types of tensors by their safetensors names, and sizes of tensors in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from holdfast_core.errors import FormatError

DTYPE_BYTES = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E5M2": 1,
        "F8_E4M3": 1,
        "F8_E8M0": 1,
        "I16": 2,
        "U16": 2,
        "F16": 2,
        "BF16": 2,
        "I32": 4,
        "U32": 4,
        "F32": 4,
        "I64": 8,
        "U64": 8,
        "F64": 8,
        "C64": 8,
    }
)

MAX_TENSOR_BYTES = 1 << 50


def element_bytes(dtype: str, path: str) -> int:
    """Return the size of one element in bytes. Raises FormatError for an unknown dtype."""
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise FormatError(f"{path}: dtype {dtype[:40]!r} is not one of {', '.join(DTYPE_BYTES)}")
    return size


def tensor_bytes(dtype: str, shape: Sequence[int], path: str) -> int:
    """Return the size of a dense tensor in bytes.

    Raises FormatError for an unknown dtype or a size above MAX_TENSOR_BYTES. The size is compared after
    each dimension, so that a shape such as 2^63 x 2^63 is refused early.
    """
    size = element_bytes(dtype, path)
    if 0 in shape:
        return 0
    for length in shape:
        size *= length
        if size > MAX_TENSOR_BYTES:
            raise FormatError(
                f"{path}: {dtype} {list(shape)} is more than {MAX_TENSOR_BYTES} bytes"
            )
    return size
