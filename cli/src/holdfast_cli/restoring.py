"""`kubectl holdfast restore`: roll a job back to one of its checkpoints, or fork it.

A rollback only sets spec.rollback. The operator carries the order out, and refuses it for the same reasons. A
fork creates a job whose spec.restoreFrom names the checkpoint, and leaves the other job as it is.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from typing import Any

from holdfast_cli.cluster import ClusterClient, ClusterError
from holdfast_cli.gangs import KINDS, obstacle_to_order
from holdfast_cli.pruning import parse_gang
from holdfast_cli.question import confirm
from holdfast_core.api import Checkpoint, Gang, JobCondition, NameRef, TrainingJob, changed
from holdfast_core.api.training_job import RestoreFromSpec
from holdfast_core.ids import Step
from holdfast_core.rollback import find_unfit
from holdfast_core.sources import NoSource, find_source


def order_rollback(cluster: ClusterClient, gang: dict[str, Any], step: Step | None) -> None:
    """Order the gang to train again from a step, or to start over if that is None.

    The order names the newest round of the lineage. It has no effect if another round has chosen its restore
    point since `gang` was read, so that it never gives up what a person has not seen.
    """
    order = {"round": gang["status"]["lineage"][-1]["round"], "step": step}
    cluster.patch(KINDS[gang["kind"]], gang["metadata"]["name"], {"spec": {"rollback": order}})


def restore(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    """Roll a job back to a step, or create a job that starts from it, after a question."""
    raw = cluster.gang(arguments.job)
    if arguments.to_new_job is not None:
        _fork(cluster, raw, arguments)
        return
    step = Step(arguments.step)
    obstacle = obstacle_to_order(raw)
    if obstacle is not None:
        raise ClusterError(obstacle)
    gang = parse_gang(raw)
    unfit = find_unfit(gang, own_checkpoints(cluster, gang), step, newest_on_nodes(gang))
    if unfit is not None:
        raise ClusterError(unfit.message)
    plan = describe_rollback(gang, step)
    if not arguments.yes:
        confirm(
            f"{plan}\nRoll {gang.name} back?",
            refused=f"{gang.name} was not rolled back",
            no_terminal=f"{plan}\nWithout a terminal, --yes confirms it",
        )
    order_rollback(cluster, raw, step)
    print(
        f"{gang.name} goes back to step {step}; condition RolledBack of the job says how far it is"
    )


def _fork(cluster: ClusterClient, raw: dict[str, Any], arguments: argparse.Namespace) -> None:
    gang, name = parse_gang(raw), arguments.to_new_job
    step = None if arguments.step is None else Step(arguments.step)
    checkpoint = find_fork_point(gang, own_checkpoints(cluster, gang), step)
    body = forked(raw, name, checkpoint, arguments.workers)
    if arguments.dry_run:
        print(json.dumps(body, indent=1))
        return
    plan = (
        f"Job {name} gets the spec of {gang.name} with {body['spec']['workers']} workers, and starts from "
        f"step {checkpoint.spec.step} of round {checkpoint.status.round} (Checkpoint {checkpoint.name}). "
        f"{gang.name} stays as it is."
    )
    if not arguments.yes:
        confirm(
            f"{plan}\nCreate {name}?",
            refused=f"{name} was not created",
            no_terminal=f"{plan}\nWithout a terminal, --yes confirms it",
        )
    cluster.create(TrainingJob.PLURAL, body)
    print(f"{name} created; kubectl holdfast status {name} shows it")


def find_fork_point(gang: Gang, checkpoints: Sequence[Checkpoint], step: Step | None) -> Checkpoint:
    """Return the Checkpoint from which a fork starts: that of the step, or the newest one.

    Raises:
        ClusterError: There is none, it cannot be restored, or the gang is no TrainingJob with a store.
    """
    if not isinstance(gang, TrainingJob):
        raise ClusterError(
            f"the pods of {gang.name} belong to another controller: copy its object there, and a "
            "CheckpointAdoption with spec.restoreFrom"
        )
    if gang.spec.store is None:
        raise ClusterError(
            f"{gang.name} has no object store, from which another job could read: set "
            "checkpoint.object, and save again"
        )
    source = RestoreFromSpec(
        job_ref=NameRef(name=gang.name), step=step, latest=True if step is None else None
    )
    fork = TrainingJob(
        metadata=changed(gang.metadata, uid=""), spec=changed(gang.spec, restore_from=source)
    )
    found = find_source(fork, checkpoints, gang)
    if isinstance(found, NoSource):
        raise ClusterError(found.message.removeprefix("spec.restoreFrom asks for "))
    return found


def forked(
    raw: dict[str, Any], name: str, checkpoint: Checkpoint, workers: int | None
) -> dict[str, Any]:
    """Return the new TrainingJob. Labels are copied, because a queue is one.

    Orders and steps of the old job say nothing about the new one.
    """
    meta, spec = raw["metadata"], copy.deepcopy(raw["spec"])
    for field in ("rollback", "suspend"):
        spec.pop(field, None)
    spec.get("failurePolicy", {}).pop("releasedSteps", None)
    spec["restoreFrom"] = {"checkpointRef": {"name": checkpoint.name}}
    if workers is not None:
        spec["workers"] = workers
    labels = meta.get("labels")
    return {
        "apiVersion": raw["apiVersion"],
        "kind": raw["kind"],
        "metadata": {"name": name, "namespace": meta["namespace"]}
        | ({"labels": labels} if labels else {}),
        "spec": spec,
    }


def own_checkpoints(cluster: ClusterClient, gang: Gang) -> Sequence[Checkpoint]:
    """Return the Checkpoints that a gang has committed."""
    found = cluster.checkpoints({"metadata": {"uid": gang.metadata.uid}})
    return [Checkpoint.from_dict(raw) for raw in found]


def newest_on_nodes(gang: Gang) -> set[Step]:
    """Return the steps of which the status knows that the nodes of the gang have them."""
    status = gang.status
    found = {status.last_committed_step, status.last_replicated_step}
    return {step for step in found if step is not None}


def describe_rollback(gang: Gang, step: Step) -> str:
    """Return what a rollback to this step gives up."""
    status = gang.status
    at = "no step yet" if status.step is None else f"step {status.step}"
    again = max(0, (status.step or 0) - step)
    lines = [
        f"{gang.name} has trained {at}. It goes back to step {step}, which can be restored.",
        f"{again} steps are trained again. Checkpoints after step {step} stay until the retention takes "
        "them; only a fork can use them then.",
    ]
    suspended = gang.spec.suspend if gang.KIND == "TrainingJob" else False
    if suspended or status.is_true(JobCondition.SUSPENDED):
        lines.append("The job is suspended, and goes back when it resumes.")
    health = status.condition(JobCondition.REMOTE_TIER_HEALTHY)
    if health is not None and health.is_false:
        lines.append(
            f"The object store does not work now, and the rollback may wait: {health.message}"
        )
    return "\n".join(lines)
