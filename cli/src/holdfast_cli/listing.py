"""`list`: the checkpoints of a job, of a namespace, of a folder or of a store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from holdfast_cli.errors import UsageError
from holdfast_cli.options import (
    Session,
    common_options,
    everywhere_option,
    target_argument,
)
from holdfast_cli.output import Column, Format, Result, Table
from holdfast_cli.places import place_of
from holdfast_cli.progress import bytes_text
from holdfast_cli.targets import ClusterTarget, Kind, PlaceTarget, Target, named, without_step
from holdfast_cli.views import checkpoints_table, metrics_text
from holdfast_core.clock import stamp
from holdfast_core.errors import CorruptionError, NotFoundError

if TYPE_CHECKING:
    from holdfast.reading.opening import Checkpoints
    from holdfast.reading.source import ListedCheckpoint
    from holdfast_cli.cluster import ClusterClient

_READERS = 8
"""Checkpoints whose metrics are read at the same time."""


@click.command("list", help="List the checkpoints of TARGET, or those of all jobs.")
@target_argument(Kind.JOB, required=False)
@everywhere_option
@common_options
@click.pass_obj
def command(session: Session, target: Target | None) -> Result:
    if target is not None and not isinstance(target, ClusterTarget):
        return list_place(place_of(session, target), is_wide=session.format is Format.WIDE)
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


def list_place(target: PlaceTarget, *, is_wide: bool) -> Result:
    """Return the committed checkpoints of a folder, or of each training in a store, the oldest first.

    Only the wide table has metrics, because each checkpoint must be read for them.
    """
    from holdfast.reading.opening import open_each

    if target.step is not None:
        raise UsageError(f"list does not take a step: omit @{target.step}, or use show")
    rows, document = [], []
    with open_each(target.place) as trainings:
        has_several = len(trainings) > 1
        for name, found in trainings.items():
            listed = found.listing()
            metrics = _metrics(found, listed) if is_wide else [None] * len(listed)
            for one, values in zip(listed, metrics, strict=True):
                pinned = None if one.pinned is None else "yes" if one.pinned else ""
                rows.append(
                    (
                        *((name,) if has_several else ()),
                        one.step,
                        one.round,
                        bytes_text(one.stored_bytes),
                        one.ranks,
                        stamp(one.saved_at),
                        pinned,
                        values,
                    )
                )
                document.append({"training": name, **asdict(one)})
    columns = [
        *([Column("TRAINING")] if has_several else []),
        Column("STEP", right=True),
        Column("ROUND", right=True),
        Column("SIZE", right=True),
        Column("RANKS", right=True),
        Column("SAVED"),
        Column("PINNED"),
        Column("METRICS", wide=True),
    ]
    if not rows:
        return Result(document, [f"{target.place} has no checkpoints yet"])
    return Result(document, [Table(columns, rows)])


def _metrics(found: Checkpoints, listed: Sequence[ListedCheckpoint]) -> list[str | None]:
    """Return the metrics of each checkpoint as one text."""

    def read(one: ListedCheckpoint) -> str | None:
        try:
            values = found.metrics_of(one)
        except NotFoundError:
            return "deleted meanwhile"
        except CorruptionError:
            return "cannot be read"
        return metrics_text(values)

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, listed))
