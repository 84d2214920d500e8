"""Rules for which steps are saved, and which of them are uploaded to the object store. Pure."""

from __future__ import annotations

from holdfast_core.errors import ConfigError
from holdfast_core.ids import Step


def save_due(step: Step, interval_steps: int) -> bool:
    """Return whether a save is due after `step`. It is at multiples of the interval, except step 0."""
    return _multiple(step, interval_steps, "interval_steps")


def object_due(step: Step, object_every_steps: int | None) -> bool:
    """Return whether a committed `step` is to be uploaded. None means that there is no object tier."""
    if object_every_steps is None:
        return False
    return _multiple(step, object_every_steps, "object_every_steps")


def next_save(step: Step, interval_steps: int) -> Step:
    """Return the first step after `step` at which a save is due."""
    if interval_steps < 1:
        raise ConfigError(f"interval_steps is {interval_steps}, expected at least 1")
    return Step((step // interval_steps + 1) * interval_steps)


def _multiple(step: Step, every: int, name: str) -> bool:
    if every < 1:
        raise ConfigError(f"{name} is {every}, expected at least 1")
    return step > 0 and step % every == 0
