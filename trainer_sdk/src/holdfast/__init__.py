"""Public API of the Holdfast SDK for training scripts.

Importing this module imports neither torch nor a Kubernetes client. The SDK uses torch only where the
state holds tensors.
"""

from __future__ import annotations

from holdfast.api import restore, save
from holdfast.base.handle import SaveHandle, SaveTimeoutError
from holdfast.checkpointer import Checkpointer
from holdfast.state.rng import RNG
from holdfast.training.warmup import pin_threads, warm_up
from holdfast_core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    HoldfastError,
    SaveFailedError,
    StateDictError,
    StateMismatchError,
    UnsupportedStateError,
)
from holdfast_core.ids import Level

__all__ = [
    "RNG",
    "CapacityError",
    "Checkpointer",
    "ConfigError",
    "CorruptionError",
    "HoldfastError",
    "Level",
    "SaveFailedError",
    "SaveHandle",
    "SaveTimeoutError",
    "StateDictError",
    "StateMismatchError",
    "UnsupportedStateError",
    "pin_threads",
    "restore",
    "save",
    "warm_up",
]
