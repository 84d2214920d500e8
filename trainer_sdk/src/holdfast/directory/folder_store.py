"""The object store of a folder: what it holds, and which training it belongs to.

This module and `uploads` import packages that only the extra `holdfast-sdk[s3]` installs. A process without
a store imports neither.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from holdfast.base.kept_run import kept_run_id
from holdfast.directory.choice import JOB_UID, NAMESPACE, ChosenCheckpoint
from holdfast_core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    HoldfastError,
    NotFoundError,
    TierError,
    UnavailableError,
)
from holdfast_core.format.manifest import manifest_digest, parse_manifest_of
from holdfast_core.ids import CheckpointId, RestartRound, ShardRef
from holdfast_core.node.documents import read_document, replace_document
from holdfast_core.store.open import MarkedRound, RunMarker, StoreRuns, open_tier, probe_url
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store_url import StoreUrl

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS = 2.0
_TRAINING = "training"


class ForeignTrainingError(ConfigError):
    """The folder and the store have checkpoints of two trainings."""


class FolderStore:
    """The object store that a folder uploads to. Calls block. Thread-safe after `adopt`.

    Args:
        url: The store.
        env: Environment variables with endpoint and keys.
        directory: Directory in the folder for what the folder records about its store.
        run_id: Id of this run.
        is_abandoned: Waits the given seconds, and returns whether nothing needs the store any more.
    """

    def __init__(
        self,
        url: StoreUrl,
        env: Mapping[str, str],
        directory: Path,
        run_id: str,
        is_abandoned: Callable[[float], bool],
    ) -> None:
        self.url = url
        self._env = env
        self._directory = directory
        self._run_id = run_id
        self._is_abandoned = is_abandoned
        self._quick = open_tier(url, env, is_quick=True)
        self._runs = StoreRuns(self._quick, NAMESPACE, JOB_UID)
        self._conditional_put: bool | None = None
        """Whether the store respects If-None-Match. None: it is not known yet."""

    def close(self) -> None:
        self._quick.close()

    @property
    def tier(self) -> ObjectTier:
        """The tier for restores. An operation that the store does not answer fails within seconds."""
        return self._quick

    @property
    def has_conditional_put(self) -> bool:
        """Whether the store respects If-None-Match. It is known after `take`."""
        return self._conditional_put is not False

    def open_for_uploads(
        self, throttle: Callable[[int], object], *, conditional_put: bool
    ) -> ObjectTier:
        """Open the tier for uploads, which the caller closes. The arguments are those of `open_tier`."""
        return open_tier(self.url, self._env, conditional_put=conditional_put, throttle=throttle)

    # ------------------------------------------------------------------ waiting

    def patiently(self, why: str, call: Callable[[], T]) -> T:
        """Return the result of `call`, which is repeated while the store does not answer.

        Args:
            why: Why this cannot go on without the store, for the log.
            call: Calls the store.

        Raises:
            UnavailableError: Nothing needs the result any more.
            HoldfastError: Any other error of `call`.
        """
        logged = False
        while True:
            try:
                found = call()
            except UnavailableError as error:
                if not logged:
                    logger.warning("waiting for %s: %s (%s)", self.url, why, error)
                logged = True
                if self._is_abandoned(_POLL_SECONDS):
                    raise
            else:
                if logged:
                    logger.warning("%s answers again", self.url)
                return found

    def usable(self, call: Callable[[], T]) -> T:
        """Return the result of `call`. A refusal is raised as ConfigError with the store's URL."""
        try:
            return call()
        except (UnavailableError, CorruptionError):
            raise
        except (TierError, ConfigError) as error:
            raise ConfigError(f"Folder(store={str(self.url)!r}): {error}") from error

    # ------------------------------------------------------------------ what the store holds

    def checkpoints(self) -> frozenset[CheckpointId]:
        """Return the checkpoints that have a manifest in the store."""
        return frozenset(self._quick.list_manifests(NAMESPACE, JOB_UID))

    def rounds(self) -> list[RestartRound]:
        """Return the rounds in which runs have uploaded."""
        found = [checkpoint.round for checkpoint in self.checkpoints()]
        newest = self._runs.newest()
        return found if newest is None else [*found, newest.round]

    def load(self, checkpoint: CheckpointId, has: Callable[[ShardRef], bool]) -> ChosenCheckpoint:
        """Load a manifest, and check that each of its shards is in the store or in the folder.

        Args:
            checkpoint: The checkpoint.
            has: Whether the folder has a shard.

        Raises:
            NotFoundError, CorruptionError, FormatError: The checkpoint cannot be restored.
        """
        document = self._quick.get_manifest(NAMESPACE, JOB_UID, checkpoint)
        manifest = parse_manifest_of(document, JOB_UID, checkpoint)
        refs = [manifest.ref(shard.rank) for shard in manifest.shards]
        missing = [ref for ref in refs if not has(ref)]
        if missing:
            stored = self._quick.shards_stored(NAMESPACE, JOB_UID, checkpoint)
            lost = [r.rank for r in missing if (r.rank, r.blake3[3:19]) not in stored]
            if lost:
                raise NotFoundError(
                    f"checkpoint {checkpoint}: neither the folder nor {self.url} has the shards of "
                    f"ranks {lost}"
                )
        return ChosenCheckpoint(manifest, manifest_digest(document))

    def keep(self, choice: ChosenCheckpoint) -> None:
        """Write the manifest of the restore point where `kept` finds it, for the gang's other persisters.

        It does not count as a checkpoint of the folder, which may lack the shards.
        """
        name = f"{choice.manifest.checkpoint}.json"
        self._record(name, choice.manifest.to_bytes())
        for path in self._directory.glob("s*-r*.json"):
            if path.name != name:
                path.unlink(missing_ok=True)

    def kept(self, checkpoint: CheckpointId) -> ChosenCheckpoint | None:
        """Return what `keep` has written for this checkpoint, or None."""
        try:
            document = read_document(self._directory / f"{checkpoint}.json")
            return ChosenCheckpoint(
                parse_manifest_of(document, JOB_UID, checkpoint), manifest_digest(document)
            )
        except HoldfastError:
            return None

    # ------------------------------------------------------------------ which training it belongs to

    def adopt(self, *, has_checkpoints: bool, is_writable: bool) -> None:
        """Find out which training the store belongs to, and record it in the folder.

        Args:
            has_checkpoints: Whether the folder has checkpoints.
            is_writable: Whether the folder can be written.

        Raises:
            ForeignTrainingError: The folder and the store have checkpoints of two trainings.
            UnavailableError: The store does not answer.
        """
        newest = self._runs.newest()
        own = self._training()
        if newest is None or newest.marker is None:
            training = own or self._new_training()
        else:
            training = newest.marker.training
            if has_checkpoints and own != training:
                whose = "were never uploaded to it" if own is None else f"are of the training {own}"
                raise ForeignTrainingError(
                    f"the store has checkpoints of the training {training}, and the folder "
                    f"{self._directory.parent} has checkpoints that {whose}: choose another prefix for the "
                    "training of this folder, or an empty folder to continue the training of the store"
                )
        if self._recorded() != training and is_writable:
            try:
                self._record(_TRAINING, training.encode())
            except CapacityError as error:
                # A full folder can be restored from. The next start or the first upload records it.
                logger.warning("%s", error)

    def run(self, round_: RestartRound) -> MarkedRound:
        """Return this run as its marker describes it."""
        training = self._training()
        if training is None:
            training = self._new_training()
            self._record(_TRAINING, training.encode())
        return MarkedRound(round_, RunMarker(training, self._run_id, socket.gethostname()))

    def take(self, round_: RestartRound, *, has_checkpoints: bool) -> None:
        """Check that checkpoints can be stored, and make this run the one that uploads.

        Args:
            round_: The round of this run.
            has_checkpoints: Whether the folder has checkpoints.

        Raises:
            TakenError, ForeignTrainingError: Another run or training uses the store.
            ConfigError, TierError: The store cannot be used.
            UnavailableError: The store does not answer.
        """
        if self._conditional_put is None:
            self._probe()
        self.adopt(has_checkpoints=has_checkpoints, is_writable=True)
        self._runs.take(self.run(round_))

    def expect_newest(self, round_: RestartRound) -> None:
        """Raise TakenError where another run has taken the store. Also raises what the store raises."""
        self._runs.expect_newest(self.run(round_))

    def _probe(self) -> None:
        report = probe_url(self.url, self._env)
        if report is None:
            self._conditional_put = True
            return
        if not report.available:
            if report.reason == "Unreachable":
                raise UnavailableError(report.message)
            if report.reason == "StorageFull":
                raise CapacityError(report.message)
            raise ConfigError(f"{report.reason}: {report.message}")
        self._conditional_put = report.features.conditional_put
        if not self._conditional_put:
            logger.warning(
                "%s ignores conditional writes: two runs that start at the same moment with this prefix are "
                "not kept apart",
                self.url,
            )

    def _new_training(self) -> str:
        """Return an id for a training that begins to use the store: the one that its folder has, if any."""
        return self._kept() or secrets.token_hex(8)

    def _training(self) -> str | None:
        """Return the training to which the folder's checkpoints in the store belong, or None if none do.

        If the record is missing or damaged, the identity of the folder takes its place: it is the same,
        unless the folder never used this store.
        """
        return self._recorded() or self._kept()

    def _recorded(self) -> str | None:
        """Return the training that the folder has recorded for its store, or None if none can be read."""
        try:
            return read_document(self._directory / _TRAINING).decode()
        except NotFoundError:
            return None
        except HoldfastError as error:
            logger.warning("%s; the identity of the folder is used instead", error)
            return None

    def _kept(self) -> str | None:
        with suppress(HoldfastError):  # a damaged file must not keep the training from its store
            return kept_run_id(self._directory.parent, read_only=True)
        return None

    def _record(self, name: str, data: bytes) -> None:
        """Write a document with its digest atomically. It is durable before any later commit."""
        replace_document(self._directory / name, data, durable=True)
