"""Our own writes that the reflectors have not shown yet: a pass on older reads would repeat them.

Names are deterministic, so a repeated create would only meet itself; waiting spares the API the
calls and the status a conflict. An expectation that is never met expires: the next pass finds out.
"""

from __future__ import annotations

EXPIRE_SECONDS = 5.0


class Expectations:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, float]] = {}

    def expect(self, owner: str, token: str, now: float) -> None:
        """`owner`: uid of the job; `token`: what the reflector will report, see `met`."""
        self._open.setdefault(owner, {})[token] = now + EXPIRE_SECONDS

    def met(self, owner: str, token: str) -> None:
        tokens = self._open.get(owner)
        if tokens is not None:
            tokens.pop(token, None)
            if not tokens:
                del self._open[owner]

    def wait_seconds(self, owner: str, now: float) -> float | None:
        """Until the last of them expires; None: nothing is expected."""
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


def written(resource_version: str) -> str:
    return f"written {resource_version}"


def is_at_least(seen: str, expected: str) -> bool:
    """resourceVersions of one collection: numbers where both are; else only equality is known."""
    if seen.isdecimal() and expected.isdecimal():
        return int(seen) >= int(expected)
    return seen == expected
