"""`show`: what a checkpoint holds, and for a Checkpoint object its state and the next command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import click

from holdfast.reading.describing import CheckpointDescription, OtherCheckpoint
from holdfast.reading.opening import open_checkpoints
from holdfast_cli.gangs import parsed
from holdfast_cli.options import Session, common_options, target_argument
from holdfast_cli.output import Cell, Column, Format, Line, Result, Table, say
from holdfast_cli.places import place_of
from holdfast_cli.progress import bytes_text
from holdfast_cli.targets import ClusterTarget, Kind, PlaceTarget, Target
from holdfast_core.api import Checkpoint, CheckpointCondition, CheckpointPhase
from holdfast_core.clock import stamp
from holdfast_core.errors import HoldfastError

_KEYS = (
    "A store is read with your own keys, as the AWS tools find them; AWS_ENDPOINT_URL names the address by "
    "which this machine reaches it"
)
_SHOWN_RANKS = 8
"""Ranks whose bytes the table shows. `-o wide` shows all."""
_TROUBLE = frozenset(
    {
        (CheckpointCondition.COMMITTED, "False"),
        (CheckpointCondition.RESTORABLE, "False"),
        (CheckpointCondition.QUARANTINED, "True"),
        (CheckpointCondition.VERIFIED, "False"),
    }
)


@dataclass(frozen=True, slots=True)
class ShownObject:
    """A Checkpoint object, and what its store says of the same checkpoint."""

    object: dict[str, object]
    """The object as the API has it."""
    next: tuple[str, ...]
    """What to do where something is wrong."""
    contents: CheckpointDescription | None
    """None: the store was not read."""
    unread: str | None
    """Why not."""


@click.command(
    "show",
    help="Show what a checkpoint holds: tensors with shapes, types and bytes, bytes by rank, metrics, the "
    "checkpoint it descends from, and the earlier ones that store a part of it. Without @STEP it is the one "
    "that a restore would choose. No tensor is read. Of a Checkpoint of the cluster it also shows "
    "conditions, pin, policy and, where something is wrong, the next command.",
)
@target_argument(Kind.JOB, Kind.CHECKPOINT)
@click.option(
    "--tensors",
    "pattern",
    default="*",
    metavar="PATTERN",
    help="List the tensors whose names match, as in 'model.*'.",
)
@common_options
@click.pass_obj
def command(session: Session, target: Target, pattern: str) -> Result:
    is_wide = session.format is Format.WIDE
    if not isinstance(target, ClusterTarget):
        found = _described(place_of(session, target))
        return Result(found, description_lines(found, pattern, is_wide=is_wide))
    raw = session.cluster(target).checkpoint_of(target)
    checkpoint = parsed(Checkpoint, raw)
    contents, unread = None, None
    try:
        contents = _described(place_of(session, ClusterTarget(checkpoint.name, Kind.CHECKPOINT)))
    except HoldfastError as error:  # the object says a part of it
        unread = str(error)
    shown = ShownObject(raw, next_steps(checkpoint), contents, unread)
    lines = object_lines(checkpoint)
    if contents is not None:
        lines += ["", *description_lines(contents, pattern, is_wide=is_wide)]
    elif unread is not None:
        say(f"what it holds is not shown: {unread}. {_KEYS}")
    return Result(shown, lines)


def _described(place: PlaceTarget) -> CheckpointDescription:
    with open_checkpoints(place.place) as found, found.at(place.step) as saved:
        return saved.describe()


def description_lines(
    found: CheckpointDescription, pattern: str = "*", *, is_wide: bool = False
) -> list[Line]:
    """Return what the tables show of a checkpoint."""
    head: list[tuple[str, object]] = [
        ("place", found.place),
        ("step", found.step),
        ("round", found.round),
        ("saved", None if found.saved_at is None else stamp(found.saved_at)),
        ("by", found.job),
        ("manifest", found.manifest),
        ("ranks", found.world_size),
        ("payload", bytes_text(found.payload_bytes)),
        (f"in the {found.tier}", bytes_text(found.stored_bytes)),
        *([] if found.pinned is None else [("pinned", "yes" if found.pinned else "no")]),
        ("restored from", _origin(found.restored_from)),
        *((name, f"{value:g}") for name, value in sorted(found.metrics.items())),
    ]
    lines: list[Line] = [_pairs(head)]
    for other in found.references:
        lines.append(
            f"step {other.step} of round {other.round} stores {bytes_text(other.shared_bytes or 0)} of it"
        )
    lines += ["", _ranks(found.rank_bytes, is_wide=is_wide)]
    lines += [
        "",
        Table(
            ["ENTRY", Column("TENSORS", right=True), Column("BYTES", right=True)],
            [(one.name, one.tensors, bytes_text(one.nbytes)) for one in found.entries],
        ),
    ]
    tensors = [one for one in found.tensors if fnmatchcase(one.name, pattern)]
    lines += [
        "",
        Table(
            ["TENSOR", "SHAPE", "DTYPE", Column("BYTES", right=True)],
            [(t.name, shape_text(t.shape), t.dtype, bytes_text(t.nbytes)) for t in tensors],
        ),
    ]
    if len(tensors) < len(found.tensors):
        lines.append(f"{len(found.tensors) - len(tensors)} tensors do not match {pattern}")
    return lines


def object_lines(checkpoint: Checkpoint) -> list[Line]:
    """Return what the tables show of a Checkpoint object."""
    spec, status = checkpoint.spec, checkpoint.status
    levels = (
        CheckpointCondition.COMMITTED,
        CheckpointCondition.REPLICATED,
        CheckpointCondition.PERSISTED,
    )
    tiers = [str(level).lower() for level in levels if status.is_true(level)]
    drill = status.verified_at
    head: list[tuple[str, object]] = [
        ("checkpoint", f"{checkpoint.namespace}/{checkpoint.name}"),
        ("job", checkpoint.job),
        ("step", spec.step),
        ("round", status.round),
        ("phase", status.phase or "Requested"),
        ("levels", ", ".join(tiers) or None),
        ("store", status.store),
        ("payload", None if status.bytes is None else bytes_text(status.bytes)),
        ("ranks", status.world_size),
        ("saved", None if status.committed_at is None else stamp(status.committed_at)),
        ("verified", "never" if drill is None else stamp(drill)),
        ("pinned", "yes" if spec.pin else "no"),
        ("deletion policy", f"{spec.deletion_policy} with the object"),
        ("when the job is deleted", status.when_deleted),
        *((name, f"{value:g}") for name, value in sorted(status.metrics.items())),
    ]
    conditions = [
        (
            Cell(c.type, "red" if (c.type, str(c.status)) in _TROUBLE else ""),
            str(c.status),
            c.reason,
            c.message,
        )
        for c in status.conditions
    ]
    lines: list[Line] = [_pairs(head), ""]
    if conditions:
        lines.append(Table(["CONDITION", "STATUS", "REASON", "MESSAGE"], conditions))
    lines += [Cell(f"next: {step}", "yellow") for step in next_steps(checkpoint)]
    return lines


def next_steps(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what to do about a Checkpoint with which something is wrong, each with its command."""
    name, place = checkpoint.name, f"-n {checkpoint.namespace}"
    job, status = checkpoint.job, checkpoint.status
    others = f"`kubectl holdfast list {job} {place}` lists the others"
    if checkpoint.deleting or status.phase is CheckpointPhase.DELETING:
        return (f"it is being deleted; {others}",)
    if status.phase is CheckpointPhase.FAILED:
        return (f"`kubectl holdfast save {job} {place}` requests another save",)
    if status.phase is not CheckpointPhase.COMMITTED:
        return (f"`kubectl holdfast status {job} {place}` shows whether the job trains and saves",)
    found: list[str] = []
    if checkpoint.damaged or status.is_true(CheckpointCondition.QUARANTINED):
        found.append(
            f"`kubectl holdfast verify checkpoint/{name} {place}` reads it again; where it is intact, "
            f"failurePolicy.releasedSteps of {job} releases step {checkpoint.spec.step}; {others}"
        )
    restorable = status.condition(CheckpointCondition.RESTORABLE)
    if restorable is not None and restorable.is_false and not found:
        found.append(f"it cannot be restored now; {others}")
    return tuple(found)


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as torch prints it."""
    return f"[{', '.join(map(str, shape))}]"


def _origin(other: OtherCheckpoint | None) -> str:
    if other is None:
        return "nothing: this history begins at step 0"
    if other.step is None:
        return f"{other.manifest}, which is not here (any more)"
    return f"step {other.step} of round {other.round}"


def _ranks(rank_bytes: Sequence[int], *, is_wide: bool) -> Table | str:
    if len(rank_bytes) > _SHOWN_RANKS and not is_wide:
        low, high = min(rank_bytes), max(rank_bytes)
        return f"{len(rank_bytes)} ranks saved {bytes_text(low)} to {bytes_text(high)} each"
    return Table(
        [Column("RANK", right=True), Column("BYTES", right=True)],
        [(rank, bytes_text(size)) for rank, size in enumerate(rank_bytes)],
    )


def _pairs(rows: Iterable[tuple[str, object]]) -> Table:
    return Table(["", ""], [(Cell(name, "dim"), value) for name, value in rows], headings=False)
