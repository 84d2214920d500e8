"""State of the random number generators of Python, numpy, torch on the CPU and every CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from holdfast.state.tensors import torch_module
from holdfast_core.errors import StateMismatchError, UnsupportedStateError


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
