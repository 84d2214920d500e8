"""The persister that a rank starts for checkpoints in a folder. At most one runs at a time."""

from __future__ import annotations

import socket
import subprocess
import sys

from holdfast.connection.link import OwnSocket


class PersisterProcess:
    """The newest persister of this rank."""

    def __init__(self) -> None:
        self.exit_status: int | None = None
        """Exit status of the last persister that another one replaced."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """End the persister, if one runs."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self.exit_status = self._process.wait()
            self._process = None

    def start(self, options: str) -> socket.socket:
        """Start a persister with `options` and return the socket to it. Raises OSError."""
        plain, theirs = socket.socketpair()
        ours = OwnSocket.of(plain)
        command = [sys.executable, "-m", "holdfast.directory.persister"]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), options],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # A launcher kills a rank's process group, and a terminal interrupts it. The
                    # persister must survive both to write what was staged.
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        return ours

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the persister to end. Return whether none is left."""
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            self._process = None
        return True
