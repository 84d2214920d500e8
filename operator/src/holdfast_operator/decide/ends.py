"""How a job ends, is suspended, or saves and stops, and what is left of it. Pure.

Pods of a failed job stay while they have the only copies of its newest committed step:
1. The write that ends the job also decides whether its pods stay (`writes.fail_job`), in condition PodsKept.
2. They stay until the step is in the object store, or until none of them is left. After a person has deleted
   the job, they go with it.
3. Pods whose deletion has begun are not kept: the answers of a gang that ends are no evidence.
4. The coordinator persists the step on request. If a part of the gang is missing, it cannot. The condition
   then says why, and what a person can do.

Deleted Checkpoint objects whose data cannot be deleted are released. Otherwise their finalizer would block
the deletion of their namespace. The sidecars of a gang delete data in the object store, and a pod with the
store's keys does it for a job that is over, suspended or gone (deletions.py). An object waits for
RELEASE_SECONDS at the longest. An Event reports what stays in the store, and where.

A rule that does not apply returns None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta

from holdfast_core.api import Checkpoint, JobCondition, TrainingJobStatus, changed, on_lineage
from holdfast_core.contract import NODE_DIR, SIDECAR_CONTAINER
from holdfast_core.ids import Step
from holdfast_core.messages.schema import GangRequest
from holdfast_core.names import first_of
from holdfast_operator.decide.checkpoints import everything_recorded, pending_commit
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.evidence import Failure
from holdfast_operator.decide.facts.sizes import may_resize
from holdfast_operator.decide.facts.world import (
    MemberState,
    Note,
    World,
    all_ended,
    asked_for,
    held_uploads,
    make_room,
    quota_text,
    stop_requested,
    trains,
)
from holdfast_operator.model.actions import Action, CallPath, Delete, warning
from holdfast_operator.model.job import PodPhase, PodView, Seen
from holdfast_operator.model.reasons import Reason


def why_kept(world: World) -> Note | None:
    """Return why the pods of a job that has failed, or fails now, must stay. None: they may be deleted."""
    holding = readable.holding(world)
    if readable.never_trained(world) or not holding:
        return None
    answered = [m for m in holding if readable.has_answered(m, world)]
    silent = _silent(world, answered)
    if silent:
        text = (
            f"the sidecar of {_named(silent)} has a record of the newest committed step and does not "
            "answer. The pods stay until it answers, or until a person deletes this job"
        )
        return Note(Reason.WAITING_FOR_HOLDERS, text)
    newest, persisted = _newest(world, answered), readable.stored(world)
    if newest is None or (persisted is not None and persisted.step >= newest):
        return None
    last, answers = world.last_persisted, world.coordinator is not None
    if last is not None and last.step >= newest and answers and _coordinates(world):
        text = (
            f"the object store does not have step {newest}, which it has had. The pods stay with its shards "
            "until the store has it again, as condition CheckpointMissing says, or until a person deletes "
            "this job"
        )
        return Note(Reason.CHECKPOINT_MISSING, text)
    lost, obstacle = readable.on_nodes_only(newest, persisted), _obstacle(world)
    if obstacle is not None:
        text = (
            f"{lost}, and it is not uploaded any more: {obstacle}. Its shards are in {_named(holding)}. To "
            f"keep them, copy {NODE_DIR} of container {SIDECAR_CONTAINER} out of these pods. After that, or "
            "to give the step up, delete the job"
        )
        return Note(Reason.CANNOT_PERSIST, text)
    away = [m for m in world.members if m.node_lost]
    waits = f" It waits for {_named(away)}, whose node is lost." if away else ""
    if world.reached_quotas:
        waits += f" It waits for a quota: {quota_text(world)}. {make_room(world)}."
    text = (
        f"{lost}. The operator requests its upload.{waits} The pods stay until it is uploaded, or until a "
        "person deletes this job"
    )
    return Note(Reason.NOT_PERSISTED, text)


def why_kept_after_the_end(world: World) -> Note | None:
    """Return why the pods of a job that is over stay, or None if they do not."""
    status = world.status
    if not status.is_true(JobCondition.FAILED):
        return None
    untouched = world.is_untouched
    return why_kept(world) if untouched or status.is_true(JobCondition.PODS_KEPT) else None


def is_upload_requested(kept: Note | None) -> bool:
    """Return whether the coordinator is requested to persist the step."""
    return kept is not None and kept.reason != Reason.CANNOT_PERSIST


def with_pods_kept(status: TrainingJobStatus, world: World, kept: Note | None) -> TrainingJobStatus:
    """Return the status with condition PodsKept, if the pods stay or have stayed."""
    kind = JobCondition.PODS_KEPT
    if kept is not None:
        return world.with_condition(status, kind, True, *kept)
    if not status.is_true(kind):
        return status
    note = Note(Reason.PODS_GONE, "no pod of the job is left that could have a committed step")
    if readable.holding(world):
        text = "no committed step would be lost with the pods any more, so they are deleted"
        note = Note(Reason.LAST_STEP_PERSISTED, text)
    return world.with_condition(status, kind, False, *note)


def _coordinates(world: World) -> bool:
    member = world.coordinator_member()
    return world.status.restore_point is not None and member is not None and member.serves


def _silent(world: World, answered: list[MemberState]) -> list[MemberState]:
    """Return the members whose answer is needed to know the newest committed step, and that may still answer.

    It is the coordinator, or any survivor while the round has no restore point.
    """
    if world.status.restore_point is None:
        return [] if answered else readable.holding(world)
    member = world.coordinator_member()
    if member is None or member.pod is None or not member.pod.alive or member.pod.ip is None:
        return []
    known = member in answered and world.coordinator is not None
    return [] if known else [member]


def _newest(world: World, answered: list[MemberState]) -> Step | None:
    """Return the newest committed step, also if the coordinator is gone.

    Then the status, its last answer and the manifests of this round on the other members show it.
    """
    apart_ids = readable.quarantined(world)
    steps = [
        id_.step
        for m in answered
        for id_ in readable.listed(m)
        if id_.round == world.round
        and id_ not in apart_ids
        and on_lineage(id_, world.status.lineage)
    ]
    found = (readable.known_commit(world, answered), world.local_step, *steps)
    return max((s for s in found if s is not None), default=None)


def _obstacle(world: World) -> str | None:
    """Return why the newest committed step cannot be uploaded any more, or None if it can.

    Each member uploads its own shards, and a sidecar that has no ROUND of this round uploads nothing.
    """
    if world.spec.store is None:
        return "the job has no object store"
    if world.status.restore_point is None:
        return (
            f"round {world.round} has no restore point yet, so that no sidecar coordinates uploads"
        )
    gone = [m for m in world.members if m.pod is None or m.pod.ended or m.pod.ip is None]
    if not gone:
        return None
    names = ", ".join(world.source.identity(m.worker, m.birth_round) for m in gone[:4])
    return f"each pod uploads its own shards, and {len(gone)} of them are not there ({names})"


def _named(members: list[MemberState]) -> str:
    pods = [m.pod for m in members if m.pod is not None]
    return first_of([f"pod {p.name} on node {p.node}" for p in pods], 4)


# --------------------------------------------------------------------------- deleted Checkpoint objects


RELEASE_SECONDS = 600.0
"""Longest wait for the delete in the store. A store that is unavailable for longer must not prevent the
deletion of a namespace."""
RELEASES_PER_PASS = 32
"""Largest number of Checkpoints of one kind that a pass releases. Each release causes another pass."""


def hanging(checkpoints: Iterable[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return the Checkpoints that a user has deleted and that our finalizer keeps."""
    return tuple(c for c in checkpoints if c.deleting and c.has_finalizer)


def has_data(checkpoint: Checkpoint) -> bool:
    """Return whether the object store has data that must be deleted with the object."""
    status = checkpoint.status
    known = checkpoint.id is not None and status.job_uid is not None and status.store is not None
    return checkpoint.deletes_data and checkpoint.persisted and known


def release_all(world: World) -> list[Action]:
    """Return actions that release the deleted Checkpoints under the job's name that have no data to delete.

    A pod deletes the data of the others, because the job has no gang that will do it.
    """
    return _released(tuple(c for c in hanging(_of_name(world)) if not has_data(c)), _UNKNOWN)


def overdue(world: World) -> list[Action]:
    """Return actions that release deleted Checkpoints of a job that has a gang.

    They are those of this job that have waited for RELEASE_SECONDS, and those of a former job of its name
    that have no data to delete.
    """
    own = {c.uid for c in world.own_checkpoints}
    known = hanging(_of_name(world))
    late = tuple(
        c
        for c in known
        if c.uid in own and world.seconds_seen(Seen.DELETING, c.uid) >= RELEASE_SECONDS
    )
    former = tuple(c for c in known if c.uid not in own and not has_data(c))
    waited = f"no sidecar could delete it in the object store for {RELEASE_SECONDS:.0f} s"
    return [*_released(late, waited), *_released(former, _UNKNOWN)]


_UNKNOWN = "the object does not say which job saved it in which CheckpointStore"


def kept_data(checkpoint: Checkpoint, why: str) -> str | None:
    """Describe the data that stays in the object store. None: there is none, or it had to be kept."""
    if not checkpoint.deletes_data or not checkpoint.persisted:
        return None
    where = f"{checkpoint.status.job_namespace}/{checkpoint.status.job_uid}"
    return (
        f"Checkpoint {checkpoint.name} is deleted, but the data of step {checkpoint.spec.step} of round "
        f"{checkpoint.status.round} is not: {why}. The data remains in the object store under {where}/ "
        "below the prefix of the CheckpointStore; delete it there if nothing else needs it"
    )


def _of_name(world: World) -> list[Checkpoint]:
    """Return the Checkpoints under the job's name.

    Those of a living gang of the other kind are left out: its sidecars may still delete their data.
    """
    name, other = world.job.name, world.observed.same_name
    theirs = None if other is None else other.uid
    return [
        c
        for c in world.observed.checkpoints
        if c.job == name and (theirs is None or c.status.job_uid != theirs)
    ]


def _released(checkpoints: tuple[Checkpoint, ...], why: str) -> list[Action]:
    actions: list[Action] = []
    for checkpoint in checkpoints[:RELEASES_PER_PASS]:
        actions.append(Delete(Checkpoint.KIND, checkpoint.name, checkpoint.uid, why))
        text = kept_data(checkpoint, why)
        if text is not None:
            actions.append(warning(Reason.DATA_KEPT, text))
    return actions


# --------------------------------------------------------------------------- what is deleted after the end


EXIT_GRACE = timedelta(seconds=60)
"""Time after the end of a complete job for its launchers to exit. Pods that still run then are deleted."""


def after_the_end(world: World, *, kept: bool) -> list[Action]:
    """Return deletes of the pods that a job does not need after its end, and of the job after its TTL.

    Pods of members that have ended stay for their logs. Pods that still run are deleted immediately after a
    failure, and after EXIT_GRACE if the job is complete. Pods on lost nodes, and pods that are not members,
    are deleted immediately.

    Args:
        kept: Whether the pods of the members stay (ends.py), and with them the job.
    """
    status = world.status
    ended = status.completion_time or world.now.utc
    failed_ = status.is_true(JobCondition.FAILED)
    overdue = failed_ or world.now.elapsed_seconds(ended) >= EXIT_GRACE.total_seconds()
    members = {p.uid for p in world.pods}
    unwanted = [
        p
        for p in world.observed.pods
        if not world.is_ahead(p)
        and not (kept and p.uid in members)
        and (p.uid not in members or (overdue and not p.ended) or world.observed.node_lost(p))
    ]
    actions: list[Action] = [*world.deletes(unwanted, "the job is over")]
    ttl_seconds = world.spec.ttl_seconds_after_finished
    if not kept and ttl_seconds is not None and world.now.elapsed_seconds(ended) >= ttl_seconds:
        job, why = world.job, "ttlSecondsAfterFinished has passed"
        actions.append(Delete(job.KIND, job.name, job.uid, why))
    return actions


# --------------------------------------------------------------------------- the end


_UNTIL_THE_END = (
    JobCondition.RUNNING,
    JobCondition.RESTARTING,
    JobCondition.UNSCHEDULABLE,
    JobCondition.RESIZING,
    JobCondition.QUEUED,
    JobCondition.SPARES_READY,
    JobCondition.WORKERS_MISSING,
    JobCondition.CHECKPOINTS_LOST,
)
"""Conditions of a gang, which are false once the job is over or suspended."""


def _ended(
    status: TrainingJobStatus, world: World, end: JobCondition, note: Note
) -> TrainingJobStatus:
    """Return the status with this end of the gang. The conditions of its work are false from now on."""
    for kind in _UNTIL_THE_END:
        if status.condition(kind) is not None:
            status = world.with_condition(status, kind, False, *note)
    return world.with_condition(status, end, True, *note)


def failed(world: World, note: Note) -> TrainingJobStatus:
    """Return the status that ends the job as failed."""
    status = changed(world.status, completion_time=world.now.utc)
    return _ended(status, world, JobCondition.FAILED, note)


def deadline_passed(world: World) -> Note | None:
    """Return the reason for failure if activeDeadlineSeconds has passed, else None."""
    if seconds_to_deadline(world) > 0:
        return None
    seconds = world.spec.active_deadline_seconds
    return Note(Reason.DEADLINE_EXCEEDED, f"activeDeadlineSeconds {seconds} has passed")


def seconds_to_deadline(world: World) -> float:
    """Return the time until activeDeadlineSeconds have passed; infinite without a deadline or a start."""
    start = world.status.start_time
    seconds = world.spec.active_deadline_seconds
    if seconds is None or start is None:
        return math.inf
    return seconds - world.now.elapsed_seconds(start)


def completed(world: World) -> TrainingJobStatus | None:
    """Return the status that completes the job, or None if it is not complete.

    A job is complete when every rank returned 0 or every pod succeeded, and every commit in the store is
    recorded. Ranks that stop for a drain return 0 as well, so while the pod of a member is being deleted the
    returns of the ranks do not count. A gang that was asked to stop does not complete the job either
    (stopped_for_nothing).
    """
    status = world.status
    if stop_requested(status):
        return None
    finished = (
        world.state.finished
        and status.restore_point is not None
        and not world.state.dead
        and world.is_untouched
    )
    if not (finished or all_ended(world)) or not everything_recorded(world):
        return None
    note = Note(Reason.COMPLETED, "every rank returned 0")
    status = changed(status, completion_time=world.now.utc)
    return _ended(status, world, JobCondition.COMPLETE, note)


# --------------------------------------------------------------------------- suspension


def suspended(world: World) -> TrainingJobStatus:
    """Return the status of a suspended job."""
    store, last = world.spec.store, world.status.last_persisted
    kept = "no committed step would be lost with the pods"
    if store is not None and last is not None:
        kept = (
            f"step {last.step} is kept in the CheckpointStore {store}, and the job resumes from it"
        )
    note = Note(Reason.SUSPENDED, f"spec.suspend is true: {kept}")
    # As for a Job of batch/v1, activeDeadlineSeconds counts from zero again when the job resumes.
    # All pods are new after the suspension, so an elastic gang then tries to have all of its workers.
    status = changed(world.status, start_time=None, scheduling=None, elastic=None)
    return _ended(status, world, JobCondition.SUSPENDED, note)


def may_suspend_now(world: World) -> bool:
    """Return whether all pods can be deleted now without the loss of a committed step.

    A gang that trains is asked to save first if the job has an object store.
    """
    if world.status.restart_round is None:
        return True
    stored = world.spec.store is not None
    if stored and (trains(world) or pending_commit(world) is not None):
        return False
    return readable.lost_with_all_pods(world) is None


def must_withdraw(world: World) -> bool:
    """Return whether a suspension must be withdrawn, because it could now lose a committed step.

    That happens if the status says Suspended, no pod is deleted yet, and the gang has committed a step since:
    the operator was stopped in between, or the commit and the status write were concurrent.
    """
    untouched = world.is_untouched
    if not untouched or stopped_and_saved(world):
        return False
    return readable.lost_with_all_pods(world) is not None


def withdrawn(world: World) -> TrainingJobStatus:
    """Return the status that withdraws a suspension before a pod was deleted. The round continues."""
    note = suspend_note(world)
    if world.spec.store is not None:
        # The gang may have been asked to stop before it was suspended: this reason records it.
        note = note._replace(reason=Reason.STOPPING)
    status = changed(world.status, start_time=world.now.utc)
    return world.with_condition(status, JobCondition.SUSPENDED, False, *note)


def suspend_note(world: World) -> Note:
    """Return why a job whose spec.suspend is true is not suspended yet.

    The gang is asked to stop exactly if the reason is STOPPING.
    """
    lost = readable.lost_with_all_pods(world)
    if world.spec.store is None:
        return Note(
            Reason.NO_OBJECT_TIER,
            (
                "the job has no object store: with its pods, all of its checkpoints would be lost. So "
                "it is not suspended, and no pod is created for it while spec.suspend is true. Delete "
                "the job, or create it again with checkpoint.object"
            ),
        )
    if trains(world):
        held = held_uploads(world)
        if held is not None and held.reason == Reason.STORE_UNAVAILABLE:
            text = f"{held.message}. The gang trains until it can save its last step there"
            return held._replace(message=text)
        text = "the gang was requested to save and stop"
        if world.reached_quotas:
            text += f". Its last step waits for a quota: {quota_text(world)}. {make_room(world)}"
        return Note(Reason.STOPPING, text)
    if lost is None:
        return Note(Reason.NOT_PERSISTED, "the operator has to record the newest upload first")
    return Note(
        Reason.NOT_PERSISTED,
        (
            f"suspending now would lose work: {lost}. The gang recovers first, and then saves to the "
            "store and stops: condition Running says what it waits for. Delete its pods to give up "
            "the steps that only they have"
        ),
    )


def stopped_and_saved(world: World) -> bool:
    """Return whether the gang has stopped, and its newest committed step is in the object store."""
    return _stopped(world) and not _unsaved(world)


def stopped_for_nothing(world: World) -> tuple[Failure, ...]:
    """Return a failure if the gang stopped for a suspension or a resize and must start again in its pods.

    Either the newest step did not reach the store, or the stop is no longer wanted.
    """
    if not stop_requested(world.status) or not _stopped(world):
        return ()
    if _unsaved(world):
        text = "the gang stopped, but the object store lacks the newest step"
        return (Failure(Reason.NOT_PERSISTED, text, disruption=True),)
    if not world.spec.suspend and not may_resize(world):
        text = "the gang was asked to stop, and this is no longer wanted"
        if asked_for(world.status, JobCondition.SUSPENDED):
            text = "the gang stopped for a suspension, and spec.suspend is false again"
        return (Failure(Reason.RESUMED, text, disruption=True),)
    return ()


def _stopped(world: World) -> bool:
    """Return whether every rank returned 0 or every pod succeeded, and every commit is recorded."""
    return (world.state.finished or all_ended(world)) and everything_recorded(world)


def _unsaved(world: World) -> bool:
    """Return whether the newest committed step is not in the store.

    For a gang that has stopped, this means that its uploads were abandoned.
    """
    persisted = readable.stored(world)
    known = [s for s in (world.local_step, readable.recorded_commit(world)) if s is not None]
    return bool(known) and (persisted is None or persisted.step < max(known))


def must_stop(world: World) -> bool:
    """Return whether the gang trains and has to save and stop, for a suspension or a resize."""
    wanted = (
        suspend_note(world).reason == Reason.STOPPING if world.spec.suspend else may_resize(world)
    )
    return wanted and trains(world)


def request_stop(world: World, *, job_is_over: bool = False) -> list[Action]:
    """Return the request to save and stop for the coordinator, if its pod has an address."""
    token = "end" if job_is_over else f"suspend-{world.job.generation}"
    path = CallPath.END if job_is_over else CallPath.STOP
    return [*world.call_coordinator(path, GangRequest(world.round, token))]


def delete_all_pods(world: World) -> list[Delete]:
    """Return deletes of all pods, except those of a round above the status."""
    pods = (p for p in world.observed.pods if not world.is_ahead(p))
    return world.deletes(pods, "the job is suspended")


# --------------------------------------------------------------------------- a gang that leaves


KUBELET_SECONDS = 10.0
"""Time after the grace period of a leaving pod in which its kubelet reports that it is gone."""
COORDINATOR_ANSWER_SECONDS = 10.0
"""Time for the coordinator to answer an operator process that finds a pod leaving when it starts. Without it,
the new process would seal a gang that is saving."""


def drains(world: World) -> bool:
    """Return whether the gang is saving and stopping because at least one of its pods leaves."""
    return any(
        m.pod is not None and m.pod.leaving and may_drain(world, m.pod)
        for m in world.members
        if not m.node_lost
    )


def may_drain(world: World, pod: PodView) -> bool:
    """Return whether a leaving pod still has time: its gang saves and stops, and its sidecar flushes.

    If a new round sealed the gang before, the steps since the last save would be lost. A rank that hangs does
    not cost the grace period: its launcher kills it earlier, and the gang then has a dead rank.
    """
    if world.status.restore_point is None or pod.phase is not PodPhase.RUNNING:
        return False
    waited = world.seconds_seen(Seen.LEAVING, pod.uid)
    state = world.coordinator
    if state is None:
        trains = world.status.is_true(JobCondition.RUNNING)
        return trains and waited < COORDINATOR_ANSWER_SECONDS
    if not state.running or state.finished or state.dead or _has_left(world, pod):
        return False
    return waited < pod.grace_seconds + KUBELET_SECONDS


def _has_left(world: World, pod: PodView) -> bool:
    """Return whether the trainer has ended and other pods have copies of the newest step.

    The round then begins before the kubelet reports that the pod is gone. If several pods leave, or another
    one is gone, the copies may have been there.
    """
    progress = world.state.progress
    return (
        pod.trainer_exit_code is not None
        and world.copies > 0
        and len(world.pods) == len(world.members)
        and sum(p.leaving for p in world.pods) == 1
        and progress is not None
        and world.copied_step == progress.last
    )
