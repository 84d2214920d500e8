"""The launcher's side of the fork server: start it, fork ranks and stores, await their ends, kill them.

It uses asyncio, with one instance for each launcher. After `close`, all processes that it started have
ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

from holdfast.base.settings import (
    RankSettings,
    current_environment,
    rank_environment,
    single_thread_defaults,
)
from holdfast.launcher import forkserver as wire
from holdfast.launcher.forkserver import TORCH_MODULES, kill_group
from holdfast.launcher.options import Command, CommandKind
from holdfast.launcher.output import LogFiles, OutputPump, Tail, open_streams
from holdfast.launcher.stacks import LocatedRank, Watched, find
from holdfast_core.errors import ConfigError, HoldfastError
from holdfast_core.ids import Rank

STORE_SECRET_BYTES = 32
_DRAIN_SECONDS = 1.0
"""Time to wait for the last lines of a rank that has ended."""


_END_SECONDS = 120.0
"""Time for the ends of killed ranks. The kernel takes long to release the memory of a large one."""


class ForkServerError(HoldfastError):
    """The fork server has ended or could not fork, or a rank does not end. No process can be started."""


@dataclass(slots=True)
class RankProcess:
    """One forked rank. `code` is None while it runs."""

    key: str
    rank: Rank
    pumps: tuple[OutputPump, ...]
    stacks: int | None
    """Descriptor of the file in memory that the rank writes its stack to on request. None: it has ended."""
    tail: Tail
    pid: int | None = None
    code: int | None = None
    forked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the rank has a pid or could not be forked."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def close_stacks(self) -> None:
        if self.stacks is not None:
            os.close(self.stacks)
            self.stacks = None


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Settings of the ranks of one round on this node."""

    first: RankSettings
    """The settings of the first rank. Those of the others differ in their numbers only."""
    group_rank: int
    """Index of the pod."""
    run_id: str
    max_restarts: int = 0

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables that a rank of this node gets."""
        rank = Rank(self.first.rank + local_rank)
        return rank_environment(
            replace(self.first, rank=rank, local_rank=local_rank),
            group_rank=self.group_rank,
            run_id=self.run_id,
            max_restarts=self.max_restarts,
        )


class Processes:
    """Owns the fork server and, through it, every process of this launcher."""

    def __init__(self, command: Command, preload: Sequence[str], logs: LogFiles) -> None:
        self._command = command
        self._logs = logs
        self._preload = tuple(preload)
        self._serial = 0
        self._ranks: dict[str, RankProcess] = {}
        self._stores: dict[str, asyncio.Future[int]] = {}
        self._store_pids: dict[str, int] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._closing = False
        self._signal: signal.Signals | None = None
        """What the ranks were sent by `signal_ranks`."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_server_lost: Callable[[str], None] = lambda _: None

    def start(self) -> None:
        """Start the fork server. It imports torch after this returns; `ready` waits for that."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * wire.MAX_PACKET_BYTES)
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "holdfast.launcher.forkserver",
                    str(theirs.fileno()),
                    # A command that is started by exec cannot use modules that the server imported.
                    *([] if self._command.kind is CommandKind.EXEC else TORCH_MODULES),
                    *self._preload,
                ],
                pass_fds=[theirs.fileno()],
                env=single_thread_defaults(current_environment()),
                stdin=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        self._socket = ours
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(ours, self._on_readable)

    async def ready(self) -> None:
        """Wait until the fork server has imported what ranks need.

        Raises ConfigError when a module cannot be preloaded, and ForkServerError when the server ended.
        """
        if self._ready is None:
            raise ForkServerError("the fork server was not started")
        await asyncio.shield(self._ready)

    @property
    def ranks(self) -> tuple[RankProcess, ...]:
        return tuple(self._ranks.values())

    async def find_stacks(self) -> tuple[LocatedRank, ...]:
        """Return where each rank is that runs. It takes some seconds."""
        with contextlib.ExitStack() as files:
            running = []
            for process in self._ranks.values():
                if process.pid is not None and process.stacks is not None:
                    # A rank that ends meanwhile closes its own descriptor, whose number may be used again.
                    file = os.dup(process.stacks)
                    files.callback(os.close, file)
                    running.append(Watched(process.rank, process.pid, file))
            return await find(running)

    async def fork_ranks(self, settings: RoundSettings) -> None:
        """Request the fork of all ranks of a round. Raises ConfigError, ForkServerError."""
        for local_rank in range(settings.first.local_world_size):
            await self._fork_rank(settings, local_rank)

    async def ends(self) -> AsyncGenerator[RankProcess, None]:
        """Yield each rank of the round when it has ended."""
        waiting = {asyncio.ensure_future(one.ended.wait()): one for one in self._ranks.values()}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for process in sorted(map(waiting.pop, done), key=lambda one: one.rank):
                    yield process
        finally:
            for future in waiting:
                future.cancel()

    async def _fork_rank(self, settings: RoundSettings, local_rank: int) -> None:
        """Request the fork of a rank. This returns before the process runs.

        Raises ConfigError for a log file that cannot be opened, and ForkServerError.
        """
        await self.ready()
        rank = Rank(settings.first.rank + local_rank)
        key = self._next_key(f"rank{rank}")
        round_ = settings.first.round or 0
        try:
            files = await asyncio.to_thread(self._logs.open, local_rank, rank, round_)
        except OSError as error:
            raise ConfigError(f"holdfast run: --log-dir: rank {rank}: {error}") from error
        tail = Tail()
        descriptors, pumps = open_streams(f"[rank {rank}] ", files, tail)
        stacks = os.memfd_create(f"stacks of rank {rank}")
        env = settings.environment(local_rank)
        request = wire.ForkRank(key, self._command.kind.value, self._command.argv, env)
        try:
            self._send(request, [*descriptors, stacks])
        except BaseException:
            os.close(stacks)
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        process = RankProcess(key, rank, tuple(pumps), stacks, tail)
        for pump in process.pumps:
            pump.start()
        self._ranks[key] = process

    async def fork_store(self, host: str) -> tuple[str, int]:
        """Fork a process that hosts a TCPStore, and return its key and port.

        Clients can connect when this returns.

        Args:
            host: Address to listen on; "" for all addresses.
        """
        await self.ready()
        key = self._next_key("store")
        self._stores[key] = asyncio.get_running_loop().create_future()
        self._send(wire.ForkStore(key, host), [])
        return key, await self._stores[key]

    def end_store(self, key: str) -> None:
        pid = self._store_pids.get(key)
        if pid is not None:
            kill_group(pid)

    def signal_ranks(self, number: signal.Signals) -> None:
        """Send a signal to every rank's process, but not to its group: a rank stops its own children.

        A rank that is being forked, or is forked later, gets it as well.
        """
        self._signal = number
        for process in self._ranks.values():
            self._pass_signal(process)

    def _pass_signal(self, process: RankProcess) -> None:
        if self._signal is not None and process.pid is not None and process.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, self._signal)

    async def end_ranks(self) -> None:
        """Send SIGKILL to every rank's process group and wait until all ranks are reaped.

        No other signal ends a rank that hangs in a collective.

        Raises ForkServerError for a rank that does not end. It runs no instruction of its program any more.
        """
        for process in self._ranks.values():
            if process.pid is not None and process.code is None:
                kill_group(process.pid)
        try:
            async with asyncio.timeout(_END_SECONDS):
                for process in tuple(self._ranks.values()):
                    if process.pid is None and process.code is None:
                        await process.forked.wait()  # the fork was requested; its pid arrives soon
                        if process.pid is not None and process.code is None:
                            kill_group(process.pid)
                    await process.ended.wait()
        except TimeoutError as error:
            self._ranks.clear()
            raise ForkServerError(
                f"holdfast run: rank {process.rank} (process {process.pid}) has not ended "
                f"{_END_SECONDS:g} s after SIGKILL: the kernel does not return from a call to a file "
                f"system or a device, which /proc/{process.pid}/stack names"
            ) from error
        self._ranks.clear()

    async def close(self) -> None:
        """Kill all processes, and end the fork server."""
        self._closing = True
        if self._server is None or self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        for pid in self._living():
            kill_group(pid)
        self._socket.close()  # the server then kills the remaining processes and exits
        await asyncio.to_thread(self._join)
        for process in self._ranks.values():
            for pump in process.pumps:
                pump.close()
            process.close_stacks()

    def _living(self) -> list[int]:
        pids = [p.pid for p in self._ranks.values() if p.pid is not None and p.code is None]
        return pids + list(self._store_pids.values())

    def _join(self) -> None:
        if self._server is None:
            return
        try:
            self._server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _next_key(self, what: str) -> str:
        self._serial += 1
        return f"{what}.{self._serial}"

    def _send(self, message: wire.Request, descriptors: list[int]) -> None:
        if self._socket is None:
            raise ForkServerError("the fork server was not started")
        try:
            socket.send_fds(self._socket, [wire.encode(message)], descriptors)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ForkServerError("the fork server has ended: no rank can be started") from error

    def _on_readable(self) -> None:
        if self._socket is None:
            return
        try:
            packet = self._socket.recv(wire.MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._lost("the fork server ended unexpectedly")
            return
        match wire.EVENTS.decode(packet):
            case wire.Ready():
                if self._ready is not None:
                    self._ready.set_result(None)
            case wire.Forked(key, pid, port):
                self._forked(key, pid, port)
            case wire.Reaped(key, code):
                self._reaped(key, code)
            case wire.Failed(key, message):
                self._failed(key, message)

    def _forked(self, key: str, pid: int, port: int) -> None:
        if key in self._ranks:
            process = self._ranks[key]
            process.pid = pid
            process.forked.set()
            self._pass_signal(process)
        elif key in self._stores:
            self._store_pids[key] = pid
            self._stores[key].set_result(port)

    def _reaped(self, key: str, code: int) -> None:
        self._store_pids.pop(key, None)
        process = self._ranks.get(key)
        if process is not None:
            self._spawn(self._conclude(process, code))

    async def _conclude(self, process: RankProcess, code: int) -> None:
        """Read the rest of an ended rank's output, then set its exit code and its events."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                for pump in process.pumps:
                    await pump.drained.wait()
        for pump in process.pumps:
            pump.close()
        process.close_stacks()
        process.code = code
        process.forked.set()
        process.ended.set()

    def _failed(self, key: str, message: str) -> None:
        if not key:
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(ConfigError(f"holdfast run: {message}"))
        elif key in self._stores:
            self._stores[key].set_exception(ForkServerError(f"TCPStore process: {message}"))
        elif key in self._ranks:
            process = self._ranks[key]
            process.tail.add(f"holdfast run: the rank could not be forked: {message}".encode())
            self._spawn(self._conclude(process, 1))

    def _lost(self, why: str) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
        error = ForkServerError(f"holdfast run: {why}")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        for waiting in self._stores.values():
            if not waiting.done():
                waiting.set_exception(error)
        for pid in self._living():
            kill_group(pid)
        for process in self._ranks.values():
            if process.code is None:
                self._spawn(self._conclude(process, -signal.SIGKILL))
        if not self._closing:
            self.on_server_lost(why)
