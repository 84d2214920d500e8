"""Carry out a decision: turn its actions into calls on `Effects`, in a safe order.

1. The status write, alone. If it fails, the pass ends. A conflict shows that the decision is based on an old
   object.
2. Service and certificates.
3. The PodDisruptionBudget, pods, seals, ROUND and the requests to save or stop, concurrently. No pod is
   created if stage 2 failed.
4. Checkpoint objects, prunes and deletes, concurrently.
5. Events.
In stages 2 to 4 the error of one action does not stop the others: all actions are idempotent, and the next
pass repeats them. This module holds no state and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from holdfast_core.api import Gang
from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_operator.model.actions import (
    Action,
    BeginRound,
    ChooseRestorePoint,
    CommitPersisted,
    CreateCertificates,
    CreateCheckpointObject,
    CreatePlaceholder,
    CreatePod,
    CreateService,
    Decision,
    DeleteCertificates,
    DeleteCheckpoint,
    DeleteJob,
    DeletePod,
    EmitEvent,
    FinishInterruptedCommit,
    PruneObject,
    ReleasePod,
    RequestSave,
    RequestStop,
    SealWorker,
    SendRound,
    SetDisruptionBudget,
    StatusWrite,
    UpdateCheckpoint,
    WriteStatus,
)
from holdfast_operator.model.effects import ConflictError, Effects
from holdfast_operator.model.job import JobMemory, Observed
from holdfast_operator.render.checkpoint import render_checkpoint
from holdfast_operator.render.disruption_budget import render_disruption_budget
from holdfast_operator.render.network_policy import render_network_policy
from holdfast_operator.render.placeholder import render_placeholder
from holdfast_operator.render.pod import SidecarSettings, render_pod
from holdfast_operator.render.service import render_service

CONCURRENT_CALLS = 32
"""Largest number of concurrent calls for one decision."""


@dataclass(frozen=True, slots=True)
class ActionFailed:
    action: Action
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of carrying out a decision."""

    conflict: bool = False
    """Whether the job had changed since it was observed. Then no action was carried out."""
    not_gone: tuple[str, ...] = ()
    """Names of pods that the decision treated as gone and that exist, because the cache lags. If there is
    one, no action was carried out."""
    failed: tuple[ActionFailed, ...] = ()

    @property
    def complete(self) -> bool:
        return not (self.conflict or self.not_gone or self.failed)

    @property
    def errors(self) -> tuple[HoldfastError, ...]:
        """The errors of actions, without those of sidecars that do not answer (SidecarsUnreachable)."""
        return tuple(f.error for f in self.failed if not isinstance(f.error, UnavailableError))


async def apply(
    decision: Decision, observed: Observed, effects: Effects, sidecar: SidecarSettings
) -> Applied:
    """Carry out a decision.

    Each HoldfastError is returned in the result. Other exceptions, such as cancellation, are raised.
    """
    interpreter = _Interpreter(observed, effects, sidecar)
    write, first, then, deletes, events = _stages(decision.actions)
    if write is not None:
        outcome = await interpreter.write(write)
        if not outcome.complete:
            return outcome
    failed: list[ActionFailed] = []
    prepared = await interpreter.all(first)
    failed.extend(prepared)
    if prepared:
        # Without its Secret, a pod would only wait in ContainerCreating.
        then = [a for a in then if not isinstance(a, CreatePod)]
    failed.extend(await interpreter.all(then))
    failed.extend(await interpreter.all(deletes))
    for event in events:
        await effects.emit(observed.job, event)
    return Applied(failed=tuple(failed))


def memory_after(decision: Decision, observed: Observed, applied: Applied) -> JobMemory:
    """Return the memory for the next Observed, corrected for the actions that failed. Pure.

    Times at which a state was first seen are kept even if a call failed: a seal that fails in each pass must
    not restart the wait for holders in each pass. Records of actions that were not carried out are dropped.
    The time of a status write is kept even if the write failed. So the operator tries to write progress as
    rarely while the API server is away as at any other time, and the writes of all jobs are not due at the
    same moment when it is back.
    """
    refused, old = _refused_create(applied), observed.memory
    new = replace(decision.memory, create_refused=refused, record_refused=_refused_record(applied))
    if any(isinstance(a, CreatePlaceholder) for a in decision.actions):
        new = replace(new, placeholders_refused=_refused_placeholder(applied))
    written = not (
        applied.conflict
        or applied.not_gone
        or any(isinstance(f.action, StatusWrite) for f in applied.failed)
    )
    if written:
        lost = {f.action.token for f in applied.failed if isinstance(f.action, RequestSave)}
        unmarked = {f.action.name for f in applied.failed if isinstance(f.action, UpdateCheckpoint)}
        requests = (
            replace(r, marked=r.marked and r.name not in unmarked)
            for r in new.save_requests
            if r.token not in lost
        )
        return replace(new, save_requests=tuple(requests))
    same_round = old.round == new.round
    return replace(
        new,
        create_refused=old.create_refused if same_round else "",
        record_refused=old.record_refused if same_round else "",
        placeholders_refused=old.placeholders_refused if same_round else "",
        save_requests=old.save_requests,
        round_sent_at=old.round_sent_at if same_round else None,
        levels_written_at=new.levels_written_at if applied.failed else old.levels_written_at,
        counted_at=new.counted_at if old.counted_at is None else old.counted_at,
        blocked_counted_seconds=old.blocked_counted_seconds if same_round else 0.0,
    )


def _refused_create(applied: Applied) -> str:
    creates = (CreateService, CreateCertificates, CreatePod)
    refused = [f for f in applied.failed if isinstance(f.action, creates)]
    if not refused:
        return ""
    first, more = refused[0], len(refused) - 1
    others = f" (and {more} more)" if more else ""
    return f"{_described(first.action)}{others} was refused: {first.error}"


def _described(action: Action) -> str:
    """Return the kind of the action, and the name of its object if it has one."""
    names = (getattr(action, field, "") for field in ("name", "pod", "secret"))
    return " ".join([type(action).__name__, *(n for n in names if n)][:2])


def _refused_placeholder(applied: Applied) -> str:
    errors = [str(f.error) for f in applied.failed if isinstance(f.action, CreatePlaceholder)]
    return errors[0] if errors else ""


def _refused_record(applied: Applied) -> str:
    for failed in applied.failed:
        action = failed.action
        if isinstance(failed.error, ConflictError):
            continue
        if isinstance(action, CreateCheckpointObject) or (
            isinstance(action, UpdateCheckpoint) and action.step is not None
        ):
            return f"Checkpoint {action.name} cannot be written: {failed.error}"
    return ""


def _stages(
    actions: Iterable[Action],
) -> tuple[StatusWrite | None, list[Action], list[Action], list[Action], list[EmitEvent]]:
    write: StatusWrite | None = None
    first: list[Action] = []
    then: list[Action] = []
    deletes: list[Action] = []
    events: list[EmitEvent] = []
    for action in actions:
        match action:
            case BeginRound() | ChooseRestorePoint() | CommitPersisted() | WriteStatus():
                write = action
            case CreateService() | CreateCertificates():
                first.append(action)
            case (
                SetDisruptionBudget()
                | CreatePlaceholder()
                | CreatePod()
                | SealWorker()
                | FinishInterruptedCommit()
                | SendRound()
                | RequestSave()
                | RequestStop()
            ):
                then.append(action)
            case (
                CreateCheckpointObject()
                | UpdateCheckpoint()
                | PruneObject()
                | DeleteCheckpoint()
                | DeletePod()
                | ReleasePod()
                | DeleteCertificates()
                | DeleteJob()
            ):
                deletes.append(action)
            case EmitEvent():
                events.append(action)
            case _:
                assert_never(action)
    return write, first, then, deletes, events


class _Interpreter:
    def __init__(self, observed: Observed, effects: Effects, sidecar: SidecarSettings) -> None:
        self._observed = observed
        self._effects = effects
        self._sidecar = sidecar
        self._slots = asyncio.Semaphore(CONCURRENT_CALLS)

    @property
    def _job(self) -> Gang:
        return self._observed.job

    async def write(self, action: StatusWrite) -> Applied:
        try:
            if isinstance(action, BeginRound):
                present = [
                    name
                    for name in action.confirm_gone
                    if not await self._effects.pod_is_gone(self._job, name)
                ]
                if present:
                    return Applied(not_gone=tuple(present))
            await self._effects.write_job_status(self._job, action.resource_version, action.status)
        except ConflictError:
            return Applied(conflict=True)
        except HoldfastError as error:
            error.add_note(f"action {_described(action)}")
            return Applied(failed=(ActionFailed(action, error),))
        return Applied()

    async def all(self, actions: list[Action]) -> list[ActionFailed]:
        outcomes = await asyncio.gather(*(self._guarded(a, self._one) for a in actions))
        return [o for o in outcomes if o is not None]

    async def _guarded(
        self, action: Action, call: Callable[[Action], Awaitable[None]]
    ) -> ActionFailed | None:
        async with self._slots:
            try:
                await call(action)
            except Exception as error:
                error.add_note(f"action {_described(action)}")  # the error alone names no object
                if isinstance(error, HoldfastError):
                    return ActionFailed(action, error)
                raise
        return None

    async def _one(self, action: Action) -> None:
        effects, job = self._effects, self._job
        match action:
            case BeginRound() | ChooseRestorePoint() | CommitPersisted() | WriteStatus():
                await effects.write_job_status(job, action.resource_version, action.status)
            case CreateService():
                network = self._sidecar.network
                policy = None if network is None else render_network_policy(job, network)
                await effects.create_service(job, render_service(job), policy)
            case SetDisruptionBudget():
                body = render_disruption_budget(job, action.workers)
                await effects.set_disruption_budget(job, body, action.workers)
            case CreateCertificates():
                await effects.create_certificates(job, action)
            case CreatePod():
                body = render_pod(
                    job,
                    action.worker,
                    action.birth_round,
                    self._observed.store,
                    self._sidecar,
                    action.avoided_nodes,
                    action.failed_nodes,
                    action.group,
                    action.certificates,
                )
                await effects.create_pod(job, body)
            case CreatePlaceholder():
                body = render_placeholder(job, action.worker, self._observed.store, self._sidecar)
                await effects.create_pod(job, body)
            case DeletePod():
                await effects.delete_pod(job, action.name, action.uid, force=action.force)
            case ReleasePod():
                await effects.release_pod(job, action)
            case DeleteCertificates():
                await effects.delete_certificates(job, action.secret)
            case DeleteJob():
                await effects.delete_job(job)
            case SealWorker():
                await effects.seal(job, action)
            case FinishInterruptedCommit():
                await effects.finish_commit(job, action)
            case SendRound():
                await effects.send_round(job, action)
            case RequestSave():
                await effects.request_save(job, action)
            case RequestStop():
                await effects.request_stop(job, action)
            case CreateCheckpointObject():
                await effects.create_checkpoint(job, render_checkpoint(job, action), action.status)
            case UpdateCheckpoint():
                await effects.update_checkpoint(job, action)
            case PruneObject():
                await self._prune(action)
            case DeleteCheckpoint():
                await effects.delete_checkpoint(job, action.name, action.uid)
            case EmitEvent():
                await effects.emit(job, action)
            case _:
                assert_never(action)

    async def _prune(self, action: PruneObject) -> None:
        """Delete the data, and delete the object only when the store has confirmed that its data is gone."""
        reply = await self._effects.prune(self._job, action)
        wanted = (action.checkpoint.step, action.checkpoint.round)
        if any((d.step, d.round) == wanted for d in reply.deleted):
            await self._effects.delete_checkpoint(self._job, action.name, action.uid)
