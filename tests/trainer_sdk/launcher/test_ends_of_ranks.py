"""Ends of ranks, of what they have started, and of commands whose pipe was closed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.sidecar.waiting import until
from tests.support.trainer.launched import stop

from holdfast.base.settings import RankSettings, single_thread_defaults
from holdfast.launcher.forkserver import (
    EVENTS,
    MAX_PACKET_BYTES,
    Event,
    Forked,
    ForkRank,
    Ready,
    Reaped,
    encode,
)
from holdfast.launcher.options import Command, CommandKind, LogOptions
from holdfast.launcher.output import LogFiles
from holdfast.launcher.processes import ForkServerError, Processes, RoundSettings


def children() -> set[int]:
    """Return the processes that this one has started."""
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread of an earlier test that has just ended
            found |= set(map(int, (task / "children").read_text().split()))
    return found


@contextlib.asynccontextmanager
async def executed(*argv: str) -> AsyncIterator[tuple[Processes, int]]:
    """Execute a program as rank 0, and yield the processes of the launcher and its fork server."""
    command = Command(CommandKind.EXEC, argv)
    processes = Processes(command, (), LogFiles(LogOptions(), "run"))
    before = children()
    processes.start()
    (server,) = children() - before
    try:
        await processes.fork_ranks(RoundSettings(RankSettings(), 0, "run"))
        yield processes, server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGCONT)  # a test may have stopped it
        await processes.close()


@pytest.mark.fault("A killed rank stays in the kernel, which waits for a device or a file system")
def test_a_rank_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server is stopped, so that it reports no rank that has ended."""
    monkeypatch.setattr("holdfast.launcher.processes._END_SECONDS", 0.1)

    async def ended() -> str:
        async with executed("sleep", "600") as (processes, server):
            (rank,) = processes.ranks
            await rank.forked.wait()
            stop(server)
            with pytest.raises(ForkServerError) as refused:
                await processes.end_ranks()
            await processes.end_ranks()  # as when the launcher leaves after the error
            return str(refused.value).replace(str(rank.pid), "PID")

    assert asyncio.run(asyncio.wait_for(ended(), HANG_SECONDS)) == (
        "holdfast run: rank 0 (process PID) has not ended 0.1 s after SIGKILL: the kernel does not return "
        "from a call to a file system or a device, which /proc/PID/stack names"
    )


@pytest.mark.fault("A launcher gets SIGTERM while it forks a rank")
def test_a_rank_whose_fork_was_only_requested_gets_the_signal() -> None:
    """It would train on until the grace period of its pod ends, and be killed without a save."""

    async def ended() -> int | None:
        async with executed("sleep", "600") as (processes, _):
            (rank,) = processes.ranks
            assert rank.pid is None
            processes.signal_ranks(signal.SIGTERM)
            await rank.ended.wait()
            return rank.code

    assert asyncio.run(asyncio.wait_for(ended(), HANG_SECONDS)) == -signal.SIGTERM


SIGNALLED = """
import os, signal, sys
from holdfast.launcher import forkserver
fork = os.fork
def fork_and_signal():
    pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid
os.fork = fork_and_signal
sys.exit(forkserver.main(sys.argv[1:]))
"""


@pytest.mark.fault("A launcher gets SIGTERM while it forks a rank")
def test_a_rank_that_gets_the_signal_before_it_is_ready_does_not_ignore_it() -> None:
    """The fork server ignores what a terminal sends to all processes, and its child begins as its copy."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(HANG_SECONDS)
    command = [sys.executable, "-c", SIGNALLED, str(theirs.fileno())]
    env = single_thread_defaults(os.environ)
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env) as server, ours, theirs:
        with open(os.devnull, "w") as null:
            assert isinstance(received(ours), Ready)
            request = encode(ForkRank("rank", CommandKind.EXEC.value, ("true",), dict(os.environ)))
            socket.send_fds(ours, [request], [null.fileno()] * 3)
        assert isinstance(received(ours), Forked)
        assert received(ours) == Reaped("rank", -signal.SIGTERM)
    assert server.returncode == 0


def test_a_fork_server_serves_a_launcher_with_many_open_files() -> None:
    """select() refuses descriptors from 1,024 on. The number of the socket is one of the launcher."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(HANG_SECONDS)
    with ours, theirs, open_files(2048):
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1024)
        command = [sys.executable, "-m", "holdfast.launcher.forkserver", str(high)]
        with subprocess.Popen(
            command, pass_fds=[high], env=single_thread_defaults(os.environ)
        ) as server:
            os.close(high)
            theirs.close()
            assert isinstance(received(ours), Ready)
            ours.shutdown(socket.SHUT_WR)
    assert server.returncode == 0


@contextlib.contextmanager
def open_files(limit: int) -> Iterator[None]:
    """Allow this process and those that it starts `limit` open files or more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def parent(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def received(sock: socket.socket) -> Event:
    return EVENTS.decode(sock.recv(MAX_PACKET_BYTES))


@pytest.mark.fault("A command of the training writes to a pipe whose reader has ended")
def test_a_closed_pipe_ends_a_command() -> None:
    """Python ignores SIGPIPE, and a shell whose parent ignored it cannot change that: the loop of
    `while true; do echo y; done | head -1` would never end."""

    async def ignored() -> int:
        async with executed("sh", "-c", "grep SigIgn /proc/self/status >&2") as (processes, _):
            (rank,) = processes.ranks
            await rank.ended.wait()
            return int(rank.tail.text().split()[1], 16)

    found = asyncio.run(asyncio.wait_for(ignored(), HANG_SECONDS))
    by_python = (signal.SIGPIPE, signal.SIGXFSZ)
    assert [number for number in by_python if found & 1 << (number - 1)] == []


@pytest.mark.fault("A gang restarts in its pods for months, and its ranks leave processes behind")
def test_what_a_rank_has_started_is_no_zombie_after_its_end() -> None:
    """The launcher is process 1 of its container, and gets the processes whose parents have ended. The pod
    would reach its limit of processes."""

    async def reaped() -> None:
        program = "(sleep 600 & echo $! >&2); exec sleep 600"
        async with executed("sh", "-c", program) as (processes, server):
            (rank,) = processes.ranks
            await until(rank.tail.text, "the rank names the process that it has started")
            left = Path("/proc") / rank.tail.text()
            await until(lambda: parent(left) == server, "the shell between the two has ended")
            await processes.end_ranks()
            await until(lambda: not left.exists(), "the process is reaped")

    asyncio.run(asyncio.wait_for(reaped(), HANG_SECONDS))
