"""Upload the shards of one persister's ranks, of the checkpoint that the leader asks for.

The persisters of a gang tell one another about uploads by files in the folder they share. The leader (rank
0's persister) writes `store/r<round>/state.json`: the checkpoint to upload now, those that wait, and what
became of earlier ones. Each persister writes `store/r<round>/<checkpoint>/<rank>.json` when a shard is in
the store. The files are not synced: what a power failure takes is found out again from the folder and the
store.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.directory.choice import JOB_UID, NAMESPACE
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
from holdfast_core.failpoint import failpoint
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, Rank, RestartRound, ShardRef
from holdfast_core.messages import codec
from holdfast_core.messages.schema import PersistRequest
from holdfast_core.node.documents import read_document, replace_document
from holdfast_core.shards.file import Trailer
from holdfast_core.store.commit import ShardUploader
from holdfast_core.store.rules import SELF_CONTAINED, StoredAs, UploadQueue
from holdfast_core.store.tier import ObjectTier

LEFT_OUT = "newer steps were saved while it waited for the store"
_MAX_OUTCOMES = 64
_ROUND = re.compile(r"r\d{6}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a checkpoint that was to be uploaded."""

    checkpoint: CheckpointId
    failure: str = ""
    """Why it will not be uploaded. "" if it is in the store."""


@dataclass(frozen=True, slots=True)
class Share:
    """What became of the upload of one shard."""

    rank: Rank
    blake3: Digest
    stored: StoredAs = SELF_CONTAINED
    failure: str = ""
    """Why it will not be uploaded. "" if it is in the store."""


@dataclass(frozen=True, slots=True)
class UploadState:
    """Contents of state.json."""

    queue: UploadQueue = field(default_factory=UploadQueue)
    outcomes: tuple[Outcome, ...] = ()
    """The newest outcomes, the oldest first."""
    over: str = ""
    """Why nothing more is uploaded: another run has taken the store. "" while uploads go on."""
    conditional_put: bool = True
    """Whether the store respects If-None-Match."""

    def ended(self, checkpoint: CheckpointId, failure: str = "") -> UploadState:
        """Return the state after a checkpoint was uploaded or given up."""
        return replace(
            self,
            queue=self.queue.without(checkpoint),
            outcomes=(*self.outcomes, Outcome(checkpoint, failure))[-_MAX_OUTCOMES:],
        )

    def with_committed(
        self, checkpoints: Iterable[CheckpointId]
    ) -> tuple[UploadState, tuple[CheckpointId, ...]]:
        """Return the state after checkpoints were committed, and those that are left out."""
        state, left_out = self, list[CheckpointId]()
        ended = {one.checkpoint for one in self.outcomes}
        for checkpoint in checkpoints:
            if checkpoint in ended:
                continue
            queue, oldest = state.queue.added(checkpoint)
            state = replace(state, queue=queue)
            if oldest is not None:
                left_out.append(oldest)
                state = state.ended(oldest, LEFT_OUT)
        return state, tuple(left_out)


class UploadFiles:
    """The files of one round.

    Args:
        directory: The folder's `store` directory.
        round_: The round of this run.
    """

    def __init__(self, directory: Path, round_: RestartRound) -> None:
        self._root = directory
        self._directory = directory / f"r{round_:06d}"

    def read(self) -> UploadState | None:
        """Return the state, or None where the leader has written none."""
        try:
            return codec.loads(UploadState, read_document(self._directory / "state.json"))
        except HoldfastError:
            return None

    @property
    def are_removed(self) -> bool:
        """Whether the directory of the files is gone: a later run has removed it."""
        return not self._directory.exists()

    def write(self, state: UploadState) -> None:
        """Write the state, and remove the records of shards that are no longer needed."""
        replace_document(self._directory / "state.json", codec.dumps(state))
        names = set(map(str, state.queue.wanted))
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                if path.is_dir() and path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)

    def add(self, checkpoint: CheckpointId, share: Share) -> None:
        """Record what became of a shard of the checkpoint."""
        path = self._directory / str(checkpoint) / f"{share.rank}.json"
        replace_document(path, codec.dumps(share))

    def share(self, checkpoint: CheckpointId, rank: Rank) -> Share | None:
        """Return the record of a rank's shard, or None."""
        try:
            path = self._directory / str(checkpoint) / f"{rank}.json"
            return codec.loads(Share, read_document(path))
        except HoldfastError:
            return None

    def remove_older(self) -> None:
        """Remove the files of other rounds, whose runs upload nothing more."""
        with contextlib.suppress(OSError):
            for path in self._root.iterdir():
                if _ROUND.fullmatch(path.name) and path.name < self._directory.name:
                    shutil.rmtree(path, ignore_errors=True)


logger = logging.getLogger(__name__)


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

    def upload(self, request: PersistRequest, files: UploadFiles, conditional_put: bool) -> None:
        """Upload what this persister is responsible for, and record it. A repeated call does nothing.

        Raises what the store raises.
        """
        if request == self._done:
            return
        checkpoint = CheckpointId(request.step, request.step_round)
        try:
            manifest = self.manifest(checkpoint)
        except GoneError:
            if self._folder.options.leads:
                raise
            return  # the leader finds that out, too
        for rank in self._own(manifest):
            files.add(checkpoint, self._share(manifest, rank, request, conditional_put))
            failpoint("uploads.share_recorded")
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

    def _share(
        self, manifest: Manifest, rank: Rank, request: PersistRequest, conditional_put: bool
    ) -> Share:
        """Upload one shard with its layout, and return how the store holds it."""
        ref, tier = manifest.ref(rank), self.tier(conditional_put)
        try:
            if self._folder.tier.look_up(ref) is None:
                raise NotFoundError(f"the folder has lost the shard {ref}")
            failpoint("uploads.before_shard")
            stored = self._shard_uploader(tier).upload(ref, request)
            failpoint("uploads.after_shard")
        except AlreadyExistsError as error:
            return Share(rank, ref.blake3, failure=f"the store holds other bytes: {error}")
        except (NotFoundError, CorruptionError) as error:
            failure = self._failure(ref, error)
            if failure is None:
                raise
            return Share(rank, ref.blake3, failure=failure)
        return Share(rank, ref.blake3, stored)

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
            self._uploader = ShardUploader(
                NAMESPACE, self._folder.tier, tier, own_ranks=1, other_tables=self._tables
            )
        return self._uploader

    def _tables(self, refs: Sequence[ShardRef]) -> Iterator[Trailer]:
        """Yield the chunk tables of shards that other persisters wrote after this one opened the folder."""
        for ref in refs:
            try:
                if self._folder.tier.look_up(ref) is not None:
                    with self._folder.tier.open_shard(ref) as reader:
                        yield Trailer(reader.record, reader.table)
            except (HoldfastError, OSError) as error:
                logger.info("reading the chunk table of %s failed: %s", ref, error)
