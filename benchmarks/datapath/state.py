"""The state that every participant saves: fp32 tensors of a transformer's shapes.

It is the same in each process.
"""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
_WIDTH = 1024
_BLOCK_ELEMENTS = 1 << 22


def shapes(mib: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor: whole layers of 48 MiB, small vectors, and an embedding.

    The embedding takes the rest. The total is at most `mib` MiB, and less than one row below it.
    """
    found: dict[str, tuple[int, ...]] = {}
    left = mib * MIB // 4
    wide = _WIDTH * _WIDTH
    layer = 12 * wide + 4 * _WIDTH
    for index in range(left // layer):
        for name in ("query", "key", "value", "out"):
            found[f"layers.{index}.{name}"] = (_WIDTH, _WIDTH)
        found[f"layers.{index}.up"] = (4 * _WIDTH, _WIDTH)
        found[f"layers.{index}.down"] = (_WIDTH, 4 * _WIDTH)
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            found[f"layers.{index}.{name}"] = (_WIDTH,)
        left -= layer
    if left >= _WIDTH:
        found["embedding"] = (left // _WIDTH, _WIDTH)
    return found


def make(mib: int) -> dict[str, Any]:
    """Return a float32 tensor for each name.

    All tensors are shifted copies of one random tensor, because generating a GiB of random numbers would
    take most of a visit's time.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    block = torch.randn(_BLOCK_ELEMENTS, generator=generator)
    state: dict[str, Any] = {}
    for index, (name, shape) in enumerate(shapes(mib).items()):
        tensor = torch.empty(shape)
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), _BLOCK_ELEMENTS):
            piece = flat[start : start + _BLOCK_ELEMENTS]
            torch.add(block[: piece.numel()], index + start / _BLOCK_ELEMENTS, out=piece)
        state[name] = tensor
    return state


def size_bytes(state: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def train_a_little(state: dict[str, Any]) -> None:
    """Change a few bytes of every tensor, so that no two saves are identical."""
    for tensor in state.values():
        tensor.view(-1)[:16].add_(1)


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    """Return zeros of the same shapes, with their pages present."""
    import torch

    return {name: torch.full_like(tensor, 0.0) for name, tensor in state.items()}


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the names of tensors that are missing or differ in any bit."""
    import torch

    return [
        name
        for name, tensor in expected.items()
        if name not in found or not torch.equal(tensor, found[name])
    ]
