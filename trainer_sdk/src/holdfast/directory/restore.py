"""Answers Restore and Fill from a folder. The calls block; connection threads make them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from holdfast.directory.choice import NAMESPACE, has_shard, open_in_folder, read_patiently
from holdfast.directory.open_folder import OpenFolder
from holdfast_core.errors import (
    CapacityError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
)
from holdfast_core.format.manifest import Manifest
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import Digest, Rank, ShardRef, TierName
from holdfast_core.messages.schema import (
    Fill,
    Filled,
    Refusal,
    Restore,
    RestorePoint,
    RestoreReply,
    ShardFile,
)
from holdfast_core.reading import Reader, ShardPlace, restore_reply, run_blocking
from holdfast_core.shm.shared_files import LayoutFiles
from holdfast_core.shm.slot_file import (
    SlotFile,
    SlotState,
    first_fitting,
    kept_slot,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

_SHOWN = 5
"""Checkpoints that a reply names as passed over."""


class ShardFetcher:
    """Reads shards and layouts of the restore point from the folder, or else from its store.

    A call waits while the store does not answer.
    """

    def __init__(self, folder: OpenFolder) -> None:
        self.tier = folder.tier
        self.has_read_store = False
        """Whether a shard, or a part of one, was read from the store."""
        self._folder = folder
        self.store = folder.store

    def fetch(self, ref: ShardRef) -> None:
        """Make sure that the folder has the shard.

        Raises:
            NotFoundError: Neither the folder nor the store has it.
            CorruptionError: The copy of the store is damaged.
            CapacityError: The folder has no room for it.
            RefusedError: The folder cannot be written.
        """
        store, folder = self.store, self._folder
        if store is None or has_shard(self.tier, ref):
            return
        if folder.options.read_only:
            raise RefusedError(
                Refusal.BAD_REQUEST,
                f"step {ref.step} is only in {store.url}, and the folder {folder.options.root}, to "
                "which it would be downloaded, cannot be written: choose a folder that can be written",
            )
        logger.info("reading %s from %s", ref, store.url)
        store.patiently(
            f"it has the shard of rank {ref.rank} of step {ref.step}, which this run restores",
            lambda: folder.write(
                ref.checkpoint,
                lambda: store.tier.download_shard(NAMESPACE, ref, self.tier.begin_copy),
                lambda gone: None,
            ),
        )
        self.has_read_store = True

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        """Return the layout of a shard. Raises NotFoundError, CorruptionError."""
        store, folder = self.store, self._folder
        try:
            return self.tier.get_layout(digest)
        except (NotFoundError, CorruptionError):
            if store is None:
                raise
        document: bytes = store.patiently(
            f"it has the layout of rank {ref.rank} of step {ref.step}, which this run restores",
            lambda: store.tier.get_layout(NAMESPACE, ref, digest),
        )
        if not folder.options.read_only:
            try:
                self.tier.put_layout(document)
            except CapacityError as error:
                logger.warning(
                    "%s; the layout is read from the store again when it is needed", error
                )
        return document


@dataclass(frozen=True, slots=True)
class FolderPlaces:
    """The folder and then its store, as `reading.CheckpointPlaces`."""

    fetcher: ShardFetcher
    manifest: Manifest

    async def layout(self, rank: Rank) -> RankLayout:
        digest = self.manifest.shards[rank].layout
        return parse_rank_layout(self.fetcher.layout(self.manifest.ref(rank), digest))

    def places(self, rank: Rank) -> tuple[ShardPlace, ...]:
        ref, store = self.manifest.ref(rank), self.fetcher.store
        tier = self.fetcher.tier
        here = ShardPlace(TierName.NODE, "the folder", partial(open_in_folder, tier, ref))
        if store is None:
            return (here,)
        opened = partial(store.tier.open_shard, NAMESPACE, ref)
        return (here, ShardPlace(TierName.OBJECT, str(store.url), opened))

    async def run(self, call: Callable[[], T], place: ShardPlace | None = None) -> T:
        store = self.fetcher.store
        if place is None or place.tier is TierName.NODE or store is None:
            return read_patiently(call)
        why = f"it has a shard of step {self.manifest.step}, which this run restores"
        found = store.patiently(why, call)
        self.fetcher.has_read_store = True
        return found

    async def failed(self, place: ShardPlace, rank: Rank, error: HoldfastError) -> None:
        """Quarantine a damaged shard of the folder."""
        logger.warning("%s; the shard of rank %d is read from elsewhere", error, rank)
        if place.tier is TierName.NODE and isinstance(error, CorruptionError):
            self.fetcher.tier.quarantine(self.manifest.ref(rank), error)


class FolderRestore:
    """Handler of the Restore and Fill requests of a folder's ranks."""

    def __init__(self, folder: OpenFolder, layouts: LayoutFiles) -> None:
        self._folder = folder
        self._tier = folder.tier
        self._world_size = folder.options.world_size
        self._layouts = layouts
        self._fetcher = ShardFetcher(folder)

    @property
    def point(self) -> RestorePoint:
        choice = self._folder.choice
        if choice is None:
            return RestorePoint()
        return RestorePoint(choice.manifest.step, choice.manifest.restart_round, choice.digest)

    def restore(self, message: Restore) -> RestoreReply:
        """Return what a rank restores from, and put the layouts that it needs into the shared directory."""
        if self._folder.choice_error is not None:
            raise self._folder.choice_error
        if self._folder.choice is None:
            return RestoreReply(RestorePoint())
        choice = self._folder.choice
        manifest = choice.manifest

        async def publish(ranks: Sequence[Rank]) -> Digest:
            return self._publish_one(manifest, ranks)

        is_own = manifest.world_size == self._world_size
        reply = run_blocking(restore_reply(message, self.point, manifest, is_own, publish))
        return replace(reply, passed_over=choice.passed_over[:_SHOWN])

    def fill(self, message: Fill) -> Filled | ShardFile:
        """Put the rank's payload into one of the offered slots, or return the file to read it from.

        A shard that does not verify is quarantined.
        """
        if self._folder.choice is None:
            raise RefusedError(Refusal.NOT_FOUND, "there is nothing to restore in this round")
        manifest, rank = self._folder.choice.manifest, message.rank
        if message.layout is not None:
            wanted = parse_rank_layout(self._layouts.read(message.layout))
            if wanted.rank != rank:
                raise FormatError(f"fill of rank {rank}: the layout is of rank {wanted.rank}")
            size = wanted.payload_bytes
        else:
            wanted = None
            if manifest.world_size != self._world_size:
                raise RefusedError(
                    Refusal.BAD_REQUEST,
                    (
                        f"checkpoint {manifest.checkpoint} was saved by {manifest.world_size} ranks, "
                        f"expected {self._world_size}: the request must name the layout that it needs"
                    ),
                )
            ref, size = manifest.ref(rank), manifest.shards[rank].payload_bytes
            self._fetcher.fetch(ref)
            kept = partial(kept_slot, message.slots, ref, size, self._folder.open_slot, _is_free)
            if message.reads_files:
                path = str(self._tier.shard_path(ref))
                return ShardFile(path, ref, self._tier_name, kept())
            if (name := kept(self._tier)) is not None:
                return Filled(name, size, TierName.MEMORY)
        with closing(self._fitting(message.slots, size)) as slot:
            reader = Reader(FolderPlaces(self._fetcher, manifest), slot)
            run_blocking(reader.fill(slot, rank, wanted, self._world_size))
        if wanted is not None:
            read = reader.read_bytes.total()
            logger.info("rank %d: read %d bytes for a payload of %d", rank, read, size)
        return Filled(slot.name, size, self._tier_name)

    @property
    def _tier_name(self) -> TierName:
        return TierName.OBJECT if self._fetcher.has_read_store else TierName.NODE

    def _publish_one(self, manifest: Manifest, ranks: Sequence[Rank]) -> Digest:
        """Publish the layout of the first of these ranks that is good.

        Raises NotFoundError or CorruptionError for the last one if none is.
        """
        for rank in ranks[:-1]:
            try:
                return self._publish(manifest, rank)
            except (NotFoundError, CorruptionError) as error:
                logger.warning("the layout of rank %d: %s", rank, error)
        return self._publish(manifest, ranks[-1])

    def _publish(self, manifest: Manifest, rank: Rank) -> Digest:
        digest = manifest.shards[rank].layout
        self._layouts.ensure(self._fetcher.layout(manifest.ref(rank), digest), digest)
        return digest

    def _fitting(self, names: Sequence[str], payload_bytes: int) -> SlotFile:
        """Open the first offered slot that is large enough. Raises CapacityError without such a slot."""

        def capacity_of(name: str) -> int:
            with closing(self._folder.open_slot(name)) as slot:
                return slot.header().capacity_bytes

        return self._folder.open_slot(first_fitting(names, payload_bytes, capacity_of))


def _is_free(slot: SlotFile) -> bool:
    return slot.header().state is SlotState.FREE
