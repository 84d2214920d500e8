"""What the persisters of a gang tell one another about uploads, by files in the folder they share.

The leader (rank 0's persister) writes `store/r<round>/state.json`: the checkpoint to upload now, those
that wait, and what became of earlier ones. Each persister writes `store/r<round>/<checkpoint>/<rank>.json`
when a shard is in the store. The files are not synced: what a power failure takes is found out again from
the folder and the store.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import CheckpointId, Digest, Rank, RestartRound
from holdfast_core.messages import codec
from holdfast_core.node.documents import read_document, replace_document
from holdfast_core.store.rules import SELF_CONTAINED, StoredAs, UploadQueue

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
