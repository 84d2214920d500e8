"""Detection of calls that neither return nor make progress, such as writes to a disk that hangs.

Such a call is reported as long as it lasts and is not given up: a thread that is blocked in the kernel
cannot be ended, and its bytes may still be written.
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
    """Await `call`, report while it makes no progress, and return or raise what it does.

    Args:
        call: The call to await.
        progress: Returns a number that grows with the work, such as a count of bytes.
        quiet_seconds: Period in which the progress is compared.
        stalled: Called after each period without progress, with the seconds that the call has stalled.
        moving: Called when there is progress again.
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
