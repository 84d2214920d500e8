"""Create, update and delete the Checkpoint objects of a job. Pure.

1. The commit in the object tier is status.lastPersisted of the job. It moves to the next step only when the
   Checkpoint object of the previous one exists (committable).
2. A Checkpoint object records a commit. It is created after the commit, and created again if it is missing.
   After the end of the job it is created before the commit, and only once.
3. A request to save is a Checkpoint without a step. It is sent to the coordinator, and becomes the record of
   the first commit above the steps that were finished when it was sent. Requests between which no step was
   finished share one save. At most MAX_OPEN_REQUESTS of a job are open, and further ones fail.
4. Retention sets phase Deleting, then orders the delete in the store, then deletes the object, as for those
   that a user deletes with their data. `holdfast_core.store_retention` says what is kept and needed. It waits
   for the first replicated commit of the round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property

from holdfast_core.api import (
    MAX_CHECKPOINT_METRICS,
    Checkpoint,
    CheckpointCondition,
    CheckpointPhase,
    CheckpointStatus,
    ConditionStatus,
    JobCondition,
    PersistedStep,
    changed,
    on_lineage,
    size_text,
)
from holdfast_core.ids import CheckpointId
from holdfast_core.messages.schema import GangRequest, Prune, RestorePoint
from holdfast_core.names import checkpoint_name
from holdfast_core.retention import EXPLAINED, RetentionReason
from holdfast_core.store_retention import needed_in_store, newest_record, plan_store, pruned_by
from holdfast_operator.decide.facts.readable import (
    answered_of,
    candidates,
    held,
    is_complete,
    may_store_shards,
    missing_ids,
    newest_is_missing,
    quarantined,
)
from holdfast_operator.decide.facts.world import World
from holdfast_operator.model.actions import Action, Call, CallPath, Delete, DesiredObject, normal
from holdfast_operator.model.job import Now, RequestedSave, StoreView
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import render_change, render_checkpoint


def with_phase(
    status: CheckpointStatus,
    phase: CheckpointPhase,
    now: Now,
    *,
    pinned: bool,
    persisted: bool = False,
    copied: bool = True,
    reason: Reason | None = None,
    message: str = "",
) -> CheckpointStatus:
    """Return the status in that phase. Conditions of other types stay as they are.

    Args:
        pinned: Whether a user has pinned the checkpoint.
        copied: Whether other nodes have copies of what each node saved.
        reason: Reason of the conditions. None stands for the usual one of the phase.
        message: Message of the conditions Committed and Restorable. "" stands for the usual one.
    """
    done = phase in (CheckpointPhase.COMMITTED, CheckpointPhase.DELETING)
    why = reason or (Reason.COMMITTED if done else Reason.SAVE_REQUESTED)
    durable = "every shard and the manifest are durable"
    committed = message or (durable if done else "the save is in progress")
    pruning = Reason.PRUNING if phase is CheckpointPhase.DELETING else why
    stored = "every shard and the manifest are in the object store" if persisted else ""
    restorable = phase is CheckpointPhase.COMMITTED
    uploaded = Reason.PERSISTED if persisted else pruning
    conditions = (
        (CheckpointCondition.COMMITTED, done, why, committed),
        (CheckpointCondition.REPLICATED, done and copied, pruning, ""),
        (CheckpointCondition.PERSISTED, persisted, uploaded, stored),
        (CheckpointCondition.RESTORABLE, restorable, pruning, message),
        (CheckpointCondition.PINNED, pinned, Reason.PINNED if pinned else Reason.NOT_PINNED, ""),
    )
    status = changed(status, phase=phase)
    for kind, value, given, text in conditions:
        status = status.with_condition(kind, value, given, text, now.utc)
    return status


def moved(
    checkpoint: Checkpoint,
    phase: CheckpointPhase,
    now: Now,
    reason: Reason | None = None,
    message: str = "",
) -> CheckpointStatus:
    """Return the status of a Checkpoint that moves to that phase. What it records does not change."""
    status = checkpoint.status
    return with_phase(
        status,
        phase,
        now,
        pinned=checkpoint.spec.pin,
        persisted=checkpoint.persisted,
        copied=status.is_true(CheckpointCondition.REPLICATED),
        reason=reason,
        message=message,
    )


def imported(checkpoint: Checkpoint, now: Now) -> CheckpointStatus | None:
    """Return the first status of a Checkpoint that was imported from a store, or None if it needs none."""
    stored = checkpoint.spec.stored
    if stored is None or not checkpoint.awaits_record:
        return None
    status = changed(
        checkpoint.status,
        round=stored.round,
        manifest=stored.manifest,
        bytes=stored.bytes,
        world_size=stored.world_size,
        job_uid=stored.job_uid,
        job_namespace=stored.job_namespace,
        store=stored.store_ref.name,
        committed_at=stored.committed_at,
    )
    reason, phase = Reason.IMPORTED, CheckpointPhase.COMMITTED
    pinned = checkpoint.spec.pin
    return with_phase(status, phase, now, pinned=pinned, persisted=True, reason=reason)


MARKED_PER_PASS = 4
"""Largest number of checkpoints that retention gives up in a pass."""
PRUNE_TURN_SECONDS = 120.0
"""Time after which a prune lets others go first, longer than that of a call. A store may refuse for ever to
delete one checkpoint."""
WRITES_PER_PASS = 32
"""Largest number of Checkpoints that one rule writes or deletes in a pass. A user may create thousands, and
the passes of other jobs must not wait until all are written. Each write causes another pass."""
MAX_OPEN_REQUESTS = 16
"""Largest number of requests to save of one job that are open at the same time."""


def pending_commit(world: World) -> PersistedStep | None:
    """Return the newest checkpoint that the coordinator persisted if the status does not record it yet."""
    point, status, last = world.state.last_persisted, world.status, world.last_persisted
    found = _commit_of(point)
    if point is None or found is None or status.restore_point is None:
        return None
    if point.job_uid not in (None, world.job.uid):
        return None
    if last is not None and (found.step, found.round) <= (last.step, last.round):
        return None
    return found if on_lineage(found.id, status.lineage) else None


def _commit_of(point: RestorePoint | None) -> PersistedStep | None:
    if point is None or point.step is None or point.round is None or point.manifest is None:
        return None
    return PersistedStep(step=point.step, round=point.round, manifest=point.manifest)


def has_object(world: World, checkpoint: CheckpointId) -> bool:
    """Return whether a Checkpoint object records this commit.

    An object that cannot be parsed counts, because only this job gives its name. It is neither written nor
    deleted.
    """
    name = checkpoint_name(world.job.name, world.job.uid, checkpoint)
    if world.observed.cannot_read(Checkpoint.KIND, name) is not None:
        return True
    return any(c.id == checkpoint for c in world.own_checkpoints)


def committable(world: World) -> PersistedStep | None:
    """Return the pending commit if the previous one has its Checkpoint object, else None."""
    last = world.status.last_persisted
    if last is not None and not has_object(world, last.id):
        return None
    return pending_commit(world)


def plan(world: World) -> list[Action]:
    """Return the actions on Checkpoint objects while the round starts or runs."""
    requests = _requests(world)
    actions = [*_projection(world, requests), *requests, *_deletes(world)]
    actions.extend(_retention(world))
    if not any(isinstance(action, DesiredObject) for action in actions):
        actions.extend(marks(world))  # a second write of an object in a pass would conflict
    return actions


def expire_requests(world: World) -> tuple[Action, ...]:
    """Return actions that fail the open requests to save of a job that has ended."""
    message = "the job ended before this was saved. Request a save of a job that trains"
    return tuple(
        _failed(world, c, Reason.JOB_ENDED, message)
        for c in _open_requests(world)[:WRITES_PER_PASS]
    )


def unsaved(checkpoint: Checkpoint, now: Now) -> tuple[Reason, str] | None:
    """Return why a request of a person will never be saved although its job does not refuse it, or None.

    Whoever creates objects may write their status, or their job, a moment later.
    """
    if checkpoint.status.phase is CheckpointPhase.FAILED or checkpoint.deleting:
        return None
    if checkpoint.id is not None or now.elapsed_seconds(checkpoint.created_at) < SETTLE_SECONDS:
        return None
    if checkpoint.spec.step is None:
        text = (
            f"{checkpoint.job} does not exist. Create the request again once there is such a TrainingJob "
            "or CheckpointAdoption in this namespace"
        )
        return Reason.JOB_NOT_FOUND, text
    text = (
        f"no commit of step {checkpoint.spec.step} is recorded here. Only the operator records commits: to "
        "request a save, create a Checkpoint without spec.step"
    )
    return Reason.STEP_NOT_COMMITTED, text


def _failed(world: World, checkpoint: Checkpoint, reason: Reason, message: str) -> DesiredObject:
    return _moved(world, checkpoint, CheckpointPhase.FAILED, reason=reason, message=message)


# --------------------------------------------------------------------------- what is true of it now


SETTLE_SECONDS = 60.0
"""Age from which an object counts that is no record of a commit and no request that could be fulfilled."""
DOUBT_SECONDS = 60.0
"""Time for which uploads must have failed before the checkpoints in the store may not be restorable: each of
thousands of them is written then, and again when the store is back."""


def marks(world: World) -> list[Action]:
    """Return the writes of what has changed about the Checkpoints of the job, at most WRITES_PER_PASS."""
    newest, own = newest_record(world.own_checkpoints), world.own_checkpoints
    actions: list[Action] = []
    look = _Look(world)
    # The newest one comes first: its whenDeleted counts if the job is deleted before the others have it.
    for checkpoint in own if newest is None else (newest, *(c for c in own if c is not newest)):
        status, id_ = checkpoint.status, checkpoint.id
        if id_ is not None:
            status = look.marked(checkpoint, id_)
        elif status.phase is None and checkpoint.spec.step is None and not checkpoint.deleting:
            text = "it is saved as soon as the job trains"
            status = moved(checkpoint, CheckpointPhase.REQUESTED, world.now, message=text)
        elif checkpoint.spec.step is not None and status.phase is None:
            note = unsaved(checkpoint, world.now)
            if note is not None:
                actions.append(_failed(world, checkpoint, *note))
        if status is not checkpoint.status:
            actions.append(DesiredObject(render_change(checkpoint, status)))
        if len(actions) >= WRITES_PER_PASS:
            break
    return actions


def without_job(
    checkpoint: Checkpoint, store: StoreView | None, now: Now
) -> CheckpointStatus | None:
    """Return the status of a Checkpoint whose job and pods are gone, or None if it says what is true.

    What only nodes had is lost. For the rest, the CheckpointStore says whether it can be restored, but for
    what is known of the checkpoint itself, such as damage.
    """
    kind, status = CheckpointCondition.RESTORABLE, checkpoint.status
    known = status.condition(kind)
    if checkpoint.id is None or known is None:
        return None
    if not checkpoint.persisted:
        found: Restorable | None = (False, Reason.PODS_GONE, _GONE)
    elif status.phase is CheckpointPhase.COMMITTED and (
        not known.is_false or known.reason == Reason.STORE_NOT_FOUND
    ):
        found = _by_store(store, status.store)
    else:
        return None
    if found is None or known.status == ConditionStatus.of(found[0]):
        return None
    return status.with_condition(kind, *found, now.utc)


Restorable = tuple[bool | None, Reason, str]
"""Value, reason and message of condition Restorable."""


def _by_store(store: StoreView | None, name: str | None) -> Restorable | None:
    """Return whether what the store has could be restored. None: nothing is known of the store yet."""
    if store is None:
        text = f"CheckpointStore {name} does not exist or cannot be read: create it again"
        return False, Reason.STORE_NOT_FOUND, text
    if store.available is False:
        text = f"CheckpointStore {name} is not available, as its condition Available says"
        return None, Reason.STORE_UNAVAILABLE, text
    if store.available is None:
        return None
    return True, Reason.PERSISTED, "the object store has every shard and the manifest"


class _Look:
    """What one pass knows about the places that may have checkpoints."""

    @cached_property
    def _needed(self) -> Mapping[RetentionReason, Collection[CheckpointId]]:
        return _needed(self._world)

    def __init__(self, world: World) -> None:
        self._world = world
        over = world.status.completion_time is not None
        self._quarantined = frozenset() if over else quarantined(world)
        self._released = world.spec.failure_policy.released_steps
        self._when_deleted = world.spec.checkpoint.retention.when_deleted
        self._store = self._of_store()
        # After the end of the job a drill is the only look at the store, and it marks the object itself.
        self._absent = frozenset() if over else missing_ids(world)
        if newest_is_missing(world) is not None and world.last_persisted is not None:
            self._absent |= {world.last_persisted.id}
        self._found = _found(world)

    def _why_it_is_still_there(self, checkpoint: Checkpoint) -> str:
        """Return why the object of a checkpoint that a user has deleted still exists."""
        trains = self._world.status.completion_time is None and not self._world.spec.suspend
        for reason, ids in self._needed.items() if trains and _loses_data(checkpoint) else ():
            if checkpoint.id in ids:
                return (
                    f"it was deleted, and its data is needed for now: {EXPLAINED[reason]}. If that lasts for "
                    "ten minutes, the object goes and the data stays"
                )
        return "it was deleted; the object goes when its data is deleted, or cannot be"

    def marked(self, checkpoint: Checkpoint, id_: CheckpointId) -> CheckpointStatus:
        """Return the status with what is true now; the same object if nothing has changed."""
        status, now = checkpoint.status, self._world.now.utc
        if checkpoint.deleting:
            text = self._why_it_is_still_there(checkpoint)
            found = moved(checkpoint, CheckpointPhase.DELETING, self._world.now, message=text)
            return status if found == status else found
        pinned = checkpoint.spec.pin
        if status.is_true(CheckpointCondition.PINNED) is not pinned:
            why = Reason.PINNED if pinned else Reason.NOT_PINNED
            status = status.with_condition(CheckpointCondition.PINNED, pinned, why, "", now)
        damaged = checkpoint.damaged and checkpoint.spec.step not in self._released
        apart = damaged or id_ in self._quarantined
        if status.is_true(CheckpointCondition.QUARANTINED) is not apart:
            why, text = Reason.RELEASED, ""
            if damaged:
                why, text = Reason.DAMAGED, _DAMAGED
            elif apart:
                why, text = Reason.QUARANTINED, _QUARANTINED
            kind = CheckpointCondition.QUARANTINED
            status = status.with_condition(kind, apart, why, text, now)
        if status.when_deleted is not self._when_deleted and checkpoint.persisted:
            status = changed(status, when_deleted=self._when_deleted)
        if not checkpoint.saved_here:  # a backup or an import brought it back to its own job
            status = changed(status, object_uid=checkpoint.uid)
        if status.phase is not CheckpointPhase.COMMITTED:
            return status
        return self._with_restorable(status, id_)

    def _with_restorable(self, status: CheckpointStatus, id_: CheckpointId) -> CheckpointStatus:
        found = self._restorable(status, id_)
        if found is None:
            return status
        value, reason, text = found
        kind = CheckpointCondition.RESTORABLE
        old = status.condition(kind)
        if old is not None and (old.status, old.reason) == (ConditionStatus.of(value), reason):
            return status
        if old is not None and old.reason == Reason.INTACT and value:
            return status  # CheckpointMissing of a job that is over ends by this reason
        return status.with_condition(kind, value, reason, text, self._world.now.utc)

    def _restorable(self, status: CheckpointStatus, id_: CheckpointId) -> Restorable | None:
        """Return whether the job could restore the checkpoint. None: nothing new is known."""
        quarantine = status.condition(CheckpointCondition.QUARANTINED)
        if quarantine is not None and quarantine.is_true:
            return False, Reason(quarantine.reason), quarantine.message
        if not status.is_true(CheckpointCondition.PERSISTED):
            return self._on_nodes(id_)
        if id_ in self._absent:
            text = "the object store lacks it: put its objects back, or restore another checkpoint"
            return False, Reason.CHECKPOINT_MISSING, text
        known = status.condition(CheckpointCondition.RESTORABLE)
        was_absent = known is not None and known.reason == Reason.CHECKPOINT_MISSING
        return None if was_absent and id_ not in self._found else self._store

    def _of_store(self) -> Restorable | None:
        """Return whether what the store has could be restored."""
        world, name = self._world, self._world.spec.store
        store = world.observed.store
        found = _by_store(store, name)
        if store is None or store.available is False:
            return found
        uploads = world.status.condition(JobCondition.REMOTE_TIER_HEALTHY)
        if uploads is not None and uploads.is_false:
            failing = world.now.elapsed_seconds(uploads.last_transition_time)
            if failing < DOUBT_SECONDS:
                return None
            text = f"requests to CheckpointStore {name} fail, as condition RemoteTierHealthy says"
            return None, Reason.STORE_UNAVAILABLE, text
        return found

    def _on_nodes(self, id_: CheckpointId) -> Restorable | None:
        """Return whether the nodes have a checkpoint that is not in the object store."""
        world = self._world
        if not any(m.alive for m in world.members):
            return False, Reason.PODS_GONE, _GONE
        if id_.step in world.state.committed:
            return True, Reason.COMMITTED, _COMPLETE
        if id_.round == world.round or world.coordinator is None:
            return None
        if id_ in self._complete:
            return True, Reason.COMMITTED, _COMPLETE
        silent = any(may_store_shards(m, world) for m in world.members)
        if silent or world.status.is_true(JobCondition.SIDECARS_UNREACHABLE):
            text = "pods that may have its shards do not answer. Delete them to give it up"
            return None, Reason.WAITING_FOR_HOLDERS, text
        text = "the nodes lack a shard of it. checkpoint.object keeps checkpoints in a store"
        return False, Reason.SHARDS_LOST, text

    @cached_property
    def _complete(self) -> frozenset[CheckpointId]:
        """Checkpoints of which the sidecars had every shard when this round began."""
        answered = answered_of(self._world)
        known = held(answered)
        found = candidates(self._world, answered)
        return frozenset(c.id for c in found if is_complete(c, known))


def _found(world: World) -> set[CheckpointId]:
    """Return the checkpoints that the gang has found in the store in this round.

    A coordinator that has not answered, or is gone, says nothing. What was missing then stays so: retention
    would keep it instead of one that is there.
    """
    compared = _commit_of(world.state.last_persisted) or world.last_persisted
    found = {compared.id} if compared is not None and world.state.newest_is_stored else set()
    point = world.status.restore_point
    if world.state.running and point is not None and point.id is not None and not point.job_uid:
        found.add(point.id)
    return found


_COMPLETE = "the nodes of the job have every shard"
_GONE = "no pod that could have its shards is left, and it was never in an object store"
_DAMAGED = "a drill found damage; the job does not restore it"
_QUARANTINED = (
    "ranks that restored it failed repeatedly; the job does not restore it. failurePolicy.releasedSteps "
    "releases it"
)


# --------------------------------------------------------------------------- projection


def records(world: World) -> list[Action]:
    """Return the create of the Checkpoint object that records the newest commit, if it is missing."""
    return _projection(world, [])


def _projection(world: World, requests: list[Action]) -> list[Action]:
    last = world.status.last_persisted
    becomes = last is not None and any(
        isinstance(a, DesiredObject)
        and (a.body.get("spec"), a.body["status"]["round"]) == ({"step": last.step}, last.round)
        for a in requests
    )
    return [] if last is None or becomes else record_of(world, last)


def record_of(world: World, last: PersistedStep) -> list[Action]:
    """Return the create of the Checkpoint object that records this commit, if it is missing."""
    if has_object(world, last.id):
        return []
    job = world.job
    name = checkpoint_name(job.name, job.uid, last.id)
    status = _with_commit(CheckpointStatus(), world, last, persisted=True, pinned=False)
    return [DesiredObject(render_checkpoint(job, name, last.step, status))]


def _with_commit(
    status: CheckpointStatus,
    world: World,
    last: PersistedStep,
    *,
    persisted: bool,
    pinned: bool,
) -> CheckpointStatus:
    """Return the status of a Checkpoint object as the record of this commit."""
    job, point = world.job, world.state.last_persisted
    is_newest = point is not None and (point.step, point.round) == (last.step, last.round)
    status = changed(
        status,
        round=last.round,
        manifest=last.manifest,
        bytes=(world.state.last_persisted_bytes or None) if is_newest else None,
        world_size=_ranks_of(world, last),
        job_uid=job.uid,
        job_namespace=job.namespace,
        committed_at=world.now.utc,
        metrics=_metrics(world) if is_newest else {},
        store=world.spec.store if persisted else None,
        when_deleted=world.spec.checkpoint.retention.when_deleted if persisted else None,
    )
    committed, copied = CheckpointPhase.COMMITTED, world.copies > 0
    return with_phase(
        status, committed, world.now, pinned=pinned, persisted=persisted, copied=copied
    )


def _metrics(world: World) -> dict[str, float]:
    """Return the metrics of the newest commit that its object records: first the one that retention uses."""
    best, found = world.spec.checkpoint.retention.keep_best, world.state.last_persisted_metrics
    names = sorted(found, key=lambda name: (best is None or name != best.metric, name))
    return {name: found[name] for name in names[:MAX_CHECKPOINT_METRICS]}


def _moved(
    world: World,
    checkpoint: Checkpoint,
    phase: CheckpointPhase,
    *,
    reason: Reason | None = None,
    message: str = "",
) -> DesiredObject:
    """Return the change of this Checkpoint object to that phase."""
    status = moved(checkpoint, phase, world.now, reason, message)
    return DesiredObject(render_change(checkpoint, status))


def _ranks_of(world: World, commit: PersistedStep) -> int | None:
    """Return the number of ranks that saved a commit, or None for one from before the newest resize.

    Its object was recorded before the resize, and a user has deleted it since.
    """
    resize = world.status.resize
    if resize is not None and commit.round < resize.round:
        return None
    return world.spec.procs_per_worker * len(world.members)


# --------------------------------------------------------------------------- requests


def _requests(world: World) -> list[Action]:
    open_ = _open_requests(world)
    excess = open_[MAX_OPEN_REQUESTS:]
    known = {a.name: a for a in world.memory.save_requests if a.round == world.round}
    save_requests = {c.name: known[c.name] for c in open_ if c.name in known}
    actions: list[Action] = []
    unsent: list[Checkpoint] = []
    for checkpoint in open_[:MAX_OPEN_REQUESTS]:
        sent = save_requests.get(checkpoint.name)
        done = _fulfilling_commit(world, checkpoint, sent)
        if done is not None:
            actions.append(_record(world, checkpoint, done))
        elif sent is None and checkpoint.spec.step is None:
            unsent.append(checkpoint)
        elif sent is not None and not sent.marked:
            actions.extend(_in_progress(world, checkpoint))
            save_requests[checkpoint.name] = replace(sent, marked=True)
    again, save_requests = _repeated(world, save_requests)
    save, served = _request_save(world, unsent, tuple(save_requests.values()))
    actions.extend((*again, *save))
    if served is not None:
        for checkpoint in unsent:
            save_requests[checkpoint.name] = replace(served, name=checkpoint.name, marked=True)
            actions.extend(_in_progress(world, checkpoint))
    message = (
        f"not saved: {MAX_OPEN_REQUESTS} older requests of the job are still open. One save serves all "
        "requests of a moment; delete this object and request again when they are saved"
    )
    for checkpoint in excess[:WRITES_PER_PASS]:
        actions.append(_failed(world, checkpoint, Reason.TOO_MANY_REQUESTS, message))
    world.remember(save_requests=tuple(save_requests.values()))
    return actions


def _repeated(
    world: World, sent: dict[str, RequestedSave]
) -> tuple[list[Action], dict[str, RequestedSave]]:
    """Return the requests that the present coordinator does not know, and what is remembered of all.

    A sidecar that has restarted knows of no request. Without a repetition, the object would wait for the next
    step that is persisted anyhow, and for ever where none is.
    """
    state, actions = world.state, dict[str, Action]()
    if not state.running or state.finished:
        return [], sent
    kept = dict(sent)
    for name, request in sent.items():
        if request.token in state.save_tokens or request.state_version == state.version:
            continue
        message = GangRequest(world.round, request.token)
        for action in world.call_coordinator(CallPath.SAVE, message):
            actions[request.token] = action
            kept[name] = replace(request, state_version=state.version)
    return list(actions.values()), kept


def _record(world: World, checkpoint: Checkpoint, commit: PersistedStep) -> DesiredObject:
    """Return the write that makes a request the record of the commit that fulfils it."""
    status = _with_commit(
        checkpoint.status,
        world,
        commit,
        persisted=world.spec.store is not None,
        pinned=checkpoint.spec.pin,
    )
    status = changed(status, object_uid=checkpoint.uid)
    return DesiredObject(render_change(checkpoint, status, step=commit.step))


def _request_save(
    world: World, unsent: list[Checkpoint], sent: tuple[RequestedSave, ...]
) -> tuple[list[Call], RequestedSave | None]:
    """Return the request for one save that serves all these Checkpoints, and what is remembered of it.

    There is no action if an earlier request serves them as well, because no step has been finished since it
    was sent. The second value is None if nothing can be requested now.
    """
    state = world.state
    if not unsent or not state.running or state.finished:
        return [], None
    trained = None if state.progress is None else state.progress.last
    shared = next((r for r in sent if r.after_step == trained), None)
    if shared is not None:
        return [], shared
    # A coordinator ignores a token that it knows. After a restart of the operator, no commit is known to be
    # later than the request. So another save is requested if a step has been finished since.
    token = f"{unsent[-1].name} after {trained}"
    save = world.call_coordinator(CallPath.SAVE, GangRequest(world.round, token))
    if not save:
        return [], None
    return save, RequestedSave(token, world.round, trained, token, state.version)


def _in_progress(world: World, checkpoint: Checkpoint) -> list[Action]:
    if checkpoint.status.phase is CheckpointPhase.IN_PROGRESS:
        return []
    return [_moved(world, checkpoint, CheckpointPhase.IN_PROGRESS)]


def _open_requests(world: World) -> list[Checkpoint]:
    """Return the requests to save that are not the record of a commit yet.

    Those that are in progress come first, then the older ones.
    """
    found = [c for c in world.own_checkpoints if not c.deleting and _is_open(c)]
    progress = CheckpointPhase.IN_PROGRESS
    return sorted(found, key=lambda c: (c.status.phase is not progress, c.created_at, c.name))


def _is_open(checkpoint: Checkpoint) -> bool:
    if checkpoint.spec.step is None:
        return checkpoint.status.phase is not CheckpointPhase.FAILED
    # An operator ended after it had written spec.step, and before it had written the status.
    return checkpoint.id is None and checkpoint.status.phase is CheckpointPhase.IN_PROGRESS


def _fulfilling_commit(
    world: World, checkpoint: Checkpoint, request: RequestedSave | None
) -> PersistedStep | None:
    """Return the commit that fulfils a request, or None.

    It is persisted if the job has a store, else replicated. If spec.step is set already, only the commit of
    that step fulfils the request.
    """
    found = world.status.last_persisted
    if world.spec.store is None:
        found = _commit_of(world.state.last_replicated)
    if found is None:
        return None
    if checkpoint.spec.step is not None:
        return found if found.step == checkpoint.spec.step else None
    if request is None or found.round != world.round:
        return None
    return found if request.after_step is None or found.step > request.after_step else None


# --------------------------------------------------------------------------- retention, deletes


def _needed(world: World) -> dict[RetentionReason, Collection[CheckpointId]]:
    """Return the checkpoints whose data is not deleted for now, by reason."""
    return needed_in_store(world.job, world.own_checkpoints, world.observed.cloned)


def may_prune(world: World) -> bool:
    """Return whether this round has a replicated or persisted commit. Before it, nothing may be pruned."""
    points = (world.state.last_replicated, world.state.last_persisted)
    of_round = any(p is not None and p.round == world.round for p in points)
    return of_round and world.status.restore_point is not None


def _deletes(world: World) -> list[Action]:
    """Return the deletes of Checkpoints that retention or a user has given up. A protected one waits."""
    own = world.own_checkpoints
    protected = {id_ for ids in _needed(world).values() for id_ in ids}
    doomed = [c for c in own if _loses_data(c) and c.id not in protected]
    prunes = [action for c in _in_turn(world, doomed) for action in _prune(world, c)]
    gone = [c for c in own if c.deleting and c.has_finalizer and not _loses_data(c)]
    why = "it was deleted, and it has no data to delete"
    deletes = [Delete(Checkpoint.KIND, c.name, c.uid, why) for c in gone[:WRITES_PER_PASS]]
    return [*deletes, *prunes]


def _loses_data(checkpoint: Checkpoint) -> bool:
    """Return whether the data in the store is to be deleted, and the object after it."""
    if checkpoint.id is None or not checkpoint.persisted:
        return False
    if checkpoint.deleting:
        return checkpoint.has_finalizer and checkpoint.deletes_data
    return checkpoint.status.phase is CheckpointPhase.DELETING


def _retention(world: World) -> list[Action]:
    own, now = world.own_checkpoints, world.now.without_gain
    actions: list[Action] = []
    marked: list[tuple[Checkpoint, RetentionReason]] = []
    if may_prune(world):
        plan = plan_store(world.job, own, world.observed.cloned, now)
        marked = pruned_by(plan, own)[:MARKED_PER_PASS]
    for checkpoint, why in marked:
        message = f"pruned by spec.checkpoint.retention: {EXPLAINED[why]}"
        actions.append(_moved(world, checkpoint, CheckpointPhase.DELETING, message=message))
    if marked:
        text = "; ".join(
            f"{c.id} (size {size_text(c.status.bytes)}): {EXPLAINED[why]}" for c, why in marked
        )
        actions.append(normal(Reason.PRUNING, f"pruning checkpoints in the object store: {text}"))
    return actions


def _in_turn(world: World, doomed: list[Checkpoint]) -> list[Checkpoint]:
    """Return those whose turn it is: first those that have begun it, last those whose turn is over."""
    now, began = world.now.monotonic, world.memory.prunes

    def place(checkpoint: Checkpoint) -> tuple[int, float]:
        at = began.get(checkpoint.name)
        if at is None:
            return 1, 0.0
        return (0 if now - at < PRUNE_TURN_SECONDS else 2), at

    chosen = sorted(doomed, key=place)[:WRITES_PER_PASS]
    begins = {c.name: now for c in chosen if place(c)[0]}
    known = {c.name: began[c.name] for c in doomed if c.name in began}
    world.remember(prunes=known | begins)
    return chosen


def _prune(world: World, checkpoint: Checkpoint) -> list[Action]:
    coordinator = world.coordinator_member()
    if (
        coordinator is None
        or not coordinator.alive
        or not may_prune(world)
        or checkpoint.id is None
    ):
        return []
    point = RestorePoint(checkpoint.spec.step, checkpoint.status.round, checkpoint.status.manifest)
    calls = world.call_coordinator(CallPath.PRUNE, Prune(world.round, (point,)))
    name, uid, why = checkpoint.name, checkpoint.uid, "it is pruned, or a user has deleted it"
    return [Delete(Checkpoint.KIND, name, uid, why, data=call) for call in calls]


def everything_recorded(world: World) -> bool:
    """Return whether the newest commit in the store is in the status, and its Checkpoint object exists."""
    last = world.status.last_persisted
    return pending_commit(world) is None and (last is None or has_object(world, last.id))
