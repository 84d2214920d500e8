"""`export` and `merge`: write one checkpoint for other tools, or the mean of the weights of several."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from holdfast.convert.exporting import DEFAULT_ENTRY, Export, Format, export
from holdfast.convert.merging import MAX_THREADS, Merge, MergeReport, Method, SourceStep, merge
from holdfast.convert.selection import CASTS
from holdfast_cli.options import Session, TargetType, common_options, expanded, target_argument
from holdfast_cli.output import Result
from holdfast_cli.places import place_of
from holdfast_cli.progress import ByteProgress
from holdfast_cli.targets import Kind, Target
from holdfast_core.names import first_of

_SHOWN_ENTRIES = 8

_dtype = click.option(
    "--dtype", type=click.Choice(sorted(CASTS)), help="Type to convert floating-point tensors to."
)


@click.command(
    "export",
    help="Write a checkpoint for other tools. Without @STEP it is the one that a restore would choose. The "
    "output appears completely or not at all.",
)
@target_argument(Kind.JOB, Kind.CHECKPOINT)
@click.option("--format", type=click.Choice(get_args(Format)), required=True, help="Its format.")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    callback=expanded,
    required=True,
    metavar="OUT",
    help="New folder; with torch a new file.",
)
@click.option(
    "--entry",
    help=f"Entry of the state (default: {DEFAULT_ENTRY} for hf, the whole state of rank 0 else).",
)
@_dtype
@click.option(
    "--config-from",
    type=click.Path(path_type=Path),
    callback=expanded,
    metavar="FOLDER",
    help="With hf: copy config.json, tokenizer and other files without weights from here.",
)
@common_options
@click.pass_obj
def command(
    session: Session,
    target: Target,
    format: Format,
    to: Path,
    entry: str | None,
    dtype: str | None,
    config_from: Path | None,
) -> Result:
    place = place_of(session, target)
    wanted = Export(place.place, format, to.absolute(), place.step, entry, dtype, config_from)
    with ByteProgress("exporting") as progress:
        step = export(wanted, progress.advance)
    return Result(
        {"step": step, "source": place.place, "to": to},
        [f"exported step {step} of {place.place} to {to}"],
    )


@click.command(
    "merge",
    help="Write the mean of the weights of several checkpoints, as safetensors. The same checkpoints give "
    "the same bits on every machine. The optimizer's state is not merged.",
)
@click.argument(
    "targets",
    metavar="TARGET@STEP...",
    type=TargetType(Kind.JOB, Kind.CHECKPOINT),
    nargs=-1,
    required=True,
)
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    callback=expanded,
    required=True,
    metavar="OUT",
    help="New folder.",
)
@click.option(
    "--method", required=True, help="mean, ema:DECAY, weights:W1,W2,... or metric:NAME[:max]."
)
@click.option("--entry", default=DEFAULT_ENTRY, show_default=True, help="Entry of the state.")
@_dtype
@click.option(
    "--config-from",
    type=click.Path(path_type=Path),
    callback=expanded,
    metavar="FOLDER",
    help="Copy config.json, tokenizer and other files without weights from here.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    metavar="N",
    help=f"Default: one for each processor, at most {MAX_THREADS}.",
)
@common_options
@click.pass_obj
def merging(
    session: Session,
    targets: tuple[Target, ...],
    to: Path,
    method: str,
    entry: str,
    dtype: str | None,
    config_from: Path | None,
    threads: int | None,
) -> Result:
    places = [place_of(session, target) for target in targets]
    sources = tuple(SourceStep(place.place, place.step) for place in places)
    wanted = Merge(sources, Method.parse(method), to.absolute(), entry, dtype, config_from, threads)
    with ByteProgress("merging") as progress:
        report = merge(wanted, progress.advance)
    return Result({"report": report, "to": to}, _text(report, entry, to))


def _text(report: MergeReport, entry: str, to: Path) -> list[str]:
    left_out = first_of(report.left_out, _SHOWN_ENTRIES) or "none"
    shares = zip(report.sources, report.shares, strict=True)
    return [
        f"merged {report.tensors} tensors of {entry} into {to}",
        *(f"  {weight:.6f}  {source}" for source, weight in shares),
        f"not merged: other entries of the state ({left_out}); a merge has no optimizer state, no generators "
        "and no data position",
    ]
