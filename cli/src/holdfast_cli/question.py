"""The question before a command that cannot be undone."""

from __future__ import annotations

import sys

import click

from holdfast_cli.errors import CommandError, UsageError
from holdfast_cli.output import visible


def confirm(question: str, *, refused: str, no_terminal: str) -> None:
    """Ask on the terminal, and return if the answer is yes.

    Args:
        question: The question, without the choices.
        refused: The error after any other answer.
        no_terminal: The error where there is no terminal to ask on.

    Raises:
        CommandError: `refused`.
        UsageError: `no_terminal`.
    """
    if sys.stdin is None or not sys.stdin.isatty():  # None: the shell has closed it
        raise UsageError(no_terminal)
    click.echo(f"{visible(question)} [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(refused)
