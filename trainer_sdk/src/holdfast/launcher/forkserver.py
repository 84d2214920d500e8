"""The fork server, which imports torch and forks ranks: `python -m holdfast.launcher.forkserver FD`.

It has exactly one thread, runs no tensor operation and opens no process group: a fork after a thread
pool has started would leave the child with locks that are never released. It ends with the launcher: at
the end of the socket it kills every process group that it started.

 1. The launcher starts it with one end of a socket pair, and with OMP and BLAS limited to one thread.
 2. The server imports the modules that the launcher names (torch, what DDP and FSDP import at first use,
    and the user's modules) and sends Ready.
 3. The launcher sends ForkRank and ForkStore. The server forks and sends Forked, and later Reaped.
 4. The forked child becomes a rank with the user's program, or the host of a TCPStore.

Each message is one packet of a SOCK_SEQPACKET pair. Both ends come from the same installation and the socket
has no name, so that the messages are trusted. Only the packet has a bound.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec

from holdfast.base.settings import apply_environment
from holdfast.gang.store import open_store, tolerate_missing_libuv
from holdfast.launcher.options import CommandKind
from holdfast.launcher.stacks import STACK_SIGNAL
from holdfast_core.errors import FormatError
from holdfast_core.messages import codec
from holdfast_core.messages.codec import clipped

MAX_PACKET_BYTES = 160 * 1024
"""Limit of a packet. It is enough for usual environments and command lines, and it is below the default
send buffer of a Unix socket."""


class ForkRank(msgspec.Struct, frozen=True, tag=True):
    """Launcher to server: fork a rank.

    The write ends of two pipes (stdout, stderr) and the file for its stacks go along with it.
    """

    key: str
    """Name of the process in every later message. The launcher chooses it."""
    kind: str
    argv: tuple[str, ...]
    env: dict[str, str]


class ForkStore(msgspec.Struct, frozen=True, tag=True):
    """Launcher to server: fork a process that hosts one TCPStore on a free port."""

    key: str
    host: str
    """Address to listen on; "" for all addresses."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Server to launcher: all modules are imported, and the process has one thread."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """Server to launcher: a process was forked."""

    key: str
    pid: int
    port: int = 0
    """Port of a store process, otherwise 0."""


class Reaped(msgspec.Struct, frozen=True, tag=True):
    """Server to launcher: a child has ended. `code` is its exit code, or -N for signal N."""

    key: str
    code: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Server to launcher: a request failed. `key` is empty when the server cannot serve at all."""

    key: str
    message: str


Request = ForkRank | ForkStore
Event = Ready | Forked | Reaped | Failed

_MAX_TEXT = 4096
REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
EVENTS: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode(message: Request | Event) -> bytes:
    """Return the packet of a message. Raises FormatError when it does not fit into a packet."""
    packet = codec.dumps(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise FormatError(
            f"{type(message).__name__}: {len(packet)} bytes, at most {MAX_PACKET_BYTES} can be "
            "sent: the command line or the environment of the rank is too large"
        )
    return packet


def failed(key: str, text: str) -> Failed:
    return Failed(key, clipped(text, _MAX_TEXT))


EXIT_NOT_FOUND = 127
"""Exit code for a command that does not exist, as in a shell."""
EXIT_NOT_EXECUTABLE = 126
"""Exit code for a command that cannot be executed, as in a shell."""

RANK_PROCESS_NAME = b"holdfast-rank"
"""Begin of the name of a rank's process in `ps -o comm` and `top`. The number of the rank follows it."""
_MAX_PROCESS_NAME = 15
_PR_SET_NAME = 15


def _name_process(name: bytes) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _process_name(rank: str) -> bytes:
    """Return the name of a rank's process. The kernel would cut a long number, and name another rank."""
    name = RANK_PROCESS_NAME + rank.encode()
    return name if len(name) <= _MAX_PROCESS_NAME else RANK_PROCESS_NAME


def become_rank(request: ForkRank, stdout: int, stderr: int, stacks: int) -> int:
    """Run the user's program as `__main__` and return its exit code.

    With EXEC this returns only if the command cannot be executed.
    """
    _wire_streams(stdout, stderr)
    apply_environment(request.env)
    _name_process(_process_name(request.env.get("RANK", "")))
    _reset_inherited_state()
    kind = CommandKind(request.kind)
    if kind is CommandKind.EXEC:
        os.close(stacks)
        return _execute(request.argv)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    tolerate_missing_libuv()
    sys.argv = list(request.argv)
    target = request.argv[0]
    try:
        if kind is CommandKind.MODULE:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - printed as the interpreter would print it
        sys.excepthook(*sys.exc_info())
        return 130 if isinstance(sys.exc_info()[1], KeyboardInterrupt) else 1
    return 0


def become_store(listener: socket.socket) -> int:
    """Host one TCPStore until it is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    port = listener.getsockname()[1]
    store = open_store(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
        use_libuv=False,  # some distributions build torch without it
    )
    while store is not None:
        signal.pause()
    return 0


def _wire_streams(stdout: int, stderr: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in {null, stdout, stderr} - {0, 1, 2}:
        os.close(descriptor)
    # Lines must reach the log when they are written, because a killed rank does not flush its buffers.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(AttributeError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _reset_inherited_state() -> None:
    """Reset signal handlers, and seed the generators that would be the same in all forked ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    threading.current_thread().name = "MainThread"


def _execute(argv: tuple[str, ...]) -> int:
    # Python ignores these signals. A command that a closed pipe should end would go on without end.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        sys.stderr.write(f"holdfast run: {argv[0]}: no such command\n")
        return EXIT_NOT_FOUND
    except OSError as error:
        sys.stderr.write(f"holdfast run: {argv[0]}: {error}\n")
        return EXIT_NOT_EXECUTABLE


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
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ChildTask:
    """Task of a forked child.

    The serving loop returns it, so that the child runs outside of the loop and ends by a normal
    interpreter exit.
    """

    request: ForkRank | ForkStore
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
        # select.select() refuses descriptors from 1,024 on, and the socket keeps its number in the launcher.
        poller = select.poll()
        poller.register(self._launcher, select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        try:
            while True:
                readable = {descriptor for descriptor, _ in poller.poll()}
                if wake_read in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                if self._launcher.fileno() in readable:
                    packet, descriptors, _, _ = socket.recv_fds(self._launcher, MAX_PACKET_BYTES, 3)
                    if not packet:
                        return None
                    task = self._handle(REQUESTS.decode(packet), descriptors)
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

    def _handle(self, message: Request, descriptors: Sequence[int]) -> ChildTask | None:
        try:
            _require_one_thread("before a fork")
            match message:
                case ForkRank():
                    stdout, stderr, stacks = descriptors
                    task = ChildTask(message, stdout, stderr, stacks)
                    return task if self._fork(message.key) else None
                case ForkStore():
                    return self._fork_store(message)
        except (OSError, ValueError, ThreadsError) as error:
            self._send(failed(message.key, f"{type(error).__name__}: {error}"))
            return None
        finally:
            if os.getpid() == self._pid:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _fork_store(self, request: ForkStore) -> ChildTask | None:
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
        self._send(Forked(key, pid, port))
        return False

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no more children
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                pid, status = ended
                key = self._children.pop(pid, None)
                if key is None:
                    continue  # a child of a rank that has ended
                kill_group(pid)  # also ends what the rank started, such as data loader workers
                self._send(Reaped(key, os.waitstatus_to_exitcode(status)))

    def _send(self, message: Event) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._launcher.sendall(encode(message))


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
    # Its ranks ignore SIGHUP, too: the launcher passes it on to them as SIGTERM.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The SIGTERM of the launcher to a rank that was just forked is pending until the rank is ready for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        preload(argv[1:])
    except (ImportError, ThreadsError) as error:
        launcher.sendall(encode(failed("", f"preload: {error}")))
        return 1
    # Processes whose parents have ended come here and are reaped. In a container, the launcher would get
    # them, and they would stay as zombies.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    launcher.sendall(encode(Ready()))
    server = ForkServer(launcher)
    task = server.serve()
    if task is None:
        server.end()
        os._exit(0)  # it has nothing to finalize, and a library reports the frozen objects as leaks
    match task.request:
        case ForkRank():
            try:
                return become_rank(task.request, task.stdout, task.stderr, task.stacks)
            finally:
                # The interpreter's end collects the preloaded objects, as it does without a fork server.
                # nanobind (triton) reports what is left of its types, which hides the script's error.
                gc.unfreeze()
        case ForkStore():
            if task.listener is None:
                raise ValueError("expected a listener in the task that starts a store")
            return become_store(task.listener)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
