"""The verb `verify` of the console script: read a whole checkpoint and compare its digests."""

from __future__ import annotations

import argparse
import sys

from holdfast.reading.opening import verify
from holdfast_core.contract import DrillExit
from holdfast_core.drill import DrillReport
from holdfast_core.errors import ConfigError, HoldfastError

VERB = "verify"
_GIB = 1 << 30


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the parser of the console script."""
    parser = verbs.add_parser(
        VERB,
        help="read every byte of a checkpoint",
        description="Exit code: 0 intact, 1 not read to its end, 3 damaged, 4 not restorable.",
    )
    parser.add_argument(
        "place", metavar="PLACE", help="folder of checkpoints, or s3://bucket/prefix"
    )
    parser.add_argument("--step", type=int, help="default: the newest checkpoint")
    parser.add_argument(
        "--restore",
        action="store_true",
        help="assemble the state for --world-size ranks and compare it with the saved ranks",
    )
    parser.add_argument("--world-size", type=int, metavar="M", help="number of ranks of --restore")


def run(arguments: argparse.Namespace) -> int:
    """Run the verb and return the exit code. Raises ConfigError for a wrong command line."""
    if arguments.restore != (arguments.world_size is not None):
        raise ConfigError(
            "verify: --restore and --world-size are given together: --restore --world-size 8 assembles the "
            "state for 8 ranks"
        )
    try:
        report = verify(arguments.place, arguments.step, arguments.world_size)
    except HoldfastError as error:
        sys.stderr.write(f"{error}\n")
        return DrillExit.NOT_READ
    sys.stdout.write(_text(report, arguments.place, arguments.world_size))
    return report.exit_code


def _text(report: DrillReport, place: str, world_size: int | None) -> str:
    gib, seconds = report.read_bytes / _GIB, max(report.seconds, 1e-9)
    text = (
        f"step {report.checkpoint.step} of {place}: read {gib:.3f} GiB of {report.shards} shards in "
        f"{seconds:.1f} s ({gib / seconds:.2f} GiB/s)\n"
    )
    if not report.is_intact:
        lines = [f"  {bad.part}: {bad.damage}: {bad.message}\n" for bad in report.bad]
        return f"{text}DAMAGED in {report.bad_count} parts:\n{''.join(lines)}"
    if report.not_restorable:
        return f"{text}intact, but not restorable on {world_size} ranks: {report.not_restorable}\n"
    if world_size is not None:
        text += f"assembled {report.tensors} tensors for {world_size} ranks: equal\n"
    return f"{text}intact\n"
