"""Calls that neither return nor get on: a disk that hangs. Told of while it lasts, never given up.

A thread inside the kernel cannot be ended, and its bytes may still arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until_done(
    call: Awaitable[T],
    progress: Callable[[], int],
    *,
    quiet_seconds: float,
    stalled: Callable[[float], object],
    moving: Callable[[], object],
) -> T:
    """What `call` returns or raises.

    `stalled` is called with the seconds that passed whenever `progress` (any number that grows with
    the work) has not grown for `quiet_seconds`; `moving` once it grows again.
    """
    task = asyncio.ensure_future(call)
    seen, quiet = progress(), 0.0
    try:
        while not (await asyncio.wait({task}, timeout=quiet_seconds))[0]:
            now = progress()
            if now == seen:
                quiet += quiet_seconds
                stalled(quiet)
            elif quiet:
                quiet = 0.0
                moving()
            seen = now
        return task.result()
    finally:
        task.cancel()
