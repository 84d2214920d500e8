"""Limits on calls to sidecars: a rate with a burst, and slots for concurrent calls.

The slots are limited in total, for each job, and for pods that do not answer:

1. Pods that answered the last call, pods of unknown state, and pods that did not answer several calls have
   separate slots. Thousands of silent pods cannot take the slots of a healthy job, nor those of a pod that
   failed once because the operator itself was slow.
2. Within each of these kinds, calls of a recovery (SEAL, ROUND, the first poll of a coordinator) go first,
   and jobs take turns, each with a limited number of concurrent calls. One large or hostile job delays
   another by one call at most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from holdfast_core.ids import JobUid


@dataclass(slots=True)
class Allowance:
    """Rate limit: `burst` uses without a wait, and one more every `seconds_each` seconds."""

    burst: int
    seconds_each: float
    used_until: float = 0.0
    """Monotonic time at which the whole burst is available again."""

    def try_use(self, now: float) -> bool:
        """Take one use if it is available without a wait. Return whether it was."""
        used_until = max(self.used_until, now) + self.seconds_each
        if used_until - now > (self.burst + 0.5) * self.seconds_each:  # 0.5: sums are rounded
            return False
        self.used_until = used_until
        return True

    def wait_seconds(self, now: float) -> float:
        """Take one use and return the seconds that the caller must wait before it."""
        self.used_until = max(self.used_until, now) + self.seconds_each
        return max(0.0, self.used_until - now - self.burst * self.seconds_each)


class Standing(Enum):
    """Whether the pod to call has answered lately."""

    ANSWERS = "answers"
    UNKNOWN = "unknown"
    SILENT = "silent"


SLOTS: Mapping[Standing, int] = MappingProxyType(
    {Standing.ANSWERS: 128, Standing.UNKNOWN: 256, Standing.SILENT: 64}
)
"""Concurrent calls of each kind. Each is one connection, and a silent pod occupies it for seconds."""
JOB_SHARE = 8
"""Divisor: one job holds at most a JOB_SHARE-th of the slots of a kind, and at least one."""


class CallSlots:
    """Owner of all call slots. Wrap each call in `async with slots.hold(...)`."""

    def __init__(self, slots: Mapping[Standing, int] = SLOTS) -> None:
        self._kinds = {standing: _Kind(count) for standing, count in slots.items()}

    @asynccontextmanager
    async def hold(self, job: JobUid, standing: Standing, *, urgent: bool) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Urgent calls go before all others of the same standing."""
        kind = self._kinds[standing]
        await kind.acquire(job, urgent)
        try:
            yield
        finally:
            kind.release(job)


class _Kind:
    """The slots of one standing."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._per_job = max(1, count // JOB_SHARE)
        self._held: dict[JobUid, int] = {}
        self._waiting: tuple[_Turns, _Turns] = ({}, {})
        """Waiting calls: the urgent ones, then the others."""

    async def acquire(self, job: JobUid, urgent: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[0 if urgent else 1]
        waiting.setdefault(job, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(job)  # the slot was assigned just before the cancellation arrived
            raise

    def release(self, job: JobUid) -> None:
        self._free += 1
        self._held[job] -= 1
        if not self._held[job]:
            del self._held[job]
        self._serve()

    def _serve(self) -> None:
        while self._free > 0:
            turn = self._next(self._waiting[0]) or self._next(self._waiting[1])
            if turn is None:
                return
            job, future = turn
            self._free -= 1
            self._held[job] = self._held.get(job, 0) + 1
            future.set_result(None)

    def _next(self, turns: _Turns) -> tuple[JobUid, asyncio.Future[None]] | None:
        """Remove and return the next call of the first job in turn that is below its limit.

        The job then moves to the end of the turns.
        """
        while True:
            job = next((j for j in turns if self._held.get(j, 0) < self._per_job), None)
            if job is None:
                return None
            queue = turns.pop(job)
            while queue:
                future = queue.popleft()
                if not future.done():
                    if queue:
                        turns[job] = queue
                    return job, future


_Turns = dict[JobUid, deque[asyncio.Future[None]]]
"""Waiting calls by job, in the order of the jobs' turns."""
