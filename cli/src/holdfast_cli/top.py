"""`top`: one line for each job, those that need a person first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import CommandError, UsageError
from holdfast_cli.gangs import MAX_STREAMS, conditions_of, persisted_name, store_of
from holdfast_cli.options import Session, common_options, everywhere_option
from holdfast_cli.output import Cell, Column, Result, Style, Table
from holdfast_cli.status import expect_shown, watched
from holdfast_cli.views import is_trouble, running_reason
from holdfast_core.api import size_text
from holdfast_core.clock import SystemClock, parse_stamp

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

WIDTH = 80
"""Columns of a terminal of the usual width."""
_OTHER_COLUMNS = 60
"""Width of all columns except the name, with the gaps between them."""
_SHORTEST_NAME = 12

Committed = Callable[[str, str], datetime | None]
"""When the Checkpoint of a namespace and a name was committed. None: not known."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """What `top` shows of one job. None stands for what is not known."""

    namespace: str
    name: str
    phase: str
    reason: str
    """Why the gang runs or does not, or the first trouble."""
    step: int | None
    persisted_step: int | None
    persisted_age_seconds: int | None
    """Age of the newest step in the store."""
    goodput: float | None
    restarts: int
    stored_bytes: int | None
    """Bytes of the job in its store, as the newest listing found them."""
    urgency: int
    """0: failed, or waits for a person. 1: does not train. 2: trains with trouble. 3: trains. 4: over or
    suspended."""


def age_text(seconds: float) -> str:
    """Return a duration in its largest unit: 47s, 12m, 5h, 3d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def job_rows(
    gangs: Iterable[dict[str, Any]],
    stores: Iterable[dict[str, Any]],
    committed: Committed,
    now: datetime,
) -> list[JobRow]:
    """Return the rows of all jobs, sorted by what needs attention."""
    usages = {
        (store["metadata"]["namespace"], store["metadata"]["name"]): _bytes_by_job(store)
        for store in stores
    }
    rows = [_row(gang, usages, committed, now) for gang in gangs]
    return sorted(rows, key=lambda row: (row.urgency, _goodput_key(row), row.namespace, row.name))


def _goodput_key(row: JobRow) -> float:
    """The jobs that lose most of their time come first."""
    return 1.0 if row.goodput is None else row.goodput


def _bytes_by_job(store: dict[str, Any]) -> dict[str, int]:
    usage = (store.get("status") or {}).get("usage") or {}
    return {job["uid"]: job["bytes"] for job in usage.get("jobs") or []}


def _row(
    gang: dict[str, Any],
    usages: Mapping[tuple[str, str], Mapping[str, int]],
    committed: Committed,
    now: datetime,
) -> JobRow:
    meta, status = gang["metadata"], gang.get("status") or {}
    persisted, checkpoint = status.get("lastPersisted") or {}, persisted_name(gang)
    at = None if checkpoint is None else committed(meta["namespace"], checkpoint)
    usage = usages.get((meta["namespace"], store_of(gang) or ""), {})
    urgency, reason = _attention(gang)
    return JobRow(
        namespace=meta["namespace"],
        name=meta["name"],
        phase=status.get("phase") or "Pending",
        reason=reason,
        step=status.get("step"),
        persisted_step=persisted.get("step"),
        persisted_age_seconds=None if at is None else int((now - at).total_seconds()),
        goodput=(status.get("goodput") or {}).get("ratio"),
        restarts=status.get("restarts") or 0,
        stored_bytes=usage.get(meta["uid"]),
        urgency=urgency,
    )


_WAITS_FOR_A_PERSON = (("Failed", "True"), ("Accepted", "False"), ("CheckpointsLost", "True"))


def _attention(gang: dict[str, Any]) -> tuple[int, str]:
    """Return how soon a person should look at a job, and why."""
    conditions = conditions_of(gang)
    stated = {kind: c["status"] for kind, c in conditions.items()}
    for kind, status in _WAITS_FOR_A_PERSON:
        if stated.get(kind) == status:
            return 0, str(conditions[kind]["reason"])
    for kind in ("Complete", "Suspended"):
        if stated.get(kind) == "True":
            return 4, str(conditions[kind]["reason"])
    reason = running_reason(gang.get("status") or {})
    if stated.get("Running") != "True":
        return 1, reason
    trouble = next((kind for kind, c in conditions.items() if is_trouble(c)), None)
    return (3, reason) if trouble is None else (2, trouble)


_STYLES: dict[int, Style] = {0: "red", 1: "yellow", 2: "yellow", 4: "dim"}


def top_result(rows: Iterable[JobRow], *, everywhere: bool, width: int = WIDTH) -> Result:
    """Return the table. It fits the width: long names are shortened, except by `-o wide`."""
    shown = list(rows)
    if not shown:
        place = "the cluster" if everywhere else "the namespace"
        return Result([], [f"{place} has no TrainingJob and no CheckpointAdoption"])
    names = [f"{row.namespace}/{row.name}" if everywhere else row.name for row in shown]
    most = max(_SHORTEST_NAME, width - _OTHER_COLUMNS)
    columns = (
        Column("NAME"),
        Column("PHASE"),
        Column("STEP", right=True),
        Column("PERSISTED", right=True),
        Column("GOODPUT", right=True),
        Column("RST", right=True),
        Column("BYTES", right=True),
        Column("PERSISTED STEP", wide=True, right=True),
        Column("REASON", wide=True),
        Column("FULL NAME", wide=True),
    )
    table = Table(
        columns,
        [
            (
                Cell(shortened(name, most), _STYLES.get(row.urgency, "")),
                Cell(row.phase, _STYLES.get(row.urgency, "")),
                row.step,
                None if row.persisted_age_seconds is None else age_text(row.persisted_age_seconds),
                None if row.goodput is None else f"{row.goodput:.1%}",
                row.restarts,
                size_text(row.stored_bytes),
                row.persisted_step,
                row.reason,
                name,
            )
            for row, name in zip(shown, names, strict=True)
        ],
    )
    return Result(shown, [table])


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters: its begin and its end, which tell names apart."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[head + 1 - most :]}"


class CommitTimes:
    """Reads when the newest persisted Checkpoints of jobs were committed, each of them once."""

    def __init__(self, cluster: ClusterClient) -> None:
        self._cluster = cluster
        self._known: dict[tuple[str, str], datetime | None] = {}

    def look(self, gangs: Iterable[dict[str, Any]]) -> None:
        """Read those of these gangs that are not known, at the same time, and forget all others."""
        wanted = [
            (gang["metadata"]["namespace"], name)
            for gang in gangs
            if (name := persisted_name(gang))
        ]
        with ThreadPoolExecutor(MAX_STREAMS) as pool:
            self._known = dict(zip(wanted, pool.map(self._read, wanted), strict=True))

    def at(self, namespace: str, name: str) -> datetime | None:
        """Return when the Checkpoint was committed. None: it is gone, or cannot be read."""
        return self._known[namespace, name]

    def _read(self, key: tuple[str, str]) -> datetime | None:
        known = self._known.get(key)
        if known is not None:
            return known
        try:
            checkpoint = self._cluster.in_namespace(key[0]).get("checkpoints", key[1])
        except CommandError:
            return None  # it may be written later, so the next look asks again
        status = checkpoint.get("status") or {}
        return parse_stamp(status.get("committedAt") or checkpoint["metadata"]["creationTimestamp"])


def read_rows(cluster: ClusterClient, commits: CommitTimes, now: datetime) -> list[JobRow]:
    """Read all jobs of the namespace, or of all namespaces, with their stores."""
    gangs = cluster.gangs()
    try:
        stores = cluster.items("checkpointstores")
    except CommandError:  # the other columns do not need the stores
        stores = []
    commits.look(gangs)
    return job_rows(gangs, stores, commits.at, now)


@click.command(
    "top",
    help="Show one line for each job, those that need a person first: phase, step, age of the newest step "
    "in the store, goodput, restarts, and bytes in the store.",
)
@click.argument("named", metavar="", nargs=-1)
@click.option("-w", "--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@everywhere_option
@common_options
@click.pass_obj
def command(session: Session, named: tuple[str, ...], watch: bool) -> Result:
    if named:
        raise UsageError(
            f"top shows all jobs: omit {' '.join(named)}. `status` shows one job, and `list` shows the "
            "checkpoints of a folder or a store"
        )
    expect_shown(session, watch=watch)
    cluster = session.cluster()
    commits = CommitTimes(cluster)

    def now(cluster: ClusterClient) -> Result:
        rows = read_rows(cluster, commits, SystemClock().utc_now())
        width = shutil.get_terminal_size((WIDTH, 24)).columns
        return top_result(rows, everywhere=session.everywhere, width=width)

    return watched(now, cluster, session.format, is_watch=watch)
