"""The interface of everything that saves a state: Holdfast and the other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Started:
    """A save that no longer blocks training, and may still be written."""

    path: Path
    """The path that must be durable for the checkpoint to be durable."""
    wait: Callable[[], object]
    """Returns when the participant itself reports the checkpoint as complete."""
    disposable: bool = True
    """Whether the harness may remove the checkpoint. False where the participant removes old ones itself."""
    is_complete: Callable[[], bool] | None = None
    """Whether the save is complete, without waiting. None where the participant does not report it."""


class Saver(Protocol):
    def start(self, step: int) -> Started:
        """Save the present state. Return when training may change it."""
        ...

    def load(self, path: Path, into: dict[str, Any]) -> None:
        """Read a checkpoint into existing tensors."""
        ...

    def close(self) -> object:
        """Release shared memory. All started saves are complete at this time."""
        ...


MakeSaver = Callable[[dict[str, Any], Path], Saver]
"""Takes the state and a directory for the participant. Raises ImportError or an error of the library."""
