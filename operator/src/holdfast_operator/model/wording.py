"""Texts that messages about jobs share. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(names: Sequence[object], limit: int = 8) -> str:
    """Return a list of at most `limit` names for a message, and the number of those that are left out."""
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
