"""Which checkpoints are set apart, which can be read, and which are left without certain pods. Pure.

Quarantined: gangs that restored the checkpoint failed, or a drill found damage in the object store.
1. evidence.py decides which restarts count against a checkpoint, and when it is quarantined or released.
   What a drill found is condition Verified of the Checkpoint (with_damaged).
2. The choice of a restore point, retention and the sidecars read status.quarantined. Nothing else decides.
3. A step in failurePolicy.releasedSteps is not quarantined. Quarantine ends with the job.

Missing: the status names the checkpoint, and it cannot be read anywhere. A bucket that was emptied, a
lifecycle rule or a wrong prefix takes checkpoints away. That is no evidence against them, and a restart does
not bring them back.
1. The restore point is missing if every place has replied to a sidecar that it has no good copy. A place that
   does not answer may have one (CoordinatorState.restore_may_succeed).
2. The coordinator compares the newest persisted checkpoint with the store (newest_is_stored), and reports a
   failure with reason CheckpointMissing while the store does not have it. From then on nothing in the store
   is sure until a sidecar has found the step there (store_is_doubted).
3. status.missing lists the restore points that were missing, until the gang trains. They are restored only if
   no other checkpoint is complete. The newest of them is then waited for: sidecars look for it until they
   find it, so no new round is necessary.

Readable: a sidecar that does not answer may still hold its shards: silence is not evidence that its data is
gone. Each rule that replaces a pod checks here first, because deleting the last holder of a committed step
destroys it.

1. An inventory counts if it was taken for the current round, which is after the seal.
2. A local commit puts its manifest on every node tier of its round. So the inventory of one survivor lists
   every committed step, and a survivor without a manifest shows that no step was committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta

from holdfast_core import store_retention
from holdfast_core.api import (
    MAX_MISSING,
    MAX_QUARANTINED,
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    JobCondition,
    LineageEntry,
    PersistedStep,
    TrainingJobStatus,
    changed,
    on_lineage,
)
from holdfast_core.ids import CheckpointId, Digest, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import RestorePoint
from holdfast_operator.decide.facts.world import (
    MemberState,
    World,
    back_to,
    restore_point_is_missing,
)
from holdfast_operator.model.job import ManifestView, PodView, Seen
from holdfast_operator.model.reasons import Reason

# --------------------------------------------------------------------------- quarantined and missing


def quarantined(world: World) -> frozenset[CheckpointId]:
    """Return the checkpoints that the gang does not restore."""
    return store_retention.quarantined(world.job)


def with_released(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status without the checkpoints that a user has released."""
    released = world.spec.failure_policy.released_steps
    kept = tuple(q for q in status.quarantined if q.step not in released)
    return status if kept == status.quarantined else changed(status, quarantined=kept)


def damaged(world: World) -> dict[CheckpointId, Checkpoint]:
    """Return the job's checkpoints in which a drill found damage, but for those that a user has released."""
    released = world.spec.failure_policy.released_steps
    return {
        id_: c
        for c in world.own_checkpoints
        if c.damaged and (id_ := c.id) is not None and id_.step not in released
    }


def with_damaged(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status in which what a drill found damaged is quarantined, and what it found intact is not.

    A checkpoint that was quarantined for another reason stays so whatever a drill finds.
    """
    kind = CheckpointCondition.QUARANTINED
    repaired = {
        c.id
        for c in world.own_checkpoints
        if c.status.is_true(CheckpointCondition.VERIFIED)
        if (mark := c.status.condition(kind)) is not None and mark.reason == Reason.DAMAGED
    }
    kept = tuple(q for q in status.quarantined if q not in repaired)
    found = sorted(damaged(world).keys() - set(kept))
    room = MAX_QUARANTINED - len(kept)
    quarantine = (*kept, *found[-room:]) if room > 0 else kept
    return status if quarantine == status.quarantined else changed(status, quarantined=quarantine)


def newest_is_missing(world: World) -> str | None:
    """Return the coordinator's report that the store lacks the newest persisted checkpoint, or None."""
    if world.state.newest_is_stored is not False:
        return None
    found = (f.message for f in world.state.failures if f.reason == Reason.CHECKPOINT_MISSING)
    return next(found, "the object store does not have the newest persisted checkpoint")


def missing_ids(world: World) -> frozenset[CheckpointId]:
    """Return the checkpoints that are restored only if no other one is complete."""
    return frozenset(world.status.missing)


def store_is_doubted(world: World) -> bool:
    """Return whether the store lacked a checkpoint of the job, and no sidecar has found the newest one since.

    A sidecar that does not answer has found nothing: after a restart of the operator, or the loss of the
    coordinator's node, condition CheckpointMissing is all that is known.
    """
    if newest_is_missing(world) is not None:
        return True
    if not world.status.is_true(JobCondition.CHECKPOINT_MISSING) or world.state.newest_is_stored:
        return False
    last = world.last_persisted
    return last is None or last.id not in stored_list(answered_of(world))


def stored(world: World) -> PersistedStep | None:
    """Return the newest persisted checkpoint, or None if there is none or the store may lack it.

    What follows from it may delete pods, which then have the only copies.
    """
    last = world.last_persisted
    if last is None or last.id in missing_ids(world) or store_is_doubted(world):
        return None
    return None if last.id in quarantined(world) and last.id in damaged(world) else last


def with_missing_restore_point(status: TrainingJobStatus) -> TrainingJobStatus:
    """Return the status of the next round, in which the restore point of this one is listed as missing.

    No rank has trained from this restore point. So the next round may also restore a newer checkpoint.
    """
    point = None if status.restore_point is None else status.restore_point.id
    if point is None:
        return status
    known = status.missing
    if point not in known:
        known = (*known, point)
    newest = max(m.step for m in known)
    return changed(status, missing=known[-MAX_MISSING:], lineage=back_to(newest, status.lineage))


LOST_LINEAGE = (LineageEntry(round=RestartRound(0)),)
"""Lineage of a job whose status was lost, before its next restore point: every checkpoint is on it."""
NEW_JOB = timedelta(minutes=5)
"""Time between the creation and the first round of a job that is certainly new. It is longer than the
difference of the clocks of the operator and the API server."""
STORE_SECONDS = 30.0
"""Time for which a store must be known not to have a checkpoint before an older one is restored."""
Held = frozenset[tuple[CheckpointId, Rank, Digest]]
"""Shards that a worker holds, by checkpoint, rank and digest."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint from which a round may start."""

    id: CheckpointId
    manifest: Digest
    info: ManifestView | None
    """Its manifest. None: the checkpoint is persisted, and no member has its manifest."""
    persisted: bool


# --------------------------------------------------------------------------- answers of sidecars


def has_answered(member: MemberState, world: World) -> bool:
    """Return whether the member answers, and its inventory was taken after its seal.

    Such an inventory cannot change while the restore point is chosen.
    """
    sidecar = member.sidecar
    return (
        member.alive
        and member.reachable
        and sidecar is not None
        and sidecar.inventory is not None
        and sidecar.inventory.round >= world.round
    )


def is_survivor(member: MemberState, world: World) -> bool:
    """Return whether the member's pod is older than the round. A newer pod has an empty node tier."""
    return member.birth_round < world.round


def may_store_shards(member: MemberState, world: World) -> bool:
    """Return whether the member is a survivor that runs and has not answered, so it may hold any step.

    A pod without an address never started and holds nothing, nor does a pod in which no rank has run.
    """
    return (
        is_survivor(member, world)
        and member.alive
        and member.pod is not None
        and member.pod.ip is not None
        and not has_answered(member, world)
        and not _never_trained_in(member, member.pod, world)
    )


def _never_trained_in(member: MemberState, pod: PodView, world: World) -> bool:
    """Return whether no rank has run in the pod, because its round ended before it had a restore point.

    Ranks start only after the sidecar has started. The lineage alone is not sufficient evidence, because the
    status may be an older one that was restored from a backup of etcd.
    """
    chosen = max((e.round for e in world.status.lineage), default=-1)
    return (
        member.birth_round > chosen
        and not pod.sidecar_started
        and pod.sidecar_restarts == 0
        and (member.sidecar is None or member.sidecar.answered_at is None)
    )


def candidates(world: World, answered: list[MemberState]) -> list[Candidate]:
    """Return the checkpoints from which the round may start, newest step first, then newest round first.

    They are on the lineage, not quarantined, and persisted, or have the gang's number of ranks and are
    listed by `answered`. The store has all shards of a persisted one, whatever its number of ranks.
    """
    status, apart = world.status, quarantined(world)
    size = world.spec.procs_per_worker * len(world.members)
    found: dict[CheckpointId, Candidate] = {}
    for member in answered:
        for info in _manifests(member):
            id_ = CheckpointId(info.step, info.round)
            if info.world_size != size or info.round >= world.round or id_ in apart:
                continue
            if on_lineage(id_, status.lineage):
                found.setdefault(id_, Candidate(id_, info.manifest, info, persisted=False))
    for id_, manifest in (*_persisted(world), *stored_list(answered).items()):
        if on_lineage(id_, status.lineage) and id_ not in apart:
            known = found.get(id_)
            manifest_info = None if known is None else known.info
            found[id_] = Candidate(id_, manifest, manifest_info, persisted=True)
    return _of_one_history(found.values())


def _of_one_history(found: Iterable[Candidate]) -> list[Candidate]:
    """Return these checkpoints without those that a later round has trained again, newest step first.

    The lineage tells them apart as well, but for a job whose status was lost. A round saves only steps above
    its restore point, so that a step of an earlier round which is not below all of them is off its history.
    """
    kept: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.id.round, c.id.step), reverse=True):
        if not kept or candidate.id.step < kept[-1].id.step:
            kept.append(candidate)
    return kept


def stored_list(answered: list[MemberState]) -> dict[CheckpointId, Digest]:
    """Return the checkpoints that these members have found in the object store, each with its manifest."""
    lists = (m.inventory.stored or {} for m in answered if m.inventory is not None)
    return {checkpoint: digest for found in lists for digest, checkpoint in found.items()}


def is_in_store(world: World, checkpoint: CheckpointId) -> bool:
    """Return whether the status, a Checkpoint object or a member's list names this persisted checkpoint."""
    recorded = {id_ for id_, _ in _persisted(world)}
    return checkpoint in recorded or checkpoint in stored_list(answered_of(world))


def store_is_listed(answered: list[MemberState]) -> bool:
    """Return whether one of these members has listed the object store for this round."""
    return any(m.inventory is not None and m.inventory.stored is not None for m in answered)


def held(answered: list[MemberState]) -> Held:
    """Return the shards that the inventories of these members list."""
    lists = (m.inventory.shards for m in answered if m.inventory is not None)
    return frozenset((s.checkpoint, s.rank, s.blake3) for found in lists for s in found)


def is_complete(candidate: Candidate, known: Held) -> bool:
    """Return whether the checkpoint is persisted, or every rank's shard has a holder."""
    return candidate.persisted or _is_held(candidate, known)


def is_sure(world: World, candidate: Candidate, known: Held) -> bool:
    """Return whether the checkpoint is complete even if what the store has lacked once is not in it now."""
    if candidate.id in missing_ids(world):
        return False
    in_store = candidate.persisted and not store_is_doubted(world)
    return in_store or _is_held(candidate, known)


def _is_held(candidate: Candidate, known: Held) -> bool:
    info = candidate.info
    if info is None:
        return False
    named = {s.rank for s in info.shards}
    return len(named) == info.world_size and all(
        (candidate.id, s.rank, s.blake3) in known for s in info.shards
    )


def best(world: World, found: list[Candidate], known: Held) -> Candidate | None:
    """Return the newest complete checkpoint. One that was missing is returned only if there is no other."""
    complete = [c for c in found if is_complete(c, known)]
    there = (c for c in complete if c.id not in missing_ids(world))
    return next(there, next(iter(complete), None))


def leaves_missing_restore_point(world: World) -> bool:
    """Return whether the next round is to start from another checkpoint than the one that is missing.

    A store is given time, because that costs steps: some miss an object for a moment after it was written.
    """
    point = world.status.restore_point
    if not restore_point_is_missing(world) or point is None or point.job_uid is not None:
        return False
    is_stored = point.id in {id_ for id_, _ in _persisted(world)}
    if is_stored and world.seconds_seen(Seen.MISSING) < STORE_SECONDS:
        return False
    status = with_missing_restore_point(world.status)
    later = world.with_status(status)
    answered = answered_of(later)
    found = best(later, candidates(later, answered), held(answered))
    return found is not None and found.id != point.id


def listed(member: MemberState) -> set[CheckpointId]:
    """Return the checkpoints of which the member has listed a manifest."""
    return {CheckpointId(i.step, i.round) for i in _manifests(member)}


def _manifests(member: MemberState) -> tuple[ManifestView, ...]:
    return () if member.inventory is None else member.inventory.manifests


def _persisted(world: World) -> list[tuple[CheckpointId, Digest]]:
    """Return the commit in the status and those that Checkpoint objects of this job record."""
    found: list[tuple[CheckpointId, Digest]] = []
    for checkpoint in world.observed.checkpoints:
        id_, manifest = checkpoint.id, checkpoint.status.manifest
        if id_ is not None and manifest is not None and _restorable(world, checkpoint):
            found.append((id_, manifest))
    last = world.last_persisted
    if last is not None:
        found.append((last.id, last.manifest))
    return found


def _restorable(world: World, checkpoint: Checkpoint) -> bool:
    job, status = world.job, checkpoint.status
    return (
        checkpoint.job == job.name
        and status.job_uid == job.uid
        and checkpoint.persisted
        and status.phase is CheckpointPhase.COMMITTED
        and not checkpoint.deleting
    )


# --------------------------------------------------------------------------- what was committed


def recorded_commit(world: World) -> Step | None:
    """Return the newest committed step in the status that may be restored, or None.

    The status names the step without its round. Until the choice of an older restore point takes a
    quarantined checkpoint off the lineage, its step is the newest one in the status.
    """
    status, persisted = world.status, world.last_persisted
    apart = {c for c in quarantined(world) if on_lineage(c, status.lineage)}
    steps = [] if persisted is None or persisted.id in apart else [persisted.step]
    committed = status.last_committed_step
    if committed is not None and committed not in {c.step for c in apart}:
        steps.append(committed)
    return max(steps, default=None)


def known_commit(world: World, answered: list[MemberState]) -> Step | None:
    """Return the newest committed step by the status and by the survivors in `answered`, or None.

    The status lags behind the gang while the operator cannot reach it. A manifest that only some of these
    survivors have belongs to a commit that was interrupted, and does not count.
    """
    survivors = [m for m in answered if is_survivor(m, world)]
    shared: set[CheckpointId] = set()
    for index, member in enumerate(survivors):
        own = listed(member)
        shared = own if index == 0 else shared & own
    steps = [
        i.step
        for i in shared - quarantined(world)
        if i.round < world.round and on_lineage(i, world.status.lineage)
    ]
    recorded = recorded_commit(world)
    return max(steps if recorded is None else [*steps, recorded], default=None)


def never_trained(world: World) -> bool:
    """Return whether no restore point was ever chosen, so that no gang of the job has ever trained."""
    status = world.status
    return not status.lineage and status.restore_point is None and recorded_commit(world) is None


def status_may_be_lost(world: World) -> bool:
    """Return whether the gang may have trained before this status, which knows of no restore point.

    The objects of a backup of etcd are such jobs, and those of a tool that restores objects without their
    status. The first round shows it if pods or Checkpoint objects of the job are left (writes.first_round).
    Otherwise the job is older than its status, and so is a new one that had to wait before its first round.
    """
    status = world.status
    if status.trained_seconds is not None or status.restore_point is not None:
        return False
    if not never_trained(world):
        return status.lineage == LOST_LINEAGE
    started = status.start_time or world.now.utc
    return abs(started - world.job.created_at) > NEW_JOB


def nothing_committed(world: World, answered: list[MemberState]) -> bool:
    """Return whether the job is known to have no committed step.

    That is so if it has never trained, or if the status has no commit and a survivor of the first round
    answers and has no manifest (rule 2).
    """
    if never_trained(world):
        return True
    lineage = world.status.lineage
    first = lineage[0].round if lineage else world.round
    return recorded_commit(world) is None and any(
        m.birth_round <= first and is_survivor(m, world) and not _manifests(m) for m in answered
    )


# --------------------------------------------------------------------------- pods that may be replaced


def silent_can_be_lost(world: World, without: Collection[Worker]) -> bool:
    """Return whether the newest committed step is readable without these members, which do not answer.

    Their pods run on healthy nodes. What they hold is readable again when the network recovers, so no part of
    it may be given up.
    """
    if _store_nothing(world, without):
        return True
    answered = answered_of(world, without)
    if world.status.restore_point is not None:
        return _untouched_since_chosen(world, answered)
    survivors = [m for m in answered if is_survivor(m, world)]
    if not survivors:
        return never_trained(world)
    if nothing_committed(world, answered):
        return True
    owed = known_commit(world, answered)
    best = _best(world, answered)
    return best is not None and (owed is None or best.step >= owed)


def lost_can_be_given_up(world: World, without: Collection[Worker]) -> bool:
    """Return whether a committed step is left without these members, whose nodes are lost.

    A step that only lost nodes hold is given up if an older committed step is left. If none is left, the pods
    must stay: several nodes also look lost when the control plane is cut off from them, and then their data
    is readable again when the connection returns.
    """
    persisted = stored(world)
    can_restore = persisted is not None and persisted.id not in quarantined(world)
    if can_restore or _store_nothing(world, without):
        return True
    answered = answered_of(world, without)
    if world.status.restore_point is None:
        return nothing_committed(world, answered) or _best(world, answered) is not None
    return _survives_by_copies(world, without) or _untouched_since_chosen(world, answered)


def answering_can_be_replaced(world: World, workers: Collection[Worker]) -> bool:
    """Return whether the newest committed step is readable without these members, whose sidecars answer.

    Unlike in `silent_can_be_lost`, this round may have commits: each of them must be replicated or persisted.
    """
    newest, copied = world.local_step, world.copied_step
    if world.status.restore_point is None:
        return silent_can_be_lost(world, workers)
    if _untouched_since_chosen(world, answered_of(world, workers)):
        return True
    if newest is None:
        return False
    persisted = stored(world)
    if persisted is not None and persisted.step >= newest:
        return True
    return copied is not None and copied >= newest and _survives_by_copies(world, workers)


def has_older(world: World, failed_from: CheckpointId) -> bool:
    """Return whether another checkpoint can be restored if this one, the restore point, is not."""
    return _best(world, answered_of(world), but=failed_from) is not None


def older_is_kept(
    world: World, workers: Collection[Worker], failed_from: CheckpointId | None
) -> bool:
    """Return whether the checkpoint below `failed_from` is as readable without these members as with them.

    The gang restores it after it has failed from this one too often. None: no checkpoint failed.
    """
    if failed_from is None:
        return True
    present = _best(world, answered_of(world), but=failed_from)
    return present is None or present == _best(world, answered_of(world, workers), but=failed_from)


def lost_with_all_pods(world: World) -> str | None:
    """Describe the committed work that would be lost with all pods of the job. None: none would be lost."""
    present = holding(world)
    if never_trained(world) or not present:
        return None
    answered = [m for m in present if has_answered(m, world)]
    newest = known_commit(world, answered)
    if world.status.restore_point is None:
        known = bool(answered)
    else:
        known = world.coordinator is not None and any(
            m.worker == world.status.coordinator for m in answered
        )
        newest = max((s for s in (newest, world.local_step) if s is not None), default=None)
    if not known:
        return "the sidecars that have a record of the newest committed step do not answer"
    persisted = stored(world)
    if newest is None or (persisted is not None and persisted.step >= newest):
        return None
    return on_nodes_only(newest, persisted)


def on_nodes_only(newest: Step, persisted: PersistedStep | None) -> str:
    there = "none is" if persisted is None else f"step {persisted.step} is"
    return f"step {newest} is committed on the nodes only ({there} in an object store)"


def holding(world: World) -> list[MemberState]:
    """Return the members whose pods may have shards of a committed step: they have run, and are not ending.

    Until the restore point is chosen, the pods of this round have none.
    """
    unchosen = world.status.restore_point is None
    return [
        m
        for m in world.members
        if m.pod is not None and m.pod.alive and m.pod.ip is not None
        if not unchosen or is_survivor(m, world)
    ]


def answered_of(world: World, without: Collection[Worker] = ()) -> list[MemberState]:
    """Return the members whose sidecars have answered in this round, but for these workers."""
    return [m for m in world.members if m.worker not in without and has_answered(m, world)]


def _best(
    world: World, answered: list[MemberState], but: CheckpointId | None = None
) -> CheckpointId | None:
    """Return the newest candidate of these members that is surely complete, other than `but`."""
    known, found = held(answered), candidates(world, answered)
    return next((c.id for c in found if c.id != but and is_sure(world, c, known)), None)


def _store_nothing(world: World, without: Collection[Worker]) -> bool:
    """Return whether the pods of these members have never saved a checkpoint.

    That is so if the job has never trained, for pods that never had an address, and, until the restore point
    is chosen, for pods that were created in this round.
    """
    if never_trained(world):
        return True
    unchosen = world.status.restore_point is None
    return all(
        m.pod is None or m.pod.ip is None or (unchosen and not is_survivor(m, world))
        for m in world.members
        if m.worker in without
    )


def _survives_by_copies(world: World, without: Collection[Worker]) -> bool:
    """Return whether a step of this round is replicated, and each shard keeps a copy without these members.

    Members that do not answer count as missing as well. A replicated step of an older round does not count,
    because it may have lost a copy since.
    """
    if not _of_round(world.state.last_replicated, world):
        return False
    away = {m.worker for m in world.members if not (m.alive and m.reachable)} | set(without)
    return len(away) <= world.copies


def _untouched_since_chosen(world: World, answered: list[MemberState]) -> bool:
    """Return whether this round has no commit yet, and its restore point is readable.

    The members in `answered` or the object store must hold the restore point. The coordinator must be among
    `answered`. Before a commit of this round no part of the restore point is pruned.
    """
    state, coordinator = world.coordinator, world.coordinator_member()
    point = world.status.restore_point
    if state is None or coordinator is None or point is None:
        return False
    if coordinator.worker not in {m.worker for m in answered}:
        return False
    if any(_of_round(p, world) for p in (state.last_local, state.last_replicated)):
        return False
    if any(i.round == world.round for m in answered for i in _manifests(m)):
        return False  # a coordinator that was replaced within the round may not report it yet
    if point.step is None or point.job_uid is not None:
        return True
    known = held(answered)
    return any(
        (c.id.step, c.id.round) == (point.step, point.round) and is_complete(c, known)
        for c in candidates(world, answered)
    )


def _of_round(point: RestorePoint | None, world: World) -> bool:
    return point is not None and point.round == world.round
