"""`holdfast run`: options, signals and exit codes. Starts the pod's launcher or a standalone one.

The exit code is 0 if all ranks returned 0. It is the failed rank's code (128 + N for signal N) when a
standalone run has no restarts left, 143 after SIGTERM, 130 after SIGINT, 2 for a wrong command line, and
1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.launcher.channel import SidecarChannel
from holdfast.launcher.command import Command, parse_command
from holdfast.launcher.pod import PodLauncher
from holdfast.launcher.processes import ForkServerError, Processes
from holdfast.launcher.record import RoundRecord
from holdfast.launcher.scratch import ScratchDirectory
from holdfast.launcher.standalone import StandaloneLauncher, StandaloneOptions
from holdfast_core.contract import LAUNCHER_ROUND_FILE, SOCKET_NAME, PodContract
from holdfast_core.errors import ConfigError, HoldfastError

logger = logging.getLogger(__name__)

_SIGNAL_EXIT = {signal.SIGTERM: 143, signal.SIGINT: 130}


@dataclass(frozen=True, slots=True)
class RunOptions:
    command: Command
    procs: int | None
    preload: tuple[str, ...] = ()
    max_restarts: int = 0
    grace_seconds: float = 10.0


class Supervisor(Protocol):
    def stop(self) -> None:
        """Start no more ranks, because the launcher is about to exit."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=int,
        help=(
            "number of ranks in this pod (default: spec.procsPerWorker in a TrainingJob, else 1)"
        ),
    )
    parser.add_argument(
        "--preload",
        nargs="+",
        action="extend",
        default=[],
        metavar="MODULE",
        help="modules, in addition to torch, that the fork server imports before it forks ranks",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        help="without a TrainingJob: how often all ranks may be restarted in place (default 0)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time from SIGTERM to SIGKILL for the ranks (default 10)",
    )


def options_from(arguments: argparse.Namespace, command: Sequence[str]) -> RunOptions:
    """Return the options of a command line. Raises ConfigError for invalid values."""
    if arguments.nproc is not None and arguments.nproc < 1:
        raise ConfigError(f"holdfast run: --nproc {arguments.nproc}: expected at least 1")
    return RunOptions(
        parse_command(command),
        arguments.nproc,
        tuple(arguments.preload),
        arguments.max_restarts,
        arguments.grace,
    )


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
    processes = Processes(options.command, options.preload)
    scratch = ScratchDirectory()
    stop = _StopSignals()
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    processes.on_server_lost = lambda why: None if lost.done() else lost.set_result(why)
    try:
        stop.install()
        processes.start()
        supervisor, work = _supervisor(options, contract, processes, scratch)
        task = asyncio.ensure_future(work)
        waiting: set[asyncio.Future[Any]] = {task, stop.first, lost}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        try:
            if task.done():
                return task.result()
            if lost.done():
                raise ForkServerError(f"holdfast run: {lost.result()}")
            return await _leave(options, processes, supervisor, stop)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, HoldfastError):
                await task
    finally:
        await processes.close()
        scratch.close()


def _supervisor(
    options: RunOptions,
    contract: PodContract | None,
    processes: Processes,
    scratch: ScratchDirectory,
) -> tuple[Supervisor, Coroutine[None, None, int]]:
    if contract is None:
        path = scratch.open()
        standalone = StandaloneLauncher(
            processes,
            StandaloneOptions(
                options.procs or 1, options.max_restarts, None if path is None else str(path)
            ),
        )
        return standalone, standalone.run()
    if options.procs not in (None, contract.procs_per_worker):
        raise ConfigError(
            f"holdfast run: --nproc {options.procs}, but spec.procsPerWorker is "
            f"{contract.procs_per_worker}: omit --nproc in a TrainingJob"
        )
    shared = Path(contract.shared_dir)
    pod = PodLauncher(processes, contract, RoundRecord(shared / LAUNCHER_ROUND_FILE))
    return pod, pod.run(SidecarChannel(shared / SOCKET_NAME, pod))


async def _leave(
    options: RunOptions, processes: Processes, supervisor: Supervisor, stop: _StopSignals
) -> int:
    """Ask the ranks to save and stop. Kill them after the grace period or at a second signal."""
    number = stop.first.result()
    supervisor.stop()
    logger.info(
        "received %s: the ranks are requested to save and stop, and are killed after %g s",
        number.name,
        options.grace_seconds,
    )
    processes.signal_ranks(signal.SIGTERM)
    ended = asyncio.gather(*(process.ended.wait() for process in processes.ranks))
    waiting: set[asyncio.Future[Any]] = {ended, stop.second}
    await asyncio.wait(
        waiting,
        timeout=options.grace_seconds,
        return_when=asyncio.FIRST_COMPLETED,
    )
    ended.cancel()
    await processes.end_ranks()
    return _SIGNAL_EXIT[number]


class _StopSignals:
    """SIGTERM and SIGINT as futures. The first signal asks the ranks to stop, the second kills them."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[signal.Signals] = loop.create_future()
        self.second: asyncio.Future[signal.Signals] = loop.create_future()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNAL_EXIT:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(number)
                return
