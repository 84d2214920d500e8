"""`verify`: read every byte of a checkpoint and compare the digests, here or by a drill of the cluster.

A checkpoint of the cluster is drilled by a pod beside the store. A request is spec.verify.trigger of the
Checkpoint. The operator drills the checkpoint once for each new text, and status.drill.trigger then has this
text. A folder or a store is read by this process. Both have the same result and the same exit codes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from holdfast_cli.errors import CommandError, Exit, NotFound, StateError, UsageError
from holdfast_cli.gangs import parsed
from holdfast_cli.options import Session, common_options, target_argument
from holdfast_cli.output import Result
from holdfast_cli.places import place_of
from holdfast_cli.progress import NO_OPERATOR, ByteProgress, Waiting, bytes_text
from holdfast_cli.targets import ClusterTarget, Kind, PlaceTarget, Target
from holdfast_core.api import Checkpoint, CheckpointCondition, CheckpointPhase, size_text
from holdfast_core.clock import SystemClock, stamp
from holdfast_core.contract import drill_world_size

if TYPE_CHECKING:
    from holdfast_cli.cluster import ClusterClient
    from holdfast_core.drill import DrillReport

POLL_SECONDS = 1.0
_EXITS = {
    "Intact": Exit.SUCCESS,
    "Damaged": Exit.DAMAGED,
    "NotRestorable": Exit.NOT_RESTORABLE,
}


@dataclass(frozen=True, slots=True)
class Verified:
    """What a drill that ran to its end has found."""

    target: str
    """What was read, with its step."""
    outcome: str
    """Intact, Damaged or NotRestorable."""
    message: str
    bytes: int
    """Payload bytes that were read and compared."""
    seconds: float
    worldSize: int | None = None
    """Number of ranks for which the state was assembled as well."""
    bad: tuple[dict[str, str], ...] = ()
    """The damaged parts, if this process has read them. At most 100."""

    def result(self) -> Result:
        """Return what the verb prints, and how it ends."""
        rate = bytes_text(self.bytes / max(self.seconds, 1e-9))
        read = f"read {bytes_text(self.bytes)} in {self.seconds:.1f} s ({rate}/s)"
        lines = [f"{self.target}: {read}", f"{self.outcome}: {self.message}"]
        if self.worldSize is not None and self.outcome == "Intact":
            lines.append(f"assembled for {self.worldSize} ranks: equal")
        lines += [f"  {bad['part']}: {bad['damage']}: {bad['message']}" for bad in self.bad]
        return Result(self, lines, _EXITS[self.outcome])


@click.command(
    "verify",
    help="Read every byte of a checkpoint, compare the digests, and say what is damaged. Nothing is changed. "
    "Without @STEP it is the newest checkpoint. A checkpoint of the cluster is read by a pod beside its "
    "store. Exit codes: 0 intact, 3 damaged, 4 not restorable, 1 not read to its end.",
)
@target_argument(Kind.JOB, Kind.CHECKPOINT)
@click.option(
    "--restore",
    is_flag=True,
    help="Also assemble the state for another number of ranks, and compare it with the saved ranks.",
)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="M",
    help="Number of ranks of --restore (default: half as many as saved it).",
)
@click.option("--no-wait", is_flag=True, help="Request the drill of the cluster only.")
@common_options
@click.pass_obj
def command(
    session: Session, target: Target, restore: bool, world_size: int | None, no_wait: bool
) -> Result:
    if world_size is not None and not restore:
        raise UsageError("--world-size is the number of ranks of --restore: add --restore")
    if isinstance(target, ClusterTarget):
        cluster = session.cluster(target)
        name = cluster.checkpoint_of(target)["metadata"]["name"]
        return drill(cluster, name, restore=restore, world_size=world_size, wait=not no_wait)
    if no_wait:
        raise UsageError(f"--no-wait is for checkpoints of a cluster: {target} is read here")
    return verify_place(place_of(session, target), restore=restore, world_size=world_size)


def verify_place(target: PlaceTarget, *, restore: bool, world_size: int | None) -> Result:
    """Read a checkpoint of a folder or a store."""
    from holdfast.reading.opening import open_checkpoints, verify

    if restore and world_size is None:
        with open_checkpoints(target.place) as opened, opened.at(target.step) as saved:
            world_size = drill_world_size(saved.world_size)
    with ByteProgress("verifying") as shown:
        report = verify(target.place, target.step, world_size, shown.advance)
    return _of_report(report, target.place, world_size).result()


def _of_report(report: DrillReport, place: str, world_size: int | None) -> Verified:
    outcome, message = "Intact", "every byte matches its digest"
    if not report.is_intact:
        parts = "1 part" if report.bad_count == 1 else f"{report.bad_count} parts"
        outcome, message = "Damaged", parts
    elif report.not_restorable:
        outcome, message = "NotRestorable", report.not_restorable
    return Verified(
        f"step {report.checkpoint.step} of {place}",
        outcome,
        message,
        report.read_bytes,
        report.seconds,
        world_size,
        tuple(
            {"part": bad.part, "damage": str(bad.damage), "message": bad.message}
            for bad in report.bad
        ),
    )


# --------------------------------------------------------------------------- a checkpoint of the cluster


def drill(
    cluster: ClusterClient, name: str, *, restore: bool, world_size: int | None, wait: bool
) -> Result:
    """Request a drill of a Checkpoint, and wait for what it finds.

    Raises:
        StateError: The checkpoint cannot be drilled, or was deleted meanwhile.
        CommandError: It was not read to its end.
    """
    checkpoint = _fit(parsed(Checkpoint, cluster.get("checkpoints", name)))
    trigger = f"{stamp(SystemClock().utc_now())}-{secrets.token_hex(3)}"
    wanted = {"trigger": trigger, "restore": restore, "worldSize": world_size}
    cluster.patch("checkpoints", name, checkpoint.uid, {"spec": {"verify": wanted}})
    if not wait:
        text = f"the drill of {name} is requested; kubectl get ckpt {name} shows the result"
        return Result({"checkpoint": name, **wanted}, [text])
    cluster, waiting = cluster.patient(), Waiting(quiet_seconds=0.0)
    while True:
        try:
            checkpoint = parsed(Checkpoint, cluster.get("checkpoints", name))
        except NotFound as error:
            raise StateError(
                f"checkpoint {name} was deleted meanwhile: nothing is known"
            ) from error
        found = outcome(checkpoint, trigger)
        if found is not None:
            return found.result()
        _fit(checkpoint)
        _expect_wanted(checkpoint, trigger)
        store = cluster.get("checkpointstores", checkpoint.status.store or "")
        waiting.on(progress(store, checkpoint))
        time.sleep(POLL_SECONDS)


def _expect_wanted(checkpoint: Checkpoint, trigger: str) -> None:
    """Raise CommandError if this request was replaced: one that is replaced before its drill has none."""
    wanted, drill = checkpoint.spec.verify, checkpoint.status.drill
    if wanted is not None and wanted.trigger == trigger:
        return
    # Until a later request is fulfilled, the drill of this one may still run.
    if wanted is None or (drill is not None and drill.trigger == wanted.trigger):
        raise CommandError(
            f"{checkpoint.name}: another request has replaced this one: `kubectl holdfast show "
            f"checkpoint/{checkpoint.name} -n {checkpoint.namespace}` shows what its drill has found"
        )


def _fit(checkpoint: Checkpoint) -> Checkpoint:
    obstacle = obstacle_to_drill(checkpoint)
    if obstacle is not None:
        raise StateError(obstacle)
    return checkpoint


def obstacle_to_drill(checkpoint: Checkpoint) -> str | None:
    """Return why the checkpoint cannot be drilled, and what to do instead, or None."""
    name, phase = checkpoint.name, checkpoint.status.phase
    if checkpoint.deleting or phase is CheckpointPhase.DELETING:
        return f"checkpoint {name} is being deleted: choose another one"
    if phase is not CheckpointPhase.COMMITTED:
        return (
            f"checkpoint {name} is {phase or 'not saved yet'}: a drill reads committed checkpoints"
        )
    if not checkpoint.persisted or checkpoint.status.store is None:
        return (
            f"checkpoint {name} is not in an object store, and a drill reads a store: the sidecars of the "
            "job verify the copies on nodes by themselves"
        )
    return None


def progress(store: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Say what the drill does now."""
    drills = (store.get("status") or {}).get("drills") or {}
    under_way = drills.get("checkpoint")
    if not under_way:
        return f"waiting for {NO_OPERATOR}"
    if under_way != checkpoint.name:
        return f"waiting for the drill of checkpoint {under_way}"
    return f"reading {size_text(checkpoint.status.bytes)} since {drills.get('since')}"


def outcome(checkpoint: Checkpoint, trigger: str) -> Verified | None:
    """Return what the drill of this request has found, or None while it has not ended.

    Raises:
        CommandError: It ended before it had read everything.
    """
    drill, status = checkpoint.status.drill, checkpoint.status
    if drill is None or drill.trigger != trigger:
        return None
    condition = status.condition(CheckpointCondition.VERIFIED)
    if condition is None or status.verified_at != drill.ended_at or condition.reason not in _EXITS:
        why = "its Events say why"
        if condition is not None:
            # A damaged checkpoint keeps its condition when a later drill cannot read it.
            before = "before, a drill found damage: " if condition.is_false else ""
            why = f"{before}{condition.message}"
        raise CommandError(f"{checkpoint.name}: not read to its end: {why}")
    return Verified(
        checkpoint.name,
        condition.reason,
        condition.message,
        drill.bytes,
        drill.seconds,
        drill.world_size,
    )
