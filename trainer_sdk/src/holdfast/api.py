"""Module-level `save` and `restore`: one Checkpointer for the whole process, for scripts that want no
context manager."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

from holdfast.base.folder import folder_path
from holdfast.base.handle import SaveHandle
from holdfast.checkpointer import Checkpointer
from holdfast_core.errors import ConfigError

_lock = threading.Lock()
_shared: tuple[str | None, Checkpointer] | None = None


def restore(
    state: MutableMapping[str, Any], *, dir: str | os.PathLike[str] | None = None
) -> int | None:
    """`Checkpointer.restore` of the process's Checkpointer."""
    return _checkpointer(dir).restore(state)


def save(
    step: int, state: Mapping[str, Any], *, dir: str | os.PathLike[str] | None = None
) -> SaveHandle:
    """`Checkpointer.save` of the process's Checkpointer; it is closed, and waited for, at exit."""
    return _checkpointer(dir).save(step, state)


def _checkpointer(dir: str | os.PathLike[str] | None) -> Checkpointer:
    """Raises ConfigError for a second directory in one process."""
    global _shared
    name = None if dir is None else str(folder_path(dir))
    with _lock:
        if _shared is None:
            checkpointer = Checkpointer(dir)
            checkpointer.open()
            atexit.register(checkpointer.close)
            _shared = (name, checkpointer)
        elif name is not None and _shared[0] != name:
            raise ConfigError(
                f"holdfast.save and restore already use {_shared[0] or 'the sidecar'}, asked for "
                f"{name}: use holdfast.Checkpointer(dir=...) for a second place"
            )
        return _shared[1]
