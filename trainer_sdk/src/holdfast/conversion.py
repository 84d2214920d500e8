"""The verbs `export`, `import` and `merge` of the console script, and the import of weights into a folder."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from holdfast.base.options import Folder
from holdfast.checkpointer import Checkpointer
from holdfast.convert.exporting import DEFAULT_ENTRY, Export, Format, export
from holdfast.convert.merging import MAX_THREADS, Merge, MergeReport, Method, SourceStep, merge
from holdfast.convert.safetensors_files import read_model
from holdfast.convert.selection import CASTS
from holdfast.convert.torch_files import read_dcp, read_torch
from holdfast_core.errors import ConfigError, FormatError, HoldfastError
from holdfast_core.names import first_of

VERBS = ("export", "import", "merge")
_SHOWN_ENTRIES = 8


def add_verbs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs to the parser of the console script."""
    one = verbs.add_parser("export", help="write a checkpoint of a folder for other tools")
    one.add_argument("dir", metavar="DIR", help="folder of checkpoints, or s3://bucket/prefix")
    one.add_argument(
        "--format", choices=get_args(Format), required=True, help="format of the output"
    )
    one.add_argument(
        "--to", required=True, type=Path, metavar="OUT", help="new folder; with torch a new file"
    )
    one.add_argument("--step", type=int, help="default: the checkpoint that a restore would choose")
    one.add_argument(
        "--entry",
        help=f"entry of the state (default: {DEFAULT_ENTRY} for hf, the whole state of rank 0 else)",
    )
    one.add_argument(
        "--dtype", choices=sorted(CASTS), help="type to convert floating-point tensors to"
    )
    one.add_argument(
        "--config-from",
        type=Path,
        metavar="FOLDER",
        help="with hf: copy config.json, tokenizer and other files without weights from here",
    )
    two = verbs.add_parser("import", help="save weights of another tool as step 0 of a new folder")
    two.add_argument("source", metavar="SOURCE", type=Path, help="folder or file with the weights")
    two.add_argument("--format", choices=get_args(Format), required=True, help="format of SOURCE")
    two.add_argument("--to", required=True, metavar="DIR", help="folder without checkpoints")
    two.add_argument(
        "--entry", default=DEFAULT_ENTRY, help=f"entry of the state (default: {DEFAULT_ENTRY})"
    )
    three = verbs.add_parser("merge", help="write the mean of the weights of several checkpoints")
    three.add_argument(
        "sources",
        nargs="+",
        metavar="SRC@STEP",
        help="folder of checkpoints, or s3://bucket/prefix; without @STEP what a restore would choose",
    )
    three.add_argument("--to", required=True, type=Path, metavar="OUT", help="new folder")
    three.add_argument(
        "--method",
        required=True,
        help="mean, ema:DECAY, weights:W1,W2,... or metric:NAME[:max]",
    )
    three.add_argument(
        "--entry", default=DEFAULT_ENTRY, help=f"entry of the state (default: {DEFAULT_ENTRY})"
    )
    three.add_argument(
        "--dtype", choices=sorted(CASTS), help="type to convert floating-point tensors to"
    )
    three.add_argument(
        "--config-from",
        type=Path,
        metavar="FOLDER",
        help="copy config.json, tokenizer and other files without weights from here",
    )
    three.add_argument(
        "--threads",
        type=int,
        choices=range(1, MAX_THREADS + 1),
        help=f"default: one for each processor, at most {MAX_THREADS}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a verb and return the exit code. Raises ConfigError for a wrong command line."""
    method = Method.parse(arguments.method) if arguments.verb == "merge" else None
    try:
        if arguments.verb == "export":
            wanted = Export(
                arguments.dir,
                arguments.format,
                arguments.to.absolute(),
                arguments.step,
                arguments.entry,
                arguments.dtype,
                arguments.config_from,
            )
            step = export(wanted)
            sys.stdout.write(f"exported step {step} of {arguments.dir} to {arguments.to}\n")
        elif method is not None:
            wanted_merge = Merge(
                tuple(map(SourceStep.parse, arguments.sources)),
                method,
                arguments.to.absolute(),
                arguments.entry,
                arguments.dtype,
                arguments.config_from,
                arguments.threads,
            )
            sys.stdout.write(_merge_text(merge(wanted_merge), arguments))
        else:
            count = import_weights(
                Import(arguments.source, arguments.format, arguments.to, arguments.entry)
            )
            sys.stdout.write(
                f"imported {count} tensors of {arguments.source} as step 0 of {arguments.to}\n"
            )
    except HoldfastError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _merge_text(report: MergeReport, arguments: argparse.Namespace) -> str:
    lines = [f"merged {report.tensors} tensors of {arguments.entry} into {arguments.to}\n"]
    for source, weight in zip(report.sources, report.shares, strict=True):
        lines.append(f"  {weight:.6f}  {source}\n")
    left_out = first_of(report.left_out, _SHOWN_ENTRIES) or "none"
    lines.append(
        f"not merged: other entries of the state ({left_out}); a merge has no optimizer state, no generators "
        "and no data position\n"
    )
    return "".join(lines)


@dataclass(frozen=True, slots=True)
class Import:
    """What to import, and where to."""

    source: Path
    format: Format
    folder: str
    """Folder of checkpoints: a path or a file URL."""
    entry: str = DEFAULT_ENTRY
    """Entry of the state that gets the tensors."""


def import_weights(wanted: Import) -> int:
    """Save the tensors as step 0 and return their number.

    The save needs one copy of the tensors in shared memory. After an interruption the folder has no
    checkpoint, and the import can be repeated.

    Raises ConfigError where the folder has checkpoints, and what the reader of the format raises.
    """
    with Checkpointer(
        Folder(wanted.folder, slots=1),
        interval_steps=0,
        on_save_error="raise",
    ) as ckpt:
        if found := ckpt.list():
            raise ConfigError(
                f"{wanted.folder} has checkpoints already, the newest of step {found[-1].step}: import into "
                "a new folder"
            )
        tensors = _read(wanted)
        if not tensors:
            raise FormatError(f"{wanted.source} has no tensors")
        ckpt.save(0, {wanted.entry: dict(sorted(tensors.items()))}).wait()
        return len(tensors)


def _read(wanted: Import) -> dict[str, object]:
    if wanted.format == "hf":
        return read_model(wanted.source)
    if wanted.format == "dcp":
        return read_dcp(wanted.source, wanted.entry)
    return read_torch(wanted.source, wanted.entry)
