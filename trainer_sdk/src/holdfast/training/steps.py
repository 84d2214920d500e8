"""Checks step numbers from scripts: Python, numpy and torch integers."""

from __future__ import annotations

import operator
from typing import Any

from holdfast_core.errors import ConfigError
from holdfast_core.ids import MAX_STEP, Step


def checked_step(value: Any, what: str) -> Step:
    """Return `value` as a number of optimizer steps.

    Args:
        value: Anything that `operator.index` accepts, such as numpy.int64(5) or a 0-d integer tensor.
        what: The call and the argument, for the error message.

    Raises:
        ConfigError: `value` is not an integer, or is outside of 0 to MAX_STEP.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError as error:
        raise ConfigError(
            f"{what}: expected a whole number of optimizer steps, found {value!r} of type "
            f"{type(value).__name__}; convert it with int(...)"
        ) from error
    if not 0 <= number <= MAX_STEP:
        raise ConfigError(
            f"{what}: expected 0 to {MAX_STEP} optimizer steps, found {number}: pass the number of "
            "steps that are done since the beginning of the training"
        )
    return Step(int(number))
