"""One sidecar process: it opens its resources, creates its components and serves until SIGTERM or SIGINT.

Order of start: node tier and round record, object store, certificates, bulk and control servers (reads are
served from here on), plain server, reporter, preStop hook, scrubber, and the pod's socket last. Saves are
accepted only after a ROUND. After the signal the process finishes what was handed over, within a time limit.
Everything is closed in the reverse order.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from holdfast_core import logs
from holdfast_core.clock import Clock, SystemClock
from holdfast_core.messages.schema import Plan
from holdfast_core.shm.shared_files import opened_directory, replace_file
from holdfast_core.tasks import Signal
from holdfast_sidecar.base.settings import PORTS_FILE, Settings
from holdfast_sidecar.base.telemetry import Failures, Metrics, Telemetry
from holdfast_sidecar.coordinator.coordinator import CoordinatorRole
from holdfast_sidecar.gang.starter import Starter
from holdfast_sidecar.gang.state import LocalGang, RankNotices, Reporter, Sources
from holdfast_sidecar.process.components import Components, Resources, open_resources
from holdfast_sidecar.process.control import (
    Control,
    ManifestRequests,
    MetricsPage,
    Pruner,
    Receivers,
)
from holdfast_sidecar.process.hook_server import HookServer
from holdfast_sidecar.process.lifecycle import DIED_STATUS, Deaths, Lifecycle, end_for_sure
from holdfast_sidecar.process.local import Local
from holdfast_sidecar.restore.components import RestoreComponents
from holdfast_sidecar.save.components import SaveComponents
from holdfast_sidecar.save.incoming import IncomingCopies
from holdfast_sidecar.upkeep.replace import Replacer
from holdfast_sidecar.upkeep.scrub import Scrubber, Verifier
from holdfast_sidecar.wire.bulk import BulkPeers, BulkServing, Members
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.following import Follower
from holdfast_sidecar.wire.intake import Intake, LocalConnections
from holdfast_sidecar.wire.relaying import Relaying
from holdfast_sidecar.wire.server import ControlServer, PlainServer

_LISTEN = "0.0.0.0"
_IDLE_POLL_SECONDS = 0.2


class Sidecar:
    """All components of one sidecar process. Only one may run at a time for each node directory."""

    def __init__(self, resources: Resources) -> None:
        """Create all components. `start` begins to serve."""
        pod, tiers, metrics = resources.pod, resources.tiers, resources.metrics
        contract, current = pod.contract, pod.current
        background, dropped = resources.background, metrics.dropped_connection
        changed: Signal[[]] = Signal()
        telemetry = Telemetry(metrics, Failures(changed))
        peers = Peers(
            contract, resources.client_tls, current, call_seconds=pod.settings.call_seconds
        )
        members = Members(peers, BulkPeers(tiers.node, resources.client_tls, peers, current))
        connections = LocalConnections()
        saves = SaveComponents(pod, tiers, members, telemetry, background, changed)
        restores = RestoreComponents(pod, tiers, members, saves, metrics, changed)
        gang = LocalGang(contract.procs_per_worker)
        starter = Starter(pod, gang, connections, peers, lambda: restores.is_here, changed)
        role = CoordinatorRole(pod, tiers, telemetry.failures)
        components = Components(current, saves, restores, gang, starter, role, changed)
        sources = Sources(gang, saves.flow, saves.stager, restores.rehydrator, telemetry.failures)
        reporter = Reporter(pod, sources, peers, starter.push_plan)
        changed.subscribe(reporter.changed)

        notices = RankNotices(current, connections)
        node_bytes = resources.disk.volume.budget.limit_bytes // contract.procs_per_worker
        local = Local(components, connections, notices, background, metrics, node_bytes)
        self._lifecycle = Lifecycle(pod, resources.disk, tiers, components, background, telemetry)
        self._incoming = IncomingCopies(pod, tiers, members, saves.flow.drops)
        self._pruner = Pruner(
            pod, tiers, saves, self._incoming, notices, starter.release, telemetry.failures
        )
        replacer = Replacer(tiers, restores.fetcher, current)
        restores.filler.lost.subscribe(replacer.shard_is_bad)
        saves.flow.gone.subscribe(replacer.shard_is_bad)
        self._verifier = Verifier(tiers, replacer, telemetry)
        self._manifests = ManifestRequests(
            pod, tiers, saves, telemetry.failures, peers, role.manifest
        )
        planned: Signal[[Plan]] = Signal()
        planned.subscribe(self._manifests.take)
        planned.subscribe(self._pruner.take)
        self._follower = Follower(pod, peers, role.plan, planned)
        receivers = Receivers(
            self._manifests,
            self._incoming,
            self._verifier,
            notices,
            Relaying(current, peers),
            self._follower,
        )
        self._control = Control(components, self._lifecycle, receivers)

        self._bulk = BulkServing(
            contract,
            tiers.node,
            resources.server_tls,
            current,
            background.take,
            dropped=dropped,
        )
        self._control_server = ControlServer(
            self._control,
            contract.job_uid,
            resources.server_tls,
            dropped=dropped,
        )
        page = MetricsPage(metrics, components, sources, resources.disk)
        self._plain_server = PlainServer(page.render, lambda: components.trains, dropped=dropped)
        self._hooks = HookServer(
            pod.settings.node_dir, self._flushed, lambda: components.stuck, pod.clock
        )
        self._scrubber = Scrubber(
            pod,
            tiers,
            replacer,
            telemetry,
            busy=lambda: components.busy,
            throttle=background.take,
        )
        self._intake = Intake(
            pod.settings.socket_path, contract.job_uid, local, connections, dropped=dropped
        )
        self._pod = pod
        self._pools = tiers.pools
        self._background = background
        self._peers = peers
        self._components = components
        self._reporter = reporter

    async def start(self, stack: AsyncExitStack) -> None:
        """Serve. `stack` closes what was started, in reverse order, also if this raises.

        Raises:
            ConfigError, OSError: A port or a socket cannot be opened.
        """
        contract, components = self._pod.contract, self._components
        closes = stack.push_async_callback
        await self._lifecycle.resume()
        bulk_port = await self._pools.read.run(self._bulk.start, _LISTEN, contract.bulk_port)
        closes(self._pools.read.run, self._bulk.close)
        control_port = await self._control_server.start(_LISTEN, contract.control_port)
        closes(self._control_server.close)
        metrics_port = await self._plain_server.start(_LISTEN, contract.metrics_port)
        closes(self._plain_server.close)
        await self._peers.start(self._control.dispatch)
        closes(self._peers.close)
        closes(self._incoming.close)
        closes(self._verifier.close)
        closes(self._pruner.close)
        closes(self._manifests.close)
        closes(self._lifecycle.close)
        closes(components.saves.flow.reset)
        closes(components.restores.rehydrator.reset)
        closes(components.starter.reset)
        self._reporter.start()
        closes(self._reporter.close)
        self._follower.start()
        closes(self._follower.close)
        _write_ports(self._pod.settings, control_port, bulk_port, metrics_port)
        await self._hooks.start()
        closes(self._hooks.close)
        self._scrubber.start()
        closes(self._scrubber.close)
        await self._intake.start()
        closes(self._intake.close)
        logs.info(
            "listening",
            control=control_port,
            bulk=bulk_port,
            metrics=metrics_port,
            round=self._pod.state.round,
        )

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until everything that was handed over is durable, copied and uploaded as required.

        The limit on background bytes is lifted. Return False after the time-out, and immediately if the
        preStop hook has given up the flush.
        """
        self._background.remove_limit()
        clock = self._pod.clock
        deadline = clock.monotonic() + timeout_seconds
        while not self._components.saves.idle:
            if self._hooks.gave_up or clock.monotonic() >= deadline:
                return False
            await clock.sleep(_IDLE_POLL_SECONDS)
        return True

    def _flushed(self) -> bool:
        """Return whether the pod may end.

        The preStop hook calls this, so the limit on background bytes is lifted.
        """
        self._background.remove_limit()
        gang = self._components.gang
        gang.ends = True
        self._reporter.changed()
        return self._components.flushed


async def start_sidecar(
    settings: Settings, clock: Clock, metrics: Metrics, stack: AsyncExitStack
) -> Sidecar:
    """Open the resources of a sidecar and begin to serve.

    Args:
        settings: The pod's contract, and the bounds of its waits.
        clock: Measures all waits.
        metrics: What the plain server shows.
        stack: Closes everything in reverse order, also if this raises.

    Raises:
        ConfigError, TierError, OSError: The pod does not match its contract, or a port is in use.
    """
    sidecar = Sidecar(await open_resources(settings, clock, metrics, stack))
    await sidecar.start(stack)
    return sidecar


def _write_ports(settings: Settings, control: int, bulk: int, metrics: int) -> None:
    """Write the ports into a file for callers of a sidecar that was given port 0 and chose them itself."""
    ports = json.dumps({"control": control, "bulk": bulk, "metrics": metrics})
    with opened_directory(settings.node_dir) as directory:
        replace_file(directory, PORTS_FILE, ports.encode())


async def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT, then flush for at most `flush_seconds`. A second signal ends the flush.

    Returns:
        The exit status: 0, or DIED_STATUS if an unexpected exception ended the process.
    """
    stop = asyncio.Event()
    again = asyncio.Event()

    def signalled() -> None:
        (again if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    metrics = Metrics()
    deaths = Deaths(metrics.unexpected)
    deaths.install(loop)
    stack = AsyncExitStack()
    try:
        sidecar = await start_sidecar(settings, SystemClock(), metrics, stack)
        # What the imports have made lives as long as the process. Without it, a full garbage collection
        # stops the event loop for a third of the time.
        gc.collect()
        gc.freeze()
        # A full collection in a coordinator of 4,096 workers takes 0.1 s, and Python's own thresholds cause
        # one during a commit. Collections of the younger generations take up to 46 ms with these thresholds.
        gc.set_threshold(5_000, 5, 50)
        await _first(deaths.fatal(), stop.wait())
        if not deaths.is_fatal:
            logs.info("stopping: finishing the transfers that are in progress")
            flush = sidecar.wait_idle(settings.flush_seconds)
            await _first(deaths.fatal(), flush, again.wait())
    finally:
        if deaths.is_fatal:
            end_for_sure()
        await stack.aclose()
    return DIED_STATUS if deaths.is_fatal else 0


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the coroutines is done, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
