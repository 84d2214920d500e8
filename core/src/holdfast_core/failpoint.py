"""Named places where a test can stop, delay or fail this process. Without a hook they do nothing.

Only `tests.support.crash.failpoints` installs a hook. No production module imports it, so a release
cannot activate a failpoint.
"""

from __future__ import annotations

from collections.abc import Callable

Hook = Callable[[str], None]

_hook: Hook | None = None


def failpoint(name: str) -> None:
    """Call the hook, if one is set, with a step of a protocol, e.g. `node.after_rename`.

    The hook may raise, sleep or end the process.
    """
    if _hook is not None:
        _hook(name)


def set_hook(hook: Hook | None) -> None:
    """Install the hook, or remove it with None. Only `tests.support.crash.failpoints` calls this."""
    global _hook
    _hook = hook
