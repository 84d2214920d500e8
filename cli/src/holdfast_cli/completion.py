"""Completion of commands in a shell: the script of the shell, and the names that complete a TARGET.

Names of objects come from kubectl. The Python client of Kubernetes takes longer to import than a person waits
for a completion.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from holdfast_cli.options import Session
from holdfast_cli.output import Result
from holdfast_cli.targets import Kind
from holdfast_core.names import GROUP

TIMEOUT_SECONDS = 2.0
"""Longest wait for the names. A shell does nothing else meanwhile."""
_SHELLS = ("bash", "zsh", "fish")
_RESOURCES = {
    Kind.JOB: ("trainingjob", "checkpointadoption"),
    Kind.CHECKPOINT: ("checkpoint",),
    Kind.STORE: ("checkpointstore",),
}
"""Resources of each kind, as kubectl prints them."""


@click.command(
    "completion",
    help="Print the script by which a shell completes commands. For bash: source <(holdfast completion "
    "bash), or source <(kubectl-holdfast completion bash).",
)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_obj
def command(session: Session, shell: str) -> Result:
    from holdfast_cli.program import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells"
    program = session.program.replace(" ", "-")
    variable = f"_{session.program.upper().replace(' ', '_')}_COMPLETE"
    return Result(None, [kind(cli, {}, program, variable).source().rstrip("\n")])


def targets(session: Session, kinds: Sequence[Kind], incomplete: str) -> list[CompletionItem]:
    """Return the files and the objects of the cluster that a beginning of a TARGET can become.

    Without a cluster, and after an error, there are no objects. No message is printed.
    """
    is_path = incomplete.startswith(("/", ".", "~"))
    found = []
    if is_path or session.program == "holdfast":
        # The first item, because the script for bash forgets those before it.
        found.append(CompletionItem(incomplete, type="file"))
    prefix, slash, _ = incomplete.partition("/")
    wanted = [kind for kind in kinds if not slash or kind == prefix]
    if is_path or not wanted:
        return found
    for kind, name in _names(session, wanted):
        # A plain word is an object of the first kind. The others need their kind.
        is_plain = not slash and kind is kinds[0] and kind is not Kind.STORE
        text = name if is_plain else f"{kind}/{name}"
        if text.startswith(incomplete):
            found.append(CompletionItem(text))
    return found


def _names(session: Session, kinds: Sequence[Kind]) -> list[tuple[Kind, str]]:
    resources = {f"{one}.{GROUP}": kind for kind in kinds for one in _RESOURCES[kind]}
    words = ["kubectl", "get", ",".join(resources), "-o", "name"]
    words.append(f"--request-timeout={TIMEOUT_SECONDS:g}s")
    for option, value in (("--namespace", session.namespace), ("--context", session.context)):
        words += [f"{option}={value}"] if value else []
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line.partition("/") for line in done.stdout.splitlines()]
    return [(resources[what], name) for what, _, name in lines if what in resources]


_ONLY_NAMES, _ALSO_FILES = 4, 0
"""Directives of cobra, by which kubectl also offers files or does not."""


def for_kubectl() -> None:
    """Complete `kubectl holdfast ...`, for which kubectl runs kubectl_complete-holdfast with the words.

    The last word is the incomplete one. Each line of the answer has a choice and its help behind a tab, and
    the last line a colon and a directive of cobra.
    """
    from holdfast_cli.program import cli

    *words, incomplete = sys.argv[1:] or [""]
    session = Session("kubectl holdfast")
    shell = ShellComplete(cli, {"obj": session}, session.program, "")
    found = shell.get_completions(words, incomplete)
    for item in found:
        if item.type == "plain":
            click.echo("\t".join(filter(None, (item.value, item.help))))
    has_files = any(item.type != "plain" for item in found)
    click.echo(f":{_ALSO_FILES if has_files else _ONLY_NAMES}")
