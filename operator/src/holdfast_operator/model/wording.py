"""Texts that messages about jobs share. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(names: Sequence[object], limit: int = 8) -> str:
    """Return a list of at most `limit` names for a message, and the number of those that are left out."""
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def first_cause(text: str) -> str:
    """Return the first of the errors that a sidecar lists, in one line, and the number of the others.

    The errors are separated by line breaks, or by a semicolon and a space. The logs of the sidecars have all.
    """
    errors = [part for line in text.splitlines() for part in line.split("; ") if part]
    if len(errors) < 2:
        return text
    return f"{errors[0]} (and {len(errors) - 1} more errors, which the logs of the sidecars have)"
