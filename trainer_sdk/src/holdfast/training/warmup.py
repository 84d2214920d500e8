"""Warm-up and pinned threads, which a bit-identical resume needs besides the state (docs/training.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.state.rng import RNG

_PASSES = 2


def warm_up(model: Any, optimizer: Any, example_forward: Callable[[], Any]) -> None:
    """Run two forward and backward passes before the restore and discard their gradients.

    model: the model, after DistributedDataParallel has wrapped it.
    optimizer: its gradients are cleared after each pass.
    example_forward: function that runs one forward pass and returns the loss, a scalar tensor.

    Call it on every rank and at every start, also without a checkpoint, before `Checkpointer.steps`.

    DistributedDataParallel puts all parameters into one bucket in its first iteration and rebuilds the
    buckets in backward order for the second one. Without the warm-up, the first step after a restart adds
    gradients in another order than an uninterrupted run.

    The random number generators get their earlier values back. Buffers that a forward pass changes, such
    as running statistics, keep their new values unless a restore overwrites them.
    """
    generators = RNG()
    before = generators.state_dict()
    training = bool(model.training)
    model.train()
    for _ in range(_PASSES):
        example_forward().backward()
        optimizer.zero_grad(set_to_none=True)
    model.train(training)
    generators.load_state_dict(before)


def pin_threads(count: int = 1) -> None:
    """Fix the number of threads that torch's operations use.

    Results depend on it, because another number of threads adds in another order. Call this function
    before the first operation of torch. Later calls may raise RuntimeError, because torch cannot change
    the number of inter-operation threads any more.
    """
    import torch

    torch.set_num_threads(count)
    if torch.get_num_interop_threads() != count:
        torch.set_num_interop_threads(count)
