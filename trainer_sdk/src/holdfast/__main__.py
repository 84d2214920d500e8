"""The `holdfast` console script: `run` (the launcher) and `version`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from holdfast_core.contract import PodContract
from holdfast_core.errors import ConfigError

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. The words after `--` are the user's command."""
    text = list(sys.argv[1:] if argv is None else argv)
    text, command = _split(text)
    parser = argparse.ArgumentParser(prog="holdfast", description="Fault-tolerant training.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("version", help="print the version")
    run_parser = verbs.add_parser(
        "run", usage="holdfast run [options] -- COMMAND ...", help="start the ranks of this pod"
    )
    from holdfast.launcher import main as launcher

    launcher.add_arguments(run_parser)
    arguments = parser.parse_args(text)
    if arguments.verb == "version":
        sys.stdout.write(f"holdfast {version('holdfast')}\n")
        return 0
    try:
        return launcher.run(launcher.options_from(arguments, command), PodContract.from_env())
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE


def _split(text: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in text:
        return text, []
    at = text.index("--")
    return text[:at], text[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
