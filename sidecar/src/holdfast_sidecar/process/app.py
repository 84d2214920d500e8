"""One sidecar process: it opens and connects all components and serves until SIGTERM or SIGINT.

Order of start: node tier and round record, object store, certificates, bulk and control servers (reads are
served from here on), plain server, reporter, preStop hook, scrubber, and the pod's socket last. Saves are
accepted only after a ROUND. After the signal the process finishes what was handed over, within a time limit.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.ids import RestartRound, TierName
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.pacing.background import Pacing
from holdfast_core.shm.shared_files import opened_directory, replace_file
from holdfast_core.store.directory import DirectoryObjectTier, directory_of
from holdfast_core.store.s3.credentials import FileCredentials
from holdfast_core.store.tier import S3ObjectTier
from holdfast_core.tiers.base import ObjectTier
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.backoff import Backoff, Patience
from holdfast_sidecar.base.failures import Failures
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import PORTS_FILE, Settings
from holdfast_sidecar.gang.report import Reporter, Sources
from holdfast_sidecar.gang.starter import Starter
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.process.control import Control
from holdfast_sidecar.process.deaths import DIED_STATUS, Deaths, end_for_sure
from holdfast_sidecar.process.hook_server import HookServer
from holdfast_sidecar.process.lifecycle import Lifecycle
from holdfast_sidecar.process.local import Local
from holdfast_sidecar.process.parts import Keeper, Parts
from holdfast_sidecar.restore.fill import Filler
from holdfast_sidecar.restore.rehydrate import Rehydrator
from holdfast_sidecar.restore.reshard import Resharder
from holdfast_sidecar.restore.sources import Places
from holdfast_sidecar.save.flow import Flow
from holdfast_sidecar.save.holding import HoldTeller
from holdfast_sidecar.save.layouts import RankLayouts
from holdfast_sidecar.save.staging import Stager
from holdfast_sidecar.upkeep.replace import Replacer
from holdfast_sidecar.upkeep.scrub import Scrubber
from holdfast_sidecar.wire.addresses import MemberAddresses
from holdfast_sidecar.wire.bulk import BulkPeers, BulkServing
from holdfast_sidecar.wire.certificates import Certificates
from holdfast_sidecar.wire.client import Peers
from holdfast_sidecar.wire.intake import Intake
from holdfast_sidecar.wire.server import ControlServer, PlainServer

_LISTEN = "0.0.0.0"
_IDLE_POLL_SECONDS = 0.2


class Sidecar:
    """All components of one sidecar process.

    Call `start`, then `wait_idle` and `close`. Only one may run at a time for each node directory.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._stack = AsyncExitStack()
        self._parts: Parts | None = None
        self._scrubber: Scrubber | None = None
        self._metrics = Metrics()
        self.deaths = Deaths(self._metrics.unexpected)
        self._pacing = Pacing(
            settings.slots_dir,
            self._clock.monotonic,
            waited_for_copies=self._metrics.waited_for_copies,
        )

    async def start(self) -> None:
        """Open all components and serve.

        Raises:
            ConfigError, TierError: The pod does not match its contract.
        """
        settings = self._settings
        contract = settings.contract
        pools = Pools(
            disk=settings.disk_threads, copy=settings.copy_threads, store=settings.store_threads
        )
        self._stack.callback(pools.close)
        node = DiskNodeTier(settings.node_dir, capacity_bytes=contract.node_capacity_bytes)
        opened = await pools.meta.run(node.open)
        logs.info("node tier is open", shards=opened.shards, quarantined=list(opened.quarantined))
        keeper = Keeper(await pools.meta.run(_first_state, settings, node))
        metrics = self._metrics
        store = self._open_store(metrics)
        certificates = Certificates(contract)
        await pools.meta.run(certificates.load)

        local = Local()
        parts = self._assemble(keeper, pools, node, store, certificates, local, metrics)
        self._parts = parts
        lifecycle = Lifecycle(parts)
        control = Control(parts, lifecycle, local, certificates)
        parts.on_restored = lifecycle.on_restored
        parts.teller.on_drop = control.drop
        local.parts = parts
        await lifecycle.resume()

        members = MemberAddresses(keeper.current)
        dropped = metrics.dropped_connection
        bulk = BulkServing(
            contract, node, certificates, keeper.current, expected=members, dropped=dropped
        )
        bulk_port = await pools.read.run(bulk.start, _LISTEN, contract.bulk_port)
        self._stack.push_async_callback(pools.read.run, bulk.close)
        server = ControlServer(
            control, contract.job_uid, certificates.server, expected=members, dropped=dropped
        )
        control_port = await server.start(_LISTEN, contract.control_port)
        self._stack.push_async_callback(server.close)
        plain = PlainServer(control, dropped=dropped)
        metrics_port = await plain.start(_LISTEN, contract.metrics_port)
        self._stack.push_async_callback(plain.close)
        await parts.peers.start(control.dispatch)
        self._stack.push_async_callback(parts.peers.close)
        self._stack.push_async_callback(control.close)
        self._stack.push_async_callback(lifecycle.close)
        self._stack.push_async_callback(parts.flow.reset)
        self._stack.push_async_callback(parts.rehydrator.reset)
        self._stack.push_async_callback(parts.starter.reset)
        parts.teller.start()
        self._stack.push_async_callback(parts.teller.close)
        parts.reporter.start()
        self._stack.push_async_callback(parts.reporter.close)
        _write_ports(settings, control_port, bulk_port, metrics_port)
        hooks = HookServer(settings.node_dir, control.flushed)
        await hooks.start()
        self._stack.push_async_callback(hooks.close)
        if self._scrubber is not None:
            self._scrubber.start()
            self._stack.push_async_callback(self._scrubber.close)
        await parts.intake.start()
        self._stack.push_async_callback(parts.intake.close)
        logs.info(
            "listening",
            control=control_port,
            bulk=bulk_port,
            metrics=metrics_port,
            round=keeper.state.round,
        )

    def _open_store(self, metrics: Metrics) -> ObjectTier | None:
        contract = self._settings.contract
        config = contract.store_config()
        if config is None:
            return None
        directory = directory_of(config.endpoint)
        if directory is not None:
            return DirectoryObjectTier(directory / config.prefix)
        credentials = FileCredentials(contract.store_dir)
        tier = S3ObjectTier(
            config,
            credentials,
            ca_file=credentials.ca_file,
            throttle=self._pacing.take,
            sent=functools.partial(metrics.sent, TierName.OBJECT),
            compressed=functools.partial(metrics.compressed, TierName.OBJECT),
        )
        self._stack.callback(tier.close)
        return tier

    def _assemble(
        self,
        keeper: Keeper,
        pools: Pools,
        node: DiskNodeTier,
        store: ObjectTier | None,
        certificates: Certificates,
        local: Local,
        metrics: Metrics,
    ) -> Parts:
        settings, clock = self._settings, self._clock
        contract = settings.contract

        def changed() -> None:
            if self._parts is not None:
                self._parts.reporter.changed()

        def restored() -> None:
            changed()
            if self._parts is not None:
                self._parts.on_restored()

        def held() -> None:
            teller.wake()
            changed()

        def patience() -> Patience:
            backoff = Backoff(settings.backoff_first_seconds, settings.backoff_last_seconds)
            return Patience(clock, backoff, settings.restore_patience_seconds)

        failures = Failures(changed)
        peers = Peers(
            contract, certificates.client, keeper.current, call_seconds=settings.call_seconds
        )
        bulk = BulkPeers(node, certificates, peers, keeper.current, self._pacing.take)
        layouts = RankLayouts(settings.layouts_dir, node, pools)
        gang = LocalGang(contract.worker)
        intake = Intake(
            settings.socket_path, contract.job_uid, local, dropped=metrics.dropped_connection
        )
        stager = Stager(
            settings,
            node,
            layouts,
            pools,
            failures,
            metrics,
            clock,
            self._pacing,
            local.staged,
            held,
        )
        teller = HoldTeller(settings, keeper.current, stager, layouts, peers, clock)
        flow = Flow(
            settings,
            keeper.current,
            node,
            store,
            peers=peers,
            bulk=bulk,
            layouts=layouts,
            pools=pools,
            failures=failures,
            metrics=metrics,
            clock=clock,
            on_change=changed,
        )
        rehydrator = Rehydrator(
            settings,
            keeper.current,
            node,
            store,
            peers=peers,
            bulk=bulk,
            pools=pools,
            metrics=metrics,
            clock=clock,
            patience=patience,
            on_change=restored,
        )
        places = Places(node, store, bulk, rehydrator, pools, metrics, contract.procs_per_worker)
        resharder = Resharder(places, pools, metrics, patience)
        filler = Filler(
            settings,
            node,
            rehydrator,
            resharder,
            layouts,
            stager=stager,
            pools=pools,
            metrics=metrics,
            patience=patience,
            on_change=changed,
        )
        starter = Starter(
            settings,
            keeper.current,
            gang,
            intake,
            peers,
            clock,
            restored=lambda: rehydrator.restored is not None,
            on_change=changed,
        )
        sources = Sources(gang, flow, stager, rehydrator, starter, failures)

        def busy() -> bool:
            restores = rehydrator.restored is None or filler.busy
            saves = not stager.idle or flow.pending > 0
            return keeper.state.held is None or restores or saves

        self._scrubber = Scrubber(
            settings,
            node,
            Replacer(node, rehydrator, keeper.current, pools),
            pools=pools,
            metrics=metrics,
            failures=failures,
            clock=clock,
            busy=busy,
            throttle=self._pacing.take,
        )
        return Parts(
            settings,
            clock,
            keeper,
            pools,
            self._pacing,
            node,
            store,
            peers,
            failures,
            metrics,
            gang,
            intake,
            stager,
            teller,
            flow,
            rehydrator,
            filler,
            starter,
            Reporter(settings, keeper.current, sources, peers, clock),
        )

    @property
    def idle(self) -> bool:
        """Whether everything that was handed over is durable, copied and uploaded as required."""
        parts = self._parts
        return parts is None or parts.idle

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Lift the limit on background bytes and wait until `idle`. Return False after the time-out."""
        self._pacing.hurry()
        deadline = self._clock.monotonic() + timeout_seconds
        while not self.idle:
            if self._clock.monotonic() >= deadline:
                return False
            await self._clock.sleep(_IDLE_POLL_SECONDS)
        return True

    async def close(self) -> None:
        await self._stack.aclose()


def _first_state(settings: Settings, node: DiskNodeTier) -> RoundState:
    """Return the state of a process that has just started.

    It is sealed for the pod's birth round, or for the recorded round if that is newer.
    """
    contract = settings.contract
    found = node.read_round()
    recorded, version = (RestartRound(-1), 0) if found is None else found
    round_ = max(contract.birth_round, recorded)
    return RoundState(
        contract.worker,
        contract.procs_per_worker,
        round_,
        version_floor=version if recorded == round_ else 0,
    )


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
    sidecar = Sidecar(settings)
    deaths = sidecar.deaths
    deaths.install(loop)
    try:
        await sidecar.start()
        await _first(deaths.fatal(), stop.wait())
        if not deaths.is_fatal:
            logs.info("stopping: finishing the transfers that are in progress")
            flush = sidecar.wait_idle(settings.flush_seconds)
            await _first(deaths.fatal(), flush, again.wait())
    finally:
        if deaths.is_fatal:
            end_for_sure()
        await sidecar.close()
    return DIED_STATUS if deaths.is_fatal else 0


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the coroutines is done, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
