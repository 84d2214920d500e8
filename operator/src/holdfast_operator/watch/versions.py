"""Order of the resourceVersions of one collection, which Kubernetes guarantees since version 1.35."""

from __future__ import annotations


def is_at_least(seen: str, expected: str) -> bool:
    """Return whether `seen` is `expected` or newer. If one of them is no number, only equality counts."""
    if seen.isdecimal() and expected.isdecimal():
        return int(seen) >= int(expected)
    return seen == expected
