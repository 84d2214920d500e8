"""`restore` and `restart`: roll a job back to one of its checkpoints, fork it, or start it over.

A rollback only sets spec.rollback. The operator carries the order out, and refuses it for the same reasons. A
fork creates a job whose spec.restoreFrom names the checkpoint, and leaves the other job as it is.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import NotFound, StateError, UsageError
from holdfast_cli.gangs import KINDS, obstacle_to_order, obstacle_to_start_over, parsed
from holdfast_cli.options import Session, common_options, target_argument, yes_option
from holdfast_cli.output import Result
from holdfast_cli.pruning import parse_gang
from holdfast_cli.question import confirm
from holdfast_cli.targets import Kind, Target, named, without_step
from holdfast_core.api import Checkpoint, Gang, JobCondition, NameRef, TrainingJob, changed
from holdfast_core.api.training_job import RestoreFromSpec
from holdfast_core.ids import Step
from holdfast_core.rollback import find_unfit
from holdfast_core.sources import NoSource, find_source

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

INSTEAD = "A script restores from a folder or a store when it starts (Checkpointer.restore)"


def order_rollback(
    cluster: ClusterClient, gang: dict[str, Any], step: Step | None
) -> dict[str, Any]:
    """Order the gang to train again from a step, or to start over if that is None.

    The order names the newest round of the lineage. It has no effect if another round has chosen its restore
    point since `gang` was read, so that it never gives up what a person has not seen. Returns the patch.
    """
    order = {"round": gang["status"]["lineage"][-1]["round"], "step": step}
    patch = {"spec": {"rollback": order}}
    metadata = gang["metadata"]
    cluster.patch(KINDS[gang["kind"]], metadata["name"], metadata["uid"], patch)
    return patch


@click.command(
    "restore",
    help="Show what a rollback of a job to one of its checkpoints gives up, and begin it after a question. "
    "The gang trains again from that step, in its present pods. With --to-new-job the job stays as it is, "
    "and a new job with its spec starts from the checkpoint, which is the newest one without @STEP.",
)
@target_argument(Kind.JOB)
@click.option("--to-new-job", metavar="NAME", help="Create this job with the spec of the job.")
@click.option("--workers", type=click.IntRange(min=1), metavar="M", help="Workers of the new job.")
@click.option("--dry-run", is_flag=True, help="Print the new job and create nothing.")
@yes_option
@common_options
@click.pass_obj
def command(
    session: Session,
    target: Target,
    to_new_job: str | None,
    workers: int | None,
    dry_run: bool,
    yes: bool,
) -> Result:
    job = named(target, "restore", (Kind.JOB,), INSTEAD)
    step = None if job.step is None else Step(job.step)
    if to_new_job is not None:
        return fork(
            session.cluster(), job.name, step, to_new_job, workers, dry_run=dry_run, yes=yes
        )
    if workers is not None or dry_run:
        raise UsageError(
            "--workers and --dry-run belong to --to-new-job: omit them, or name the new job"
        )
    if step is None:
        raise UsageError(
            f"restore needs a step to go back to, {job}@STEP, or --to-new-job NAME: "
            f"`{session.program} list {job}` lists the steps"
        )
    return roll_back(session.cluster(), job.name, step, yes=yes)


def roll_back(cluster: ClusterClient, job: str, step: Step, *, yes: bool) -> Result:
    """Roll a job back to a step, after a question."""
    raw = cluster.gang(job)
    obstacle = obstacle_to_order(raw)
    if obstacle is not None:
        raise StateError(obstacle)
    gang = parse_gang(raw)
    unfit = find_unfit(gang, own_checkpoints(cluster, gang), step, newest_on_nodes(gang))
    if unfit is not None:
        raise (StateError if unfit.is_known else NotFound)(unfit.message)
    plan = describe_rollback(gang, step)
    if not yes:
        confirm(
            f"{plan}\nRoll {gang.name} back?",
            refused=f"{gang.name} was not rolled back",
            no_terminal=f"{plan}\nWithout a terminal, --yes confirms it",
        )
    order = order_rollback(cluster, raw, step)
    return Result(
        order,
        [
            f"{gang.name} goes back to step {step}; condition RolledBack of the job says how far it is"
        ],
    )


def fork(
    cluster: ClusterClient,
    job: str,
    step: Step | None,
    name: str,
    workers: int | None,
    *,
    dry_run: bool,
    yes: bool,
) -> Result:
    """Create a job that starts from a step of another one, or from its newest, after a question."""
    raw = cluster.gang(job)
    gang = parse_gang(raw)
    checkpoint = find_fork_point(gang, own_checkpoints(cluster, gang), step)
    body = forked(raw, name, checkpoint, workers)
    if dry_run:
        return Result(body, [json.dumps(body, indent=1)])
    plan = (
        f"Job {name} gets the spec of {gang.name} with {body['spec']['workers']} workers, and starts from "
        f"step {checkpoint.spec.step} of round {checkpoint.status.round} (Checkpoint {checkpoint.name}). "
        f"{gang.name} stays as it is."
    )
    if not yes:
        confirm(
            f"{plan}\nCreate {name}?",
            refused=f"{name} was not created",
            no_terminal=f"{plan}\nWithout a terminal, --yes confirms it",
        )
    created = cluster.create(TrainingJob.PLURAL, body)
    return Result(created, [f"{name} created; kubectl holdfast status {name} shows it"])


@click.command(
    "restart", help="Start a job over that has lost all of its checkpoints and waits for that."
)
@target_argument(Kind.JOB)
@click.option(
    "--from-start",
    is_flag=True,
    required=True,
    help="Train from spec.restoreFrom, or from step 0, and give up what was trained since.",
)
@yes_option
@common_options
@click.pass_obj
def restart(session: Session, target: Target, from_start: bool, yes: bool) -> Result:
    job = without_step(named(target, "restart", (Kind.JOB,), INSTEAD), "restart").name
    if not from_start:
        raise UsageError("restart needs --from-start")
    return start_over(session.cluster(), job, yes=yes)


def start_over(cluster: ClusterClient, job: str, *, yes: bool) -> Result:
    """Start a job over, after a question."""
    gang = cluster.gang(job)
    obstacle = obstacle_to_start_over(gang)
    if obstacle is not None:
        raise StateError(obstacle)
    lost = next(
        c["message"] for c in gang["status"]["conditions"] if c["type"] == "CheckpointsLost"
    )
    if not yes:
        confirm(
            f"{lost}\nStart {job} over?",
            refused=f"{job} was not started over",
            no_terminal=f"{lost}. Without a terminal, --yes confirms it",
        )
    order = order_rollback(cluster, gang, None)
    return Result(order, [f"{job} starts over; kubectl holdfast status {job} shows it"])


def find_fork_point(gang: Gang, checkpoints: Sequence[Checkpoint], step: Step | None) -> Checkpoint:
    """Return the Checkpoint from which a fork starts: that of the step, or the newest one.

    Raises:
        NotFound: There is none.
        StateError: It cannot be restored, or the gang is no TrainingJob with a store.
    """
    if not isinstance(gang, TrainingJob):
        raise StateError(
            f"the pods of {gang.name} belong to another controller: copy its object there, and a "
            "CheckpointAdoption with spec.restoreFrom"
        )
    if gang.spec.store is None:
        raise StateError(
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
        text = found.message.removeprefix("spec.restoreFrom asks for ")
        raise (StateError if found.is_known else NotFound)(text)
    return found


def forked(
    raw: dict[str, Any], name: str, checkpoint: Checkpoint, workers: int | None
) -> dict[str, Any]:
    """Return the new TrainingJob. It keeps only the labels of Kueue, because a queue is one.

    A GitOps tool may track its objects by a label, and delete an unknown object that has it.
    Orders and steps of the old job say nothing about the new one.
    """
    meta, spec = raw["metadata"], copy.deepcopy(raw["spec"])
    for field in ("rollback", "suspend"):
        spec.pop(field, None)
    spec.get("failurePolicy", {}).pop("releasedSteps", None)
    spec["restoreFrom"] = {"checkpointRef": {"name": checkpoint.name}}
    if workers is not None:
        spec["workers"] = workers
    labels = {k: v for k, v in (meta.get("labels") or {}).items() if "kueue.x-k8s.io/" in k}
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
    return [parsed(Checkpoint, raw) for raw in found]


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
