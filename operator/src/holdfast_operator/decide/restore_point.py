"""Choose the step from which a round starts, once per round. Pure.

1. A candidate is a step with a manifest that is on the lineage and was saved by as many ranks as the gang
   has. Persisted commits are candidates whatever their number of ranks, because the object store has all of
   their shards.
2. The newest complete candidate is chosen. A candidate is complete if it is persisted, or if each rank's
   shard is held by a member that has answered for this round.
3. A survivor that has not answered may hold any step. Until it answers or its pod is gone, no step below the
   newest committed one is chosen, however long that takes: a lower choice would discard a step that this pod
   may still hold. A user who gives the step up deletes the pods that do not answer. For a newer step that
   was not committed everywhere, the choice waits for HOLDERS_SECONDS at most.
4. A quarantined checkpoint is no candidate (readable.py). The message names the number of steps that
   this gives up. If no other checkpoint is left, the job fails.
5. While new pods start, the choice waits for TAKE_IN_SECONDS after the newest loss: the round can replace
   further pods only until its restore point is chosen.
6. If all members have survived, and a failure has interrupted the commit of a newer step whose shards are
   all on their nodes, the commit is finished first. The choice waits for that for HOLDERS_SECONDS at most.
   The ranks of a gang save a step together, and each sidecar writes its shard before it answers SEAL. If no
   pod is lost, such a step is as complete as a committed one, except for its manifest (ADR 0018).
7. If no candidate is complete, a sidecar lists the object store, which may have a checkpoint that the
   status does not name. If the whole status may be lost, it does so unless a survivor lists checkpoints. A
   round that is not above those of the store gives way to one that is (failures.py).
8. If a step is known to have been committed and no candidate is complete, the gang starts over if that
   loses little, or a person has said so. Otherwise it waits for a person (rollback.py).
9. A checkpoint that could not be read anywhere is chosen only if no other one is complete (readable.py).
   Sidecars then look for it until they find it.
10. If a person has rolled the gang back to a step, that step is chosen if it is complete. Nothing newer is
   waited for, because the person gives it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast_core.api import LineageEntry, RestorePointStatus, changed, on_lineage
from holdfast_core.errors import FormatError
from holdfast_core.format.manifest import JobIdentity, manifest_document
from holdfast_core.ids import CheckpointId, Digest, Step, ranks_of
from holdfast_core.messages.schema import UncommittedShard
from holdfast_core.names import first_of
from holdfast_core.sources import NoSource, describe
from holdfast_operator.decide.facts import readable, rollback
from holdfast_operator.decide.facts.spec import grant_problem, source_of
from holdfast_operator.decide.facts.world import MemberState, Note, World
from holdfast_operator.model.job import Done, Seen
from holdfast_operator.model.reasons import Reason

Saved = tuple[UncommittedShard, ...]
"""The shards of one step of all ranks of a worker, in order of the ranks."""


HOLDERS_SECONDS = 60.0
"""Longest wait for survivors that may hold a newer step that was not committed everywhere."""
TAKE_IN_SECONDS = 1.0
"""Time after the newest loss for which the choice waits for further ones while new pods start."""
MAX_LINEAGE = 64
"""Largest number of entries in status.lineage."""


@dataclass(frozen=True, slots=True)
class Chosen:
    point: RestorePointStatus
    manifest: Digest | None
    """Digest of the point's manifest, or None without a checkpoint. The lineage keeps it."""
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Wait:
    note: Note


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Every checkpoint that can be read is quarantined, so the job fails."""

    note: Note


@dataclass(frozen=True, slots=True)
class InterruptedCommit:
    """A step whose commit the failure has interrupted is committed first. The choice waits for that."""

    id: CheckpointId
    manifest: str
    note: Note


@dataclass(frozen=True, slots=True)
class AskStore:
    """A sidecar lists the object store first, because nothing that is known can be restored."""

    note: Note


Choice = Chosen | Wait | Exhausted | InterruptedCommit | AskStore


def choose(world: World) -> Choice:
    """Return the restore point of the round, or why the choice waits. It must not be chosen yet."""
    missing = [m.worker for m in world.members if m.pod is None]
    if missing:
        return Wait(Note(Reason.STARTING, f"pods of workers {first_of(missing)} do not exist yet"))
    starting = [m.worker for m in world.members if _may_be_joined(m, world)]
    if starting:
        text = (
            f"the pods of workers {first_of(starting)} start; further pods may be lost with theirs"
        )
        return Wait(Note(Reason.STARTING, text))
    kept = [m.worker for m in world.members if _kept_on_lost_node(m, world)]
    if kept:
        text = f"workers {first_of(kept)} are on nodes that seem to be lost, and may have the only copies"
        return Wait(Note(Reason.WAITING_FOR_HOLDERS, f"{text} of the newest step"))
    answered = readable.answered_of(world)
    unknown = [m for m in world.members if readable.may_store_shards(m, world)]
    found = readable.candidates(world, answered)
    held = readable.held(answered)
    best = readable.best(world, found, held)
    newest = _newest_known(world, found)
    back = _rolled_back(world, found, held, waits=bool(unknown))
    if back is not None:
        return back
    if unknown:
        is_sure = best is not None and readable.is_sure(world, best, held)
        sure = best if is_sure else None
        reason = _reason_to_await_silent(world, answered, sure)
        below = newest is not None and (best is None or best.id.step < newest)
        if reason is not None or (below and not _timed_out(world)):
            text = f"workers {first_of([m.worker for m in unknown])} have not answered yet"
            return Wait(Note(Reason.WAITING_FOR_HOLDERS, f"{text}: {reason or _MAY_HAVE_NEWEST}"))
    finish = (
        None if _timed_out(world) else _unfinished(world, None if best is None else best.id.step)
    )
    if finish is not None:
        return finish
    if _store_may_have_newer(world, answered, best):
        text = (
            "no checkpoint that the status names can be read, so the sidecars list those in CheckpointStore "
            f"{world.spec.store}. The gang waits until the store answers"
        )
        return AskStore(Note(Reason.WAITING_FOR_STORE, text))
    if best is not None:
        return _chosen(world, best, newest, bool(unknown))
    committed = readable.recorded_commit(world)
    if committed is not None:
        return _started_over(world, committed)
    apart = _quarantined_above(world, None)
    if apart and unknown:
        text = f"workers {first_of([m.worker for m in unknown])} have not answered yet: {_MAY_HAVE_OLDER}"
        return Wait(Note(Reason.WAITING_FOR_HOLDERS, text))
    if apart and readable.damaged(world).keys() >= set(apart):
        return _started_over(world, apart[0].step)
    if apart:
        text = (
            f"step {apart[0].step} of round {apart[0].round} is quarantined, and no other checkpoint can be "
            "read. Look at the errors of its ranks. To try this checkpoint again, create a new job; "
            "if it is in the object store, the new job can name it in spec.restoreFrom"
        )
        return Exhausted(Note(Reason.NO_PROGRESS, text))
    return _from_spec(world, newest)


def _may_be_joined(member: MemberState, world: World) -> bool:
    """Return whether this new pod still starts, and further lost pods may join the round (ADR 0008).

    The gang waits for the new pod in any case. So this wait delays no recovery.
    """
    newest = world.memory.done.get(Done.TAKEN_IN, world.memory.round_seen_at)
    if newest is None or world.seconds_since(newest) >= TAKE_IN_SECONDS:
        return False
    started = member.reachable or (member.pod is not None and member.pod.sidecar_started)
    others = any(m.alive and readable.is_survivor(m, world) for m in world.members)
    return not readable.is_survivor(member, world) and not started and others


def _kept_on_lost_node(member: MemberState, world: World) -> bool:
    """Return whether the member is a survivor that the round kept although its node is lost.

    The rules in failures.py kept it because it may hold the only copies, so the choice must not give them up.
    """
    alive = member.pod is not None and member.pod.alive
    return alive and member.node_lost and readable.is_survivor(member, world)


def _store_may_have_newer(
    world: World, answered: list[MemberState], best: readable.Candidate | None
) -> bool:
    """Return whether the object store may have a newer checkpoint, of which the status has no record.

    All pods may be lost, or the operator may be away, between the upload of a step and its record. The
    whole status may be lost as well: the Checkpoint objects that are left may lack the newest step, which a
    survivor has. Silence of the store is no loss (ADR 0007).
    """
    if world.spec.store is None or readable.store_is_listed(answered):
        return False
    if readable.status_may_be_lost(world):
        survivors = (m for m in answered if readable.is_survivor(m, world))
        return best is None or not any(readable.listed(m) for m in survivors)
    return best is None and not readable.nothing_committed(world, answered)


_MAY_HAVE_NEWEST = "they may have the newest step"
_MAY_HAVE_OLDER = "they may have an older checkpoint than the quarantined one"


def _reason_to_await_silent(
    world: World, answered: list[MemberState], best: readable.Candidate | None
) -> str | None:
    """Return why the choice waits without a time limit for survivors that have not answered, or None."""
    if readable.never_trained(world) and best is None:
        return None
    survivors = [m for m in answered if readable.is_survivor(m, world)]
    if not survivors:
        return "no survivor has answered, so the newest committed step is unknown"
    newest = readable.known_commit(world, survivors)
    if newest is not None and (best is None or best.id.step < newest):
        return f"step {newest} was committed, and no complete copy of it is readable without them"
    return None


def _timed_out(world: World) -> bool:
    """Return whether the choice has waited for HOLDERS_SECONDS while at least one sidecar answered.

    While no sidecar answers, the cause is probably the network, and the wait does not begin.
    """
    memory = world.memory
    answering_since = memory.seen_at(Seen.ANSWERING)
    if memory.round_seen_at is None or answering_since is None:
        return False
    return world.seconds_since(max(memory.round_seen_at, answering_since)) >= HOLDERS_SECONDS


def _newest_known(world: World, candidates: list[readable.Candidate]) -> Step | None:
    """Return the newest step that may have been committed, complete or not, or None.

    A manifest alone does not prove a commit, which may have been interrupted before every member had the
    manifest.
    """
    steps = [c.id.step for c in candidates]
    committed = readable.recorded_commit(world)
    return max(steps if committed is None else [*steps, committed], default=None)


def _chosen(world: World, best: readable.Candidate, newest: Step | None, unknown: bool) -> Chosen:
    point = RestorePointStatus(step=best.id.step, round=best.id.round)
    text = f"round {world.round} starts from step {best.id.step} of round {best.id.round}"
    if newest is None or best.id.step >= newest:
        apart = _quarantined_above(world, best.id.step)
        if not apart:
            return Chosen(point, best.manifest, Reason.RESTORE_POINT_CHOSEN, text)
        given_up = apart[0].step - best.id.step
        text += (
            f", and gives up {given_up} steps: step {apart[0].step} of round {apart[0].round} is "
            "quarantined"
        )
        return Chosen(point, best.manifest, Reason.QUARANTINED, text)
    lower = f"{text}, not from {newest}:"
    if any(m.step > best.id.step for m in world.status.missing):
        reason = Reason.CHECKPOINT_MISSING
        text = f"{lower} no place has a good copy of step {newest}"
    elif unknown:
        reason = Reason.HOLDER_UNREACHABLE
        text = (
            f"{lower} a worker that may have its shards did not answer for {HOLDERS_SECONDS:.0f} s"
        )
    else:
        reason = Reason.SHARDS_LOST
        text = f"{lower} every copy of one of its shards is lost"
    return Chosen(point, best.manifest, reason, text)


def _rolled_back(
    world: World, found: list[readable.Candidate], held: readable.Held, *, waits: bool
) -> Choice | None:
    """Return the choice that a person has ordered, or None if there is no order or it cannot be carried out.

    Args:
        waits: Whether a survivor that has not answered may hold the step.
    """
    order = rollback.ordered(world)
    step = None if order is None else order.step
    if step is None:
        return None
    of_step = (c for c in found if c.id.step == step and c.id not in readable.missing_ids(world))
    there = next((c for c in of_step if readable.is_complete(c, held)), None)
    if there is not None:
        point = RestorePointStatus(step=step, round=there.id.round)
        text = (
            f"round {world.round} starts from step {step} of round {there.id.round}, to which a person has "
            "rolled the job back. The checkpoints of later steps stay until the retention takes them"
        )
        return Chosen(point, there.manifest, Reason.ROLLED_BACK, text)
    if waits and not _timed_out(world):
        text = f"workers have not answered yet: they may have step {step}, to which the job is rolled back"
        return Wait(Note(Reason.WAITING_FOR_HOLDERS, text))
    return None


def _quarantined_above(world: World, step: Step | None) -> list[CheckpointId]:
    """Return the quarantined checkpoints of the lineage above a step, newest first. None: all of them."""
    return sorted(
        (
            c
            for c in readable.quarantined(world)
            if on_lineage(c, world.status.lineage) and (step is None or c.step > step)
        ),
        reverse=True,
    )


def _started_over(world: World, committed: Step) -> Choice:
    """Choose the start of a gang all of whose checkpoints are lost, or wait for a person.

    A quarantined checkpoint may still be there. So only a person gives it up.
    """
    lost, apart = rollback.loss(world, committed), _quarantined_above(world, None)
    what = "every copy of one of its shards is lost"
    if committed in {c.step for c in apart}:
        what = "a drill found damage in it"
    why = f"step {committed} was committed, but {what}"
    if rollback.is_confirmed(world) or (not apart and rollback.is_small(world, lost)):
        choice = _from_spec(world, None)
        if not isinstance(choice, Chosen):
            return choice
        text = f"{choice.message}. The gang starts over and gives up {lost}: {why}"
        return replace(choice, reason=Reason.STARTED_OVER, message=text)
    limit = world.spec.failure_policy.start_over.at_most
    text = (
        f"{why}, and no other checkpoint is complete. To start over loses {lost}, and "
        f"failurePolicy.startOver.atMost is {limit}. If you give them up: "
        f"`kubectl holdfast restart {world.job.name} -n {world.job.namespace} --from-start`"
    )
    if apart:
        text += f". Step {apart[0].step} is quarantined: failurePolicy.releasedSteps releases it"
    return Wait(Note(Reason.CHECKPOINTS_LOST, text))


def _from_spec(world: World, unfinished: Step | None) -> Choice:
    """Choose the start of a job that has no committed step: spec.restoreFrom, or no checkpoint at all."""
    spec = world.spec.restore_from
    if spec is None:
        beginning = RestorePointStatus()
        text = f"round {world.round} starts without a checkpoint"
        if unfinished is not None:
            text += (
                f": the commit of step {unfinished} was interrupted, and one of its shards is lost"
            )
            return Chosen(beginning, None, Reason.SHARDS_LOST, text)
        return Chosen(beginning, None, Reason.RESTORE_POINT_CHOSEN, text)
    refused = grant_problem(world)
    if refused is not None:
        return Wait(refused)
    source = source_of(world)
    if isinstance(source, NoSource):
        return Wait(Note(Reason.RESTORE_POINT_UNAVAILABLE, source.message))
    id_ = source.id
    assert id_ is not None
    point = RestorePointStatus(
        step=id_.step,
        round=id_.round,
        job_uid=source.status.job_uid,
        job_namespace=source.status.job_namespace or source.namespace,
    )
    text = (
        f"round {world.round} starts from Checkpoint {source.name}, step {id_.step} of job {source.job}. "
        f"spec.restoreFrom asks for {describe(spec)}"
    )
    return Chosen(point, source.status.manifest, Reason.RESTORE_POINT_CHOSEN, text)


def extend_lineage(
    lineage: tuple[LineageEntry, ...], entry: LineageEntry
) -> tuple[LineageEntry, ...]:
    """Return the lineage with the entry of a new round, compacted.

    Compaction never puts a step back on the lineage. It drops entries that a later one implies, because its
    base is not above theirs. An entry with a higher base stays until the later round is known to have
    trained, which it has if the new round starts from a step that it saved: otherwise the gang may go back to
    the higher step (world.back_to). Above MAX_LINEAGE entries it merges the two oldest into one that is at
    least as strict as both.
    """
    trained = -1 if entry.base is None else entry.base.round
    kept: list[LineageEntry] = []
    for new in (*lineage, entry):
        kept = [e for e in kept if not _implied(e, new, trained)]
        kept.append(new)
    while len(kept) > MAX_LINEAGE:
        first, second = kept[0], kept[1]
        lower = first if _base(first) <= _base(second) else second
        kept[:2] = [changed(lower, round=second.round)]
    return tuple(kept)


def _implied(old: LineageEntry, new: LineageEntry, trained: int) -> bool:
    if new.base is None:
        return True
    return _base(old) == _base(new) or (_base(old) > _base(new) and new.round <= trained)


def _base(entry: LineageEntry) -> int:
    return -1 if entry.base is None else entry.base.step


# --------------------------------------------------------------------------- an interrupted commit


def _unfinished(world: World, above: Step | None) -> InterruptedCommit | Wait | None:
    """Return the newest step above `above` whose commit is to be finished first, or why to wait for one.

    It was saved in the newest round that has a restore point, by as many ranks as the gang has now. All
    members that have answered have it, and the others may.
    """
    lineage = world.status.lineage
    listed = [dict(_steps(m, world)) for m in readable.answered_of(world)]
    silent = len(world.members) - len(listed)
    may_have = sum(readable.may_store_shards(m, world) for m in world.members)
    if not lineage or not listed or silent > may_have:
        return None
    common = set.intersection(*(set(steps) for steps in listed)) - readable.quarantined(world)
    of_round = (c for c in common if c.round == lineage[-1].round < world.round)
    newest = max(of_round, default=None)
    if newest is None or (above is not None and newest.step <= above):
        return None
    text = f"the failure interrupted the commit of step {newest.step}"
    if silent:
        text = f"{text}, and its last shards are being written"
        return Wait(Note(Reason.WAITING_FOR_HOLDERS, text))
    try:
        manifest = _manifest(world, newest, [steps[newest] for steps in listed])
    except FormatError:  # a sidecar has sent a value that no manifest can hold
        return None
    note = Note(Reason.WAITING_FOR_HOLDERS, f"{text}. All of its shards are there: it is finished")
    return InterruptedCommit(newest, manifest, note)


def _steps(member: MemberState, world: World) -> Iterator[tuple[CheckpointId, Saved]]:
    """Yield the steps of which the member has one shard of each of its ranks."""
    inventory = member.inventory
    per_worker = world.spec.procs_per_worker
    size = per_worker * len(world.members)
    own = list(ranks_of(member.worker, per_worker))
    by_step: dict[CheckpointId, list[UncommittedShard]] = {}
    for item in () if inventory is None else inventory.uncommitted:
        by_step.setdefault(CheckpointId(item.step, item.round), []).append(item)
    for checkpoint, found in by_step.items():
        found.sort(key=lambda item: item.shard.rank)
        if [i.shard.rank for i in found] == own and all(i.world_size == size for i in found):
            yield checkpoint, tuple(found)


def _manifest(world: World, checkpoint: CheckpointId, saved: list[Saved]) -> str:
    """Return the manifest that the coordinator of that round would have built."""
    job = world.job
    return manifest_document(
        JobIdentity(job.namespace, job.name, job.uid),
        checkpoint,
        world.status.lineage[-1].base_manifest,
        [(item.shard, item.layout) for of_worker in saved for item in of_worker],
    ).decode()
