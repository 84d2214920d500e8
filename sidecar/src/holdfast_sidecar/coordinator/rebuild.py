"""How a new coordinator finds out which manifests exist: it reads every member's inventory.

Where all shards of a step still exist, this only saves work: the reports list them, and the coordinator
builds the same manifest. Where a node has lost its shard, nothing else says that the step is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_core.format.digest import digest_of
from holdfast_core.ids import Digest, RestartRound, Step, Worker
from holdfast_core.messages.schema import ManifestDocument, ManifestList
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.pod import Backoff
from holdfast_sidecar.wire.client import Peers


@dataclass(frozen=True, slots=True)
class RebuildTarget:
    """Callbacks of the coordinator."""

    inventory: Callable[[ManifestList], None]
    """Called with the inventory of the member."""
    has_manifest: Callable[[Step], bool]
    """Returns whether the manifest of a step of this round need not be read."""
    manifest: Callable[[Step, Digest, ManifestDocument], Awaitable[None]]
    """Called with a manifest of this round. An error that it raises is logged."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a manifest is read. Members have the same ones, which have megabytes in a large gang."""


async def rebuild_from(
    worker: Worker, round_: RestartRound, peers: Peers, clock: Clock, target: RebuildTarget
) -> None:
    """Request the member's inventory until it answers, then read its manifests of this round that are new."""
    backoff = Backoff(0.2, 5.0)
    while True:
        try:
            inventory = await peers.get(worker, "/v1/inventory", ManifestList)
            break
        except HoldfastError:
            await clock.sleep(backoff.next_seconds())
    target.inventory(inventory)
    for found in inventory.manifests:
        if found.round != round_:
            continue
        async with target.reading:
            if target.has_manifest(found.step):
                continue
            query = {"step": str(found.step), "round": str(found.round)}
            try:
                document = await peers.get(worker, "/v1/manifest", ManifestDocument, query=query)
                if digest_of(document.manifest.encode()) == found.manifest:
                    await target.manifest(found.step, found.manifest, document)
            except HoldfastError as error:
                logs.warning("a manifest was not adopted", step=found.step, error=str(error))
