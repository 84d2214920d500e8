"""Find problems of a spec that the rules of the CRD cannot express. They prevent the first round.

They do not stop a job that runs. Condition RemoteTierHealthy reports a problem of its store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast_core.api import Checkpoint, CheckpointPhase, CheckpointStore
from holdfast_core.contract import TRAINER_CONTAINER
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.report.status import Note
from holdfast_operator.model.reasons import Reason
from holdfast_operator.model.template.isolation import find_breach, items_of
from holdfast_operator.model.template.shape import find_misfit


def find_problem(world: World) -> Note | None:
    """Return the first problem, or None if the operator can run the job.

    STORE_NOT_PROBED ends without a change by a user: the job waits for the probe.
    """
    return (
        template_problem(world.observed.job.spec.template)
        or _unknown_field(world.observed.job.spec.template)
        or _refused_template(world)
        or _name_problem(world)
        or _store_problem(world)
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
    other, job = world.observed.same_name, world.observed.job
    if other is None:
        return None
    text = (
        f"namespace {job.namespace} has a {other.kind} of the same name, {job.name}, and Checkpoints name "
        f"their job by it: create this {job.KIND} under another name, or delete the {other.kind}"
    )
    return Note(Reason.NAME_TAKEN, text)


def _store_problem(world: World) -> Note | None:
    name = world.observed.job.spec.store
    if name is None:
        return None
    store = world.observed.store
    hidden = world.observed.cannot_read(CheckpointStore.KIND, name)
    if hidden is not None:
        return Note(Reason.CANNOT_READ, f"CheckpointStore {name} cannot be read: {hidden.problem}")
    if store is None:
        text = f"CheckpointStore {name} is not in namespace {world.observed.job.namespace}"
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
    refused = template_problem(world.observed.job.spec.template)
    if refused is not None:
        return refused
    missing = _store_problem(world)
    if missing is None or world.observed.store is not None:
        return None  # the sidecar retries a store that is not reachable now
    return Note(missing.reason, f"{missing.message}; no pod is created without it")


def replacement_problem(world: World) -> Note | None:
    """Return why no pod is deleted to be created again from the present template, or None.

    `World.may_replace_pods` says why the refusal of a dry run counts here and not in `birth_problem`.
    """
    return birth_problem(world) or _refused_template(world)


def _restore_from_problem(world: World) -> Note | None:
    job = world.observed.job
    name = job.spec.source_checkpoint
    if name is None:
        return None
    source = next((c for c in world.observed.checkpoints if c.name == name), None)
    hidden = world.observed.cannot_read(Checkpoint.KIND, name)
    if hidden is not None:
        text = f"Checkpoint {name} of spec.restoreFrom cannot be read: {hidden.problem}"
        return Note(Reason.CHECKPOINT_NOT_RESTORABLE, text)
    if source is None:
        text = f"spec.restoreFrom names Checkpoint {name}, which is not in namespace"
        return Note(Reason.CHECKPOINT_NOT_FOUND, f"{text} {job.namespace}")
    problem = None
    if job.spec.store is None:
        problem = "this job has no checkpoint.object.storeRef to read it from"
    elif source.deleting:
        problem = "it is being deleted"
    elif (
        source.status.phase is not CheckpointPhase.COMMITTED
        or source.status.manifest is None
        or source.status.job_uid is None
    ):
        problem = f"its phase is {source.status.phase or 'unknown'}, expected Committed"
    elif not source.persisted:
        problem = "it is not in an object store"
    if problem is not None:
        text = f"Checkpoint {name} of spec.restoreFrom cannot be restored: {problem}"
        return Note(Reason.CHECKPOINT_NOT_RESTORABLE, text)
    return None


def _invalid(message: str) -> Note:
    return Note(Reason.INVALID_TEMPLATE, message)


def _text(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, Sequence) else []
