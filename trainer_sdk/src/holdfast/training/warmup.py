"""What a bit-identical resume needs besides the state (docs/training.md): warm-up and pinned threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.state.rng import RNG

_PASSES = 2


def warm_up(model: Any, optimizer: Any, example_forward: Callable[[], Any]) -> None:
    """Two forward and backward passes before the restore, whose gradients are thrown away.

    DistributedDataParallel puts all parameters into one bucket in its first iteration and rebuilds the
    buckets in backward order for the second: without the warm-up the first step after a restart adds
    gradients in another order than the run that was never interrupted. Every rank calls it, in every
    start, restored or not, after wrapping the model and before `Checkpointer.steps`.

    example_forward: one forward pass; returns the loss, a scalar tensor. Random number generators are
    put back as they were; buffers that a forward pass changes are overwritten by a restore only.
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
    """Fix the threads of torch's operations: another number of threads adds in another order.

    Call it before the first operation; raises RuntimeError from torch if it is too late for the
    number of inter-operation threads.
    """
    import torch

    torch.set_num_threads(count)
    if torch.get_num_interop_threads() != count:
        torch.set_num_interop_threads(count)
