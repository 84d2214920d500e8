"""A socket that is closed in forked children.

A data loader's workers are forked children and inherit every descriptor. The other side of a socket sees
its end only when the last process that holds it has closed it. A live worker would thus keep a persister
and `Checkpointer.close` waiting.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from typing import Self


class OwnSocket(socket.socket):
    """Socket that a forked child closes right after the fork.

    `close` ends the connection even if another process still holds the descriptor: a child that C code
    forked does not run Python's fork hooks.
    """

    @classmethod
    def of(cls, plain: socket.socket) -> Self:
        """Return a socket that takes over the descriptor of `plain`, which is unusable afterwards."""
        owned = cls(plain.family, plain.type, plain.proto, fileno=plain.detach())
        _open.add(owned)
        return owned

    def close(self) -> None:
        if self.fileno() >= 0:
            with contextlib.suppress(OSError):  # the other side has already closed its end
                self.shutdown(socket.SHUT_RDWR)
        super().close()

    def forget(self) -> None:
        """Close only this process's descriptor. The connection of the parent process stays open."""
        super().close()


_open: weakref.WeakSet[OwnSocket] = weakref.WeakSet()


def _forget_all() -> None:
    for one in tuple(_open):
        one.forget()


os.register_at_fork(after_in_child=_forget_all)
