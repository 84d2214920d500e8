"""`kubectl holdfast verify`: request a drill of one checkpoint, wait for it, and print what it found.

A request is spec.verify.trigger of the Checkpoint. The operator drills the checkpoint once for each new text,
and status.drill.trigger then has this text. The exit codes are those of `holdfast verify`.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

from holdfast_cli.cluster import ClusterClient, ClusterError, NotFound
from holdfast_core.api import Checkpoint, CheckpointCondition, CheckpointPhase, size_text
from holdfast_core.clock import SystemClock, stamp
from holdfast_core.contract import DrillExit

POLL_SECONDS = 1.0
_EXITS = {
    "Intact": DrillExit.INTACT,
    "Damaged": DrillExit.DAMAGED,
    "NotRestorable": DrillExit.NOT_RESTORABLE,
}


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


def request_of(arguments: argparse.Namespace, trigger: str) -> dict[str, Any]:
    """Return the patch that requests the drill."""
    wanted = {"trigger": trigger, "restore": arguments.restore, "worldSize": arguments.world_size}
    return {"spec": {"verify": wanted}}


def progress(store: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """Say what the drill does now."""
    drills = (store.get("status") or {}).get("drills") or {}
    under_way = drills.get("checkpoint")
    if not under_way:
        return "waiting for the operator"
    if under_way != checkpoint.name:
        return f"waiting for the drill of checkpoint {under_way}"
    return f"reading {size_text(checkpoint.status.bytes)} since {drills.get('since')}"


def outcome(checkpoint: Checkpoint, trigger: str) -> tuple[DrillExit, str] | None:
    """Return exit code and text of the drill of this request, or None while it has not ended."""
    drill, status = checkpoint.status.drill, checkpoint.status
    if drill is None or drill.trigger != trigger:
        return None
    condition = status.condition(CheckpointCondition.VERIFIED)
    if condition is None or status.verified_at != drill.ended_at:
        why = "its Events say why"
        if condition is not None:
            # A damaged checkpoint keeps its condition when a later drill cannot read it.
            before = "before, a drill found damage: " if condition.is_false else ""
            why = f"{before}{condition.message}"
        return DrillExit.NOT_READ, f"{checkpoint.name}: not read to its end: {why}"
    gib = drill.bytes / (1 << 30)
    text = (
        f"{checkpoint.name}: read {gib:.3f} GiB in {drill.seconds:.1f} s "
        f"({drill.gib_per_second:.2f} GiB/s)\n{condition.reason}: {condition.message}"
    )
    if drill.world_size is not None and condition.is_true:
        text += f"\nassembled for {drill.world_size} ranks: equal"
    return _EXITS.get(condition.reason, DrillExit.NOT_READ), text


def verify_checkpoint(cluster: ClusterClient, arguments: argparse.Namespace) -> None:
    """Request a drill, wait for it, print what it found, and exit with a DrillExit."""
    if arguments.world_size is not None and not arguments.restore:
        raise ClusterError("--world-size is the number of ranks of --restore: add --restore")
    name = arguments.checkpoint
    checkpoint = Checkpoint.from_dict(cluster.get("checkpoints", name))
    obstacle = obstacle_to_drill(checkpoint)
    if obstacle is not None:
        raise ClusterError(obstacle)
    trigger = f"{stamp(SystemClock().utc_now())}-{secrets.token_hex(3)}"
    cluster.patch("checkpoints", name, request_of(arguments, trigger))
    if arguments.no_wait:
        print(f"the drill of {name} is requested; kubectl get ckpt {name} shows the result")
        return
    shown = ""
    while True:
        try:
            checkpoint = Checkpoint.from_dict(cluster.get("checkpoints", name))
        except NotFound as error:
            raise ClusterError(
                f"checkpoint {name} was deleted meanwhile: nothing is known"
            ) from error
        found = outcome(checkpoint, trigger)
        if found is not None:
            status, text = found
            print(text)
            sys.exit(status)
        obstacle = obstacle_to_drill(checkpoint)
        if obstacle is not None:
            raise ClusterError(obstacle)
        now = progress(cluster.get("checkpointstores", checkpoint.status.store or ""), checkpoint)
        if now != shown:
            print(now, file=sys.stderr)
            shown = now
        time.sleep(POLL_SECONDS)
