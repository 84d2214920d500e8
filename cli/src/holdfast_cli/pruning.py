"""`prune`: show and delete what the retention of a job does not keep in the object store.

The command plans with the operator's own function. It deletes no data itself: it sets deletionPolicy
DeleteData and the finalizer of a Checkpoint, and deletes the object. The operator then has the data deleted.
It keeps the data of a checkpoint that something needs meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import StateError
from holdfast_cli.options import Session, common_options, target_argument, yes_option
from holdfast_cli.output import Column, Format, Result, Table, say, show
from holdfast_cli.question import confirm
from holdfast_cli.targets import Kind, Target, named, without_step
from holdfast_core.api import (
    GANGS,
    Checkpoint,
    DeletionPolicy,
    Gang,
    JobPhase,
    changed,
    size_text,
)
from holdfast_core.clock import SystemClock
from holdfast_core.ids import JobUid
from holdfast_core.retention import EXPLAINED, RetentionReason
from holdfast_core.sources import NoSource, find_source
from holdfast_core.store_retention import cloned_of, plan_store, pruned_by

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

INSTEAD = "A folder is pruned by its Checkpointer (keep_last), after each save"


@dataclass(frozen=True, slots=True)
class Pruned:
    """A Checkpoint object that is to be deleted with its data."""

    checkpoint: Checkpoint
    reason: RetentionReason


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a prune of a job deletes and keeps."""

    prune: tuple[Pruned, ...]
    """The newest step first."""
    kept: Mapping[RetentionReason, int]
    """Number of the checkpoints that stay, by the reason."""

    @property
    def bytes(self) -> int:
        return sum(p.checkpoint.status.bytes or 0 for p in self.prune)

    @property
    def summary(self) -> str:
        """Return one sentence about the whole plan."""
        kept = ", ".join(f"{number} {EXPLAINED[reason]}" for reason, number in self.kept.items())
        number = len(self.prune)
        return (
            f"prune {number} checkpoint{'' if number == 1 else 's'} ({size_text(self.bytes)}), "
            f"keep {sum(self.kept.values())}{f': {kept}' if kept else ''}"
        )


def parse_gang(raw: Mapping[str, Any]) -> Gang:
    kind = next(kind for kind in GANGS if raw["kind"] == kind.KIND)
    return kind.from_dict(raw)


def plan_pruning(
    gang: Gang,
    checkpoints: Sequence[Checkpoint],
    gangs: Sequence[Gang],
    now: datetime,
    *,
    keep_last: int | None = None,
) -> Pruning:
    """Return what the retention of a job prunes from the object store.

    Args:
        checkpoints: The Checkpoints of the namespace, of any job.
        gangs: All gangs of the namespace. Some may start from a checkpoint of the job. The operator also
            knows those of other namespaces that have a CheckpointGrant, and keeps what they need.
        keep_last: Number of newest checkpoints, in place of the job's.
    """
    if keep_last is not None:
        spec = gang.spec
        retention = changed(spec.checkpoint.retention, keep_last=keep_last)
        policy = changed(spec.checkpoint, retention=retention)
        gang = gang.model_copy(update={"spec": changed(spec, checkpoint=policy)})
    uid = JobUid(gang.metadata.uid)
    own = [c for c in checkpoints if c.job == gang.name and c.status.job_uid == uid]
    clones = [g for g in gangs if g.spec.source_namespace(g.namespace) == gang.namespace]
    named = {other.name: other for other in gangs}

    def source_of(other: Gang) -> Checkpoint | NoSource:
        return find_source(other, checkpoints, named.get(other.spec.source_job or ""))

    plan = plan_store(gang, own, cloned_of(clones, uid, source_of), now)
    doomed = [Pruned(checkpoint, reason) for checkpoint, reason in pruned_by(plan, own)]
    doomed.sort(key=lambda p: p.checkpoint.spec.step or 0, reverse=True)
    return Pruning(tuple(doomed), Counter(verdict.reason for verdict in plan.keep))


def pruning_table(pruning: Pruning) -> Table:
    """Return the table of what is pruned."""
    rows = [
        (p.checkpoint.name, size_text(p.checkpoint.status.bytes), EXPLAINED[p.reason])
        for p in pruning.prune
    ]
    return Table(["CHECKPOINT", Column("SIZE", right=True), "REASON"], rows)


def pruning_document(pruning: Pruning) -> dict[str, Any]:
    """Return the plan as JSON: names, bytes and reasons as the API spells them."""
    return {
        "prune": [
            {
                "checkpoint": p.checkpoint.name,
                "bytes": p.checkpoint.status.bytes,
                "reason": p.reason.value,
            }
            for p in pruning.prune
        ],
        "bytes": pruning.bytes,
        "kept": {reason.value: number for reason, number in pruning.kept.items()},
    }


def why_not(gang: Gang) -> str | None:
    """Return why no data of the job can be deleted now, or None.

    Its sidecars delete while it trains, and a pod of the store does it while the job has no gang.
    """
    phase = gang.status.phase
    ended = gang.status.completion_time is not None
    if ended or phase in (JobPhase.RUNNING, JobPhase.SUSPENDED):
        return None
    return (
        f"{gang.name} is {phase or 'not started'}: its data in the object store can be deleted when it "
        "trains, is suspended or is over"
    )


def with_data(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the patch after which a deletion of the object deletes the data as well."""
    added = () if checkpoint.has_finalizer else (Checkpoint.FINALIZER,)
    return {
        "metadata": {
            "finalizers": [*checkpoint.metadata.finalizers, *added],
            "resourceVersion": checkpoint.metadata.resource_version,
        },
        "spec": {"deletionPolicy": DeletionPolicy.DELETE_DATA.value},
    }


@click.command(
    "prune",
    help="Show which checkpoints in the object store the retention of a job does not keep, with their sizes "
    "and the reasons, and delete them after a question.",
)
@target_argument(Kind.JOB)
@click.option("--dry-run", is_flag=True, help="Show the plan and delete nothing.")
@click.option(
    "--keep-last",
    type=click.IntRange(min=2),
    metavar="N",
    help="Keep N newest checkpoints in place of retention.keepLast, at least 2: if the newest one cannot be "
    "read, an older one is needed.",
)
@yes_option
@common_options
@click.pass_obj
def command(
    session: Session, target: Target, dry_run: bool, keep_last: int | None, yes: bool
) -> None:
    job = without_step(named(target, "prune", (Kind.JOB,), INSTEAD), "prune").name
    prune_store(
        session.cluster(), job, session.format, keep_last=keep_last, dry_run=dry_run, yes=yes
    )


def prune_store(
    cluster: ClusterClient,
    job: str,
    format: Format = Format.TABLE,
    *,
    keep_last: int | None = None,
    dry_run: bool = False,
    yes: bool = False,
) -> None:
    """Show the plan of a job, and delete what it names after a question."""
    gang = parse_gang(cluster.gang(job))
    checkpoints = [Checkpoint.from_dict(c) for c in cluster.items("checkpoints")]
    gangs = [parse_gang(raw) for raw in cluster.gangs()]
    pruning = plan_pruning(gang, checkpoints, gangs, SystemClock().utc_now(), keep_last=keep_last)
    table = [pruning_table(pruning)] if pruning.prune else []
    show(Result(pruning_document(pruning), [*table, pruning.summary]), format)
    obstacle = why_not(gang)
    if dry_run or not pruning.prune:
        if obstacle is not None and pruning.prune:
            say(f"note: {obstacle}")
        return
    if obstacle is not None:
        raise StateError(f"nothing was deleted: {obstacle}")
    if not yes:
        confirm(
            f"delete the data of {len(pruning.prune)} checkpoints? It cannot be undone.",
            refused="nothing was deleted",
            no_terminal="nothing was deleted: there is no terminal to ask on. Add --yes to delete what the "
            "plan names, or --dry-run to see the plan only",
        )
    for pruned in pruning.prune:
        item = pruned.checkpoint
        cluster.delete_with("checkpoints", item.name, item.uid, with_data(item))
    say("the operator deletes them now; their objects go when the data is gone")
