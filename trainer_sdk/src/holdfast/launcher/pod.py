"""`holdfast run` in a worker pod: runs the rounds that the sidecar requests.

 1. The launcher connects and sends Hello, with the round whose ranks run and the last round that it forked.
 2. The sidecar sends a LauncherPlan whenever it changes. The launcher carries it out: it ends the ranks of
    older rounds by SIGKILL and reaps them, starts the round's store process, and finds out where its ranks
    are, whose stacks it writes to its log.
 3. When the plan has a Run, it records the round durably and forks the round's ranks. It never runs a round
    twice: if the launcher's container restarts during a round, the gang cannot continue with that round's
    ranks.
 4. After each of these, and when a rank ends, it sends its whole LauncherState. When all ranks have returned
    0, it exits as soon as a plan releases it.

The launcher of a spare pod connects when the fork server has imported torch. So the sidecar knows that the
spare is ready (ADR 0015).

This also works when the sidecar starts late, restarts, or repeats a message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.base.settings import RankSettings
from holdfast.connection.link import Link, connect_to
from holdfast.launcher.processes import STORE_SECRET_BYTES, Processes, RankProcess, RoundSettings
from holdfast_core.contract import LAUNCHER_ROUND_FILE, SOCKET_NAME, PodContract
from holdfast_core.errors import FormatError, HoldfastError, NotFoundError
from holdfast_core.ids import Rank, RestartRound, Worker, is_spare
from holdfast_core.messages.schema import (
    PROTOCOL_VERSION,
    DeadRank,
    Hello,
    HelloReply,
    LauncherPlan,
    LauncherState,
    RankStack,
    Run,
    StoreAddress,
)
from holdfast_core.node.documents import read_document, replace_document

logger = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")
_CLOSE_SECONDS = 1.0
"""Time for the last messages. A sidecar that does not read them may not keep the pod from ending."""
_REPORT_SECONDS = 5.0
"""Limit for the reports of ended ranks when the launcher leaves. They need some turns of its event loop."""


class RoundRecord:
    """Durable record of the newest round for which this pod has forked ranks. Only its launcher writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> RestartRound | None:
        """Return the recorded round, or None if no round was ever run. Raises FormatError."""
        try:
            return RestartRound(int(json.loads(read_document(self._path))["round"]))
        except NotFoundError:
            return None
        except (
            ValueError,
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
            FormatError,
        ) as error:
            raise FormatError(
                f'{self._path}: expected {{"round": N}} with its digest, found another text: {error}; only '
                "`holdfast run` writes this file. Delete it only if no rank of this pod runs"
            ) from error

    def write(self, round_: RestartRound) -> None:
        """Record `round_`. It is durable when this returns."""
        replace_document(self._path, json.dumps({"round": round_}).encode(), durable=True)


class ContainerMemory:
    """Reader of a memory cgroup. Without a cgroup of version 2 it finds nothing.

    Args:
        root: Folder of the cgroup.
    """

    def __init__(self, root: Path = CGROUP) -> None:
        self._root = root
        self._kills = 0

    def begin(self) -> None:
        """Begin a round: only processes that the kernel ends after this call count."""
        self._kills = self._killed()

    def exceeded(self) -> str:
        """Return limit and peak if the kernel has ended a process in this round because memory ran out.

        Otherwise returns "".
        """
        if self._killed() <= self._kills:
            return ""
        limit, peak = "no limit, so the node ran out of memory", "peak not known"
        if (most := self._read("memory.max")) is not None:
            limit = f"limit {most / 2**20:,.0f} MiB"
        if (used := self._read("memory.peak")) is not None:  # kernels before 5.19 do not record it
            peak = f"peak {used / 2**20:,.0f} MiB"
        return f"{limit}, {peak}"

    def _killed(self) -> int:
        """Return the number of processes of the cgroup that the kernel has ended because memory ran out."""
        for line in self._text("memory.events").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdecimal():
                return int(count)
        return 0

    def _read(self, name: str) -> int | None:
        """Return the number in a file. None: there is no such file, or it says "max"."""
        text = self._text(name).strip()
        return int(text) if text.isdecimal() else None

    def _text(self, name: str) -> str:
        try:
            return (self._root / name).read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class _Store:
    """The store process of a round, which this pod hosts."""

    key: str
    address: StoreAddress


@dataclass(slots=True)
class _StacksSearch:
    """The search for the stacks of the ranks that a plan has requested."""

    token: str = ""
    task: asyncio.Task[None] | None = None
    found: tuple[RankStack, ...] | None = None
    """None: not found yet."""

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _SidecarLink:
    """The link to the sidecar, whose callbacks run in the event loop.

    They run in the order of the calls, each after the end of the one before: a Hello that is sent while a Run
    is carried out would say that no ranks run.
    """

    def __init__(self, path: Path, launcher: PodLauncher) -> None:
        self._launcher = launcher
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._logged = ""
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Is done when the launcher is released, or has the error of a callback, which ends the launcher."""
        self.link = Link(partial(connect_to, path), self)

    # ------------------------------------------------------------------ LinkEvents, in the link's thread

    def hello(self) -> Hello:
        try:
            hello: Hello = self._in_turn(self._launcher.hello).result()
        except CancelledError as error:
            raise ConnectionAbortedError("the launcher ends") from error
        return hello

    def hello_accepted(self, reply: HelloReply) -> None:
        logger.info("connected to the sidecar, which is in round %d", reply.round)
        self._logged = ""

    def connected(self) -> None:
        self._in_turn(self._launcher.report)

    def disconnected(self, reason: str) -> None:
        if reason != self._logged:
            self._logged = reason
            logger.info("no connection to the sidecar, connecting again: %s", reason)

    def refused(self, error: HoldfastError) -> None:
        """Do nothing: `disconnected` gets the reason."""

    def push(self, message: Any) -> None:
        self._in_turn(partial(self._launcher.handle, message))

    def _in_turn(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        async def run() -> Any:
            async with self._turn:
                try:
                    return await work()
                except Exception as error:
                    if not self.over.done():
                        self.over.set_exception(error)
                    raise

        return asyncio.run_coroutine_threadsafe(run(), self._loop)


class PodLauncher:
    """Launcher of one pod's ranks. `run` returns when the gang has finished."""

    def __init__(
        self,
        processes: Processes,
        contract: PodContract,
        memory: ContainerMemory,
    ) -> None:
        shared = Path(contract.shared_dir)
        self._processes = processes
        self._memory = memory
        self._contract = contract
        self._record = RoundRecord(shared / LAUNCHER_ROUND_FILE)
        self._sidecar = _SidecarLink(shared / SOCKET_NAME, self)
        self._last_round: RestartRound | None = None
        self._round: RestartRound | None = None
        """The round whose ranks run."""
        self._watch: asyncio.Task[None] | None = None
        self._stacks = _StacksSearch()
        self._ended: dict[Rank, DeadRank | None] = {}
        """The ranks of `_round` that have ended by themselves. None: with code 0."""
        self._ended_below: RestartRound | None = None
        self._store: _Store | None = None
        self._stopping = False

    async def run(self) -> int:
        """Serve the sidecar until the gang has finished, then return 0.

        Raises FormatError for an invalid round record, what a message leads to, such as ConfigError for a log
        file that cannot be opened, and for a spare what `Processes.ready` raises.
        """
        self._last_round = self._record.read()
        if is_spare(self._contract.worker):
            await self._processes.ready()
        link = self._sidecar.link
        link.start()
        try:
            await self._sidecar.over
            return 0
        finally:
            if self._stopping and self._watch is not None:
                # All ranks have ended. Without this wait the sidecar would miss those that ended last.
                await asyncio.wait({self._watch}, timeout=_REPORT_SECONDS)
            await asyncio.to_thread(link.close, _CLOSE_SECONDS)
            self._cancel_tasks()

    def stop(self) -> None:
        """Fork no more ranks and do not report that they have finished: the pod is about to end."""
        self._stopping = True

    # ------------------------------------------------------------------ called one after another

    async def hello(self) -> Hello:
        return Hello(
            PROTOCOL_VERSION,
            self._contract.job_uid,
            round=self._round,
            last_round=self._last_round,
        )

    async def report(self) -> None:
        """Send the whole state of the launcher."""
        search = self._stacks
        state = LauncherState(
            self._round,
            self._ended_below,
            tuple(rank for rank, death in self._ended.items() if death is None),
            tuple(death for death in self._ended.values() if death is not None),
            None if self._store is None else self._store.address,
            "" if search.found is None else search.token,
            search.found or (),
            self._finished,
        )
        self._sidecar.link.notify(state)

    async def handle(self, message: Any) -> None:
        match message:
            case LauncherPlan():
                await self._carry_out(message)
                await self.report()
                if message.released and self._finished and not self._sidecar.over.done():
                    self._sidecar.over.set_result(None)
            case _:
                logger.warning("ignored a message that is not for launchers: %s", message)

    async def _carry_out(self, plan: LauncherPlan) -> None:
        await self._end(plan.round)
        if plan.hosts_store:
            await self._host_store(plan.round)
        if plan.run is not None:
            await self._start(plan.run)
        self._take_stacks(plan)

    async def _host_store(self, round_: RestartRound) -> None:
        if self._store is not None and self._store.address.round != round_:
            self._processes.end_store(self._store.key)
            self._store = None
        if self._store is None:
            key, port = await self._processes.fork_store("")
            secret = secrets.token_hex(STORE_SECRET_BYTES)
            self._store = _Store(key, StoreAddress(round_, port, secret))

    async def _start(self, run: Run) -> None:
        if self._stopping or self._round == run.round:
            return
        if self._last_round is not None and run.round <= self._last_round:
            logger.warning(
                "ignored Run for round %d: the ranks of round %d were forked already, and a round "
                "is never forked twice",
                run.round,
                self._last_round,
            )
            return
        if self._round is not None:
            await self._stop_ranks()
        await asyncio.to_thread(self._record.write, run.round)
        self._last_round = run.round
        self._ended.clear()
        self._ended_below = None
        self._round = run.round
        settings = _settings(run, self._contract)
        logger.info(
            "round %d: forking ranks %d to %d of %d, from step %s",
            run.round,
            settings.first.rank,
            settings.first.rank + settings.first.local_world_size - 1,
            run.world_size,
            run.restore_point.step,
        )
        self._memory.begin()
        await self._processes.fork_ranks(settings)
        self._watch = asyncio.ensure_future(self._watch_ranks(run))

    async def _end(self, round_: RestartRound) -> None:
        if self._round is not None and self._round < round_:
            logger.info("round %d begins: ending the ranks", round_)
            await self._stop_ranks()
        if self._store is not None and self._store.address.round < round_:
            self._processes.end_store(self._store.key)
            self._store = None
        if self._round is None:
            self._ended.clear()
            self._ended_below = round_

    def _take_stacks(self, plan: LauncherPlan) -> None:
        """Find the stacks of the ranks in a task, because the next plan must not wait for them."""
        if plan.stacks_token == self._stacks.token or self._round != plan.round:
            return
        self._stacks.cancel()
        self._stacks = _StacksSearch(plan.stacks_token)
        if plan.stacks_token:
            self._stacks.task = asyncio.ensure_future(self._find_stacks(self._stacks))

    async def _find_stacks(self, search: _StacksSearch) -> None:
        found = await self._processes.find_stacks()
        for one in found:
            logger.warning(
                "no rank of the gang has finished a step for long; rank %d: %s",
                one.stack.rank,
                one.log,
            )
        search.found = tuple(one.stack for one in found)
        await self.report()

    def _cancel_tasks(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._stacks.cancel()
        self._watch, self._stacks = None, _StacksSearch()

    async def _stop_ranks(self) -> None:
        self._cancel_tasks()
        await self._processes.end_ranks()
        self._round = None

    async def _watch_ranks(self, run: Run) -> None:
        async for process in self._processes.ends():
            code = 1 if process.code is None else process.code
            self._ended[process.rank] = self._death_of(process, code, run.group_rank)
            if code != 0:
                logger.error(
                    "rank %d ended with code %s in round %d; waiting for the next round",
                    process.rank,
                    code,
                    run.round,
                )
            await self.report()

    def _death_of(self, process: RankProcess, code: int, worker: Worker) -> DeadRank | None:
        if code == 0:
            return None
        memory = self._memory.exceeded()
        return DeadRank(process.rank, worker, code, process.tail.text(), memory)

    @property
    def _finished(self) -> bool:
        """Whether all ranks of the round have returned 0, and not because the pod is about to end."""
        ended = self._ended
        returned = len(ended) == self._contract.procs_per_worker and not any(ended.values())
        return returned and self._round is not None and not self._stopping


def _settings(run: Run, contract: PodContract) -> RoundSettings:
    procs = contract.procs_per_worker
    first = RankSettings(
        rank=Rank(run.group_rank * procs),
        world_size=run.world_size,
        local_world_size=procs,
        master_address=run.store.host,
        master_port=run.store.port,
        round=run.round,
        interval_steps=run.policy.interval_steps,
        timing=run.policy.timing,
        restore_step=run.restore_point.step,
        restore_known=True,
        rolled_back_from=run.rolled_back_from,
        store_secret=run.store.secret,
    )
    return RoundSettings(first, run.group_rank, contract.job_uid)
