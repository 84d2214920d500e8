"""Public API of the Holdfast SDK for training scripts.

Importing this module imports neither torch nor a Kubernetes client. The SDK uses torch only where the
state holds tensors. The module of a name is imported at the first use of the name (PEP 562), because the
persister and the launcher import this package and need few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.api import restore, save
    from holdfast.base.handle import RestorePoint, SaveHandle, SaveTimeoutError, TensorInfo
    from holdfast.base.options import Folder
    from holdfast.checkpointer import Checkpointer
    from holdfast.reading.checkpoint import LazyTensor, SavedCheckpoint
    from holdfast.reading.comparing import CheckpointDiff
    from holdfast.reading.describing import CheckpointDescription
    from holdfast.reading.opening import Checkpoints, SavedStep
    from holdfast.reading.opening import open_checkpoints as open
    from holdfast.reading.pruning import PrunePlan
    from holdfast.reading.source import ListedCheckpoint
    from holdfast.state.kinds import Shared
    from holdfast.state.rng import RNG
    from holdfast.training.warmup import pin_threads, warm_up
    from holdfast_core.errors import (
        CapacityError,
        ConfigError,
        CorruptionError,
        HoldfastError,
        NotFoundError,
        SaveFailedError,
        StateDictError,
        StateMismatchError,
        UnsupportedStateError,
    )
    from holdfast_core.ids import Level
    from holdfast_core.messages.schema import Interval
    from holdfast_core.retention import BestMode, KeepBest, RetentionPolicy

__all__ = [
    "RNG",
    "BestMode",
    "CapacityError",
    "CheckpointDescription",
    "CheckpointDiff",
    "Checkpointer",
    "Checkpoints",
    "ConfigError",
    "CorruptionError",
    "Folder",
    "HoldfastError",
    "Interval",
    "KeepBest",
    "LazyTensor",
    "Level",
    "ListedCheckpoint",
    "NotFoundError",
    "PrunePlan",
    "RestorePoint",
    "RetentionPolicy",
    "SaveFailedError",
    "SaveHandle",
    "SaveTimeoutError",
    "SavedCheckpoint",
    "SavedStep",
    "Shared",
    "StateDictError",
    "StateMismatchError",
    "TensorInfo",
    "UnsupportedStateError",
    "open",
    "pin_threads",
    "restore",
    "save",
    "warm_up",
]

_MODULES = {
    "BestMode": "holdfast_core.retention",
    "CapacityError": "holdfast_core.errors",
    "CheckpointDescription": "holdfast.reading.describing",
    "CheckpointDiff": "holdfast.reading.comparing",
    "Checkpointer": "holdfast.checkpointer",
    "Checkpoints": "holdfast.reading.opening",
    "ConfigError": "holdfast_core.errors",
    "CorruptionError": "holdfast_core.errors",
    "Folder": "holdfast.base.options",
    "HoldfastError": "holdfast_core.errors",
    "Interval": "holdfast_core.messages.schema",
    "KeepBest": "holdfast_core.retention",
    "LazyTensor": "holdfast.reading.checkpoint",
    "Level": "holdfast_core.ids",
    "ListedCheckpoint": "holdfast.reading.source",
    "NotFoundError": "holdfast_core.errors",
    "PrunePlan": "holdfast.reading.pruning",
    "RNG": "holdfast.state.rng",
    "RestorePoint": "holdfast.base.handle",
    "RetentionPolicy": "holdfast_core.retention",
    "SaveFailedError": "holdfast_core.errors",
    "SaveHandle": "holdfast.base.handle",
    "SaveTimeoutError": "holdfast.base.handle",
    "SavedCheckpoint": "holdfast.reading.checkpoint",
    "SavedStep": "holdfast.reading.opening",
    "Shared": "holdfast.state.kinds",
    "StateDictError": "holdfast_core.errors",
    "StateMismatchError": "holdfast_core.errors",
    "TensorInfo": "holdfast.base.handle",
    "UnsupportedStateError": "holdfast_core.errors",
    "open": "holdfast.reading.opening",
    "pin_threads": "holdfast.training.warmup",
    "restore": "holdfast.api",
    "save": "holdfast.api",
    "warm_up": "holdfast.training.warmup",
}
"""Module of each name."""
_OTHER_NAMES = {"open": "open_checkpoints"}
"""Names that their modules spell differently."""


if not TYPE_CHECKING:  # so that a type checker still finds misspelled names

    def __getattr__(name: str) -> object:
        module = _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(module), _OTHER_NAMES.get(name, name))
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
