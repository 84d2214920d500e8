"""The worker's connection to a zygote: `python -m tests.support.zygote.server SOCKET PIDFD MODULES TITLE`."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from tests.support.zygote.start import Start, written

ENVIRONMENT = dict(os.environ)
"""Environment of the zygotes: that of the worker before its tests change it."""
WORKER = os.getpid()
STATUS = struct.Struct("i")
"""How a child ended, as os.waitpid returns it."""
ANSWER = struct.Struct("i")
"""Process id of a child."""
TITLE_BYTES = 32 << 10
"""Room for the command line that the child shows in /proc."""


def helper(preload: Sequence[str]) -> Zygote:
    """Return the zygote of this worker for programs that import these modules."""
    return _zygote("torch" in {name.partition(".")[0] for name in preload})


@functools.cache
def _zygote(with_torch: bool) -> Zygote:
    return Zygote(("torch",) if with_torch else ())


class Zygote:
    """The process that forks. It ends when this process ends, or closes its socket."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        worker = os.pidfd_open(WORKER)
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
                env={**ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno(), worker],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        os.close(worker)
        atexit.register(self._end)

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
                socket.send_fds(self._socket, [b"s"], [file, status, *descriptors])
                answer = self._socket.recv(ANSWER.size)
        finally:
            os.close(file)
        if not answer:
            self._errors.seek(0)
            raise AssertionError(f"the zygote failed: {self._errors.read()[-3000:]}")
        pid: int = ANSWER.unpack(answer)[0]
        return pid

    def _end(self) -> None:
        """End the zygote, so that its CPU time counts as this process's."""
        if os.getpid() == WORKER:
            self._socket.close()
            self._process.wait()
