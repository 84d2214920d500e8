"""Pods that the operator created or deleted and that the reflectors have not delivered yet.

A pass on older reads would repeat these writes. Repeating is harmless, because names are deterministic, but
waiting saves the calls. An expectation that is never met expires, and the next pass acts on what the
reflectors show.
"""

from __future__ import annotations

EXPIRE_SECONDS = 5.0


class Expectations:
    """Open expectations by owner. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, float]] = {}

    def expect(self, owner: str, token: str, now: float) -> None:
        """Record a write of ours.

        Args:
            owner: Uid of the job.
            token: Result of `created` or `deleted`; the cache passes the same one to `met`.
        """
        self._open.setdefault(owner, {})[token] = now + EXPIRE_SECONDS

    def met(self, owner: str, token: str) -> None:
        tokens = self._open.get(owner)
        if tokens is not None:
            tokens.pop(token, None)
            if not tokens:
                del self._open[owner]

    def wait_seconds(self, owner: str, now: float) -> float | None:
        """Return the seconds until the last open expectation expires, or None if there is none."""
        tokens = self._open.get(owner)
        if tokens is None:
            return None
        for token in [t for t, until in tokens.items() if until <= now]:
            del tokens[token]
        if not tokens:
            del self._open[owner]
            return None
        return max(tokens.values()) - now

    def forget(self, owner: str) -> None:
        self._open.pop(owner, None)


def created(uid: str) -> str:
    return f"created {uid}"


def deleted(uid: str) -> str:
    return f"deleted {uid}"
