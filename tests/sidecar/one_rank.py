"""A checkpoint that one rank saved, and a Rehydrator of its job over stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support.shards.builders import (
    JOB,
    BytesSource,
    rank_layout,
    rank_payload,
    shard_header,
)
from tests.support.tiers.memory import MemoryTier

from holdfast_core.clock import ManualClock
from holdfast_core.format.digest import digest_of
from holdfast_core.format.layout import merge_layouts
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.tiers.base import NodeTier
from holdfast_core.tiers.local_commit import build_manifest
from holdfast_sidecar.base.backoff import Backoff, Patience
from holdfast_sidecar.base.metrics import Metrics
from holdfast_sidecar.base.pools import Pools
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.restore.rehydrate import Rehydrator

LAYOUT = merge_layouts([rank_layout(world_size=1)]).to_bytes()
PAYLOAD = rank_payload(world_size=1)
HEADER = shard_header(len(PAYLOAD), world_size=1, layout=digest_of(rank_layout(world_size=1)))
RECORD = MemoryTier().write_shard(HEADER, BytesSource(PAYLOAD))
DOCUMENT = build_manifest(JOB, [RECORD], parent=None, layout=LAYOUT)
MANIFEST = parse_manifest(DOCUMENT)
PATIENCE_SECONDS = 60.0


def rehydrator_of(
    state: RoundState,
    node: NodeTier,
    others: Any,
    pools: Pools,
    clock: ManualClock,
    on_change: Callable[[], None] = lambda: None,
) -> Rehydrator:
    """`others` stands for the members and the store."""
    settings: Any = SimpleNamespace(
        contract=SimpleNamespace(namespace=JOB.namespace, job_uid=JOB.uid)
    )
    return Rehydrator(
        settings,
        lambda: state,
        node,
        others,
        peers=others,
        bulk=others,
        pools=pools,
        metrics=Metrics(),
        clock=clock,
        patience=lambda: Patience(clock, Backoff(0.001, 0.001), PATIENCE_SECONDS),
        on_change=on_change,
    )
