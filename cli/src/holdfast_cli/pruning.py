"""`kubectl holdfast prune`: show and delete what the retention of a job does not keep in the object store.

The command plans with the operator's own function. It deletes no data itself: it sets deletionPolicy
DeleteData and the finalizer of a Checkpoint, and deletes the object. The operator then has the data deleted.
It keeps the data of a checkpoint that something needs meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast_cli.cluster import ClusterClient, ClusterError
from holdfast_cli.question import confirm
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


def pruning_view(pruning: Pruning) -> Table:
    """Return the table of what is pruned. It fits into 80 columns; long names are folded."""
    table = Table(box=None, padding=(0, 2, 0, 0), width=80)
    table.add_column("CHECKPOINT", overflow="fold", ratio=1)
    table.add_column("SIZE", no_wrap=True, justify="right")
    table.add_column("REASON", no_wrap=True)
    for pruned in pruning.prune:
        status = pruned.checkpoint.status
        table.add_row(pruned.checkpoint.name, size_text(status.bytes), EXPLAINED[pruned.reason])
    return table


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


def prune_store(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    """Show the plan of a job, and delete what it names after a question."""
    gang = parse_gang(cluster.gang(arguments.job))
    checkpoints = [Checkpoint.from_dict(c) for c in cluster.items("checkpoints")]
    gangs = [parse_gang(raw) for raw in cluster.gangs()]
    now = SystemClock().utc_now()
    pruning = plan_pruning(gang, checkpoints, gangs, now, keep_last=arguments.keep_last)
    if arguments.output == "json":
        print(json.dumps(pruning_document(pruning), indent=1))
    else:
        if pruning.prune:
            Console(width=80).print(pruning_view(pruning))
        print(textwrap.fill(pruning.summary, 80))
    obstacle = why_not(gang)
    if arguments.dry_run or not pruning.prune:
        if obstacle is not None and pruning.prune:
            print(textwrap.fill(f"note: {obstacle}", 80), file=sys.stderr)
        return
    if obstacle is not None:
        raise ClusterError(f"nothing was deleted: {obstacle}")
    if not arguments.yes:
        confirm(
            f"delete the data of {len(pruning.prune)} checkpoints? It cannot be undone.",
            refused="nothing was deleted",
            no_terminal="nothing was deleted: there is no terminal to ask on. Add --yes to delete what the "
            "plan names, or --dry-run to see the plan only",
        )
    for pruned in pruning.prune:
        item = pruned.checkpoint
        cluster.delete_with("checkpoints", item.name, item.uid, with_data(item))
    print("the operator deletes them now; their objects go when the data is gone")
