"""Objects that the `state_dict()` of another object holds, such as a schedule in a schedule.

A script's class often returns its attributes, and expects the objects among them in its `load_state_dict`.
A restore therefore loads the saved state into the object that `state_dict()` holds now, and hands over that
object. The mark of such a state in the saved text lets it find them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HeldState:
    """The saved state of an object that another object's state_dict held."""

    kind: str
    """Name of the object's class."""
    content: Any
    """Result of its state_dict."""


def content_of(saved: Any) -> Any:
    """Return the state of an object, whether or not another object held it."""
    return saved.content if isinstance(saved, HeldState) else saved


def has_held(saved: Any) -> bool:
    """Return whether a saved value contains the state of a held object."""
    if isinstance(saved, dict):
        return any(map(has_held, saved.values()))
    if isinstance(saved, list | tuple):
        return any(map(has_held, saved))
    return isinstance(saved, HeldState)
