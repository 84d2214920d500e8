"""The `holdfast` console script: `run` (the launcher), `export`, `import`, `merge`, `verify`, `version`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from holdfast.base.settings import current_environment
from holdfast_core.contract import PodContract
from holdfast_core.errors import ConfigError

EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    text = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="holdfast", description="Fault-tolerant training.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("version", help="print the version")
    run_parser = verbs.add_parser(
        "run",
        usage="holdfast run [options] SCRIPT ...  or  holdfast run [options] -- COMMAND ...",
        help="start the ranks of this pod or node",
        allow_abbrev=False,
    )
    from holdfast.launcher import main as launcher
    from holdfast.launcher import options

    options.add_arguments(run_parser)
    from holdfast import conversion, verifying

    conversion.add_verbs(verbs)
    verifying.add_verb(verbs)
    try:
        words, command, is_command_line = text, list[str](), False
        if text[:1] == ["run"]:
            words, command, is_command_line = options.split(text)
        arguments = parser.parse_args(words)
        if arguments.verb == "version":
            sys.stdout.write(f"holdfast {version('holdfast-sdk')}\n")
            return 0
        if arguments.verb in conversion.VERBS:
            return conversion.run(arguments)
        if arguments.verb == verifying.VERB:
            return verifying.run(arguments)
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
