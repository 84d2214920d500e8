"""Which tensors of a checkpoint an export has, and their type in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.reading.checkpoint import Box, LazyTensor, SavedCheckpoint
from holdfast_core.errors import ConfigError, UnsupportedStateError

CASTS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
"""Types to which an export can convert floating-point tensors, with their names in safetensors."""
_PIECE_BYTES = 64 << 20

PartMaker = Callable[[], memoryview]
"""Makes the bytes of one part of a tensor."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor with the type that it has in an export."""

    tensor: LazyTensor
    dtype: str | None = None
    """Type to convert to: a name of `CASTS`. None: as it was saved."""

    @classmethod
    def of(cls, tensor: LazyTensor, dtype: str | None) -> Exported:
        """Convert `tensor` if its type is one of `CASTS`. Types of one byte stay: they would need a scale."""
        is_cast = dtype is not None and tensor.stored_dtype in CASTS.values()
        return cls(tensor, dtype if is_cast else None)

    @property
    def torch_dtype(self) -> Any:
        import torch

        return self.tensor.torch_dtype if self.dtype is None else getattr(torch, self.dtype)

    @property
    def stored_dtype(self) -> str:
        """Type in safetensors. Raises UnsupportedStateError if safetensors does not have it."""
        if self.dtype is not None:
            return CASTS[self.dtype]
        if self.tensor.is_raw:
            raise UnsupportedStateError(
                f"{self.tensor.name}: safetensors has no type {self.tensor.torch_dtype}: export it as dcp "
                "or torch"
            )
        return self.tensor.stored_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def read(self) -> Any:
        """Return the whole tensor, of torch also where an array was saved."""
        dtype = self.torch_dtype
        return _as_tensor(self.tensor.read()).to(dtype)

    def parts(self) -> Iterator[PartMaker]:
        """Yield the makers of parts of at most about 64 MiB, in row-major order."""
        for box in self.tensor.boxes(_PIECE_BYTES):
            yield partial(self._part, box)

    def _part(self, box: Box) -> memoryview:
        if self.dtype is None:
            return self.tensor.read_stored(box).data
        import torch

        flat = _as_tensor(self.tensor.read_flat(box)).to(self.torch_dtype)
        return memoryview(flat.view(torch.uint8).numpy())


def _as_tensor(value: Any) -> Any:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.from_numpy(value)


def entry_of(saved: SavedCheckpoint, entry: str, dtype: str | None) -> dict[str, Exported]:
    """Return the tensors of one entry of the state, such as "model", by their names within it.

    Raises ConfigError if the state has no such entry with tensors.
    """
    tensors = saved.tensors()
    prefix = f"{entry}."
    found = {
        name.removeprefix(prefix): Exported.of(tensor, dtype)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    if not found:
        entries = ", ".join(sorted({name.partition(".")[0] for name in tensors})) or "none"
        raise ConfigError(
            f"step {saved.step} has no tensors below {entry!r}: choose one with --entry; entries with "
            f"tensors: {entries}"
        )
    return found
