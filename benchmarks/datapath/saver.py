"""What the harness asks of everybody who saves a state: ours and peers alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Started:
    """A save whose blocking part is over."""

    path: Path
    """What must be durable for the checkpoint to be."""
    wait: Callable[[], object]
    """Returns when the participant itself calls the checkpoint complete."""
    disposable: bool = True
    """False: the participant removes old checkpoints itself."""
    is_complete: Callable[[], bool] | None = None
    """What `wait` waits for, without waiting; None where the participant does not tell."""


class Saver(Protocol):
    def start(self, step: int) -> Started:
        """Save the state as it is now; returns when training may change it."""
        ...

    def load(self, path: Path, into: dict[str, Any]) -> None:
        """Read a checkpoint into tensors that are there."""
        ...

    def close(self) -> object:
        """Give back shared memory; what was started is complete by then."""
        ...


MakeSaver = Callable[[dict[str, Any], Path], Saver]
"""(state, own directory) -> Saver. Raises ImportError or what the library says of this machine."""

Savers = Mapping[str, MakeSaver]
