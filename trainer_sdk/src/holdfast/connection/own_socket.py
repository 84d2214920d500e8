"""A socket that belongs to the process that made it, and to none of its forked children.

A data loader's workers are forked children: they inherit every descriptor. The other side of a socket
sees its end only when the last process that holds it has closed it, so that a worker that lives would
keep a persister, and `Checkpointer.close`, waiting.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Self


class OwnSocket(socket.socket):
    """Closed in a forked child right after the fork. `close` ends the connection at once, also
    where another process still holds the descriptor (a child that C code forked runs no Python)."""

    @classmethod
    def of(cls, plain: socket.socket) -> Self:
        """Take over the descriptor of `plain`, which is unusable afterwards."""
        owned = cls(plain.family, plain.type, plain.proto, fileno=plain.detach())
        _open.add(owned)
        return owned

    def close(self) -> None:
        if self.fileno() >= 0:
            with contextlib.suppress(OSError):  # the other side is gone already
                self.shutdown(socket.SHUT_RDWR)
        super().close()

    def forget(self) -> None:
        """Close this process's descriptor only: the connection stays that of the parent process."""
        super().close()


_open: weakref.WeakSet[OwnSocket] = weakref.WeakSet()


def _forget_all() -> None:
    for one in tuple(_open):
        one.forget()


os.register_at_fork(after_in_child=_forget_all)
