"""`status`: the levels, pods, tiers and recoveries of one job, or one line for each job."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import CommandError, UsageError
from holdfast_cli.gangs import MAX_STREAMS, MemberPod, silence_of_operator
from holdfast_cli.options import (
    Session,
    common_options,
    everywhere_option,
    target_argument,
)
from holdfast_cli.output import Format, Result, show
from holdfast_cli.targets import Kind, Target, named, without_step
from holdfast_cli.views import Screen, gangs_lines, status_lines
from holdfast_core.clock import SystemClock

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

WATCH_SECONDS = 1.0
_SAMPLE = re.compile(r"^holdfast_newest_step\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
INSTEAD = "`list` shows the checkpoints of a folder or a store"


@click.command(
    "status",
    help="Show levels, pods, tiers and recoveries of a job, which is a TrainingJob or a "
    "CheckpointAdoption, or list all jobs.",
)
@target_argument(Kind.JOB, required=False)
@click.option("-w", "--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@everywhere_option
@common_options
@click.pass_obj
def command(session: Session, target: Target | None, watch: bool) -> Result:
    expect_shown(session, watch=watch)
    name = None
    if target is not None:
        name = without_step(named(target, "status", (Kind.JOB,), INSTEAD), "status").name
        if session.everywhere:
            raise UsageError("--all-namespaces lists everything: omit it, or omit the job")
    look = partial(status_of, name=name)
    return watched(look, session.cluster(), session.format, is_watch=watch)


def expect_shown(session: Session, *, watch: bool) -> None:
    """Raise UsageError for a format that cannot be shown again and again."""
    if watch and session.format in (Format.JSON, Format.YAML):
        raise UsageError(f"--watch shows tables only: omit it, or omit --output {session.format}")


def watched(
    look: Callable[[ClusterClient], Result],
    cluster: ClusterClient,
    format: Format,
    *,
    is_watch: bool,
) -> Result:
    """Return what a look at the cluster finds. A watch shows it again and again, and does not return."""
    result, cluster = look(cluster), cluster.patient()
    while is_watch:
        click.clear()
        show(result, format)
        time.sleep(WATCH_SECONDS)
        result = look(cluster)
    return result


def status_of(cluster: ClusterClient, name: str | None) -> Result:
    """Return the screen of a job, or the list of all jobs."""
    if name is None:
        gangs = cluster.gangs()
        return Result(gangs, gangs_lines(gangs, everywhere=cluster.everywhere))
    screen = _screen(cluster, name)
    return Result(_document(screen), status_lines(screen))


def _screen(cluster: ClusterClient, name: str) -> Screen:
    gang = cluster.gang(name)
    members: list[MemberPod] = []
    silence = silence_of_operator(gang, SystemClock().utc_now())
    problems = [] if silence is None else [silence]
    try:
        members = cluster.members(gang)
    except CommandError as error:  # the rest of the screen does not need the pods
        problems.append(str(error))
    return Screen(
        gang, members, newest_steps(cluster, members), cluster.checkpoints(gang), problems
    )


def _document(screen: Screen) -> dict[str, Any]:
    return {
        "kind": screen.gang["kind"],
        "status": screen.gang.get("status"),
        "pods": [asdict(member) for member in screen.members],
        "tiers": screen.tiers,
        "checkpoints": screen.checkpoints,
        "problems": screen.problems,
    }


def newest_steps(cluster: ClusterClient, members: Iterable[MemberPod]) -> dict[int, dict[str, int]]:
    """Return the newest step by rank and tier, from the metrics of the members' sidecars.

    Sidecars that cannot be read are left out. All are asked at the same time: one that is lost does not
    answer before the time-out.
    """

    def read(pod: str) -> str:
        try:
            return cluster.metrics(pod)
        except CommandError:
            return ""

    with ThreadPoolExecutor(MAX_STREAMS) as pool:
        texts = list(pool.map(read, [member.pod for member in members if member.exists]))
    tiers: dict[int, dict[str, int]] = {}
    for text in texts:
        for labels_text, value in _SAMPLE.findall(text):
            labels = dict(_LABEL.findall(labels_text))
            tiers.setdefault(int(labels["rank"]), {})[labels["tier"]] = int(float(value))
    return tiers
