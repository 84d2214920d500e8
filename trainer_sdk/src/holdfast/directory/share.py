"""Upload the shards of one persister's ranks, of the checkpoint that the leader asks for."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from holdfast.directory.choice import JOB_UID, NAMESPACE
from holdfast.directory.commit import Record
from holdfast.directory.folder_store import FolderStore
from holdfast.directory.open_folder import OpenFolder
from holdfast_core.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
    UnreadableError,
)
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Rank, ShardRef
from holdfast_core.messages.schema import PersistRequest, ReportedShard
from holdfast_core.store.commit import ShardUploader
from holdfast_core.store.tier import ObjectTier

_UNREAD_ATTEMPTS = 5
"""Uploads of a shard that fail because the disk does not return it, after which newer steps are uploaded."""


class GoneError(HoldfastError):
    """The folder does not have the checkpoint, or a good shard of it, any more."""


class ShareUploader:
    """Uploader of this persister's part of a checkpoint. Only one thread uploads.

    Args:
        folder: The folder.
        store: Its object store.
        throttle: Receives the size of each part in bytes before it is sent, and may block.
    """

    def __init__(
        self, folder: OpenFolder, store: FolderStore, throttle: Callable[[int], object]
    ) -> None:
        self._folder = folder
        self._store = store
        self._throttle = throttle
        self._unread: Counter[ShardRef] = Counter()
        """Attempts to read a shard that the disk did not return."""
        self._opening = threading.Lock()
        self._is_closed = False
        self._tier: ObjectTier | None = None
        self._uploader: ShardUploader | None = None
        self._done: PersistRequest | None = None

    def tier(self, conditional_put: bool) -> ObjectTier:
        """Return the tier of uploads. The first call opens it."""
        with self._opening:
            if self._tier is None:
                self._tier = self._store.open_for_uploads(
                    self._throttle, conditional_put=conditional_put
                )
                if self._is_closed:
                    self._tier.close()
            return self._tier

    def close(self) -> None:
        """End the requests in progress. No upload succeeds afterwards."""
        with self._opening:
            self._is_closed = True
            if self._tier is not None:
                self._tier.close()

    def upload(self, request: PersistRequest, conditional_put: bool) -> None:
        """Upload what this persister is responsible for, and record it. A repeated call does nothing.

        Raises what the store raises.
        """
        if request == self._done:
            return
        try:
            manifest = self.manifest(request.checkpoint)
        except GoneError:
            if self._folder.options.leads:
                raise
            return  # the leader finds that out, too
        for rank in self._own(manifest):
            record = self._upload(manifest, rank, request, conditional_put)
            self._folder.committer.files(self._folder.round).write(record)
            sys.audit("holdfast.uploads.share_recorded")
        self._done = request

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        """Return the manifest in the folder. Raises GoneError."""
        try:
            document = self._folder.tier.get_manifest(JOB_UID, checkpoint)
            return parse_manifest_of(document, JOB_UID, checkpoint)
        except (NotFoundError, CorruptionError, FormatError) as error:
            if isinstance(error, UnreadableError) and error.may_pass:
                raise UnavailableError(str(error)) from error
            raise GoneError(
                f"the folder has lost {checkpoint} before it was uploaded: {error}"
            ) from error

    def _own(self, manifest: Manifest) -> list[Rank]:
        """Return the ranks whose shards this process uploads. Another number of ranks may have saved them."""
        world, own = self._folder.options.world_size, self._folder.options.own_ranks
        return [shard.rank for shard in manifest.shards if shard.rank % world in own]

    def _upload(
        self, manifest: Manifest, rank: Rank, request: PersistRequest, conditional_put: bool
    ) -> Record:
        """Upload one shard with its layout, and return how the store holds it, or why it never will."""
        ref, tier, named = manifest.ref(rank), self.tier(conditional_put), manifest.shards[rank]
        shard = ReportedShard(ref.step, ref.round, named.info, None)
        failure = ""
        try:
            sys.audit("holdfast.uploads.before_shard")
            stored = self._shard_uploader(tier).upload(ref, request)
            sys.audit("holdfast.uploads.after_shard")
        except AlreadyExistsError as error:
            failure = f"the store holds other bytes: {error}"
        except (NotFoundError, CorruptionError) as error:
            why = self._failure(ref, error)
            if why is None:
                raise
            failure = why
        else:
            shard = replace(shard, uploaded=stored)
        return Record(shard, manifest.world_size, failure=failure)

    def _failure(self, ref: ShardRef, error: HoldfastError) -> str | None:
        """Return why the shard will never be uploaded. None if it is good, so that the store is at fault."""
        tier = self._folder.tier
        try:
            with tier.open_shard(ref) as reader:
                reader.verify()
        except NotFoundError:
            return f"the folder has lost the shard of rank {ref.rank}: {error}"
        except UnreadableError as error:
            self._unread[ref] += 1
            if error.may_pass and self._unread[ref] < _UNREAD_ATTEMPTS:
                return None
            return f"the shard of rank {ref.rank} cannot be read: {error}"
        except CorruptionError as damage:
            tier.quarantine(ref, damage)
            return f"the shard of rank {ref.rank} is damaged: {damage}"
        return None

    def _shard_uploader(self, tier: ObjectTier) -> ShardUploader:
        if self._uploader is None:
            self._uploader = ShardUploader(NAMESPACE, self._folder.tier, tier, own_ranks=1)
        return self._uploader
