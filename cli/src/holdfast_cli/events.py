"""`events`: what happened to a job, its pods, its Checkpoints and its store, the newest last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.gangs import store_of
from holdfast_cli.logs import printable
from holdfast_cli.options import Session, common_options, target_argument
from holdfast_cli.output import Cell, Column, Result, Table
from holdfast_cli.targets import Kind, Target, named, without_step
from holdfast_cli.top import age_text
from holdfast_core.clock import SystemClock, parse_stamp
from holdfast_core.ids import JobUid
from holdfast_core.names import JOB_UID_LABEL, job_prefix

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

INSTEAD = "A folder and a store have no Events: `list` and `show` say what they hold"
PAGE = 500
"""Events of one request. A namespace may have some ten thousand."""
MAX_ROWS = 500
"""Rows that are kept, the newest."""
MAX_MESSAGE_CHARACTERS = 2000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class EventRow:
    """Events of one object with the same reason and text."""

    first: datetime
    last: datetime
    count: int
    type: str
    """Normal or Warning."""
    kind: str
    name: str
    reason: str
    message: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.kind, self.name, self.reason, self.message


@dataclass(frozen=True, slots=True)
class Subjects:
    """The objects of one job whose Events are shown."""

    uids: frozenset[str]
    """The job itself, and its pods that exist."""
    prefix: str
    """Start of the names of its pods and Checkpoints, also of those that are gone."""
    store: str | None

    def has(self, event: dict[str, Any]) -> bool:
        about = event.get("involvedObject") or {}
        kind, name = about.get("kind"), str(about.get("name", ""))
        if about.get("uid") in self.uids:
            return True
        if kind == "CheckpointStore":
            return name == self.store
        return name.startswith(self.prefix)


def subjects_of(gang: dict[str, Any], pods: Iterable[dict[str, Any]]) -> Subjects:
    meta = gang["metadata"]
    uids = frozenset({meta["uid"], *(pod["metadata"]["uid"] for pod in pods)})
    return Subjects(uids, f"{job_prefix(meta['name'], JobUid(meta['uid']))}-", store_of(gang))


def row_of(event: dict[str, Any]) -> EventRow:
    """Return an Event of core/v1, which Kubernetes writes in two forms: with a count, or with a series."""
    about, series = event.get("involvedObject") or {}, event.get("series") or {}
    created = event["metadata"].get("creationTimestamp")
    first = event.get("firstTimestamp") or event.get("eventTime") or created
    last = series.get("lastObservedTime") or event.get("lastTimestamp") or first
    return EventRow(
        first=_moment(first),
        last=_moment(last),
        count=max(int(series.get("count") or 1), int(event.get("count") or 1)),
        type=str(event.get("type") or "Normal"),
        kind=str(about.get("kind", "")),
        name=str(about.get("name", "")),
        reason=str(event.get("reason") or ""),
        message=printable(_one_line(str(event.get("message") or "")))[:MAX_MESSAGE_CHARACTERS],
    )


def _moment(text: str | None) -> datetime:
    try:
        return _EPOCH if text is None else parse_stamp(text)
    except ValueError:
        return _EPOCH


def _one_line(text: str) -> str:
    return " ".join(text[: 2 * MAX_MESSAGE_CHARACTERS].split())


def folded(rows: Iterable[EventRow]) -> list[EventRow]:
    """Return the newest rows, the newest last. Those with the same object, reason and text become one."""
    found: dict[tuple[str, str, str, str], EventRow] = {}
    for row in rows:
        before = found.get(row.key)
        if before is not None:
            row = replace(
                row,
                first=min(before.first, row.first),
                last=max(before.last, row.last),
                count=before.count + row.count,
            )
        found[row.key] = row
        if len(found) > 2 * MAX_ROWS:
            found = {row.key: row for row in _newest(found.values())}
    return _newest(found.values())


def _newest(rows: Iterable[EventRow]) -> list[EventRow]:
    return sorted(rows, key=lambda row: (row.last, row.first, row.key))[-MAX_ROWS:]


def read_events(cluster: ClusterClient, name: str) -> list[EventRow]:
    """Read the Events of a job. Raises NotFound if there is no such job."""
    gang = cluster.gang(name)
    subjects = subjects_of(gang, cluster.pods(f"{JOB_UID_LABEL}={gang['metadata']['uid']}"))
    return folded(row_of(event) for event in _pages(cluster) if subjects.has(event))


def _pages(cluster: ClusterClient) -> Iterator[dict[str, Any]]:
    more: dict[str, Any] = {"limit": PAGE}
    while True:
        page = cluster.ask("CoreV1Api.list_namespaced_event", cluster.namespace, **more)
        yield from page["items"]
        more["_continue"] = page["metadata"].get("continue")
        if not more["_continue"]:
            return


def events_result(rows: list[EventRow], name: str, now: datetime) -> Result:
    """Return the table of a job's Events."""
    if not rows:
        text = f"{name} has no Events now: the API server keeps them for about an hour"
        return Result([], [text])
    columns = (
        Column("LAST", right=True),
        Column("FIRST", right=True, wide=True),
        Column("COUNT", right=True),
        Column("TYPE", wide=True),
        Column("OBJECT"),
        Column("REASON"),
        Column("MESSAGE"),
    )
    table = Table(
        columns,
        [
            (
                age_text((now - row.last).total_seconds()),
                age_text((now - row.first).total_seconds()),
                row.count,
                row.type,
                printable(f"{row.kind.lower()}/{row.name}"),
                Cell(printable(row.reason), "yellow" if row.type == "Warning" else ""),
                row.message,
            )
            for row in rows
        ],
    )
    return Result(rows, [table])


@click.command(
    "events",
    help="Show the Events of a job, its pods, its Checkpoints and its store, the newest last. Those that "
    "repeat are one line.",
)
@target_argument(Kind.JOB)
@common_options
@click.pass_obj
def command(session: Session, target: Target) -> Result:
    job = without_step(named(target, "events", (Kind.JOB,), INSTEAD), "events")
    rows = read_events(session.cluster(job), job.name)
    return events_result(rows, job.name, SystemClock().utc_now())
