"""The question before a command that cannot be undone."""

from __future__ import annotations

import sys

from holdfast_cli.cluster import ClusterError


def confirm(question: str, *, refused: str, no_terminal: str) -> None:
    """Ask on the terminal, and return if the answer is yes.

    Args:
        question: The question, without the choices.
        refused: The error after any other answer.
        no_terminal: The error where there is no terminal to ask on.

    Raises:
        ClusterError: `refused` or `no_terminal`.
    """
    if not sys.stdin.isatty():
        raise ClusterError(no_terminal)
    print(f"{question} [y/N] ", end="")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ClusterError(refused)
