"""Whether a spec can be run, and which pods lack an edit of it. Pure.

Problems that the rules of the CRD cannot express prevent the first round. They do not stop a job that runs.
Condition RemoteTierHealthy reports a problem of its store.

Edits of the spec of a gang that runs: pods that were created from an earlier spec are replaced if no rank ran
in them. Condition SpecApplied reports the others.

A CheckpointAdoption has condition Adopted besides, which says what the controller of its pods costs (ADR
0015).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast_core.api import (
    Checkpoint,
    CheckpointAdoption,
    CheckpointAdoptionStatus,
    CheckpointStore,
    JobCondition,
    TrainingJobStatus,
    changed,
    missing_grant,
)
from holdfast_core.contract import TRAINER_CONTAINER
from holdfast_core.ids import Worker
from holdfast_core.names import first_of
from holdfast_core.sources import NoSource, began_from, describe, find_source
from holdfast_operator.decide.facts import readable
from holdfast_operator.decide.facts.world import MemberState, Note, World
from holdfast_operator.model.actions import Action, normal
from holdfast_operator.model.job import OwnerView, place_of
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.render import injection
from holdfast_operator.model.template import (
    RESTORE_FROM,
    TEMPLATE,
    find_breach,
    find_misfit,
    items_of,
    part_digests,
)

# --------------------------------------------------------------------------- problems


def find_problem(world: World) -> Note | None:
    """Return the first problem, or None if the operator can run the job.

    STORE_NOT_PROBED ends without a change by a user: the job waits for the probe.
    """
    return (
        template_problem(world.spec.template)
        or _unknown_field(world.spec.template)
        or _refused_template(world)
        or _name_problem(world)
        or store_problem(world)
        or _restore_from_problem(world)
    )


def template_problem(template: Mapping[str, Any] | None) -> Note | None:
    """Return the first problem of spec.template that prevents a worker pod, or None.

    A gang without a template has no such problem, because another controller creates its pods.
    """
    if template is None:
        return None
    misfit = find_misfit(template)
    if misfit is not None:
        return _invalid(str(misfit))
    containers = [c for _, c in items_of(template.get("spec"), "containers", "spec.template.spec")]
    trainers = [c for c in containers if c.get("name") == TRAINER_CONTAINER]
    if len(trainers) != 1:
        names = ", ".join(str(c.get("name")) for c in containers) or "none"
        return _invalid(
            f"spec.template has {len(trainers)} containers named {TRAINER_CONTAINER}, expected "
            f"exactly one (found: {names}): give this name to the container that runs the training"
        )
    breach = find_breach(template)
    if breach is not None:
        return _invalid(str(breach))
    command = _text(trainers[0].get("command"))
    if command and not uses_launcher(command + _text(trainers[0].get("args"))):
        return _invalid(
            "the command of container trainer does not start its processes with the launcher, so "
            f"a lost rank could not be restarted: found {' '.join(command)[:200]!r}, put "
            "`holdfast run --` before it"
        )
    return None


def _unknown_field(template: Mapping[str, Any] | None) -> Note | None:
    """Return the first field beside metadata and spec. No pod would get it, and no server would refuse it."""
    unknown = sorted((template or {}).keys() - {"metadata", "spec"})
    if not unknown:
        return None
    return _invalid(
        f"spec.template.{unknown[0]}: unknown field, expected metadata and spec: fields of a pod, such as "
        "tolerations, belong below spec.template.spec"
    )


def uses_launcher(text: Sequence[str]) -> bool:
    """Return whether a command contains `holdfast run` or `python -m holdfast.run`, also in a shell line."""
    for index, word in enumerate(text):
        if "holdfast.run" in word or "holdfast run" in word:
            return True
        is_launcher = word == "holdfast" or word.endswith("/holdfast")
        if is_launcher and index + 1 < len(text) and text[index + 1] == "run":
            return True
    return False


def _refused_template(world: World) -> Note | None:
    text = world.observed.template_refusal
    if text is None:
        return None
    return _invalid(f"the API server refuses the pod of spec.template: {text}")


def _name_problem(world: World) -> Note | None:
    """Return the problem of a gang whose Checkpoints could be taken for those of another one of its name."""
    other, job = world.observed.same_name, world.job
    if other is None:
        return None
    text = (
        f"namespace {job.namespace} has a {other.kind} of the same name, {job.name}, and Checkpoints name "
        f"their job by it: create this {job.KIND} under another name, or delete the {other.kind}"
    )
    return Note(Reason.NAME_TAKEN, text)


def store_problem(world: World) -> Note | None:
    """Return why the store of the job cannot be used, or None. A job without a store has no such problem."""
    name = world.spec.store
    if name is None:
        return None
    store = world.observed.store
    hidden = world.observed.cannot_read(CheckpointStore.KIND, name)
    if hidden is not None:
        return Note(Reason.CANNOT_READ, f"CheckpointStore {name} cannot be read: {hidden.problem}")
    if store is None:
        text = f"CheckpointStore {name} is not in namespace {world.job.namespace}"
        return Note(Reason.STORE_NOT_FOUND, f"{text}: create it, or correct storeRef")
    if store.available is None:
        return Note(Reason.STORE_NOT_PROBED, f"CheckpointStore {name} is being probed")
    if not store.available:
        return Note(Reason.STORE_UNAVAILABLE, f"CheckpointStore {name}: {store.message}")
    return None


def birth_problem(world: World) -> Note | None:
    """Return why no pod of this job may be created now, or None.

    A pod gets the configuration of its store once, when it is created. A pod that is created while the
    CheckpointStore is absent would never upload anything.
    """
    refused = template_problem(world.spec.template)
    if refused is not None:
        return refused
    missing = store_problem(world)
    if missing is None or world.observed.store is not None:
        return None  # the sidecar retries a store that is not reachable now
    return Note(missing.reason, f"{missing.message}; no pod is created without it")


def replacement_problem(world: World) -> Note | None:
    """Return why no pod is deleted to be created again from the present template, or None.

    `World.may_replace_pods` says why the refusal of a dry run counts here and not in `birth_problem`.
    """
    return birth_problem(world) or _refused_template(world)


def _restore_from_problem(world: World) -> Note | None:
    """Return why the job cannot start from spec.restoreFrom, or None."""
    if world.spec.restore_from is None:
        return None
    refused = grant_problem(world) or _other_place(world)
    if refused is not None:
        return refused
    name, foreign = world.spec.source_checkpoint, world.observed.foreign
    hidden = None
    if name is not None and foreign is None:
        hidden = world.observed.cannot_read(Checkpoint.KIND, name)
    if hidden is not None:
        text = f"Checkpoint {name} of spec.restoreFrom cannot be read: {hidden.problem}"
        return Note(Reason.CHECKPOINT_NOT_RESTORABLE, text)
    found = source_of(world)
    if isinstance(found, NoSource):
        known = found.is_known
        reason = Reason.CHECKPOINT_NOT_RESTORABLE if known else Reason.CHECKPOINT_NOT_FOUND
        return Note(reason, found.message)
    if world.spec.store is None:
        text = f"Checkpoint {found.name} of spec.restoreFrom cannot be restored"
        why = "this job has no checkpoint.object.storeRef to read it from"
        return Note(Reason.CHECKPOINT_NOT_RESTORABLE, f"{text}: {why}")
    return None


def source_of(world: World) -> Checkpoint | NoSource:
    """Return the Checkpoint for which spec.restoreFrom stands. The job must have the field."""
    observed, foreign = world.observed, world.observed.foreign
    if foreign is None:
        return find_source(observed.job, observed.checkpoints, observed.source)
    there = () if foreign.checkpoint is None else (foreign.checkpoint,)
    found = find_source(observed.job, there, None)
    if isinstance(found, NoSource) and not there:
        text = f"{found.message}, or the operator does not watch that namespace"
        return replace(found, message=text)
    return found


def grant_problem(world: World) -> Note | None:
    """Return which CheckpointGrant is missing, or None if the job needs none or has it.

    Whether the Checkpoint exists is not said without a grant.
    """
    foreign, name, job = world.observed.foreign, world.spec.source_checkpoint, world.job
    if foreign is None or foreign.granted or name is None:
        return None
    text = (
        f"no CheckpointGrant of namespace {foreign.namespace} lets {job.name} of namespace {job.namespace} "
        f"start from Checkpoint {name}. The job waits for one. An administrator of namespace "
        f"{foreign.namespace} creates it with `kubectl apply -f -`:\n"
    )
    wanted = missing_grant(job.namespace, job.name, foreign.namespace, name)
    return Note(Reason.GRANT_MISSING, text + wanted)


def _other_place(world: World) -> Note | None:
    """Return why the store of the job cannot have a Checkpoint of another namespace, or None.

    Each namespace has keys of its own, so both stores must read the same place.
    """
    foreign, store = world.observed.foreign, world.observed.store
    if foreign is None or store is None or not foreign.places:
        return None
    own = place_of(store.config)
    if own in foreign.places:
        return None
    there = " or ".join(foreign.places[:3])
    text = (
        f"Checkpoint {world.spec.source_checkpoint} of namespace {foreign.namespace} is in {there}, and "
        f"CheckpointStore {store.name} of this job reads {own}: name a CheckpointStore of namespace "
        f"{world.job.namespace} with the same endpoint, bucket and prefix in checkpoint.object.storeRef"
    )
    return Note(Reason.CHECKPOINT_NOT_RESTORABLE, text)


def _invalid(message: str) -> Note:
    return Note(Reason.INVALID_TEMPLATE, message)


def _text(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, Sequence) else []


def accepted(world: World, problem: Note | None) -> TrainingJobStatus:
    """Return the status with condition Accepted: False for a problem, Unknown while the store is probed."""
    note = problem or Note(Reason.ACCEPTED, f"the spec can be run{_beginning(world)}")
    waiting = problem is not None and problem.reason == Reason.STORE_NOT_PROBED
    value = None if waiting else problem is None
    return world.with_condition(world.status, JobCondition.ACCEPTED, value, *note)


def _beginning(world: World) -> str:
    """Return from which checkpoint of another job the gang has begun, as the end of a sentence."""
    spec = world.spec.restore_from
    began = None if spec is None else began_from(world.job)
    if spec is None or began is None or began.base is None:
        return ""
    base = began.base
    asked = f"spec.restoreFrom asks for {describe(spec)}"
    return f". It began from step {base.step} of round {base.round}: {asked}"


# --------------------------------------------------------------------------- edits


def outdated(world: World) -> dict[str, list[MemberState]]:
    """Return the members whose pods have an earlier value, by the path of each part of the spec.

    A pod without the digest of a part, such as one of an earlier release or of another controller, is not
    among them.
    """
    found: dict[str, list[MemberState]] = {}
    present = part_digests(world.job)
    for member in world.members:
        if member.pod is None:
            continue
        for path, digest in member.pod.rendered_from:
            if path in present and present[path] != digest:
                found.setdefault(path, []).append(member)
    return found


def outdated_pods(world: World) -> list[Action]:
    """Return deletes of the pods that have an earlier template and in which no rank ever ran.

    A user has probably corrected the template because of them. A pod of this round that has not started is
    created again in this round, and another one in the next round. A pod whose sidecar may hold the last copy
    of a committed step stays.

    The caller has checked that a pod can be created from the present template.
    """
    if world.state.running:
        return []
    idle = [
        m
        for m in outdated(world).get(TEMPLATE, [])
        if m.pod is not None and m.pod.alive and not m.pod.trainer_ran and not m.node_lost
    ]
    holders = [m.worker for m in idle if not world.awaits_start(m)]
    if holders and not _may_go(world, holders):
        idle = [m for m in idle if world.awaits_start(m)]
    pods = [m.pod for m in idle if m.pod is not None]
    if not pods:
        return []
    names = first_of([p.name for p in pods])
    text = f"spec.template has changed, and no rank ever ran in {names}: created again from the new one"
    deletes = world.deletes(pods, "spec.template has changed")
    return [*deletes, normal(Reason.TEMPLATE_CHANGED, text)]


def _may_go(world: World, workers: list[Worker]) -> bool:
    """Return whether no committed step can be lost with these pods."""
    status = world.status
    if status.step is None and status.last_committed_step is None and status.restore_point:
        point = status.restore_point
        if point.step is None or point.job_uid is not None:
            return True  # the gang has not trained yet
    return readable.answering_can_be_replaced(world, workers)


def with_spec_applied(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with condition SpecApplied. A job that was never edited does not get it."""
    kind = JobCondition.SPEC_APPLIED
    if status.restart_round is None or status.completion_time is not None:
        return status
    found = outdated(world)
    reason, problems = Reason.SPEC_APPLIED, list[str]()
    problem = template_problem(world.spec.template) or _refused_template(world)
    if problem is not None:
        reason = Reason.INVALID_TEMPLATE
        problems.append(
            f"no pod can be created from the present template: {problem.message}. Correct spec.template "
            "before you suspend the job or delete a pod, because no pod would come back"
        )
    elif found:
        reason = Reason.PODS_DIFFER if _differ(world, found) else Reason.APPLIES_LATER
    problems.extend(_moments(world, found, replaceable=problem is None))
    if not problems and status.condition(kind) is None:
        return status
    text = ". ".join(problems) or "the gang has the present spec"
    return world.with_condition(status, kind, not problems, reason, text)


def _differ(world: World, found: Mapping[str, list[MemberState]]) -> bool:
    """Return whether some pods have an earlier template and others the present one."""
    return 0 < len(found.get(TEMPLATE, ())) < len(world.members)


def _moments(
    world: World, found: Mapping[str, list[MemberState]], *, replaceable: bool
) -> list[str]:
    """Return which pods have earlier values, and when they get the present ones.

    Args:
        replaceable: Whether pods can be created from the present template.
    """
    total, problems = len(world.members), list[str]()
    parts = {path: members for path, members in found.items() if path != RESTORE_FROM}
    named = [
        f"{path} ({len(members)} of {total} workers: {first_of([m.worker for m in members])})"
        for path, members in parts.items()
    ]
    if named:
        problems.append(f"pods have earlier values of {', '.join(named)}")
        if _differ(world, found):
            problems.append("The gang runs with different templates, images included")
        problems.append("A pod gets the present values when it is replaced")
        if replaceable:
            problems.append(_how_to_replace(world))
    if RESTORE_FROM in found:
        problems.append(
            f"{RESTORE_FROM} has changed: it is read only before the first checkpoint of a job, so this job "
            "does not read it again. Create another job to restore from it"
        )
    return problems


def _how_to_replace(world: World) -> str:
    if world.spec.store is None:
        return (
            "To replace all pods, delete one after the other, each when all ranks train again: without an "
            "object store the job cannot be suspended"
        )
    return "To replace all pods, set spec.suspend to true, and to false when the job is suspended"


# --------------------------------------------------------------------------- adoption


def refusal(world: World) -> str | None:
    """Return why the pods may not become workers, or None.

    If all of them are deleted after one has failed, no copy would be left of any step.
    """
    owner = world.observed.owner
    if owner is None or not owner.loses_all_copies or world.spec.store is not None:
        return None
    return (
        f"{owner.cost}. This CheckpointAdoption has no object store, so each failure would lose all work: "
        f"set checkpoint.object in a new CheckpointAdoption, or {owner.remedy}"
    )


def with_adoption(status: TrainingJobStatus, world: World) -> TrainingJobStatus:
    """Return the status with what pods get at admission, and with condition Adopted."""
    if not isinstance(world.job, CheckpointAdoption) or not isinstance(
        status, CheckpointAdoptionStatus
    ):
        return status
    status = _with_injection(status, world, world.job)
    owner, kind = world.observed.owner, JobCondition.ADOPTED
    if owner is None:
        return status
    refused = refusal(world)
    reason = Reason.PODS_ADOPTED if refused is None else Reason.LOCAL_COPIES_WOULD_BE_LOST
    text = owner.cost if refused is None else refused
    return world.with_condition(status, kind, refused is None, reason, text)


def _with_injection(
    status: CheckpointAdoptionStatus, world: World, job: CheckpointAdoption
) -> CheckpointAdoptionStatus:
    """Return the status with `injection` as the spec and the store are now.

    It is absent before the first round, and after the end of the gang: pods that come then are refused.
    """
    over = status.is_true(JobCondition.COMPLETE) or status.is_true(JobCondition.FAILED)
    if status.restart_round is None or over:
        return changed(status, injection=None)
    if job.spec.store is not None and world.observed.store is None:
        return status  # a pod without the store's configuration would never upload anything
    return changed(status, injection=injection(job, world.observed.store))


_DEFAULT_BACKOFF_LIMIT = 6
"""spec.backoffLimit of a Job that does not set it."""
NO_OWNER = OwnerView(
    "no controller creates a lost pod of this gang again: create it yourself, or let a Job create it",
    loses_all_copies=False,
)
_LOST = "every copy in memory and on nodes is lost, and only a step in the object store is left"


def other_owner(kind: str, name: str) -> OwnerView:
    text = (
        f"{kind} {name} creates the pods, and Holdfast does not know its restart policy: if it deletes the "
        "remaining pods after a failure, only a step in the object store is left"
    )
    return OwnerView(text, loses_all_copies=False)


def owner_of_job(raw: Mapping[str, Any]) -> OwnerView:
    """Return what the restart policy of a Job of batch/v1 costs."""
    meta, spec = raw["metadata"], raw.get("spec") or {}
    limit = spec.get("backoffLimit")
    limit = _DEFAULT_BACKOFF_LIMIT if limit is None else int(limit)
    job = f"Job {meta['name']} (backoffLimit {limit})"
    parent = next((r for r in meta.get("ownerReferences") or [] if r.get("controller")), None)
    if spec.get("backoffLimitPerIndex") is not None:
        return OwnerView(f"{job} creates a lost pod again, index by index", loses_all_copies=False)
    if limit == 0:
        end = "fails, which deletes the remaining pods"
        if parent is not None:
            end = f"fails, and {parent['kind']} {parent['name']} deletes all pods and creates them again"
        return OwnerView(
            f"when one pod fails, {job} {end}: {_LOST}",
            loses_all_copies=True,
            remedy="set a backoffLimit above 0 on the Jobs of the pods",
        )
    text = (
        f"{job} creates a lost pod again. After {limit} failed pods all pods are deleted, and only a step in "
        "the object store is left"
    )
    return OwnerView(text, loses_all_copies=False)
