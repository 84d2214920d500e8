"""List what this pod has for a restore: manifests, and shards on the node tier and in shared memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from holdfast_core import logs
from holdfast_core.errors import (
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    UnreadableError,
)
from holdfast_core.format.manifest import manifest_digest, parse_manifest_of
from holdfast_core.ids import (
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    TierName,
    age_of,
)
from holdfast_core.messages.codec import MAX_LISTED, dumps, reply_limit_bytes
from holdfast_core.messages.schema import Inventory, UncommittedShard
from holdfast_core.shm.slot_file import SlotFile, SlotState, list_slots
from holdfast_core.store.tier import ObjectTier
from holdfast_core.tasks import Tasks
from holdfast_core.tiers.base import NodeTier, ShardRecord
from holdfast_sidecar.base.pod import Pod
from holdfast_sidecar.base.rounds import RoundState
from holdfast_sidecar.base.telemetry import Telemetry
from holdfast_sidecar.base.tiers import Tiers
from holdfast_sidecar.save.components import SaveComponents

MOST_ENTRY_BYTES = 320
"""Bound of the JSON of one entry, a shard or a manifest."""
_UNCOMMITTED_OF_A_RANK = 8
"""Shards without a manifest that are listed for each rank. A fast rank has some that a slow one has not, and
only the newest step that all ranks have can be restored."""
STORE_LIST_SECONDS = 5.0
"""Time for which a SEAL waits for the list of the object store. A later inventory has a list that takes
longer."""
_LISTED_OF_STORE = 64
"""Checkpoints of the store whose manifests are read, those of the newest rounds first."""


class Inventories:
    """Maker of the inventories of this pod."""

    def __init__(self, pod: Pod, tiers: Tiers, saves: SaveComponents, telemetry: Telemetry) -> None:
        self._pod = pod
        self._node = tiers.node
        self._store = tiers.store
        self._pools = tiers.pools
        self._read = tiers.pools.read
        self._stager = saves.stager
        self._layouts = saves.layouts
        self._telemetry = telemetry
        self._changed = logs.Changed()
        self._stored: tuple[RestartRound, dict[Digest, CheckpointId]] | None = None
        """The sealed round for which the store was listed last, and what it had."""
        self._look: asyncio.Task[None] | None = None
        """The newest list of the store, which may be under way."""

    async def look_in_store(self, round_: RestartRound, tasks: Tasks) -> None:
        """Wait for a list of the store for STORE_LIST_SECONDS at most. Begin one if none is under way.

        No sealed sidecar persists a step any more, so that a list after the seal is complete.
        """
        if self._look is None or self._look.done():
            self._look = tasks.spawn(self._list_store(round_), "list of the object store")
        await asyncio.wait((self._look,), timeout=STORE_LIST_SECONDS)

    async def _list_store(self, round_: RestartRound) -> None:
        """List the checkpoints of the job in the store, for the inventories of this sealed round.

        A store that cannot be listed is logged. The operator asks again.
        """
        if self._store is None:
            return
        contract = self._pod.contract
        try:
            found = await self._pools.store.run(
                stored_manifests, self._store, contract.namespace, contract.job_uid
            )
        except HoldfastError as error:
            self._changed.warning("store", "the object store cannot be listed", error=str(error))
            return
        self._changed.healthy("store")
        self._stored = (round_, found)

    async def take(self, state: RoundState, *, launcher: bool) -> Inventory:
        """Return what this pod has now.

        Args:
            state: The state whose round the inventory names.
            launcher: Whether the launcher is connected.
        """
        uid = self._pod.job_uid
        corrupt = partial(self._telemetry.metrics.corruption, TierName.NODE)
        manifests, ranks = await self._read.run(listed_manifests, self._node, uid, corrupt)
        slots, known = self._pod.settings.slots_dir, dict(self._stager.memory)
        shards, in_memory = await self._read.run(listed_shards, self._node, uid, slots, known)
        try:
            self._telemetry.metrics.free(await self._read.run(self._node.free_bytes))
        except HoldfastError as error:
            self._telemetry.failures.note("node volume", TierName.NODE, error)
        else:
            self._telemetry.failures.healthy("node volume")
        whole = Inventory(
            worker=state.worker,
            pod=self._pod.contract.pod_name,
            round=state.round,
            version=state.version,
            manifests=manifests,
            shards=shards,
            in_memory=in_memory,
            uncommitted=await self._uncommitted(state, frozenset(manifests.values())),
            launcher=launcher,
            stored=self._listed_of_store(state),
        )
        fitting = await self._read.run(fit, whole, ranks)
        left_out = len(whole.manifests) - len(fitting.manifests)
        if left_out:
            oldest = next(iter(fitting.manifests.values())).step
            text = "the inventory is too large: it leaves out its oldest steps. Lower retention.keepLast"
            self._changed.warning("inventory", text, steps=left_out, oldest_listed=oldest)
        else:
            self._changed.healthy("inventory")
        return fitting

    def _listed_of_store(self, state: RoundState) -> dict[Digest, CheckpointId] | None:
        """Return what the store had after the seal of this round. None: it is not known, or no longer."""
        stored = self._stored
        if stored is None or state.accepted is not None or stored[0] != state.round:
            return None
        return stored[1]

    async def _uncommitted(
        self, state: RoundState, committed: frozenset[CheckpointId]
    ) -> tuple[UncommittedShard, ...]:
        """Return the own shards of the newest steps without a manifest."""
        records = await self._read.run(
            own_uncommitted, self._node, self._pod.job_uid, state.own_ranks, committed
        )
        found: list[UncommittedShard] = []
        for record in records:
            header = record.header
            try:
                layout = await self._layouts.digests(header.layout)
            except HoldfastError as error:
                logs.warning("a layout cannot be read", ref=str(record.ref), error=str(error))
                continue
            shard = UncommittedShard(
                header.step, header.round, header.world_size, record.info, layout
            )
            found.append(shard)
        return tuple(found)


def own_uncommitted(
    node: NodeTier, job_uid: JobUid, ranks: range, committed: Collection[CheckpointId]
) -> tuple[ShardRecord, ...]:
    """Return the newest shards of these ranks that no manifest names, in order of their steps. Blocking."""
    found = [
        record
        for record in node.list_shards()
        if record.header.job_uid == job_uid
        and record.header.rank in ranks
        and record.checkpoint not in committed
    ]
    found.sort(key=lambda record: record.checkpoint)
    return tuple(found[max(0, len(found) - _UNCOMMITTED_OF_A_RANK * len(ranks)) :])


def fit(inventory: Inventory, ranks: int) -> Inventory:
    """Return the inventory without its oldest manifests and their shards, so that the operator accepts it.

    The operator refuses a larger one, and a restart would wait for this sidecar without end. The newest
    manifest always stays.

    Args:
        ranks: Number of ranks of the newest checkpoint.
    """
    listed = list(inventory.manifests.items())
    if not listed:
        return inventory
    limit_bytes = reply_limit_bytes(Inventory, ranks)
    first = max(0, len(listed) - MAX_LISTED)
    entries = len(inventory.shards) + len(inventory.in_memory) + len(listed)
    if not first and entries * MOST_ENTRY_BYTES <= limit_bytes:
        return inventory  # The exact size need not be known.
    excess = len(dumps(inventory)) - limit_bytes
    shard_bytes: Counter[CheckpointId] = Counter()
    for shard in (*inventory.shards, *inventory.in_memory):
        shard_bytes[shard.checkpoint] += len(dumps(shard)) + 1  # with the comma after it

    def freed_bytes(digest: Digest, checkpoint: CheckpointId) -> int:
        return len(dumps({digest: checkpoint})) - 1 + shard_bytes[checkpoint]  # without the braces

    excess -= sum(freed_bytes(*entry) for entry in listed[:first])
    while excess > 0 and first < len(listed) - 1:
        excess -= freed_bytes(*listed[first])
        first += 1
    if not first:
        return inventory
    omitted = {checkpoint for _, checkpoint in listed[:first]}
    shards, in_memory = (
        tuple(s for s in found if s.checkpoint not in omitted)
        for found in (inventory.shards, inventory.in_memory)
    )
    manifests = dict(listed[first:])
    return replace(inventory, manifests=manifests, shards=shards, in_memory=in_memory)


def listed_manifests(
    node: NodeTier, job_uid: JobUid, corrupt: Callable[[], object]
) -> tuple[dict[Digest, CheckpointId], int]:
    """Return the manifests of this job on the node tier, and the number of ranks of the newest. Blocking.

    A manifest that cannot be read is left out and logged. One that is corrupt or is another checkpoint's is
    quarantined.

    Args:
        corrupt: Called for each manifest that is damaged.
    """
    found: dict[Digest, CheckpointId] = {}
    ranks = 0
    for checkpoint in sorted(node.checkpoints(job_uid)):
        try:
            document = node.get_manifest(job_uid, checkpoint)
            ranks = parse_manifest_of(document, job_uid, checkpoint).world_size
            found[manifest_digest(document)] = checkpoint
        except UnreadableError as error:
            logs.warning("a manifest cannot be read", checkpoint=str(checkpoint), error=str(error))
        except CorruptionError as error:
            logs.warning("a manifest is damaged", checkpoint=str(checkpoint), error=str(error))
            corrupt()
            try:
                node.quarantine_manifest(job_uid, checkpoint, error)
            except HoldfastError as refusal:
                # A disk that cannot be written must not hide the other manifests.
                logs.warning("quarantining a manifest failed", error=str(refusal))
        except HoldfastError as error:
            logs.warning("a manifest cannot be read", checkpoint=str(checkpoint), error=str(error))
    return found, ranks


def stored_manifests(
    store: ObjectTier, namespace: str, job_uid: JobUid
) -> dict[Digest, CheckpointId]:
    """Return the checkpoints of the newest rounds in the object store, in order of step and round. Blocking.

    A manifest that is not valid is left out and logged: no restore could use it.
    """
    found: dict[Digest, CheckpointId] = {}
    there = sorted(store.list_manifests(namespace, job_uid), key=age_of)
    for checkpoint in sorted(there[-_LISTED_OF_STORE:]):
        try:
            document = store.get_manifest(namespace, job_uid, checkpoint)
            parse_manifest_of(document, job_uid, checkpoint)
        except (CorruptionError, FormatError, NotFoundError) as error:
            logs.warning("a manifest of the store is left out", error=str(error))
            continue
        found[manifest_digest(document)] = checkpoint
    return found


def listed_shards(
    node: NodeTier, job_uid: JobUid, slots_dir: Path, known: dict[str, ShardRecord]
) -> tuple[tuple[ShardRef, ...], tuple[ShardRef, ...]]:
    """Return this job's shards on the node tier, and those in the slots of this pod. Blocking.

    Args:
        known: The digested shard that each slot held last. It counts only if the slot's header still agrees.
    """
    records = [r for r in node.list_shards() if r.header.job_uid == job_uid]
    identities = {
        (r.header.rank, r.header.round, r.header.step, r.header.payload_bytes): r for r in records
    }
    slots = (_in_slot(slots_dir, n, known.get(n), identities) for n in list_slots(slots_dir))
    return _listed(records), _listed(r for r in slots if r is not None)


def _in_slot(
    slots_dir: Path,
    name: str,
    known: ShardRecord | None,
    identities: Mapping[tuple[Rank, RestartRound, Step, int], ShardRecord],
) -> ShardRecord | None:
    try:
        slot = SlotFile.open(slots_dir, name)
    except HoldfastError:
        return None
    try:
        header = slot.header()
    except HoldfastError:
        return None
    finally:
        slot.close()
    if header.state is SlotState.FILLING or header.step is None or header.round is None:
        return None
    identity = (header.rank, header.round, header.step, header.payload_bytes)
    if known is not None:
        k = known.header
        if (k.rank, k.round, k.step, k.payload_bytes) == identity:
            return known
    return identities.get(identity)


def _listed(records: Iterable[ShardRecord]) -> tuple[ShardRef, ...]:
    return tuple(sorted((r.ref for r in records), key=lambda s: (s.checkpoint, s.rank)))
