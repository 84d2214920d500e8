"""The training that fake sidecars coordinate, enough to make promises and keep them.

The gang trains one step a tick. A save takes one tick for each phase, so that a fault can hit between any two
of them: shards, manifest at the coordinator, manifest at all members (local), copies (replicated), store
(persisted). Names stand for bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.operator.builders import manifest, manifest_digest
from tests.support.operator.fake_sidecar import FakeSidecar
from tests.support.operator.progress import progress_of

from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import (
    CHECKPOINT_MISSING,
    CoordinatorState,
    DeadRank,
    Failure,
    RestorePoint,
    Round,
)
from holdfast_operator.model.job import ManifestView


@dataclass(frozen=True, slots=True)
class Promise:
    """A commit at one level, and the pods that the gang had when it was made."""

    id: CheckpointId
    level: Level
    pods: frozenset[str]


@dataclass(slots=True)
class ToyStore:
    """Object store, which loses nothing."""

    checkpoints: dict[CheckpointId, ManifestView] = field(default_factory=dict)
    away: bool = False
    """Whether the store does not answer. The gang then gives up an upload immediately."""

    def lacks(self, point: RestorePoint | None) -> bool:
        """Return whether the store answers and does not have this checkpoint."""
        id_ = None if point is None else point.own_checkpoint
        return id_ is not None and not self.away and id_ not in self.checkpoints


@dataclass(slots=True)
class ToyRun:
    """The training of one round."""

    round: RestartRound
    step: Step
    interval: int
    persist_every: int | None
    total: int
    started: bool = False
    saving: tuple[CheckpointId, int] | None = None
    last: dict[Level, CheckpointId] = field(default_factory=dict)
    dead: tuple[DeadRank, ...] = ()
    waited_seconds: int = 0
    """Time for which the ranks have waited for their data."""
    cannot_restore: str = ""
    restore_may_succeed: bool = False
    """Whether a place that may have what `cannot_restore` lacks did not answer."""
    persisted: RestorePoint | None = None
    """The newest persisted checkpoint as ROUND has named it."""
    newest_is_stored: bool | None = None
    """Whether the store has the newest persisted checkpoint, as far as it answers."""
    version: int = 1
    restored: CheckpointId | None = None
    """The restore point of the round."""
    is_over: bool = False
    """Whether the operator has ended the job, and asked for the upload of its newest committed step."""
    stop_asked: bool = False
    stopped: bool = False
    finished: bool = False
    is_held: bool = False
    """Whether the newest step waits for a quota of the store."""
    released: bool = False
    """Whether the operator has recorded the end, so that launchers may exit."""

    def state(self, world_size: int, store: ToyStore) -> CoordinatorState:
        steps = [self.step] * world_size if self.started else []
        persisted = self._point(Level.PERSISTED) or self.persisted
        failures: tuple[Failure, ...] = ()
        if persisted is not None and not store.away:
            self.newest_is_stored = not store.lacks(persisted)
        if persisted is not None and self.newest_is_stored is False:
            text = f"step {persisted.step} is persisted by the status, and the store has no manifest of it"
            failures = (Failure(persisted.step, TierName.OBJECT, CHECKPOINT_MISSING, text),)
        if persisted is not None and store.away:
            failures = (Failure(None, TierName.OBJECT, "StoreUnavailable", "503 Slow Down"),)
        return CoordinatorState(
            version=self.version,
            round=self.round,
            last_local=self._point(Level.LOCAL),
            last_replicated=self._point(Level.REPLICATED),
            last_persisted=self._point(Level.PERSISTED),
            dead=self.dead,
            progress=progress_of(*steps),
            running=self.started and not self.dead,
            cannot_restore=self.cannot_restore,
            restore_may_succeed=self.restore_may_succeed,
            failures=failures,
            newest_is_stored=self.newest_is_stored,
            restored_from={} if self.is_over and self.started else None,
            finished=self.finished,
        )

    def _point(self, level: Level) -> RestorePoint | None:
        id_ = self.last.get(level)
        if id_ is None:
            return None
        return RestorePoint(id_.step, id_.round, manifest_digest(id_.step, id_.round))


@dataclass(slots=True)
class ToyGang:
    """Training of the newest round for which the sidecars have a ROUND."""

    store: ToyStore
    total: int
    run: ToyRun | None = None
    promises: list[Promise] = field(default_factory=list)
    manifests_made: set[CheckpointId] = field(default_factory=set)
    """Every checkpoint whose manifest was written anywhere."""
    poisoned: set[CheckpointId] = field(default_factory=set)
    """Checkpoints whose content makes the script fail after the restore."""
    cannot_reshard_to: set[int] = field(default_factory=set)
    """Numbers of workers on which the ranks refuse a checkpoint of another number."""
    restored: dict[RestartRound, CheckpointId | None] = field(default_factory=dict)
    """The checkpoint from which each round's training started."""
    data_is_away: bool = False
    """Whether ranks fail before their first step, because something else than the checkpoint is away."""
    seconds_to_failure: int = 0
    """Time for which ranks wait for it before they fail."""
    peers_hang: bool = False
    """Whether ranks wait for a lost peer without an error, because a machine without power closes no
    connection."""

    def tick(self, sidecars: dict[str, FakeSidecar]) -> None:
        """Advance training by one second. `sidecars` holds the sidecars of running pods by pod name."""
        newest = max((s.round for s in sidecars.values()), default=None)
        message = next(
            (
                s.message
                for s in sidecars.values()
                if s.message is not None and s.message.round == newest and s.round == newest
            ),
            None,
        )
        if message is None:
            return
        gang = [sidecars.get(m.pod) for m in message.members]
        present = [s for s in gang if s is not None and s.round == message.round]
        if len(present) < message.workers:
            self._rank_loss(message, gang)
            return
        if any(s.message is None or s.message.round != message.round for s in present):
            return
        if any(not m.address for s in present if s.message for m in s.message.members):
            return
        if self.run is None or self.run.round != message.round:
            self._start(message)
        self._advance(message, present, sidecars)

    def _rank_loss(self, message: Round, gang: list[FakeSidecar | None]) -> None:
        """Report a dead rank on a member that is left, because its collectives fail without the lost peer."""
        run = self.run
        if run is None or run.round != message.round or run.dead or run.finished:
            return
        if self.peers_hang:
            return
        left = next((i for i, s in enumerate(gang) if s is not None), None)
        if left is not None and run.started:
            run.dead = (DeadRank(Rank(left), Worker(left), -6, "connection closed by peer"),)
            run.version += 1

    def _start(self, message: Round) -> None:
        point = message.restore_point
        step = Step(0) if point.step is None else point.step
        self.run = ToyRun(
            round=message.round,
            step=step,
            interval=message.policy.interval_steps,
            persist_every=message.policy.object_every_steps,
            persisted=message.last_persisted,
            restored=point.own_checkpoint,
            total=self.total,
        )

    def _advance(
        self, message: Round, present: list[FakeSidecar], sidecars: dict[str, FakeSidecar]
    ) -> None:
        run = self.run
        if run is not None and run.is_over and (run.dead or run.saving is None):
            self._persist_last(run, message, present)
        if run is not None and run.is_held and not message.hold_uploads:
            self._persist_last(run, message, present)
            run.is_held = self.store.away
        if run is None or run.dead or run.finished:
            return
        if not run.started:
            self._restore(run, message, present)
            return
        run.version += 1
        if run.saving is not None:
            self._save_phase(run, message, present, sidecars)
        if run.saving is not None and (run.step >= run.total or run.stopped):
            return
        if run.step >= run.total or run.stopped:
            run.finished = not run.is_held  # the coordinator keeps the pods for the upload
            return
        run.step = Step(run.step + 1)
        due = run.step % run.interval == 0 or run.step >= run.total or run.stop_asked
        if due and run.saving is None:
            run.saving = (CheckpointId(run.step, run.round), 0)
            run.stopped = run.stop_asked

    def _persist_last(self, run: ToyRun, message: Round, present: list[FakeSidecar]) -> None:
        """Persist the newest committed step, or the restore point if the round has committed none."""
        id_ = run.last.get(Level.LOCAL) or run.restored
        if id_ is None or id_ in self.store.checkpoints or self.store.away:
            return
        if message.hold_uploads:
            run.is_held = True
            return
        if run.persist_every is None or not all(id_ in s.manifests for s in present):
            return
        self.store.checkpoints[id_] = manifest(id_.step, id_.round, message.workers)
        self._promise(run, id_, Level.PERSISTED, present)
        run.version += 1

    def _restore(self, run: ToyRun, message: Round, present: list[FakeSidecar]) -> None:
        """Restore the ranks. A restore that fails is tried again with the next tick, as sidecars do."""
        point = message.restore_point
        if run.cannot_restore:
            run.cannot_restore, run.restore_may_succeed = "", False
            run.version += 1
        if point.step is None or point.round is None:
            self.restored[run.round] = None
            self._begin_steps(run)
            return
        id_ = CheckpointId(point.step, point.round)
        info = next((s.manifests[id_] for s in present if id_ in s.manifests), None)
        stored = {} if self.store.away else self.store.checkpoints
        info = info or stored.get(id_)
        if info is None or info.manifest != point.manifest:
            run.cannot_restore = f"worker 0: manifest in the object store: no manifest of {id_}"
            run.restore_may_succeed = self.store.away
            run.version += 1
            return
        for worker, sidecar in enumerate(present):
            rank = Rank(worker)
            has = any((id_, rank) in s.shards for s in present) or id_ in stored
            if not has:
                run.cannot_restore = f"worker {worker}: no shard of {id_} for rank {rank}"
                run.restore_may_succeed = self.store.away
                run.version += 1
                return
            if info.world_size == len(present):  # a resharded restore keeps nothing on the nodes
                sidecar.keep(id_, rank)
                sidecar.manifests[id_] = info
        if info.world_size != len(present) and len(present) in self.cannot_reshard_to:
            error = "holdfast.errors.StateMismatchError: tensor w.0 is a plain tensor"
            run.dead = (DeadRank(Rank(0), Worker(0), 1, error),)
            run.version += 1
            return
        self.restored[run.round] = id_
        if id_ in self.poisoned:
            run.dead = (DeadRank(Rank(0), Worker(0), 1, "ValueError: NaN in the optimizer"),)
            run.version += 1
            return
        self._begin_steps(run)

    def _begin_steps(self, run: ToyRun) -> None:
        """Begin the first step, or let a rank fail if its data stays away."""
        run.waited_seconds += 1
        if not self.data_is_away:
            run.started = True
        elif run.waited_seconds < self.seconds_to_failure:
            return
        else:
            error = "FileNotFoundError: /data/train.bin"
            run.dead = (DeadRank(Rank(0), Worker(0), 1, error),)
        run.version += 1

    def _save_phase(
        self,
        run: ToyRun,
        message: Round,
        present: list[FakeSidecar],
        sidecars: dict[str, FakeSidecar],
    ) -> None:
        assert run.saving is not None
        id_, phase = run.saving
        info = manifest(id_.step, id_.round, message.workers)
        if phase == 0:
            for worker, sidecar in enumerate(present):
                sidecar.keep(id_, Rank(worker))
                sidecar.saved[id_] = message.workers
        elif phase == 1:
            present[message.coordinator].manifests[id_] = info
            self.manifests_made.add(id_)
        elif phase == 2:
            for sidecar in present:
                sidecar.manifests[id_] = info
            self._promise(run, id_, Level.LOCAL, present)
        elif phase == 3:
            for source, targets in message.copies.items():
                for target in targets:
                    present[target].keep(id_, Rank(source))
            self._promise(run, id_, Level.REPLICATED, present)
        elif phase == 4 and self._persists(run, id_) and message.hold_uploads:
            run.is_held = True
        elif phase == 4 and self._persists(run, id_):
            self.store.checkpoints[id_] = info
            self._promise(run, id_, Level.PERSISTED, present)
        done = phase == 4
        run.saving = None if done else (id_, phase + 1)

    def _persists(self, run: ToyRun, id_: CheckpointId) -> bool:
        if run.persist_every is None or self.store.away:
            return False
        if run.persisted is None and Level.PERSISTED not in run.last:
            return True  # the first committed step
        return id_.step % run.persist_every == 0 or id_.step >= run.total or run.stopped

    def _promise(
        self, run: ToyRun, id_: CheckpointId, level: Level, present: list[FakeSidecar]
    ) -> None:
        run.last[level] = id_
        self.promises.append(Promise(id_, level, frozenset(s.pod for s in present)))
