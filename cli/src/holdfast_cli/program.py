"""The command line: its verbs, and how a command runs, prints its result and ends.

The module of a verb is imported when the verb runs. `--help` and completion read the table here only, so that
they import no client of a cluster, no numpy and no torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click
from click.shell_completion import CompletionItem

from holdfast_cli.errors import EXPLAINED, Exit, exit_of
from holdfast_cli.options import (
    COMMON_OPTIONS,
    EITHER,
    JOBS,
    STORES,
    Session,
    TargetType,
    common_options,
    place_options,
)
from holdfast_cli.output import Result, say, show
from holdfast_cli.targets import PLAIN_WORDS, SYNTAX, Kind, Program
from holdfast_core.errors import HoldfastError


@dataclass(frozen=True, slots=True)
class LazyVerb:
    """A verb, and where its command is."""

    module: str
    """Module of this package."""
    help: str
    command: str = "command"
    """Name of the command in the module."""
    kinds: tuple[Kind, ...] = EITHER
    """Kinds of objects that its TARGET may name, by which a shell completes it. Empty: it has no TARGET."""

    def load(self) -> click.Command:
        """Import the module and return the command."""
        module = importlib.import_module(f"holdfast_cli.{self.module}")
        found: click.Command = getattr(module, self.command)
        return found


VERBS = {
    "completion": LazyVerb(
        "completion", "print the script by which a shell completes commands", kinds=()
    ),
    "diff": LazyVerb("diffing", "show what changed between two checkpoints, and by how much"),
    "doctor": LazyVerb("doctor", "say what is wrong, and what mends it", kinds=(*JOBS, *STORES)),
    "events": LazyVerb(
        "events", "show the Events of a job, its pods, its checkpoints and its store", kinds=JOBS
    ),
    "export": LazyVerb("exporting", "write a checkpoint for other tools"),
    "import": LazyVerb(
        "importing",
        "save weights of another tool, or make objects of what a store has",
        kinds=STORES,
    ),
    "inject": LazyVerb("injecting", "cause a fault in a job, to see how it recovers", kinds=JOBS),
    "list": LazyVerb("listing", "list checkpoints", kinds=JOBS),
    "logs": LazyVerb("logs", "show the logs of all ranks of a job, merged by time", kinds=JOBS),
    "merge": LazyVerb(
        "exporting", "write the mean of the weights of several checkpoints", "merging"
    ),
    "pin": LazyVerb("pinning", "keep a checkpoint whatever a retention says"),
    "prune": LazyVerb(
        "pruning", "delete the checkpoints that a retention does not keep", kinds=JOBS
    ),
    "restart": LazyVerb(
        "restoring", "start a job over that has lost all of its checkpoints", "restart", kinds=JOBS
    ),
    "restore": LazyVerb(
        "restoring", "roll a job back to one of its checkpoints, or fork it", kinds=JOBS
    ),
    "save": LazyVerb("saving", "request a save now", kinds=JOBS),
    "show": LazyVerb("showing", "show what a checkpoint holds, and the state of its object"),
    "status": LazyVerb(
        "status", "show a job with its pods, tiers and recoveries, or list all jobs", kinds=JOBS
    ),
    "top": LazyVerb("top", "show one line for each job, those that need a person first", kinds=()),
    "unpin": LazyVerb("pinning", "release a pinned checkpoint", "unpin"),
    "verify": LazyVerb("verifying", "read every byte of a checkpoint, and compare the digests"),
}
_OF_THE_SDK = {
    "run": "start the ranks of this pod or node",
    "version": "print the version",
}
"""Verbs that the program `holdfast` has without this package."""
_ELSEWHERE = {
    "checkpoints": "it is `{program} list` now",
    "import-store": "it is `{program} import store/NAME` now",
    "run": "it is a verb of the program holdfast: `holdfast run --help`",
    "version": "it is a verb of the program holdfast: `holdfast version`",
}
"""What to do instead of a verb that does not exist here."""
_EXIT_CODES = "Exit codes: " + "; ".join(f"{code.value} {EXPLAINED[code]}" for code in Exit) + "."


class _Verbs(click.Group):
    """The group of the verbs, which imports a verb when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_shown(ctx))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        return None if verb is None else verb.load()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and args[0] in _ELSEWHERE:
            advice = _ELSEWHERE[args[0]].format(program=ctx.info_name)
            raise click.UsageError(f"no verb {args[0]}: {advice}", ctx)
        verb = VERBS.get(args[0])
        if ctx.resilient_parsing and verb is not None and verb.kinds and _has_no_own(args[1:]):
            return args[0], _completed(args[0], verb), args[1:]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(sorted(_shown(ctx).items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        program = ctx.ensure_object(Session).program
        for text in (f"{SYNTAX} {PLAIN_WORDS[program]}", _EXIT_CODES):
            formatter.write_paragraph()
            formatter.write_text(text)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=text)
            for name, text in sorted(_shown(ctx).items())
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]


class _CompletedVerb(click.Command):
    """A verb of which a shell completes the TARGET.

    The module of the verb may import pydantic and numpy, which takes longer than a person waits. So only the
    completion of an option imports it.
    """

    verb: LazyVerb

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return self.verb.load().shell_complete(ctx, incomplete)


def _completed(name: str, verb: LazyVerb) -> click.Command:
    targets = click.Argument(["targets"], type=TargetType(*verb.kinds), nargs=-1)
    command = common_options(_CompletedVerb(name, params=[targets]))
    command.verb = verb
    return command


def _has_no_own(words: Sequence[str]) -> bool:
    """Return whether all options among the words are those of every verb."""
    return all(word in COMMON_OPTIONS for word in words if word.startswith("-"))


def _shown(ctx: click.Context) -> dict[str, str]:
    """Return the help of each verb that the program has."""
    own = {name: verb.help for name, verb in VERBS.items()}
    is_sdk = ctx.ensure_object(Session).program == "holdfast"
    return own | _OF_THE_SDK if is_sdk else own


@click.command(
    cls=_Verbs,
    help="Show, verify, move, restore and delete checkpoints of a folder, a store or a cluster.",
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@place_options
def cli() -> None:
    pass


@cli.result_callback()
@click.pass_obj
def _print(session: Session, /, result: object, **_: object) -> int:
    """Print the result of a verb, and return its exit code.

    It runs within click, which ends the program quietly when the reader of the output has ended.
    """
    if not isinstance(result, Result):
        return Exit.SUCCESS
    show(result, session.format)
    return result.exit


def run(words: Sequence[str], program: Program) -> int:
    """Run one command, print its result, and return the exit code."""
    session = Session(program)
    variable = f"_{program.upper().replace(' ', '_')}_COMPLETE"
    try:
        code: int = cli.main(
            list(words),
            prog_name=program,
            complete_var=variable,
            standalone_mode=False,
            obj=session,
        )
        return code
    except click.Abort:  # click makes it of an interrupt
        return Exit.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return Exit.USAGE
    except HoldfastError as error:
        say(f"{program}: {error}")
        return exit_of(error)
    except OSError as error:  # of a path, such as one in a directory of another user
        say(f"{program}: {error.filename or 'the command'}: {error.strerror or error}")
        return Exit.FAILED


def main() -> None:
    """Run `kubectl holdfast`."""
    sys.exit(run(sys.argv[1:], "kubectl holdfast"))
