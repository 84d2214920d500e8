"""Named places where a test may stop, slow or fail this process. Without a hook they do nothing.

The hook is installed only by `tests.support.crash.failpoints`, which no production module
imports: in a release there is nothing that could turn a failpoint on.
"""

from __future__ import annotations

from collections.abc import Callable

Hook = Callable[[str], None]

_hook: Hook | None = None


def failpoint(name: str) -> None:
    """Mark a step of a protocol, e.g. `node.after_rename`. The hook may raise, sleep, or exit."""
    if _hook is not None:
        _hook(name)


def set_hook(hook: Hook | None) -> None:
    """Install or remove the hook; for `tests.support.crash.failpoints` only."""
    global _hook
    _hook = hook
