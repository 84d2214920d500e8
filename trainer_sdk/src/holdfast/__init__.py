"""Public API of the Holdfast SDK for training scripts.

Importing this module imports neither torch nor a Kubernetes client. The SDK uses torch only where the
state holds tensors.
"""

from __future__ import annotations

from holdfast.api import restore, save
from holdfast.base.handle import SaveHandle, SaveTimeoutError
from holdfast.base.restore_point import RestorePoint, TensorInfo
from holdfast.checkpointer import Checkpointer
from holdfast.reading.checkpoint import SavedCheckpoint
from holdfast.reading.opening import Checkpoints, SavedStep
from holdfast.reading.opening import open_checkpoints as open
from holdfast.reading.tensor import LazyTensor
from holdfast.state.rng import RNG
from holdfast.state.shared import Shared
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

__all__ = [
    "RNG",
    "CapacityError",
    "Checkpointer",
    "Checkpoints",
    "ConfigError",
    "CorruptionError",
    "HoldfastError",
    "Interval",
    "LazyTensor",
    "Level",
    "NotFoundError",
    "RestorePoint",
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
