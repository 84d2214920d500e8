"""The zygote: a process with one thread that imports modules and forks a child for each start.

The worker sends one byte and descriptors for each start: the start, the pipe for the child's status, and what
the child gets. The zygote answers with the child's process id. It ends when its worker has ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.zygote.child import Child, be_program, note_command_line, take_session
from tests.support.zygote.helper import ANSWER, CONNECT, START, STATUS
from tests.support.zygote.start import Start, read

_MOST_DESCRIPTORS = 64


class Server:
    """Loop over the sockets of the worker and its launchers, and the ends of the children."""

    def __init__(self, worker: socket.socket, lifetime: int, *, torch: bool) -> None:
        self._worker = worker.fileno()
        self._clients = {self._worker: worker}
        self._lifetime = lifetime
        self._torch = torch
        self._imported: set[str] = set()
        self._children: dict[int, tuple[int, int]] = {}
        self._poll = select.poll()
        for descriptor in (worker.fileno(), lifetime):
            self._poll.register(descriptor, select.POLLIN)

    def serve(self) -> Child | None:
        """Serve until the worker has ended. Return in a new child what it shall be."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._reap(descriptor)
                elif descriptor in self._clients:
                    child = self._receive(self._clients[descriptor])
                    if child is not None:
                        return child
                if self._worker not in self._clients or descriptor == self._lifetime:
                    return None

    def _receive(self, client: socket.socket) -> Child | None:
        message, received, _, _ = socket.recv_fds(client, 1, _MOST_DESCRIPTORS)
        if message == START:
            return self._fork(client, read(received[0]), received[1], received[2:])
        if message == CONNECT:
            (connection,) = received
            self._clients[connection] = socket.socket(fileno=connection)
            self._poll.register(connection, select.POLLIN)
            return None
        self._poll.unregister(client.fileno())
        del self._clients[client.fileno()]
        client.close()
        return None

    def _fork(
        self, client: socket.socket, start: Start, status: int, given: Sequence[int]
    ) -> Child | None:
        self._import(start.preload)
        ready, is_ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            take_session(start)
            os.close(is_ready)
            return Child(start, given)
        # subprocess returns after the exec, so that the child has its session by then. So does this.
        os.close(is_ready)
        os.read(ready, 1)
        os.close(ready)
        for descriptor in given:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, status)
        self._poll.register(pidfd, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):  # the client was killed
            client.sendall(ANSWER.pack(pid))
        return None

    def _reap(self, pidfd: int) -> None:
        pid, pipe = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb", buffering=0) as ended:
            ended.write(STATUS.pack(os.waitpid(pid, 0)[1]))

    def _import(self, modules: Sequence[str]) -> None:
        """Import what is not imported yet. The child reports what cannot be imported, if it uses it."""
        new = [name for name in modules if name not in self._imported]
        if not new:
            return
        self._imported.update(new)
        if not self._torch:
            # A module that imports torch is not preloaded.
            sys.modules["torch"] = None  # type: ignore[assignment]
        for name in new:
            with contextlib.suppress(ImportError):
                module = importlib.import_module(name)
                for public in getattr(module, "__all__", ()):  # imports what is imported lazily
                    getattr(module, public, None)
        if not self._torch:
            del sys.modules["torch"]
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads != 1:
            raise AssertionError(f"an import of {new} started threads; they would miss in children")
        _freeze()


def _freeze() -> None:
    """Keep the collector of the children from writing to the pages of objects that they do not change."""
    gc.collect()
    gc.freeze()


def main(worker: str, lifetime: str, modules: str, title: str) -> None:
    """Serve, and in a child run the program. Does not return there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the worker, too
    note_command_line(len(title))
    names = tuple(filter(None, modules.split(",")))
    server = Server(socket.socket(fileno=int(worker)), int(lifetime), torch="torch" in names)
    child = server.serve()
    if child is not None:
        be_program(child)


if __name__ == "__main__":
    main(*sys.argv[1:])
