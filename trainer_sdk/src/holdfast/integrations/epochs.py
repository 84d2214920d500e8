"""Random numbers of a pass over the data, for the loaders of accelerate, the Trainer and Lightning.

A sampler draws its order when a pass begins: from the global generators, from a generator that it shares
with the other ranks, or from a seed of its own and the number of the pass. A training that restarts in the
middle of a pass needs the generators as they were when the pass began, and not as they were at the save.

Batches that draw from the global generators while they are fetched differ after a restart: a loader fetches
ahead, so that the saved generators have already drawn for batches that were not trained yet.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
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
        self._own = list(generators_of(loader))
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
        self._own, self._left = list(generators_of(loader)), []
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


def generators_of(*loaders: Any) -> Iterator[torch.Generator]:
    """Return the generators that loaders and their samplers draw from, besides the global ones."""
    seen: set[int] = set()
    for owner in itertools.chain.from_iterable(map(_with_samplers, loaders)):
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


class DrawWatch:
    """Compares the generators before and after a fetch, until the first save.

    The first fetch of a pass is left out, because samplers may draw the order of the pass in it. Draws in
    the workers of a loader are not seen.
    """

    def __init__(self) -> None:
        self.has_drawn = False
        self._is_first = True
        self._has_ended = False

    def pass_begins(self) -> None:
        """Leave out the next fetch."""
        self._is_first = True

    def end(self) -> None:
        """Stop comparing."""
        self._has_ended = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Compare the generators before and after this block, which fetches batches."""
        if self._is_first or self._has_ended:
            self._is_first = False
            yield
            return
        before = _global_states()
        yield
        self.has_drawn = self.has_drawn or _global_states() != before


def _global_states() -> tuple[object, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2], torch.get_rng_state().numpy().tobytes()
