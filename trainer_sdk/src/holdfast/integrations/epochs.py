"""What decides the order of the samples of a pass over the data, for loaders that accelerate has prepared.

A sampler draws its order when a pass begins: from the global generators, from a generator that it shares
with the other ranks, or from a seed of its own and the number of the pass. A training that restarts in the
middle of a pass needs the generators as they were when the pass began, and not as they were at the save.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import holdfast


class EpochStart:
    """The state of the generators when a pass over a loader began. It can be a part of another state."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._own: list[torch.Generator] = []
        """The generators of the loader itself."""
        self._left: list[torch.Tensor] = []
        """Restored states of these generators, until a pass begins."""

    def record(self, loader: Any) -> None:
        """Record the generators. Call it directly before `iter(loader)`."""
        self._own = list(_generators(loader))
        for one, state in zip(self._own, self._left, strict=False):
            one.set_state(state)
        self._left = []
        self._state = {"rng": holdfast.RNG().state_dict(), "own": self._states()}
        seed = getattr(_sampler(loader), "initial_seed", None)
        if seed is not None:
            self._state["seed"] = int(seed)

    def repeat(self, loader: Any) -> None:
        """Load the recorded generators. Call it directly before `iter(loader)`."""
        holdfast.RNG().load_state_dict(self._state["rng"])
        self._own, self._left = list(_generators(loader)), []
        for one, state in zip(self._own, self._state["own"], strict=False):
            one.set_state(state)
        sampler = _sampler(loader)
        if "seed" in self._state and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = self._state["seed"]

    def state_dict(self) -> dict[str, Any]:
        return {**self._state, "left": self._left or self._states()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = {key: value for key, value in state.items() if key != "left"}
        self._left = state["left"]

    def _states(self) -> list[torch.Tensor]:
        return [one.get_state() for one in self._own]


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, besides the global ones."""
    seen: set[int] = set()
    for owner in _with_samplers(loader):
        for name in ("synchronized_generator", "generator"):
            generator = getattr(owner, name, None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield generator


def _sampler(loader: Any) -> Any:
    """Return the sampler that has a seed of its own, or None."""
    return next((one for one in _with_samplers(loader) if hasattr(one, "initial_seed")), None)


def _with_samplers(loader: Any) -> Iterator[Any]:
    """Return a loader and its samplers. accelerate wraps batch samplers in each other."""
    one = loader
    while one is not None:
        yield one
        inner = getattr(one, "batch_sampler", None)
        one = inner if inner is not None else getattr(one, "sampler", None)
