"""The connection of a worker, or of a launcher that it forked, to a zygote."""

from __future__ import annotations

import atexit
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from tests.support.zygote.start import Start, at_load, written

ENVIRONMENT = dict(os.environ)
"""Environment of the zygotes: that of the worker before its tests change it."""
STATUS = struct.Struct("i")
"""How a child ended, as os.waitpid returns it."""
ANSWER = struct.Struct("i")
"""Process id of a child."""
START, CONNECT = b"s", b"c"
"""Requests: a start, and another process that may ask for starts."""
TITLE_BYTES = 32 << 10
"""Room for the command line that the child shows in /proc."""
_MOST_ZYGOTES = 4
"""Each has 60 MB of memory, or 250 MB with torch."""


class Zygote:
    """A process that forks."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def fork(self, start: Start, descriptors: Sequence[int], status: int) -> int:
        """Fork a child and return its process id.

        Args:
            start: The program.
            descriptors: Descriptors that the child gets, in the order of `start.descriptors`.
            status: Pipe to which the zygote writes how the child ended.
        """
        file = written(start)
        try:
            with self._lock:
                socket.send_fds(self._socket, [START], [file, status, *descriptors])
                answer = self._socket.recv(ANSWER.size)
        finally:
            os.close(file)
        if not answer:
            raise AssertionError(f"the zygote failed at {start.arguments}: {self.errors()}")
        pid: int = ANSWER.unpack(answer)[0]
        return pid

    def connect(self) -> socket.socket:
        """Return a connection for a child."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._socket, [CONNECT], [theirs.fileno()])
        return ours

    def errors(self) -> str:
        return ""


class OwnZygote(Zygote):
    """A zygote of this worker. It ends when this process ends, or closes its socket."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        worker = os.pidfd_open(os.getpid())
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.zygote.server",
                    str(theirs.fileno()),
                    str(worker),
                    ",".join(modules),
                    " " * TITLE_BYTES,
                ],
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno(), worker],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        os.close(worker)
        super().__init__(ours)
        atexit.register(self._end, os.getpid())

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:]

    def _end(self, worker: int) -> None:
        """End the zygote, so that its CPU time counts as this process's."""
        if os.getpid() == worker:
            self._socket.close()
            self._process.wait()


class Zygotes:
    """The zygotes of a process."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._own: dict[object, Zygote] = {}
        self._given: Zygote | None = None

    @property
    def usable(self) -> bool:
        """Whether this is the process that the zygotes serve, and not a forked copy of it."""
        return os.getpid() == self._owner

    def give(self, connection: socket.socket) -> None:
        """Use only this zygote from now on. The process is a child of a zygote."""
        self._owner = os.getpid()
        self._given = Zygote(connection)

    def of(self, start: Start) -> Zygote | None:
        """Return the zygote for the program. None: the worker has enough zygotes."""
        if self._given is not None:
            return self._given
        with_torch = "torch" in {name.partition(".")[0] for name in start.preload}
        return self.find(start.environment, with_torch=with_torch)

    def find(self, variables: Mapping[str, str], *, with_torch: bool) -> Zygote | None:
        """Return the zygote for programs with these variables."""
        early = at_load(ENVIRONMENT)
        late = {name: value for name, value in ENVIRONMENT.items() if name not in early}
        environment = {**late, **at_load(variables)}
        key = (with_torch, tuple(sorted(environment.items())))
        with self._lock:
            if key not in self._own and len(self._own) < _MOST_ZYGOTES:
                self._own[key] = OwnZygote(environment, ("torch",) if with_torch else ())
            return self._own.get(key)


zygotes = Zygotes()
