"""`save`: request a save of a job by creating a Checkpoint object."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import CommandError, NotFound, StateError
from holdfast_cli.gangs import VERSION, conditions_of
from holdfast_cli.options import Session, common_options, target_argument
from holdfast_cli.output import Result, say
from holdfast_cli.progress import NO_OPERATOR, Waiting
from holdfast_cli.targets import Kind, Target, named, without_step
from holdfast_core.names import GROUP

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient

LOOK_SECONDS = 0.5
INSTEAD = "The script that trains into it saves, by Checkpointer.save or at its interval"
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # as in the names of pods


@click.command("save", help="Request a save now, by creating a Checkpoint object.")
@target_argument(Kind.JOB)
@click.option("--name", help="Name of the Checkpoint (default: <job>-manual-<5 letters>).")
@click.option("--pin", is_flag=True, help="Keep it: no retention policy removes it later.")
@click.option("--wait", is_flag=True, help="Wait until it is committed.")
@common_options
@click.pass_obj
def command(session: Session, target: Target, name: str | None, pin: bool, wait: bool) -> Result:
    job = without_step(named(target, "save", (Kind.JOB,), INSTEAD), "save").name
    # No step in the name: the step that the request reaches is a later one than that of now.
    letters = "".join(secrets.choice(_LETTERS) for _ in range(5))
    return save(session.cluster(), job, name or f"{job}-manual-{letters}", pin=pin, wait=wait)


def save(cluster: ClusterClient, job: str, name: str, *, pin: bool, wait: bool) -> Result:
    """Create the Checkpoint, and wait until it is committed if that is wanted."""
    gang = cluster.gang(job)
    if gang["metadata"].get("deletionTimestamp"):
        raise StateError(
            f"{job} is being deleted, and saves no more: `kubectl holdfast list {job}` lists what it has"
        )
    created = cluster.create(
        "checkpoints",
        {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Checkpoint",
            "metadata": {"name": name},
            "spec": {"jobRef": {"name": job}, "pin": pin},
        },
    )
    if not pin:
        say("keepLast removes it later, as any other checkpoint; --pin keeps it")
    phase = (gang.get("status") or {}).get("phase")
    when = "" if phase in (None, "Running") else f"{job} is {phase}, it saves when it trains"
    if wait:
        if when:
            say(when)
        return Result(_committed(cluster.patient(), created), [f"checkpoint {name} committed"])
    return Result(created, [f"checkpoint {name} requested{when and '; '}{when}"])


def _committed(cluster: ClusterClient, created: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Checkpoint when it is committed. Say what it waits for if that takes more than a moment."""
    name, job, waiting = created["metadata"]["name"], created["spec"]["jobRef"]["name"], Waiting()
    gone = StateError(f"checkpoint {name} was deleted meanwhile: it was not saved, or is not kept")
    while True:
        try:
            item = cluster.get("checkpoints", name)
        except NotFound as error:
            raise gone from error
        phase = (item.get("status") or {}).get("phase")
        if phase == "Deleting" or item["metadata"]["uid"] != created["metadata"]["uid"]:
            raise gone
        if phase == "Committed":
            return item
        why = conditions_of(item).get("Committed", {}).get("message", "")
        if phase == "Failed":
            raise CommandError(f"checkpoint {name} failed: {why}")
        shows = f"`kubectl holdfast status {job}` shows the job"
        waiting.on(f"{phase}: {why}; {shows}" if phase else f"waiting for {NO_OPERATOR}")
        time.sleep(LOOK_SECONDS)
