"""Beginning and end of a job: acceptance, suspension, completion, failure, deadlines. Pure.

Each rule answers what the status becomes, or None where it has nothing to say.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from holdfast_core.api import JobCondition
from holdfast_operator.decide.checkpoints import has_object, pending_commit
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.failure import Failure, budget_spent, failing_rule
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report.status import Note, set_condition
from holdfast_operator.model.actions import Action, AskStop, DeleteJob, DeletePod
from holdfast_operator.model.job import JobStatusView, Now, PodPhase
from holdfast_operator.model.reasons import Reason

EXIT_GRACE = timedelta(seconds=60)
"""After Complete the launchers are released; pods that still run then are deleted."""


def is_over(status: JobStatusView) -> bool:
    return status.is_true(JobCondition.COMPLETE) or status.is_true(JobCondition.FAILED)


def accepted(world: World, now: Now, problem: Note | None) -> JobStatusView:
    note = problem or Note(Reason.ACCEPTED, "the spec can be run")
    waiting = problem is not None and problem.reason == Reason.STORE_NOT_PROBED
    value = None if waiting else problem is None
    generation = world.observed.job.generation
    return set_condition(world.status, JobCondition.ACCEPTED, value, note, now, generation)


# --------------------------------------------------------------------------- the end


def failed(world: World, now: Now, note: Note) -> JobStatusView:
    generation = world.observed.job.generation
    status = replace(world.status, completion_time=now.utc)
    for kind in (JobCondition.RUNNING, JobCondition.RESTARTING):
        if status.condition(kind) is not None:
            status = set_condition(status, kind, False, note, now, generation)
    return set_condition(status, JobCondition.FAILED, True, note, now, generation)


def failure_of_job(world: World, failures: tuple[Failure, ...], now: Now) -> Note | None:
    """Why the job ends here instead of restarting; None: it restarts."""
    rule = failing_rule(world, failures)
    if rule is not None:
        return Note(Reason.EXIT_CODE_RULE, f"failurePolicy.rules say FailJob: {rule.message}")
    if budget_spent(world, failures, now):
        spec = world.observed.job.spec
        window = int(spec.restart_window.total_seconds())
        return Note(
            Reason.BACKOFF_LIMIT_EXCEEDED,
            f"more than {spec.max_restarts} restarts within {window} s; the newest: "
            f"{failures[0].message}",
        )
    return None


def deadline_passed(world: World, now: Now) -> Note | None:
    job = world.observed.job
    start = world.status.start_time
    if job.spec.active_deadline is None or start is None:
        return None
    if now.utc - start < job.spec.active_deadline:
        return None
    seconds = int(job.spec.active_deadline.total_seconds())
    return Note(Reason.DEADLINE_EXCEEDED, f"activeDeadlineSeconds {seconds} has passed")


def completed(world: World, now: Now) -> JobStatusView | None:
    """The status that ends the job well: every rank returned 0 and every commit is recorded, or
    every pod ended well. Ranks that a drain stopped return 0 too: a pod on its way out counts as
    not completed. The same holds for a gang that was asked to stop (see stopped_for_nothing)."""
    job = world.observed.job
    status = world.status
    if asked_to_stop(status):
        return None
    state = world.coordinator
    finished = (
        state is not None
        and state.finished
        and status.restore_point is not None
        and not state.dead
        and all(m.pod is not None and not m.pod.terminating for m in world.members)
    )
    if not (finished or _all_ended(world)) or not everything_recorded(world):
        return None
    note = Note(Reason.COMPLETED, "every rank returned 0")
    status = replace(status, completion_time=now.utc)
    for kind in (JobCondition.RUNNING, JobCondition.RESTARTING):
        if status.condition(kind) is not None:
            status = set_condition(status, kind, False, note, now, job.generation)
    return set_condition(status, JobCondition.COMPLETE, True, note, now, job.generation)


def everything_recorded(world: World) -> bool:
    """The newest commit of the store is in the status, and its object exists."""
    last = world.status.last_persisted
    return pending_commit(world) is None and (last is None or has_object(world, last.id))


def after_the_end(world: World, now: Now) -> list[Action]:
    """Pods that have no business any more; the ones that ended stay for their logs."""
    status = world.status
    ended = status.completion_time or now.utc
    failed_ = status.is_true(JobCondition.FAILED)
    overdue = failed_ or now.utc - ended >= EXIT_GRACE
    members = {m.pod.uid for m in world.members if m.pod is not None}
    actions: list[Action] = []
    for pod in world.observed.pods:
        if world.is_ahead(pod):
            continue
        lost = world.observed.node_lost(pod)
        running = pod.phase not in (PodPhase.SUCCEEDED, PodPhase.FAILED)
        unwanted = pod.uid not in members or (running and overdue) or lost
        if unwanted and (lost or not pod.terminating):
            actions.append(DeletePod(pod.name, pod.uid, force=lost))
    ttl = world.observed.job.spec.ttl_after_finished
    if ttl is not None and now.utc - ended >= ttl:
        actions.append(DeleteJob(world.observed.job.uid))
    return actions


# --------------------------------------------------------------------------- suspension


def suspended(world: World, now: Now) -> JobStatusView:
    job = world.observed.job
    note = Note(Reason.SUSPENDED, "spec.suspend is true: saved as far as there was something to")
    # As a Job of batch/v1: the clock of activeDeadlineSeconds stops, and starts anew at the resumption.
    status = replace(world.status, start_time=None)
    for kind in (JobCondition.RUNNING, JobCondition.RESTARTING):
        if status.condition(kind) is not None:
            status = set_condition(status, kind, False, note, now, job.generation)
    return set_condition(status, JobCondition.SUSPENDED, True, note, now, job.generation)


def may_suspend_now(world: World) -> bool:
    """All pods can go at once: no commit goes with them. A gang that trains is asked to save first,
    where the object store can keep what it saves."""
    if world.status.restart_round is None:
        return True
    stored = world.observed.job.spec.store is not None
    if stored and (trains(world) or pending_commit(world) is not None):
        return False
    return readable.lost_with_all_pods(world) is None


def must_take_back(world: World) -> bool:
    """Suspended is written, no pod was deleted yet, and a commit would go with the pods: the operator
    was away in between and the gang went on, or it committed a step in this very moment."""
    untouched = all(m.pod is not None and not m.pod.terminating for m in world.members)
    if not untouched or stopped_and_saved(world):
        return False
    return readable.lost_with_all_pods(world) is not None


def taken_back(world: World, now: Now) -> JobStatusView:
    """The status that ends a suspension before a pod was deleted: the round goes on."""
    job = world.observed.job
    note = suspend_note(world)
    if job.spec.store is not None:
        # The gang may have been asked to stop before it was suspended: this reason records it.
        note = replace(note, reason=Reason.STOPPING)
    status = replace(world.status, start_time=now.utc)
    return set_condition(status, JobCondition.SUSPENDED, False, note, now, job.generation)


def trains(world: World) -> bool:
    """The gang can be asked to save and stop."""
    state = world.coordinator
    return (
        state is not None
        and state.running
        and not state.dead
        and all(m.alive for m in world.members)
    )


def suspend_note(world: World) -> Note:
    """Why a job whose spec.suspend is true is not suspended yet. The gang is asked to stop exactly
    where the reason is STOPPING."""
    lost = readable.lost_with_all_pods(world)
    if world.observed.job.spec.store is None:
        return Note(
            Reason.NO_OBJECT_TIER,
            "the job has no object store: without its pods nothing that it saved would be left, so "
            "it is not suspended, and no pod is created for it meanwhile. Delete the job, or "
            "create it anew with checkpoint.object",
        )
    if trains(world):
        return Note(Reason.STOPPING, "the gang was asked to save and stop")
    if lost is None:
        return Note(Reason.NOT_PERSISTED, "the newest upload is recorded first")
    return Note(
        Reason.NOT_PERSISTED,
        f"suspending now would lose work: {lost}. A gang that trains is asked to save into the "
        "store first; this one does not train, and no pod is created while spec.suspend is true. Set "
        "spec.suspend to false to let it recover, or delete its pods to give up what they hold",
    )


def asked_to_stop(status: JobStatusView) -> bool:
    """The gang of this round was asked to save and stop. The record is written before the gang is
    asked, and stays until the next round begins: the request cannot be taken back, and ranks that
    stop for it return 0 although they have not finished."""
    condition = status.condition(JobCondition.SUSPENDED)
    return condition is not None and condition.reason == Reason.STOPPING


def stopped_and_saved(world: World) -> bool:
    """The gang saved, stopped, and what it saved is where it survives the loss of all pods."""
    return _stopped(world) and not _unsaved(world)


def stopped_for_nothing(world: World) -> tuple[Failure, ...]:
    """A gang that stopped for a suspension has to start again in its pods: spec.suspend is false
    again, or the store did not take the newest step."""
    if not asked_to_stop(world.status) or not _stopped(world):
        return ()
    if not world.observed.job.spec.suspend:
        words = "the gang had stopped for a suspension, and spec.suspend is false again"
        return (Failure(Reason.RESUMED, words, disruption=True),)
    if _unsaved(world):
        words = "the gang stopped for the suspension, but the object store lacks the newest step"
        return (Failure(Reason.NOT_PERSISTED, words, disruption=True),)
    return ()


def _stopped(world: World) -> bool:
    """Every rank returned 0, and what is in the store is recorded."""
    state = world.coordinator
    finished = state is not None and state.finished
    return (finished or _all_ended(world)) and everything_recorded(world)


def _all_ended(world: World) -> bool:
    pods = [m.pod for m in world.members]
    return bool(pods) and all(p is not None and p.phase is PodPhase.SUCCEEDED for p in pods)


def _unsaved(world: World) -> bool:
    """A step is committed on the nodes that the store does not have: its uploads were given up."""
    state, persisted = world.coordinator, world.last_persisted
    local = None if state is None or state.last_local is None else state.last_local.step
    known = [s for s in (local, readable.recorded_commit(world)) if s is not None]
    return bool(known) and (persisted is None or persisted.step < max(known))


def ask_stop(world: World) -> list[Action]:
    coordinator = world.coordinator_member()
    if coordinator is None or coordinator.pod is None or coordinator.pod.ip is None:
        return []
    return [
        AskStop(
            coordinator.worker,
            coordinator.pod.name,
            coordinator.pod.ip,
            world.round,
            token=f"suspend-{world.observed.job.generation}",
        )
    ]


def delete_all_pods(world: World) -> list[Action]:
    return [
        DeletePod(p.name, p.uid, force=world.observed.node_lost(p))
        for p in world.observed.pods
        if (not p.terminating or world.observed.node_lost(p)) and not world.is_ahead(p)
    ]
