"""Checks the arguments that a script passes to a Checkpointer before anything is opened or allocated.

Without these checks a wrong value would fail far from its cause, or not at all: an unknown
`on_save_error` would count as "warn".
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from holdfast_core.errors import ConfigError


def checked_count(
    value: Any, what: str, least: int, remedy: str = "", *, of: str = "Checkpointer"
) -> int:
    """Return `value` as an integer of at least `least`.

    Raises ConfigError that names the argument `what` of `of`, and ends with the remedy if there is one.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(
            f"{of}({what}={value!r}): expected an integer of at least {least}"
            + (f": {remedy}" if remedy else "")
        )
    return number


def require_one_of(
    value: Any, what: str, choices: tuple[str, ...], *, of: str = "Checkpointer"
) -> None:
    """Raise ConfigError that names the argument `what` of `of`, unless `value` is one of `choices`."""
    if value not in choices:
        expected = " or ".join(repr(one) for one in choices)
        raise ConfigError(f"{of}({what}={value!r}): expected {expected}")


def require_seconds(value: Any, what: str) -> None:
    """Raise ConfigError that names the argument `what`, unless `value` is a positive finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"Checkpointer({what}={value!r}): expected a number of seconds above 0")


def require_state(state: Any, call: str) -> None:
    """Raise ConfigError unless `state` is a mapping. A script may pass the model itself by mistake."""
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"Checkpointer.{call}: expected the state as a dict of names and objects, such as "
            f'{{"model": model, "optim": optimizer}}, found {type(state).__name__}'
        )
