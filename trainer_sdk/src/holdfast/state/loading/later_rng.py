"""Random number generators that a restore leaves for a later call, because the loop still draws numbers.

A run must never go on with generators that were not restored. The second call is therefore required after
each restore that has deferred it, also after one that has found no checkpoint: a script without that call
fails in its first run, and not only after its first failure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from holdfast.state.rng import RNG
from holdfast_core.errors import ConfigError

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
