"""Code of a forked child, which becomes a rank with the user's program or the host of a TCPStore.

It runs only in the child, once, right after the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import runpy
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

from holdfast.base.settings import apply_environment
from holdfast.gang.tcp_store import open_store, tolerate_missing_libuv
from holdfast.launcher.command_line.command import CommandKind
from holdfast.launcher.ranks import wire
from holdfast.launcher.ranks.stacks import STACK_SIGNAL

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


def become_rank(request: wire.ForkRank, stdout: int, stderr: int, stacks: int) -> int:
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
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    threading.current_thread().name = "MainThread"


def _execute(argv: tuple[str, ...]) -> int:
    try:
        os.execvp(argv[0], argv)
    except FileNotFoundError:
        sys.stderr.write(f"holdfast run: {argv[0]}: no such command\n")
        return EXIT_NOT_FOUND
    except OSError as error:
        sys.stderr.write(f"holdfast run: {argv[0]}: {error}\n")
        return EXIT_NOT_EXECUTABLE
