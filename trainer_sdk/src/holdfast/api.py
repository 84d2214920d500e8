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


class SharedCheckpointer:
    """The one Checkpointer of a process, which the first call opens and the end of the process closes.

    Args:
        users: The functions that use it, for an error message.
        advice: What to use instead for a second folder.
        options: Arguments of the Checkpointer.
    """

    def __init__(self, users: str, advice: str, **options: Any) -> None:
        self._users = users
        self._advice = advice
        self._options = options
        self._lock = threading.Lock()
        self._opened: tuple[str | None, Checkpointer] | None = None

    def of(self, place: str | os.PathLike[str] | Folder | None) -> Checkpointer:
        """Return the Checkpointer. Raises ConfigError if `place` is not the folder of the first call."""
        path = place.path if isinstance(place, Folder) else place
        name = None if path is None else str(folder_path(path))
        with self._lock:
            if self._opened is None:
                checkpointer = Checkpointer(place, **self._options)
                checkpointer.open()
                atexit.register(checkpointer.close)
                self._opened = name, checkpointer
            elif name is not None and self._opened[0] != name:
                raise ConfigError(
                    f"{self._users} already use {self._opened[0] or 'the sidecar'}, requested {name}: "
                    f"{self._advice} for a second location"
                )
            return self._opened[1]


_shared = SharedCheckpointer("holdfast.save and restore", "use holdfast.Checkpointer(dir=...)")


def restore(
    state: MutableMapping[str, Any], *, dir: str | os.PathLike[str] | Folder | None = None
) -> int | None:
    """Call `Checkpointer.restore` on the Checkpointer that this process shares.

    Raises ConfigError when an earlier call named another `dir`.
    """
    return _shared.of(dir).restore(state)


def save(
    step: int, state: Mapping[str, Any], *, dir: str | os.PathLike[str] | Folder | None = None
) -> SaveHandle:
    """Call `Checkpointer.save` on the Checkpointer that this process shares.

    At exit the process closes this Checkpointer and waits for its saves. Raises ConfigError when an
    earlier call named another `dir`.
    """
    return _shared.of(dir).save(step, state)
