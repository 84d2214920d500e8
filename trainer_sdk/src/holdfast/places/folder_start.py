"""The round and the checkpoint that all ranks of a folder start from.

The ranks agree through the gang's store:
 1. Rank 0's persister chooses the round and the restore point. Rank 0 writes both to the store.
 2. The other ranks read both and start their persisters with them.
 3. All ranks fetch and verify their shards and write success or failure to the store. Rank 0 reads all
    results and writes the verdict.
 4. If any shard fails verification, all ranks reject that checkpoint and begin again at 1.

Before that, they check that all nodes see the same folder. A folder on a local disk looks right on every
node, but no checkpoint in it would ever be committed, and every node would restore from its own folder. All
ranks call `expect_shared`:
 1. Rank 0 creates a file with a random name and publishes the name in the gang's store.
 2. Every other rank publishes whether it sees that file.
 3. Rank 0 publishes the verdict, and removes the file.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from holdfast.base.kept_run import kept_run_id
from holdfast.base.notices import show_notice
from holdfast.base.settings import RankSettings
from holdfast.directory.choice import committed
from holdfast.gang.store import GangStore
from holdfast.places.place import NextFetch
from holdfast_core.errors import ConfigError, CorruptionError, HoldfastError
from holdfast_core.ids import CheckpointId, RestartRound, Step, age_of
from holdfast_core.messages.schema import RestorePoint
from holdfast_core.names import first_of

logger = logging.getLogger(__name__)

_GOOD = "good"
_BAD = "bad"


class FolderStart:
    """The start of this rank's run, or of a new round after a rollback or a checkpoint that is bad."""

    def __init__(
        self,
        root: Path,
        settings: RankSettings,
        *,
        keep_last: int,
        is_read_only: bool = False,
        raises_on_damage: bool = False,
    ) -> None:
        self.round: RestartRound | None = None
        self.restore: CheckpointId | None = None
        self.run_id = secrets.token_hex(8)
        """Identity of this start of the training. Rank 0 creates it, and all ranks use the same."""
        self._kept: tuple[str | None, str] | None = None
        """The identity that the folder keeps, or None and the reason."""
        self._root = root
        self._settings = settings
        self._keep_last = keep_last
        self._is_read_only = is_read_only
        self._raises_on_damage = raises_on_damage
        self._rejected: list[CheckpointId] = []
        self._newer: list[CheckpointId] = []
        """Checkpoints that the choice skips once, because the script asked for an older one."""
        self._asked: Step | None = None
        """The step that the script asked for. No other step is restored instead."""
        self._starts = itertools.count()
        self._start = 0
        self._lookups = itertools.count(1)
        self._fetches = itertools.count()
        """Numbers of the verdicts. A restore may be called twice in one start, and ranks must not read the
        verdict of the first one."""
        self._rounds: set[RestartRound] = set()
        """Rounds of this run. No other run has them, because each one is reserved in the folder."""
        self._found: frozenset[CheckpointId] = frozenset()
        """Checkpoints that the folder held before the newest choice of a restore point."""
        self._base: CheckpointId | None = None
        """The restore point of the state in memory. A round that no state was loaded from has another one."""
        self._seen: frozenset[CheckpointId] = frozenset()
        """Checkpoints that the folder held before that restore point was chosen."""

    @property
    def asked(self) -> Step | None:
        """The step that the script asked for, or None."""
        return self._asked

    @property
    def excluded(self) -> list[CheckpointId]:
        """Checkpoints that rank 0's persister must not choose."""
        return [*self._rejected, *self._newer]

    def agree(
        self,
        store: GangStore | None,
        join: Callable[[RestartRound], None],
        choose: Callable[[], tuple[RestartRound, RestorePoint, str | None]],
    ) -> CorruptionError | None:
        """Agree on round and restore point.

        Args:
            store: The gang's store, or None for a gang of one rank.
            join: Starts the persister of another rank than 0, in the round that was agreed.
            choose: Starts rank 0's persister, and returns what it has chosen, and why the ranks may not
                restore it.

        Returns:
            The error that every rank must raise. If it is about the step that the script asked for, of which
            rank 0 can read no copy, the ranks are in no round, and `round` is None.

        Raises:
            CorruptionError: The folder cannot be read, or rank 0 could not open it.
            ConfigError: The object store cannot be used.

        After an error, the next call asks for no step.
        """
        self._start = next(self._starts)
        key = f"start/{self._start}"
        self.round = None
        try:
            if self._settings.rank != 0 and store is not None:
                value = json.loads(store.wait(key))
                if "no_copy" in value:
                    self._asked = None
                    return CorruptionError(value["no_copy"])
                self._take(value)
                join(RestartRound(self.round or 0))
                return _as_error(value["refused"])
            # A checkpoint that is committed while the restore point is chosen must not count as seen.
            found = self._checkpoints()
            try:
                self.round, point, refused = choose()
            except (HoldfastError, OSError) as error:
                if self._asked is not None and isinstance(error, CorruptionError):
                    no_copy = self._no_copy(f" ({error})")
                    if store is not None:
                        store.publish(key, json.dumps({"no_copy": str(no_copy)}))
                    return no_copy
                if store is not None:
                    is_config = isinstance(error, ConfigError)
                    store.publish(key, json.dumps({"error": str(error), "config": is_config}))
                self._asked = None
                raise
            if self._kept is None:
                self._kept = self._read_kept()
            self.restore = None
            if point.step is not None and point.round is not None:
                self.restore = CheckpointId(point.step, point.round)
            self._found = found
            self._rounds.add(self.round)
            if self._start == 0:
                self._loaded()
            if store is not None:
                pair = None if self.restore is None else [self.restore.step, self.restore.round]
                value = {
                    "round": self.round,
                    "restore": pair,
                    "run": self.run_id,
                    "kept": self._kept,
                    "refused": refused,
                }
                store.publish(key, json.dumps(value))
            return _as_error(refused)
        finally:
            self._newer = []

    @property
    def kept_run_id(self) -> str:
        """The identity that the folder keeps for all its runs. Raises ConfigError if it has none."""
        found, reason = self._kept or (None, f"{self._root} was not opened")
        if found is None:
            raise ConfigError(f"Checkpointer.run_id: {reason}")
        return found

    def _read_kept(self) -> tuple[str | None, str]:
        """Read or create the identity. A failure must not end a training that does not use it."""
        try:
            found = kept_run_id(self._root, read_only=self._is_read_only)
        except HoldfastError as error:
            return None, str(error)
        return (
            found,
            f"{self._root} cannot be written by this process, and no run has trained in it",
        )

    def after_fetch(
        self, store: GangStore | None, step: Step | None, error: HoldfastError | None
    ) -> NextFetch:
        """Agree whether all ranks could read the restore point. If not, no later choice returns it.

        Raises CorruptionError where the script asked for this step.
        """
        if self.restore is None:
            if self._asked is not None:  # it was deleted after it had been looked up
                raise self._no_copy("")
            self._loaded()
            return NextFetch.NONE
        is_asked_for = self._asked is None or step == self._asked
        if self._all_succeeded(store, succeeded=error is None) and is_asked_for:
            self._loaded()
            return NextFetch.NONE
        because = "" if error is None else f" ({error})"
        if self._asked is not None:
            raise self._no_copy(because) from error
        if self._raises_on_damage:
            raise CorruptionError(
                f"checkpoint {self.restore} in {self._root} cannot be restored by all ranks{because}. To go "
                'on from an older one, use on_damage="older"'
            ) from error
        logger.warning(
            "checkpoint %s cannot be restored by all ranks%s: trying an older one",
            self.restore,
            because,
        )
        self._rejected.append(self.restore)
        return NextFetch.OLDER

    def _loaded(self) -> None:
        """Record that the state in memory is that of the restore point, or that there is none to load."""
        self._base, self._seen = self.restore, self._found

    def _no_copy(self, because: str) -> CorruptionError:
        """Return the error about the step that the script asked for, and no longer ask for it."""
        asked, self._asked = self._asked, None
        steps = {checkpoint.step for checkpoint in self._checkpoints()}
        if asked is not None and asked not in steps:
            return CorruptionError(
                f"Checkpointer.restore(step={asked}): the step was pruned or deleted after it had been found"
                f"{because}: {self._what_is_kept(steps)}"
            )
        return CorruptionError(
            f"Checkpointer.restore(step={asked}): no copy of it in {self._root} can be read by "
            f"all ranks{because}; call restore() without a step to restore another checkpoint"
        )

    def roll_back(self, store: GangStore | None, step: Step | None) -> None:
        """Let the next `agree` choose `step`, or the newest committed step.

        Later saves form a new history, which does not collide with later steps of the old one, and which a
        run that starts afterwards prefers. Raises ConfigError where the folder has no such step.
        """
        if step is not None:
            self._newer = self._newer_than(store, step)
        self._asked = step

    def expect_nothing_newer(self) -> None:
        """Raise ConfigError if another run has saved since this run chose its restore point.

        This run's own persister may commit what an ended run left complete. Such a checkpoint is the
        restore point, or older than it.
        """
        newer = [c for c in self._checkpoints() - self._seen if self._is_of_later_run(c)]
        if newer:
            raise ConfigError(
                f"{self._root}: another run has saved step {max(c.step for c in newer)} since "
                "this one opened the folder. Start again to continue from that step, or choose "
                "another folder"
            )

    def _take(self, value: dict[str, object]) -> None:
        """Take over what rank 0 has chosen."""
        if "error" in value:
            self._asked = None
            kind = ConfigError if value.get("config") else CorruptionError
            raise kind(f"rank 0 could not open {self._root}: {value['error']}")
        self.round = RestartRound(int(str(value["round"])))
        self.run_id = str(value["run"])
        kept = value["kept"]
        if isinstance(kept, list):
            self._kept = kept[0], kept[1]
        pair = value["restore"]
        self.restore = None
        if isinstance(pair, list):
            self.restore = CheckpointId(Step(pair[0]), RestartRound(pair[1]))

    def _all_succeeded(self, store: GangStore | None, *, succeeded: bool) -> bool:
        if store is None:
            return succeeded
        prefix = f"fetched/{next(self._fetches)}"
        store.publish(f"{prefix}/{self._settings.rank}", _GOOD if succeeded else _BAD)
        if self._settings.rank == 0:
            results = [store.wait(f"{prefix}/{r}") for r in range(self._settings.world_size)]
            store.publish(f"{prefix}/verdict", _BAD if _BAD in results else _GOOD)
        return store.wait(f"{prefix}/verdict") == _GOOD

    def _newer_than(self, store: GangStore | None, step: Step) -> list[CheckpointId]:
        """Return the checkpoints that the search for `step` must skip (on rank 0; empty on the others).

        Only rank 0 reads the folder, because ranks may see a shared folder at different moments. All
        ranks raise the same ConfigError where it holds no such step.
        """
        key = f"lookup/{next(self._lookups)}"
        if self._settings.rank != 0 and store is not None:
            error = json.loads(store.wait(key))
            if error is not None:
                raise ConfigError(error)
            return []
        known = committed(self._root)
        newer = list(itertools.takewhile(lambda one: one.step != step, known))
        error = None
        if len(newer) == len(known):
            error = (
                f"Checkpointer.restore(step={step}): there is no such checkpoint: "
                f"{self._what_is_kept({c.step for c in known})}"
            )
        if store is not None:
            store.publish(key, json.dumps(error))
        if error is not None:
            raise ConfigError(error)
        return newer

    def _what_is_kept(self, steps: Collection[Step]) -> str:
        """Describe the steps that the folder has, and the rule by which saves delete older ones."""
        listed = ", ".join(map(str, sorted(steps)))
        return (
            f"{self._root} has steps {listed or 'none'}. Saves keep the newest {self._keep_last} checkpoints "
            f"(keep_last={self._keep_last}): choose one of these steps, and use a larger keep_last where "
            "older ones are needed"
        )

    def _is_of_later_run(self, checkpoint: CheckpointId) -> bool:
        if checkpoint.round in self._rounds:
            return False
        return self._base is None or age_of(checkpoint) > age_of(self._base)

    def _checkpoints(self) -> frozenset[CheckpointId]:
        try:
            return frozenset(committed(self._root))
        except (HoldfastError, OSError):
            return frozenset()  # the folder was removed, so that it holds no newer checkpoint


def _as_error(refused: object) -> CorruptionError | None:
    return None if refused is None else CorruptionError(str(refused))


_FILE = "shared/file"
_SEEN = "shared/seen"
_VERDICT = "shared/verdict"


def expect_shared(root: Path, settings: RankSettings, store: GangStore | None) -> None:
    """Return if all ranks see the folder `root` of rank 0. The gang's ranks must all call it.

    A gang on one node is not checked, and neither is a folder that rank 0 cannot write.

    Raises ConfigError on every rank if a rank does not see it.
    """
    if store is None or settings.local_world_size >= settings.world_size:
        return
    if settings.rank == 0:
        _lead(root, settings, store)
    else:
        name = json.loads(store.wait(_FILE))
        seen = name is None or (root / name).exists()
        host = None if seen else socket.gethostname()
        store.publish(f"{_SEEN}/{settings.rank}", json.dumps(host))
    error = json.loads(store.wait(_VERDICT))
    if error is not None:
        raise ConfigError(error)


def _lead(root: Path, settings: RankSettings, store: GangStore) -> None:
    name = f".shared-{secrets.token_hex(8)}"
    try:
        os.close(os.open(root / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o640))
    except OSError as error:
        logger.warning("%s: cannot check that all nodes share this folder: %s", root, error)
        store.publish(_FILE, json.dumps(None))
        store.publish(_VERDICT, json.dumps(None))
        return
    try:
        store.publish(_FILE, json.dumps(name))
        hosts = {
            rank: json.loads(store.wait(f"{_SEEN}/{rank}"))
            for rank in range(1, settings.world_size)
        }
    finally:
        (root / name).unlink(missing_ok=True)
    blind = [f"rank {rank} on {host}" for rank, host in hosts.items() if host is not None]
    if not blind:
        show_notice(
            logger,
            "%s is the same folder on all %d nodes",
            root,
            -(-settings.world_size // settings.local_world_size),
        )
        store.publish(_VERDICT, json.dumps(None))
        return
    store.publish(
        _VERDICT,
        json.dumps(
            f"{root} is not the same folder on all nodes: rank 0 on {socket.gethostname()} created a file "
            f"in it, which {first_of(blind, 4)} cannot see. Put the folder on a file system that "
            "all nodes mount at this path, such as NFS or Lustre"
        ),
    )
