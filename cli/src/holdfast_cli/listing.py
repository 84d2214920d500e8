"""`list`: the checkpoints of a job, of a namespace, of a folder or of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from holdfast_cli.errors import UsageError
from holdfast_cli.options import (
    Session,
    common_options,
    everywhere_option,
    target_argument,
)
from holdfast_cli.output import Column, Result, Table
from holdfast_cli.places import place_of
from holdfast_cli.targets import ClusterTarget, Kind, PlaceTarget, Target, named, without_step
from holdfast_cli.views import checkpoints_table

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient


@click.command("list", help="List the checkpoints of TARGET, or those of all jobs.")
@target_argument(Kind.JOB, required=False)
@everywhere_option
@common_options
@click.pass_obj
def command(session: Session, target: Target | None) -> Result:
    if target is not None and not isinstance(target, ClusterTarget):
        return list_place(place_of(session, target))
    name = None
    if target is not None:
        target = without_step(named(target, "list", (Kind.JOB,), ""), "list")
        name = target.name
        if session.everywhere:
            raise UsageError("--all-namespaces lists everything: omit it, or omit the job")
    return list_objects(session.cluster(target), name)


def list_objects(cluster: ClusterClient, job: str | None) -> Result:
    """Return the Checkpoint objects of a job, or all."""
    items = [
        item
        for item in cluster.items("checkpoints")
        if job in (None, item["spec"].get("jobRef", {}).get("name"))
    ]
    return Result(items, [checkpoints_table(items, everywhere=cluster.everywhere)])


def list_place(target: PlaceTarget) -> Result:
    """Return the committed checkpoints of a folder or a store, the oldest first."""
    from holdfast.reading.opening import open_checkpoints

    with open_checkpoints(target.place) as opened:
        found = opened.list()
    columns = [Column("STEP", right=True), Column("ROUND", right=True)]
    document = [{"step": one.step, "round": one.round} for one in found]
    return Result(document, [Table(columns, [(one.step, one.round) for one in found])])
