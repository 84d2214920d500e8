"""State of the random number generators of Python, numpy, torch on the CPU and every CUDA device.

A restore may leave them for a later call, because the loop still draws numbers (`LaterRng`). A run must
never go on with generators that were not restored. The second call is therefore required after each restore
that has deferred it, also after one that has found no checkpoint: a script without that call fails in its
first run, and not only after its first failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from holdfast.state.tensors import torch_module
from holdfast_core.errors import ConfigError, StateMismatchError, UnsupportedStateError


class RNG:
    """The state of all random number generators, as an entry of the state: `{"rng": holdfast.RNG()}`.

    generators: further torch.Generator and numpy.random.Generator objects to include, always in the same
      order.

    It includes the global generators of Python, numpy and torch. A restore loads it last, after all
    objects that may draw random numbers.
    """

    def __init__(self, *generators: Any) -> None:
        for position, generator in enumerate(generators):
            if not hasattr(generator, "get_state") and not hasattr(generator, "bit_generator"):
                raise UnsupportedStateError(
                    f"RNG: argument {position} is a {type(generator).__name__}, expected a "
                    "torch.Generator or a numpy.random.Generator"
                )
        self._generators = generators

    @property
    def generators(self) -> tuple[Any, ...]:
        """The further generators."""
        return self._generators

    def state_dict(self) -> dict[str, Any]:
        version, keys, gauss = random.getstate()
        name, vector, position, has_gauss, cached = np.random.get_state()
        state: dict[str, Any] = {
            "python": {
                "version": version,
                "keys": np.array(keys, dtype=np.uint32),
                "gauss": gauss,
            },
            "numpy": [name, vector, position, has_gauss, cached],
            "generators": [_get(generator) for generator in self._generators],
        }
        torch = torch_module()
        if torch is not None:
            state["torch"] = torch.get_rng_state()
            # Reading their state would initialise CUDA. Before that, it follows from the seed.
            if torch.cuda.is_initialized():
                state["cuda"] = list(torch.cuda.get_rng_state_all())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all generators.

        Raises StateMismatchError when the number of generators or CUDA devices differs.
        """
        python = state["python"]
        random.setstate((python["version"], tuple(python["keys"].tolist()), python["gauss"]))
        np.random.set_state(tuple(state["numpy"]))
        saved = state["generators"]
        if len(saved) != len(self._generators):
            raise StateMismatchError(
                f"RNG: expected {len(self._generators)} generators, found {len(saved)}"
            )
        for generator, value in zip(self._generators, saved, strict=True):
            _set(generator, value)
        if "torch" in state:
            import torch

            torch.set_rng_state(state["torch"])
            if "cuda" in state and torch.cuda.is_available():
                devices = state["cuda"]
                if len(devices) != torch.cuda.device_count():
                    raise StateMismatchError(
                        f"RNG: expected the states of {torch.cuda.device_count()} CUDA devices, "
                        f"found {len(devices)}"
                    )
                torch.cuda.set_rng_state_all(devices)


def _get(generator: Any) -> Any:
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state()


def _set(generator: Any, value: Any) -> None:
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = value
    else:
        generator.set_state(value)


WhenRng = Literal["now", "later"]

Load = Callable[[], tuple[str, ...]]
"""Loads one object, and returns a line if it was skipped."""


class LaterRng:
    """The generators of one state, from a restore with rng="later" until they are loaded."""

    def __init__(self) -> None:
        self._loads: list[Load] | None = None
        """None: no call is expected."""

    def begin(
        self, state: Mapping[str, Any], rng: WhenRng, call: str
    ) -> Callable[[Load], None] | None:
        """Begin a restore. Return a function that defers a load, or None with rng="now".

        Args:
            state: The state to restore.
            rng: When its generators are loaded.
            call: The call, for error messages.

        Raises:
            ConfigError: `rng` is invalid, or the state has no generators that could be loaded later.
        """
        self._loads = None
        if rng == "now":
            return None
        if rng != "later":
            raise ConfigError(f'{call}: rng={rng!r}, expected "now" or "later"')
        if not _holds_rng(state):
            raise ConfigError(
                f'{call}: rng="later", but the state holds no holdfast.RNG(), so that no random number '
                'generators would be saved or loaded: add state["rng"] = holdfast.RNG()'
            )
        self._loads = []
        return self._loads.append

    def load(self) -> tuple[str, ...]:
        """Load the generators. Return one line for each that was skipped.

        Raises ConfigError if no call is expected, and StateMismatchError.
        """
        loads, self._loads = self._loads, None
        if loads is None:
            raise ConfigError(
                'Checkpointer.restore_rng: no restore with rng="later" has left random number generators '
                "to load, or they are loaded already: call it once after each such restore"
            )
        return tuple(line for load in loads for line in load())

    @property
    def is_expected(self) -> bool:
        return self._loads is not None

    def expect_loaded(self, what: str) -> None:
        """Raise ConfigError if the generators were not loaded before `what`."""
        if self._loads is not None:
            raise ConfigError(
                f"Checkpointer: {what}, but restore_rng() was not called after the restore with "
                'rng="later": the random numbers would differ from a run without the interruption. Call '
                "restore_rng() before the first step, also if there was nothing to restore"
            )


def _holds_rng(value: Any) -> bool:
    if isinstance(value, RNG):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_rng, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_rng, value))
