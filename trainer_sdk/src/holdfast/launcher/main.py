"""`holdfast run`: signals and exit codes. Starts the launcher of a pod or of one machine.

The exit code is 0 if all ranks returned 0. Without a TrainingJob it is the failed rank's code (128 + N for
signal N) when no restarts are left. It is 143 after SIGTERM, 130 after SIGINT, 129 after SIGHUP (the terminal
was closed), 2 for a wrong command line, and 1 otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import uuid
from dataclasses import replace
from typing import Any, Protocol

from holdfast.base.settings import RankSettings
from holdfast.launcher.device_count import count_ranks
from holdfast.launcher.options import DEFAULT_GRACE_SECONDS, RunOptions
from holdfast.launcher.output import LogFiles
from holdfast.launcher.pod import ContainerMemory, PodLauncher
from holdfast.launcher.processes import ForkServerError, Processes, RoundSettings
from holdfast.launcher.standalone import ScratchDirectory, StandaloneLauncher
from holdfast_core.contract import PodContract
from holdfast_core.errors import ConfigError, HoldfastError

logger = logging.getLogger(__name__)

_SIGNAL_EXIT = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129}


class Supervisor(Protocol):
    async def run(self) -> int:
        """Run until the ranks have ended. Return the exit code."""
        ...

    def stop(self) -> None:
        """Start no more ranks, because the launcher is about to exit."""
        ...


def run(options: RunOptions, contract: PodContract | None) -> int:
    """Run until the ranks have ended or a signal arrives. Return the exit code.

    Afterwards no process of this launcher is left, except persisters of a folder that still write what
    their ranks have saved. The next run waits for them.
    """
    logging.basicConfig(
        level=logging.INFO, format="[holdfast] %(message)s", stream=sys.stderr, force=True
    )
    try:
        return asyncio.run(_run(options, contract))
    except HoldfastError as error:
        logger.error("%s", error)
        return 1


async def _run(options: RunOptions, contract: PodContract | None) -> int:
    if contract is not None:
        _expect_fit(options, contract)
    options = _with_run_id(options, contract)
    logs = LogFiles(options.logs, options.run_id)
    log_root = logs.prepare()
    if log_root is not None:
        logger.info("the output of the ranks is in %s", log_root)
    processes = Processes(options.command, options.preload, logs)
    scratch = ScratchDirectory()
    stop = _StopSignals()
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    processes.on_server_lost = lambda why: None if lost.done() else lost.set_result(why)
    try:
        stop.install()
        processes.start()
        supervisor: Supervisor
        if contract is not None:
            supervisor = PodLauncher(processes, contract, ContainerMemory())
        else:
            supervisor = await _on_this_machine(options, processes, scratch)
        task = asyncio.ensure_future(supervisor.run())
        waiting: set[asyncio.Future[Any]] = {task, stop.first, lost}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        try:
            if task.done():
                return task.result()
            if lost.done():
                raise ForkServerError(f"holdfast run: {lost.result()}")
            return await _leave(_grace_seconds(options, contract), processes, supervisor, stop)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, HoldfastError):
                await task
    finally:
        await processes.close()
        scratch.close()


def _expect_fit(options: RunOptions, contract: PodContract) -> None:
    """Raise ConfigError for another number of ranks than that of the TrainingJob."""
    if options.nproc not in (None, str(contract.procs_per_worker)):
        raise ConfigError(
            f"holdfast run: --nproc-per-node {options.nproc}, but spec.procsPerWorker is "
            f"{contract.procs_per_worker}: omit --nproc-per-node in a TrainingJob"
        )


def _with_run_id(options: RunOptions, contract: PodContract | None) -> RunOptions:
    given = options.run_id if contract is None else contract.job_uid
    return replace(options, run_id=given or f"holdfast-{uuid.uuid4().hex[:12]}")


async def _on_this_machine(
    options: RunOptions, processes: Processes, scratch: ScratchDirectory
) -> StandaloneLauncher:
    procs = await count_ranks(options.nproc or "1")
    path = scratch.open()
    first = RankSettings(
        local_world_size=procs,
        world_size=procs,
        scratch_dir=None if path is None else str(path),
    )
    return StandaloneLauncher(
        processes, RoundSettings(first, 0, options.run_id, options.max_restarts)
    )


def _grace_seconds(options: RunOptions, contract: PodContract | None) -> float:
    if options.grace_seconds is not None:
        return options.grace_seconds
    return DEFAULT_GRACE_SECONDS if contract is None else float(contract.stop_seconds)


async def _leave(
    grace_seconds: float, processes: Processes, supervisor: Supervisor, stop: _StopSignals
) -> int:
    """Ask the ranks to save and stop. Kill them after the grace period or at a second signal."""
    number = stop.first.result()
    supervisor.stop()
    logger.info(
        "received %s: the ranks are requested to save and stop, and are killed after %g s",
        number.name,
        grace_seconds,
    )
    processes.signal_ranks(signal.SIGTERM)
    ended = asyncio.ensure_future(_all_ended(processes))
    waiting: set[asyncio.Future[Any]] = {ended, stop.second}
    await asyncio.wait(
        waiting,
        timeout=grace_seconds,
        return_when=asyncio.FIRST_COMPLETED,
    )
    ended.cancel()
    await processes.end_ranks()
    return _SIGNAL_EXIT[number]


async def _all_ended(processes: Processes) -> None:
    for process in processes.ranks:
        await process.ended.wait()


class _StopSignals:
    """Signals to stop, as futures. The first one asks the ranks to stop, the second one kills them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[signal.Signals] = loop.create_future()
        self.second: asyncio.Future[signal.Signals] = loop.create_future()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNAL_EXIT:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        future = self.second if self.first.done() else self.first
        if not future.done():
            future.set_result(number)
