"""`diff`: which tensors changed between two checkpoints, by how much, and what both share."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace

import click

from holdfast.reading.comparing import ChangeKind, CheckpointDiff, TensorChange
from holdfast.reading.describing import DescribedTensor
from holdfast.reading.opening import open_checkpoints
from holdfast_cli.errors import Exit
from holdfast_cli.options import Session, TargetType, common_options
from holdfast_cli.output import Cell, Column, Line, Result, Style, Table
from holdfast_cli.places import place_of
from holdfast_cli.progress import ByteProgress, bytes_text
from holdfast_cli.showing import shape_text
from holdfast_cli.targets import ClusterTarget, Kind, Target
from holdfast_core.names import first_of

_SHOWN_ENTRIES = 8
_STYLES: dict[ChangeKind, Style] = {
    ChangeKind.ADDED: "green",
    ChangeKind.REMOVED: "red",
    ChangeKind.RESHAPED: "yellow",
    ChangeKind.CHANGED: "",
}
_target = TargetType(Kind.JOB, Kind.CHECKPOINT)


@click.command(
    "diff",
    help="Show which tensors changed from BEFORE to AFTER, the L2 norm of each change, also relative to the "
    "tensor before, and the bytes that both share. They may lie in two places, and other numbers of ranks "
    "may have saved them. Bytes that the digests prove to be equal are not read.",
)
@click.argument("before", metavar="BEFORE[@STEP]", type=_target)
@click.argument("after", metavar="AFTER[@STEP]", type=_target)
@click.option(
    "--tensors",
    "pattern",
    default="*",
    metavar="PATTERN",
    help="Compare the tensors whose names match, as in 'model.*'.",
)
@click.option(
    "--exit-code",
    is_flag=True,
    help=f"End with {Exit.DIFFERENT.value} where a compared tensor differs, and with 0 where none does.",
)
@common_options
@click.pass_obj
def command(
    session: Session, before: Target, after: Target, pattern: str, exit_code: bool
) -> Result:
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(stack.enter_context(open_checkpoints(place.place)).at(place.step))
            for place in [place_of(session, target) for target in (before, after)]
        )
        names = _named(before, one.step), _named(after, other.step)
        total = sum(t.nbytes for t in one.tensors().values())
        with ByteProgress("comparing") as progress:
            found = one.compare(
                other, tensors=pattern, progress=lambda done: progress.advance(done, total)
            )
    ends_as = Exit.DIFFERENT if exit_code and not found.is_equal else Exit.SUCCESS
    document = {"before": names[0], "after": names[1], "equal": found.is_equal, "diff": found}
    return Result(document, diff_lines(found, *names), ends_as)


def _named(target: Target, step: int) -> str:
    """Return the target with its step. A Checkpoint has one by itself."""
    is_object = isinstance(target, ClusterTarget) and target.kind is Kind.CHECKPOINT
    return str(target if is_object else replace(target, step=step))


def diff_lines(found: CheckpointDiff, before: str, after: str) -> list[Line]:
    """Return what the tables show of a comparison."""
    lines: list[Line] = [f"from {before} to {after}:"]
    if found.changes:
        columns: list[Column | str] = [
            "TENSOR",
            "CHANGE",
            Column("BYTES", right=True),
            Column("NORM", right=True),
            Column("RELATIVE", right=True),
        ]
        lines.append(Table(columns, [_row(change) for change in found.changes]))
    numbers = ", ".join(
        f"{sum(c.kind is kind for c in found.changes)} {kind}" for kind in ChangeKind
    )
    lines.append(f"tensors: {numbers}, {found.unchanged} equal")
    if any(change.kind is ChangeKind.CHANGED for change in found.changes):
        lines.append(f"norm of all changes together: {_number(found.norm)}")
    if found.entries:
        lines.append(f"other values of rank 0 differ in: {first_of(found.entries, _SHOWN_ENTRIES)}")
    lines.append(
        f"{bytes_text(found.shared_bytes)} of {bytes_text(found.payload_bytes)} are the same chunks in both; "
        f"read {bytes_text(found.read_bytes)}"
    )
    return lines


def _row(change: TensorChange) -> tuple[object, ...]:
    size = change.after or change.before
    return (
        Cell(change.name, _STYLES[change.kind]),
        _kind(change),
        "-" if size is None else bytes_text(size.nbytes),
        _number(change.norm),
        _number(change.relative_norm),
    )


def _kind(change: TensorChange) -> str:
    before, after = change.before, change.after
    if change.kind is not ChangeKind.RESHAPED or before is None or after is None:
        return str(change.kind)
    return f"{_type(before)} -> {_type(after)}"


def _type(tensor: DescribedTensor) -> str:
    return f"{tensor.dtype} {shape_text(tensor.shape)}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
