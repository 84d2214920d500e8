"""Objects whose tensors belong to all ranks together, although Holdfast does not know their class."""

from __future__ import annotations

from typing import Any

from holdfast_core.errors import UnsupportedStateError


class Shared:
    """An object with state_dict and load_state_dict whose tensors belong to all ranks together.

    stateful: the object, such as a container of models.

    Put it into the state as `{"model": holdfast.Shared(container)}`. Without it, the tensors of an object
    that is neither a module nor an optimizer belong to one rank. In a Shared object, tensors of the same name
    are the same tensor on every rank: equal copies are stored once, and DTensors are restored on another
    number of ranks. Values that are no tensors stay those of each rank.

    The object's own load_state_dict loads what was saved. The tensors of its state_dict are not written
    before that. Raises UnsupportedStateError for an object without these methods.
    """

    def __init__(self, stateful: Any) -> None:
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(stateful, name, None)):
                raise UnsupportedStateError(
                    f"Shared: expected an object with state_dict and load_state_dict, and "
                    f"{type(stateful).__qualname__} has no {name}"
                )
        self.stateful = stateful
        """The object that was passed in."""

    def state_dict(self) -> Any:
        """Return the state_dict of the object."""
        return self.stateful.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        """Call the object's load_state_dict."""
        return self.stateful.load_state_dict(state)
