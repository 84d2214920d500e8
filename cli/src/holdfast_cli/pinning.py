"""`pin` and `unpin`: keep a checkpoint whatever a retention says, and release it again."""

from __future__ import annotations

import click

from holdfast.reading.opening import open_checkpoints
from holdfast_cli.cluster import ClusterClient
from holdfast_cli.errors import StateError, UsageError
from holdfast_cli.gangs import parsed
from holdfast_cli.options import Session, common_options, target_argument
from holdfast_cli.output import Result
from holdfast_cli.places import place_of
from holdfast_cli.targets import ClusterTarget, FolderTarget, Kind, Target
from holdfast_core.api import Checkpoint, CheckpointPhase


@click.command(
    "pin",
    help="Keep a checkpoint: no retention, no prune and no full folder deletes it until it is unpinned. In a "
    "folder the pin also holds the copy in the store to which the folder uploads.",
)
@target_argument(Kind.CHECKPOINT, Kind.JOB)
@common_options
@click.pass_obj
def command(session: Session, target: Target) -> Result:
    return set_pin(session, target, pin=True)


@click.command("unpin", help="Release a pinned checkpoint. The next retention may delete it.")
@target_argument(Kind.CHECKPOINT, Kind.JOB)
@common_options
@click.pass_obj
def unpin(session: Session, target: Target) -> Result:
    return set_pin(session, target, pin=False)


def set_pin(session: Session, target: Target, *, pin: bool) -> Result:
    """Pin or release what a target names. Raises UsageError where it names no one checkpoint."""
    verb = "pin" if pin else "unpin"
    if isinstance(target, ClusterTarget):
        return pin_object(session.cluster(target), target, pin=pin)
    if target.step is None:
        raise UsageError(
            f"{verb}: expected {target}@STEP; `holdfast list {target}` shows the steps"
        )
    with open_checkpoints(place_of(session, target).place) as found:
        if pin:
            found.pin(target.step)
        else:
            found.unpin(target.step)
    hint = (
        "" if pin or not isinstance(target, FolderTarget) else ": the next retention may delete it"
    )
    document = {"target": str(target), "pinned": pin}
    return Result(document, [f"{target} is {'pinned' if pin else f'not pinned{hint}'}"])


def pin_object(cluster: ClusterClient, target: ClusterTarget, *, pin: bool) -> Result:
    """Set spec.pin of a Checkpoint. Raises StateError for one that is being deleted or was never saved."""
    verb = "pin" if pin else "unpin"
    if target.kind is Kind.JOB and target.step is None:
        raise UsageError(f"{verb}: expected {target}@STEP, or checkpoint/NAME")
    item = parsed(Checkpoint, cluster.checkpoint_of(target))
    name, phase = item.name, item.status.phase
    if target.kind is None and target.step is None and name != target.name:
        raise UsageError(f"{verb}: {target} is a job: expected {target}@STEP, or checkpoint/NAME")
    if item.deleting or phase is CheckpointPhase.DELETING:
        raise StateError(f"checkpoint {name} is being deleted, and cannot be kept any more")
    if phase is CheckpointPhase.FAILED:
        raise StateError(
            f"checkpoint {name} was never saved, so there is nothing to {verb}: `kubectl holdfast show "
            f"checkpoint/{name} -n {item.namespace}` says why"
        )
    if item.spec.pin is not pin:
        cluster.patch("checkpoints", name, item.uid, {"spec": {"pin": pin}})
    hint = "" if pin else ": the retention of the job may delete it"
    document = {"target": f"checkpoint/{name}", "pinned": pin}
    return Result(document, [f"checkpoint {name} is {'pinned' if pin else f'not pinned{hint}'}"])
