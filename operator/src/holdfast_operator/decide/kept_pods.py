"""Pods of a failed job that stay, because they have the only copies of its newest committed step. Pure.

1. The write that ends the job also decides whether its pods stay (`writes.fail_job`), in condition PodsKept.
2. They stay until the step is in the object store, or until none of them is left. After a person has deleted
   the job, they go with it.
3. Pods whose deletion has begun are not kept: the answers of a gang that ends are no evidence.
4. The coordinator persists the step on request. If a part of the gang is missing, it cannot. The condition
   then says why, and what a person can do.
"""

from __future__ import annotations

from holdfast_core.api import JobCondition, TrainingJobStatus
from holdfast_core.contract import NODE_DIR, SIDECAR_CONTAINER
from holdfast_core.ids import Step
from holdfast_operator.decide.facts import apart, readable
from holdfast_operator.decide.facts.world import MemberState, World, on_lineage
from holdfast_operator.decide.report.status import Note, set_condition
from holdfast_operator.model.job import Now
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.wording import first_of


def why(world: World) -> Note | None:
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
    newest, persisted = _newest(world, answered), apart.stored(world)
    if newest is None or (persisted is not None and persisted.step >= newest):
        return None
    last, state = world.last_persisted, world.coordinator
    if last is not None and last.step >= newest and state is not None and _coordinates(world):
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
    text = (
        f"{lost}. The operator requests its upload.{waits} The pods stay until it is uploaded, or until a "
        "person deletes this job"
    )
    return Note(Reason.NOT_PERSISTED, text)


def after_the_end(world: World) -> Note | None:
    """Return why the pods of a job that is over stay, or None if they do not."""
    status = world.status
    if not status.is_true(JobCondition.FAILED):
        return None
    untouched = all(m.pod is not None and not m.pod.terminating for m in world.members)
    return why(world) if untouched or status.is_true(JobCondition.PODS_KEPT) else None


def is_requested(kept: Note | None) -> bool:
    """Return whether the coordinator is requested to persist the step."""
    return kept is not None and kept.reason != Reason.CANNOT_PERSIST


def with_condition(
    status: TrainingJobStatus, world: World, kept: Note | None, now: Now
) -> TrainingJobStatus:
    """Return the status with condition PodsKept, if the pods stay or have stayed."""
    kind, generation = JobCondition.PODS_KEPT, world.observed.job.generation
    if kept is not None:
        return set_condition(status, kind, True, kept, now, generation)
    if not status.is_true(kind):
        return status
    note = Note(Reason.PODS_GONE, "no pod of the job is left that could have a committed step")
    if readable.holding(world):
        text = "no committed step would be lost with the pods any more, so they are deleted"
        note = Note(Reason.LAST_STEP_PERSISTED, text)
    return set_condition(status, kind, False, note, now, generation)


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
    state, point = world.coordinator, None
    if state is not None and state.last_local is not None:
        point = state.last_local.step
    apart_ids = apart.quarantined(world)
    steps = [
        id_.step
        for m in answered
        for id_ in readable.listed(m)
        if id_.round == world.round
        and id_ not in apart_ids
        and on_lineage(id_, world.status.lineage)
    ]
    found = (readable.known_commit(world, answered), point, *steps)
    return max((s for s in found if s is not None), default=None)


def _obstacle(world: World) -> str | None:
    """Return why the newest committed step cannot be uploaded any more, or None if it can.

    Each member uploads its own shards, and a sidecar that has no ROUND of this round uploads nothing.
    """
    if world.observed.job.spec.store is None:
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
