"""The fork server, which imports torch and forks ranks: `python -m holdfast.launcher.ranks.forkserver FD`.

It has exactly one thread, runs no tensor operation and opens no process group: a fork after a thread
pool has started would leave the child with locks that are never released. It ends with the launcher: at
the end of the socket it kills every process group that it started.

 1. The launcher starts it with one end of a socket pair, and with OMP and BLAS limited to one thread.
 2. The server imports the modules that the launcher names (torch, what DDP and FSDP import at first use,
    and the user's modules) and sends Ready.
 3. The launcher sends ForkRank and ForkStore. The server forks and sends Forked, and later Reaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
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

from holdfast.launcher.ranks import wire
from holdfast.launcher.ranks.child import become_rank, become_store

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
"""The first use of DDP() alone imports about 900 modules. This takes seconds, which a restart must avoid."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildTask:
    """Task of a forked child.

    The serving loop returns it, so that the child runs outside of the loop and ends by a normal
    interpreter exit.
    """

    request: wire.ForkRank | wire.ForkStore
    stdout: int = -1
    stderr: int = -1
    stacks: int = -1
    listener: socket.socket | None = None


class ForkServer:
    """Single-threaded loop over the launcher's socket and SIGCHLD."""

    def __init__(self, launcher: socket.socket) -> None:
        self._launcher = launcher
        self._children: dict[int, str] = {}
        self._pid = os.getpid()

    def serve(self) -> ChildTask | None:
        """Serve the launcher's requests.

        Returns None in the server when the launcher has ended. Returns a task in a newly forked child,
        which must do it and exit.
        """
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
                        self._launcher, wire.MAX_PACKET_BYTES, 3
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
        """Send SIGKILL to the process group of every child and wait for the children."""
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
                    stdout, stderr, stacks = descriptors
                    task = ChildTask(message, stdout, stderr, stacks)
                    return task if self._fork(message.key) else None
                case wire.ForkStore():
                    return self._fork_store(message)
                case wire.Ready() | wire.Forked() | wire.Reaped() | wire.Failed():
                    raise ValueError(f"{type(message).__name__} is sent only by the server")
        except (OSError, ValueError, ThreadsError) as error:
            key = getattr(message, "key", "")
            self._send(wire.Failed(key, f"{type(error).__name__}: {error}"))
            return None
        finally:
            if os.getpid() == self._pid:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _fork_store(self, request: wire.ForkStore) -> ChildTask | None:
        # The listener is created before the fork, so that its port can be reported immediately and early
        # clients wait in its backlog.
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
        """Fork and report the child to the launcher. Return True in the child."""
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
        self._send(wire.Forked(key, pid, port))
        return False

    def _reap(self) -> None:
        for pid, key in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == 0:
                continue
            del self._children[pid]
            kill_group(pid)  # also ends what the rank started, such as data loader workers
            self._send(wire.Reaped(key, pid, os.waitstatus_to_exitcode(status)))

    def _send(self, message: wire.Message) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._launcher.sendall(wire.encode(message))


class ThreadsError(Exception):
    """An imported module has started a thread, so that a fork would not be safe."""


def kill_group(pid: int) -> None:
    """Send SIGKILL to a process group. The group may have ended already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def preload(modules: Sequence[str]) -> None:
    """Import the modules that ranks need. A missing torch is not an error, because ranks may not use it.

    Raises ImportError for a missing module that the user named, and ThreadsError for a module that starts
    threads.
    """
    _require_one_thread("at the start")
    # Imports leave hardly any garbage, and the collector would search all objects again and again: an eighth
    # of the time. Frozen, the objects are not searched in the ranks either, which share their memory.
    gc.disable()
    holdfast = importlib.import_module("holdfast")
    for name in holdfast.__all__:
        getattr(holdfast, name)  # imports its module
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            if name not in TORCH_MODULES:
                raise
        _require_one_thread(f"after importing {name} (--preload)")
    gc.freeze()
    gc.enable()


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
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def main(argv: Sequence[str]) -> int:
    launcher = socket.socket(fileno=int(argv[0]))
    launcher.set_inheritable(False)
    # A terminal sends its signals to the whole process group. Only the launcher handles them.
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
            return become_rank(task.request, task.stdout, task.stderr, task.stacks)
        case wire.ForkStore():
            if task.listener is None:
                raise ValueError("expected a listener in the task that starts a store")
            return become_store(task.listener)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
