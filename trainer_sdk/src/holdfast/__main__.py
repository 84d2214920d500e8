"""The `holdfast` console script: `run` (the launcher), `version`, and the verbs of the package holdfast-cli.

`run` and `version` need no other package, because they run in every pod.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.metadata import version

from holdfast_core.errors import ConfigError

EXIT_USAGE = 2
_COMMAND_LINE = "holdfast_cli"
"""Imported by name, because the package depends on this one."""
_OWN_VERBS = (
    "holdfast run [options] SCRIPT ... starts the ranks of this pod or node, and holdfast version prints the "
    "version. The other verbs need the package holdfast-cli: pip install holdfast-cli\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    match words[:1]:
        case ["run"]:
            return _run(words)
        case ["version"] if len(words) == 1:
            sys.stdout.write(f"holdfast {version('holdfast-sdk')}\n")
            return 0
    if importlib.util.find_spec(_COMMAND_LINE) is None:
        is_help = words in (["-h"], ["--help"])
        (sys.stdout if is_help else sys.stderr).write(_OWN_VERBS)
        return 0 if is_help else EXIT_USAGE
    program = importlib.import_module(f"{_COMMAND_LINE}.program")
    code: int = program.run(words, "holdfast")
    return code


def _run(words: list[str]) -> int:
    from holdfast.base.settings import current_environment
    from holdfast.launcher import main as launcher
    from holdfast.launcher import options
    from holdfast_core.contract import PodContract

    parser = argparse.ArgumentParser(
        prog="holdfast run",
        usage="holdfast run [options] SCRIPT ...  or  holdfast run [options] -- COMMAND ...",
        description="Start the ranks of this pod or node.",
        allow_abbrev=False,
    )
    options.add_arguments(parser)
    try:
        own, command, is_command_line = options.split(words)
        arguments = parser.parse_args(own[1:])
        contract = PodContract.from_env()
        run_options = options.options_from(
            arguments,
            command,
            current_environment(),
            is_command_line=is_command_line,
            in_pod=contract is not None,
        )
        return launcher.run(run_options, contract)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
