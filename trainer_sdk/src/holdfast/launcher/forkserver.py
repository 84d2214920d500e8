"""The process that has torch imported and forks ranks: `python -m holdfast.launcher.forkserver FD`.

It owns exactly one thread, runs no tensor operation and opens no process group: a fork after a
thread pool came to life leaves the child with locks that nobody will release. Its life ends with the
launcher's: at the end of the socket it kills every process group that it started.

 1. launcher: starts it with one end of a socket pair, OMP and BLAS held to one thread.
 2. server: imports what the launcher names (torch, what DDP and FSDP import at first use, what the
    user asked for); says Ready.
 3. launcher: ForkRank, ForkStore; server: forks, says Forked; later Reaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.launcher import wire
from holdfast.launcher.child import become_rank, become_store

TORCH_MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
)
"""DDP() alone imports some 900 modules at its first use: seconds that a restart must not pay."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildTask:
    """What the forked process is to be: returned out of the serving loop, so that the child runs on
    a clean stack and ends by an ordinary interpreter exit."""

    request: wire.ForkRank | wire.ForkStore
    stdout: int = -1
    stderr: int = -1
    listener: socket.socket | None = None


class ForkServer:
    """Single-threaded loop over the launcher's socket and SIGCHLD."""

    def __init__(self, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._children: dict[int, str] = {}
        self._pid = os.getpid()

    def serve(self) -> ChildTask | None:
        """None: the launcher is gone. A task: this is a freshly forked child, do it and exit."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        try:
            while True:
                waiting: list[socket.socket | int] = [self._launcher, wake_read]
                readable, _, _ = select.select(waiting, [], [])
                if wake_read in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                if self._launcher in readable:
                    packet, descriptors, _, _ = socket.recv_fds(
                        self._launcher, wire.MAX_PACKET_BYTES, 2
                    )
                    if not packet:
                        return None
                    task = self._handle(wire.decode(packet), descriptors)
                    if task is not None:
                        return task
        finally:
            signal.set_wakeup_fd(-1)
            os.close(wake_read)
            os.close(wake_write)

    def end(self) -> None:
        """SIGKILL to the process group of every child, and wait for them."""
        for pid in self._children:
            kill_group(pid)
        for pid in self._children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _handle(self, message: wire.Message, descriptors: Sequence[int]) -> ChildTask | None:
        try:
            _require_one_thread("before a fork")
            match message:
                case wire.ForkRank():
                    task = ChildTask(message, descriptors[0], descriptors[1])
                    return task if self._fork(message.key) else None
                case wire.ForkStore():
                    return self._fork_store(message)
                case wire.Ready() | wire.Forked() | wire.Reaped() | wire.Failed():
                    raise ValueError(f"{type(message).__name__} goes from the server only")
        except (OSError, ValueError, ThreadsError) as error:
            key = getattr(message, "key", "")
            self._say(wire.Failed(key, f"{type(error).__name__}: {error}"))
            return None
        finally:
            if os.getpid() == self._pid:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _fork_store(self, request: wire.ForkStore) -> ChildTask | None:
        # The listener exists before the fork: its port is known at once, and clients that come
        # early wait in its backlog.
        if request.host:
            listener = socket.create_server((request.host, 0))
        else:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        if self._fork(request.key, port=listener.getsockname()[1]):
            return ChildTask(request, listener=listener)
        listener.close()
        return None

    def _fork(self, key: str, port: int = 0) -> bool:
        """True in the child."""
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            _die_with_parent(self._pid)
            self._launcher.close()
            self._children.clear()
            return True
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        self._children[pid] = key
        self._say(wire.Forked(key, pid, port))
        return False

    def _reap(self) -> None:
        for pid, key in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == 0:
                continue
            del self._children[pid]
            kill_group(pid)  # what the rank started (data loader workers) goes with it
            self._say(wire.Reaped(key, pid, os.waitstatus_to_exitcode(status)))

    def _say(self, message: wire.Message) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._launcher.sendall(wire.encode(message))


class ThreadsError(Exception):
    """Something that was imported started a thread: forking would not be safe."""


def kill_group(pid: int) -> None:
    """SIGKILL a whole process group; it may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def preload(modules: Sequence[str]) -> None:
    """Import what ranks need. A torch that is not there is no error: ranks need not use it.

    Raises ImportError for a module that the user named, ThreadsError for one that starts threads.
    """
    _require_one_thread("at the start")
    importlib.import_module("holdfast.checkpointer")
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if name not in TORCH_MODULES:
                raise
        _require_one_thread(f"after importing {name} (--preload)")


def _require_one_thread(moment: str) -> None:
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads != 1:
        raise ThreadsError(
            f"the fork server has {threads} threads {moment}, expected 1: a module that starts "
            "threads when it is imported cannot be preloaded"
        )


def _die_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main(argv: Sequence[str]) -> int:
    launcher = socket.socket(fileno=int(argv[0]))
    launcher.set_inheritable(False)
    # A signal that the terminal sends to the whole group is the launcher's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started = time.monotonic()
    try:
        preload(argv[1:])
    except (ImportError, ThreadsError) as error:
        launcher.sendall(wire.encode(wire.Failed("", f"preload: {error}")))
        return 1
    launcher.sendall(wire.encode(wire.Ready(time.monotonic() - started)))
    server = ForkServer(launcher)
    task = server.serve()
    if task is None:
        server.end()
        return 0
    match task.request:
        case wire.ForkRank():
            return become_rank(task.request, task.stdout, task.stderr)
        case wire.ForkStore():
            if task.listener is None:
                raise ValueError("a store task carries its listener")
            return become_store(task.listener)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
