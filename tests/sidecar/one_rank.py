"""A checkpoint that one rank saved, and a Rehydrator of its job over stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.clock import ManualClock
from tests.support.shards.builders import (
    JOB,
    BytesSource,
    build_manifest,
    rank_layout,
    rank_payload,
    shard_header,
)
from tests.support.sidecar.contracts import contract_with
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.tiers.base import NodeTier
from holdfast_sidecar.base.pod import CurrentRound, Pod
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Metrics
from holdfast_sidecar.base.tiers import Pools, Tiers
from holdfast_sidecar.restore.fetch import Fetcher
from holdfast_sidecar.restore.rehydrate import Rehydrator
from holdfast_sidecar.wire.bulk import Members

LAYOUT = rank_layout(world_size=1)
PAYLOAD = rank_payload(world_size=1)
HEADER = shard_header(len(PAYLOAD), world_size=1, layout=digest_of(LAYOUT))
RECORD = ScratchTier().write_shard(HEADER, BytesSource(PAYLOAD))
DOCUMENT = build_manifest(JOB, [(RECORD, layout_digests(LAYOUT))], parent=None)
MANIFEST = parse_manifest(DOCUMENT)
PATIENCE_SECONDS = 60.0


def fetcher_of(
    state: RoundState, node: NodeTier, others: Any, pools: Pools, clock: ManualClock
) -> tuple[Pod, Fetcher]:
    """Return a fetcher. `others` stands for the members and the store."""
    settings = Settings(
        contract_with(namespace=JOB.namespace, job_uid=JOB.uid),
        backoff_first_seconds=0.001,
        backoff_last_seconds=0.001,
        restore_patience_seconds=PATIENCE_SECONDS,
    )
    pod = Pod(settings, clock, CurrentRound(state))
    return pod, Fetcher(pod, Tiers(node, others, pools), Members(others, others), Metrics())


def rehydrator_of(
    state: RoundState,
    node: NodeTier,
    others: Any,
    pools: Pools,
    clock: ManualClock,
    on_change: Callable[[], None] = lambda: None,
) -> Rehydrator:
    """Return a Rehydrator. `others` stands for the members and the store."""
    pod, fetcher = fetcher_of(state, node, others, pools, clock)
    return Rehydrator(pod, fetcher, Metrics(), on_change)
