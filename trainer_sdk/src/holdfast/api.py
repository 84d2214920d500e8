"""Module-level `save` and `restore` for scripts that do not use a context manager.

Both use one Checkpointer that the whole process shares.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

from holdfast.base.handle import SaveHandle
from holdfast.base.options import Folder, folder_path
from holdfast.checkpointer import Checkpointer
from holdfast_core.errors import ConfigError

_lock = threading.Lock()
_shared: tuple[str | None, Checkpointer] | None = None


def restore(
    state: MutableMapping[str, Any], *, dir: str | os.PathLike[str] | Folder | None = None
) -> int | None:
    """Call `Checkpointer.restore` on the Checkpointer that this process shares.

    Raises ConfigError when an earlier call named another `dir`.
    """
    return _checkpointer(dir).restore(state)


def save(
    step: int, state: Mapping[str, Any], *, dir: str | os.PathLike[str] | Folder | None = None
) -> SaveHandle:
    """Call `Checkpointer.save` on the Checkpointer that this process shares.

    At exit the process closes this Checkpointer and waits for its saves. Raises ConfigError when an
    earlier call named another `dir`.
    """
    return _checkpointer(dir).save(step, state)


def _checkpointer(dir: str | os.PathLike[str] | Folder | None) -> Checkpointer:
    """Return the shared Checkpointer; the first call opens it.

    Raises ConfigError when `dir` differs from the directory of the first call.
    """
    global _shared
    path = dir.path if isinstance(dir, Folder) else dir
    name = None if path is None else str(folder_path(path))
    with _lock:
        if _shared is None:
            checkpointer = Checkpointer(dir)
            checkpointer.open()
            atexit.register(checkpointer.close)
            _shared = (name, checkpointer)
        elif name is not None and _shared[0] != name:
            raise ConfigError(
                f"holdfast.save and restore already use {_shared[0] or 'the sidecar'}, requested "
                f"{name}: use holdfast.Checkpointer(dir=...) for a second location"
            )
        return _shared[1]
