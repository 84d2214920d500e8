"""The components of one sidecar, which are created once, and what they work with.

That is the node volume, the object store, keys and threads.
"""

from __future__ import annotations

import functools
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from holdfast_core import logs
from holdfast_core.clock import Clock
from holdfast_core.ids import RestartRound, TierName
from holdfast_core.net import TlsFiles, client_context, server_context
from holdfast_core.node.tier import DiskNodeTier
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.store.access import access_in_pod
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Signal
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.coordinator.coordinator import CoordinatorRole
from holdfast_sidecar.gang.starter import Starter
from holdfast_sidecar.gang.state import LocalGang
from holdfast_sidecar.restore.components import RestoreComponents
from holdfast_sidecar.save.components import SaveComponents


@dataclass(frozen=True, slots=True)
class Components:
    """The components that begin with a ROUND and end with a SEAL, and the state that fences them."""

    current: CurrentRound
    saves: SaveComponents
    restores: RestoreComponents
    gang: LocalGang
    starter: Starter
    role: CoordinatorRole
    changed: Signal[[]]
    """Called when this worker's report to the coordinator may have changed."""

    @property
    def busy(self) -> bool:
        """Whether a save or a restore moves bytes, or may begin to."""
        restores = not self.restores.is_here or self.restores.filler.busy
        saves = not self.saves.stager.idle or self.saves.flow.pending > 0
        return self.current.state.accepted is None or restores or saves

    @property
    def trains(self) -> bool:
        """Whether every rank of this pod runs and has finished a step of the current round."""
        state = self.current()
        return self.gang.trains(state.round, state.own_ranks)

    @property
    def flushed(self) -> bool:
        """Whether preStop may end: all is idle, and no rank of this pod can hand over another save."""
        idle = self.saves.idle and not self._only_here and self.role.may_end
        return idle and not self.gang.may_save

    @property
    def stuck(self) -> bool:
        """Whether nothing that preStop waits for makes progress now, as when other pods are gone."""
        waits = self._only_here and self.saves.flow.idle and bool(self.gang.waits_for_store)
        return (
            self.saves.stager.idle
            and self.saves.flow.stuck
            and not waits
            and not self.gang.may_save
        )

    @property
    def _only_here(self) -> bool:
        return self.saves.only_here(self.gang.waits_for_store)


@dataclass(frozen=True, slots=True)
class Resources:
    """What is open before any component exists."""

    pod: Pod
    disk: DiskNodeTier
    """The node tier of `tiers`, with the record of the round, which only a disk has."""
    tiers: Tiers
    server_tls: ssl.SSLContext
    client_tls: ssl.SSLContext
    background: BackgroundLimit
    metrics: Metrics


async def open_resources(
    settings: Settings, clock: Clock, metrics: Metrics, stack: AsyncExitStack
) -> Resources:
    """Open everything, in this order: threads, node tier, record of the round, object store, certificates.

    Args:
        settings: The pod's contract, and the bounds of its waits.
        clock: Measures all waits.
        metrics: Count what the tiers send.
        stack: Closes what was opened, in reverse order.

    Raises:
        ConfigError, TierError: The pod does not match its contract.
    """
    contract = settings.contract
    pools = Pools(
        disk=settings.disk_threads,
        fetch=settings.fetch_threads,
        store=settings.store_threads,
    )
    stack.callback(pools.close)
    disk = DiskNodeTier(settings.node_dir, capacity_bytes=contract.node_capacity_bytes)
    opened = await pools.meta.run(disk.open)
    logs.info("node tier is open", shards=opened.shards, quarantined=list(opened.quarantined))
    state = await pools.meta.run(_first_state, settings, disk)
    background = BackgroundLimit(
        settings.slots_dir, clock.monotonic, waited_for_copies=metrics.waited_for_copies
    )
    store = _open_store(settings, metrics, background, stack)
    files = TlsFiles.in_directory(Path(contract.certs_dir))
    server_tls = await pools.meta.run(server_context, files)
    client_tls = await pools.meta.run(client_context, files)
    pod = Pod(settings, clock, CurrentRound(state))
    tiers = Tiers(disk, store, pools)
    return Resources(pod, disk, tiers, server_tls, client_tls, background, metrics)


def _first_state(settings: Settings, disk: DiskNodeTier) -> RoundState:
    """Return the state of a process that has just started.

    It is sealed for the pod's birth round, or for the recorded round if that is newer.
    """
    contract = settings.contract
    found, promoted = disk.records.read_round(), disk.records.read_worker()
    recorded, version = (RestartRound(-1), 0) if found is None else found
    round_ = max(contract.birth_round, recorded)
    return RoundState(
        contract.worker if promoted is None else promoted,
        contract.procs_per_worker,
        round_,
        contract.pod_name,
        version_floor=version if recorded == round_ else 0,
    )


def _open_store(
    settings: Settings, metrics: Metrics, background: BackgroundLimit, stack: AsyncExitStack
) -> ObjectTier | None:
    config = settings.contract.store_config()
    if config is None:
        return None
    objects = access_in_pod(config, settings.contract.store_dir).open(
        throttle=background.take, sent=functools.partial(metrics.sent, TierName.OBJECT)
    )
    tier = ObjectTier(
        objects,
        config.prefix,
        readers=config.max_concurrency,
        compressed=functools.partial(metrics.compressed, TierName.OBJECT),
    )
    stack.callback(tier.close)
    return tier
