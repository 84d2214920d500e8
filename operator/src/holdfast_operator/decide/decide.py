"""Decide what one pass does about one job. Pure: no clock, no I/O, no randomness.

The rules apply in this order, and the first that fits decides the pass:
 1. The job is being deleted.
 2. A pod of the job cannot be parsed: the pass only reports it.
 3. The job is over.
 4. The job is suspended and stays so or resumes, or it can be suspended immediately.
 5. The job has no round yet: acceptance and the first round (CAS 1).
 6. activeDeadlineSeconds has passed: the job fails.
 7. Failures: a new round (CAS 1), a wait, or the end of the job (failures.py).
 8. Completion, or suspension after the gang has saved and stopped.
 9. A person has rolled the gang back, or spec.workers has changed and no committed step would be lost with
    the pods: a new round (CAS 1).
10. An elastic gang is resized when there are nodes for missing workers, and begins a round (CAS 1) without
    the workers for which there are none.
11. The pods cannot all be scheduled in time: a new round (CAS 1) creates them again after a back-off.
12. Pods have not started on their nodes in time: the nodes are avoided, and the pods created again.
13. Adopted pods that have started are recorded in the status.
14. The round has no restore point: choose it (CAS 2), or seal survivors and create pods until it can be.
15. Seals, pods, ROUND, Checkpoint objects, and one status write if it is due.
Each pass but those of rule 2 and those that begin a round also deletes placeholders that are not needed.
Pods that are being deleted lose Kueue's finalizer, whichever rule decides (scheduling.py).
A pass that begins a round or chooses its restore point only emits Events besides. No pass writes the status
more than once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holdfast_core.api import (
    GoodputStatus,
    JobCondition,
    LineageEntry,
    PersistedStep,
    RestorePointStatus,
    TrainingJobStatus,
    changed,
)
from holdfast_core.messages.schema import FinishCommit, Seal
from holdfast_operator.decide import (
    checkpoints,
    ends,
    failures,
    gang,
    restore_point,
    writes,
)
from holdfast_operator.decide.facts import readable, rollback, scheduling, sizes, spec
from holdfast_operator.decide.facts.evidence import CANNOT_START
from holdfast_operator.decide.facts.nodes import next_departure, waiting_note
from holdfast_operator.decide.facts.spec import birth_problem
from holdfast_operator.decide.facts.world import (
    Note,
    World,
    advance,
    again_after,
    is_over,
    see_failure,
    stop_requested,
)
from holdfast_operator.decide.report import recovery
from holdfast_operator.decide.report.conditions import (
    describe_wait,
    unreadable_pass,
    with_missing,
    with_rollback,
)
from holdfast_operator.decide.report.status import (
    must_write,
    refresh,
    refresh_kept,
    remember_write,
    with_notices,
    with_ratio,
)
from holdfast_operator.decide.writes import (
    STARTING_SECONDS,
    WAITING_SECONDS,
    committed,
    fail_job,
    persisted,
    renamed,
    with_status_write,
    written,
)
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    CallPath,
    ChooseRestorePoint,
    CommitPersisted,
    Decision,
    Delete,
    ReleasePod,
    WriteStatus,
    normal,
    warning,
)
from holdfast_operator.model.job import Done, Now, Observed, PodPhase, Seen
from holdfast_operator.model.reasons import Reason

ASKED_MEMBERS = 4
"""Members that are sent the manifest of an interrupted commit, or that list the object store."""
LIST_SECONDS = 60.0
"""Interval in which the store is listed while a gang waits because the store lacks its checkpoints."""
RUNNING_SECONDS = 5.0
"""Pause between passes while the gang trains."""


def decide(observed: Observed, now: Now) -> Decision:
    """Return the actions of one pass over one job, and the memory for the next pass."""
    world = World(observed, now)
    advance(world)
    decision, source = _decide(world), world.source
    deletes = decision.deletes
    if not isinstance(decision.status, BeginRound | ChooseRestorePoint):
        deletes = (*deletes, *_in_each_pass(world))
    decision = replace(
        decision,
        memory=world.memory,
        objects=tuple(o for o in decision.objects if source.may_put(o.kind)),
        deletes=tuple(d for d in deletes if source.may_delete(d.kind)),
    )
    return with_notices(decision, world)


def _in_each_pass(world: World) -> list[Delete | ReleasePod]:
    """Return what is done to pods whichever rule decides, except in a pass that begins a round."""
    observed = world.observed
    deletes: list[Delete | ReleasePod] = []
    deletes.extend(scheduling.due(world))
    if observed.placeholders and not observed.unreadable:
        deletes.extend(sizes.unneeded_placeholders(world))
    return deletes


def _decide(world: World) -> Decision:
    job = world.job
    if job.deleting:
        freed = ends.release_all(world)
        return Decision.of(freed, None, "the job is being deleted")
    unreadable = unreadable_pass(world)
    if unreadable is not None:
        return unreadable
    if is_over(job.status):
        return over(world)
    if job.status.is_true(JobCondition.SUSPENDED) or (
        job.spec.suspend and ends.may_suspend_now(world)
    ):
        return suspended(world)
    if job.status.restart_round is None:
        return writes.first_round(world)
    deadline = ends.deadline_passed(world)
    if deadline is not None:
        return fail_job(world, deadline)
    found = failures.find(world)
    see_failure(world, bool(found))
    if found:
        return failures.plan(world, found)
    done = ends.completed(world)
    if done is not None and (not job.spec.suspend or job.spec.store is None):
        event = normal(Reason.COMPLETED, "every rank returned 0")
        return written(world, done, [event], "complete")
    if job.spec.suspend and job.spec.store is not None and ends.stopped_and_saved(world):
        status = ends.suspended(world)
        return written(world, status, [], "the gang has stopped and saved: the job is suspended")
    for rule in (  # the rules 9 to 13, each of which returns None if it does not apply
        writes.roll_back,
        writes.resize_gang,
        writes.grow_gang,
        writes.shrink_gang,
        writes.schedule,
        writes.replace_late_pods,
        record_births,
    ):
        decision = rule(world)
        if decision is not None:
            return decision
    if job.status.restore_point is None:
        return choose(world)
    return run(world)


# --------------------------------------------------------------------------- passes that begin no round


def record_births(world: World) -> Decision | None:
    """Return the decision that records adopted pods which have started, or None if all are recorded.

    No ROUND names a pod that is not recorded: after a restart of the operator, its loss would look like a pod
    that has not started.
    """
    status = world.source.with_births(world.status, world.observed.pods)
    if status is world.status:
        return None
    if world.observed.owner is None:
        return Decision.of((), STARTING_SECONDS, "the controller of the pods is not known yet")
    refused = spec.refusal(world)
    if refused is None:
        return written(world, status, [], "pods have started as workers")
    known = world.status.condition(JobCondition.ADOPTED)
    note = Note(Reason.LOCAL_COPIES_WOULD_BE_LOST, refused)
    is_known = known is not None and known.is_false
    return with_status_write(world, () if is_known else [warning(*note)], note, WAITING_SECONDS)


def choose(world: World) -> Decision:
    choice = restore_point.choose(world)
    if isinstance(choice, restore_point.Exhausted):
        return fail_job(world, choice.note)
    if isinstance(choice, restore_point.Chosen):
        return _chosen(world, choice)
    actions = [*gang.standing(world), *gang.member_actions(world)]
    if isinstance(choice, restore_point.InterruptedCommit):
        actions.extend(_finishes(world, choice))
        return with_status_write(world, actions, choice.note, STARTING_SECONDS)
    if isinstance(choice, restore_point.AskStore) or _store_is_due(world, choice.note):
        actions.extend(_store_lists(world))
    if world.seconds_since(world.memory.round_seen_at) >= checkpoints.DOUBT_SECONDS:
        actions.extend(checkpoints.marks(world))  # not before: a round that starts has other work
    note = _refused(world) or _pod_trouble(world) or choice.note
    pause = again_after(world, world.memory.round_seen_at, STARTING_SECONDS)
    return with_status_write(world, actions, note, pause)


def _chosen(world: World, choice: restore_point.Chosen) -> Decision:
    """Return CAS 2."""
    status = refresh(world, _with_choice(world, choice), Note(choice.reason, choice.message))
    wanted = (Reason.RESTORE_POINT_CHOSEN, Reason.ROLLED_BACK)
    event = normal if choice.reason in wanted else warning
    write = ChooseRestorePoint(status)
    remember_write(world)
    return Decision.of((write, event(choice.reason, choice.message)), 0.0, choice.message)


def _finishes(world: World, choice: restore_point.InterruptedCommit) -> Iterator[Action]:
    """Yield the requests to some members to write the manifest. The others read it from one of them."""
    message = FinishCommit(world.round, choice.manifest)
    for member in world.members[:ASKED_MEMBERS]:
        yield from member.call(CallPath.FINISH_COMMIT, message)


def _store_is_due(world: World, note: Note) -> bool:
    """Return whether the store is listed again while the gang waits: its objects may be restored."""
    for_holders = note.reason == Reason.WAITING_FOR_HOLDERS and readable.store_is_doubted(world)
    if not for_holders and note.reason != Reason.CHECKPOINTS_LOST:
        return False
    first = None if for_holders else world.memory.round_seen_at
    listed = world.memory.done.get(Done.STORE_LISTED, first)
    is_recent = listed is not None and world.seconds_since(listed) < LIST_SECONDS
    return world.spec.store is not None and not is_recent


def _store_lists(world: World) -> Iterator[Action]:
    """Yield the requests to some members to list the object store. One of them suffices."""
    world.remember_done(Done.STORE_LISTED)
    for member in readable.answered_of(world)[:ASKED_MEMBERS]:
        yield from member.call(CallPath.SEAL, Seal(world.round, look_in_store=True))


def _with_choice(world: World, choice: restore_point.Chosen) -> TrainingJobStatus:
    """Return the status of CAS 2 with restore point, lineage and coordinator.

    The step and the levels in the status go down to the restore point. A checkpoint that was found in the
    store is recorded as persisted.
    """
    status = _with_found(world, choice)
    point: RestorePointStatus = choice.point
    entry = LineageEntry(
        round=world.round,
        base=point.id,
        base_manifest=choice.manifest,
        rolled_back_from=rollback.reached(
            world, point, by_order=choice.reason is Reason.ROLLED_BACK
        ),
    )
    own = point.step if point.job_uid is None else None
    lineage = status.lineage
    if own is None and lineage:
        # The steps of another job's checkpoint say nothing about those that this job saved before.
        lineage = restore_point.extend_lineage(lineage, LineageEntry(round=world.round))
    lost = None if status.step is None else max(0, status.step - (point.step or 0))
    record = status.last_recovery
    if record is not None and record.round == world.round:
        status = status.with_recovery(changed(record, lost_steps=lost, restored_step=point.step))
    replicated = status.last_replicated_step
    status = rollback.with_chosen(status, world, point)
    return changed(
        status,
        restore_point=point,
        lineage=restore_point.extend_lineage(lineage, entry),
        coordinator=gang.first_coordinator(world),
        step=point.step,
        last_committed_step=own,
        last_replicated_step=None if replicated is None or own is None else min(replicated, own),
        goodput=_less_lost_work(status.goodput, lost, lost if own is None else status.step),
    )


def _with_found(world: World, choice: restore_point.Chosen) -> TrainingJobStatus:
    """Return the status in which a restore point is persisted that the store has and the status lacks.

    A list of the store or a Checkpoint object names it.
    """
    id_, manifest, status = choice.point.id, choice.manifest, world.status
    if id_ is None or manifest is None or choice.point.job_uid is not None:
        return status
    if world.last_persisted is not None or not readable.is_in_store(world, id_):
        return status
    found = PersistedStep(step=id_.step, round=id_.round, manifest=manifest)
    return changed(status, last_persisted=found)


def _less_lost_work(
    goodput: GoodputStatus | None, lost: int | None, trained: int | None
) -> GoodputStatus | None:
    """Add the lost steps to the lost work, at the mean training time of a step so far."""
    if goodput is None or not lost or not trained:
        return goodput
    seconds = goodput.lost_work_seconds + goodput.training_seconds * lost / trained
    return with_ratio(changed(goodput, lost_work_seconds=min(seconds, goodput.training_seconds)))


def run(world: World) -> Decision:
    if gang.awaits_coordinator(world):
        text = "the coordinator has not answered this operator process yet"
        return Decision.of((), STARTING_SECONDS, text)
    running = world.state.running
    actions = gang.member_actions(world)
    rounds = gang.round_actions(world)
    actions.extend(rounds.actions)
    actions.extend(checkpoints.plan(world))
    if running:
        actions.extend(gang.delete_old_certificates(world))
        actions.extend(gang.spare_actions(world))
    actions.extend(sizes.new_placeholders(world))
    if ends.must_stop(world):
        actions.extend(ends.request_stop(world))
    actions.extend(_departing(world))
    commit = checkpoints.committable(world)
    if not (rounds.complete and running):
        requeue = again_after(world, world.memory.seen_at(Seen.CHOSEN), STARTING_SECONDS)
    elif not actions and _is_undisturbed(world):
        requeue = max(RUNNING_SECONDS, world.observed.routine_seconds)
    else:
        requeue = RUNNING_SECONDS
    requeue = min(requeue, ends.seconds_to_deadline(world))
    actions.extend(gang.standing(world))
    note = None
    if not running:
        note = _refused(world) or _missing(world) or _pod_trouble(world)
    if note is None and not running and not world.job.status.is_true(JobCondition.RUNNING):
        note = Note(Reason.STARTING, f"round {world.round}: ranks restore and rendezvous")
    if commit is None:
        return with_status_write(world, actions, note, requeue)
    return committed(world, commit, actions, note)


def _is_undisturbed(world: World) -> bool:
    """Return whether nothing can become due with time alone: whatever happens next requests a pass."""
    return all(m.alive and m.reachable for m in world.members) and not any(
        c.deleting for c in world.observed.checkpoints
    )


def _departing(world: World) -> list[Action]:
    """Return the delete of a pod whose node will be taken away soon, and its Event."""
    leaves = next_departure(world)
    if leaves is None or stop_requested(world.status):
        return []
    text = f"{leaves} is deleted, because the node will be taken away: the gang saves, and the worker moves"
    return [
        *world.deletes([leaves.pod], "its node will be taken away"),
        normal(Reason.NODE_LEAVING, text),
    ]


def _refused(world: World) -> Note | None:
    """Return a note with the error of a create that was refused in an earlier pass, or None."""
    text = world.observed.memory.create_refused
    return Note(Reason.CREATE_REFUSED, text) if text else None


def _missing(world: World) -> Note | None:
    text = describe_wait(world)
    return None if text is None else Note(Reason.CHECKPOINT_MISSING, text)


def _pod_trouble(world: World) -> Note | None:
    """Return why a pod is not created or does not start, or None.

    The note contains the problem of the spec, or the message of the kubelet or the scheduler.
    """
    refused = birth_problem(world)
    if refused is not None and any(member.pod is None for member in world.members):
        return refused
    for member in world.members:
        pod = member.pod
        if pod is not None and pod.waiting_reason in CANNOT_START:
            text = f"pod {pod.name}: {pod.waiting_reason}: {pod.waiting_message}"
            return Note(Reason.CONTAINER_CANNOT_START, text)
    if scheduling.waits(world):
        return Note(Reason.WAITING_FOR_QUEUE, scheduling.describe_wait(world))
    waiting = waiting_note(world)
    if waiting is not None:
        return waiting
    late = scheduling.describe_late(world)
    if late is not None:
        return Note(Reason.POD_NOT_STARTED, late)
    for member in world.members:
        pod = member.pod
        if pod is not None and pod.phase is PodPhase.PENDING and pod.node is None:
            text = f"pod {pod.name} is not scheduled: {pod.message}".rstrip(": ")
            text += scheduling.claim_of(world.job, pod)
            return Note(Reason.WAITING_FOR_PODS, text)
    return None


def over(world: World) -> Decision:
    """Return the decision about a job that has completed or failed.

    A commit gets its Checkpoint object before the status records it. So an object that a user deletes after
    the end is not created again. The create is repeated only while it fails.
    """
    status = world.status
    commit = checkpoints.pending_commit(world)
    if commit is not None:
        record = checkpoints.record_of(world, commit)
        if record and not world.memory.record_refused:
            return Decision.of(record, STARTING_SECONDS, "the last commit is recorded")
        write = CommitPersisted(changed(status, last_persisted=commit))
        event = persisted(commit)
        return Decision.of((write, *record, event), 0.0, event.message)
    if status.is_true(JobCondition.PODS_KEPT):
        status = renamed(world, refresh_kept(world, status))
    else:
        status = with_missing(status, world)
    present = world.with_status(status)
    kept = ends.why_kept_after_the_end(present)
    status = ends.with_pods_kept(status, present, kept)
    actions: list[Action] = []
    if must_write(world, status):
        actions.append(WriteStatus(status))
        remember_write(world)
    if world.memory.record_refused:
        actions.extend(checkpoints.records(world))
    actions.extend(checkpoints.expire_requests(world) or checkpoints.marks(world))
    actions.extend(ends.release_all(world))
    actions.extend(ends.after_the_end(world, kept=kept is not None))
    if kept is not None:
        actions.extend(gang.seals(world))  # the members of an unsealed round answer only after it
    if ends.is_upload_requested(kept) and status.restore_point is not None:
        # A sidecar whose container restarts after the end needs ROUND again.
        plan = gang.round_actions(present)
        actions.extend((*plan.actions, *ends.request_stop(present, job_is_over=True)))
        world.memory = present.memory
    # Launchers leave when the version is acknowledged, and their pods end.
    state = world.coordinator
    acted = None if state is None or kept is not None else state.version
    return Decision.of(actions, WAITING_SECONDS, "the job is over", acted)


def suspended(world: World) -> Decision:
    status = world.job.status
    if not status.is_true(JobCondition.SUSPENDED):
        status = recovery.interrupted(ends.suspended(world), world)
        return written(world, status, [], "the job is suspended without a save")
    if ends.must_withdraw(world):
        status = ends.withdrawn(world)
        return written(world, status, [], "the suspension is withdrawn")
    if world.spec.suspend:
        shown = with_rollback(status, world)
        if shown != status:
            return written(world, shown, [], "spec.rollback waits for the end of the suspension")
        acted = None if world.coordinator is None else world.coordinator.version
        freed = ends.release_all(world)
        actions = (*ends.delete_all_pods(world), *checkpoints.marks(world), *freed)
        return Decision.of(actions, WAITING_SECONDS, "suspended", acted)
    if status.restart_round is None:
        note = Note(Reason.RESUMED, "spec.suspend is false")
        status = world.with_condition(status, JobCondition.SUSPENDED, False, *note)
        return written(world, status, [], "the job is resumed")
    return writes.resume(world)
