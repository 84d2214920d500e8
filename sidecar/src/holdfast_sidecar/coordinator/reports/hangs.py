"""Detection of a gang that finishes no step (ADR 0014). It uses no I/O and no clock.

1. The time without a step counts only while every rank has finished a step of this round, no rank has
   announced a pause, none has ended, and every worker reports. So it does not count during a start, a
   restore, the first step, a save or an outage of a sidecar.
2. After the limit the coordinator requests the stacks of all ranks, in its replies to their reports.
3. If every rank waits for others or is stopped, the gang hangs, and the coordinator's state says so until a
   rank finishes a step.
4. Otherwise a rank may do honest work that the script does not announce, for example an evaluation. The
   stacks are taken again after another limit. The gang counts as hung after IDLE_SECONDS if no rank is at
   work, and after WORKING_SECONDS if one is. If the user has set the limit in seconds, it counts as hung at
   once if no rank is at work, and after PATIENCE limits if one is.
5. After hangs at the same step, the limits of point 4 are Policy.hang_factor times as long, because a pause
   may be missing in the script. Those of point 3 are not: a rank that waits for others does no work that
   could be announced, and a deadlock that repeats has to spend the budget of restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from holdfast_core.ids import Rank
from holdfast_core.messages.common import Policy, RankStack
from holdfast_core.messages.operator import Hang
from holdfast_sidecar.coordinator.reports.gathered import Gathered
from holdfast_sidecar.coordinator.reports.late import find_late

MIN_SECONDS = 60.0
"""Lower bound of the limit that follows from step times, because a step may read data for many seconds."""
STACKS_SECONDS = 20.0
"""Wait for the stacks of all ranks. A worker sends a report, whose reply requests them, every 5 seconds."""
SILENT_SECONDS = 15.0
"""Age of a worker's report from which on it says nothing about its ranks: three reports are missing."""
LONGEST_GAP_SECONDS = 5.0
"""Longest time between two looks. After a longer one this sidecar itself was stopped, and may have reports
to read that show a step."""
IDLE_SECONDS = 600.0
"""Time without a step after which a gang hangs of which a rank neither waits for others nor is at work. It
may wait for a slow server."""
WORKING_SECONDS = 1800.0
"""Time after which a gang hangs although a rank is at work: it may repeat something for ever."""
PATIENCE = 10
"""The same, as a number of limits that the user has set in seconds."""


class HangWatch:
    """Look at the reports of a gang's ranks about once a second.

    Args:
        gathered: The reports.
        instance: Identity of this coordinator, which its requests begin with.
    """

    def __init__(self, gathered: Gathered, instance: str) -> None:
        self._gathered = gathered
        self._instance = instance
        self._requests = 0
        self._requested_at = 0.0
        self._finished = -1
        self._since = 0.0
        self._looked_at: float | None = None
        self._next_at = 0.0
        self.token = ""
        """The request for stacks that members have not all answered yet, or answered last. "": none."""
        self.hang: Hang | None = None
        self.at_work = ""
        """Why a gang without steps does not count as hung, for the log."""

    def look(self, policy: Policy, now: float) -> bool:
        """Update `token` and `hang`. Return whether `hang` has changed.

        Args:
            policy: Has the limit.
            now: Monotonic seconds.
        """
        before = self.hang
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        finished = self._gathered.steps_finished
        if finished != self._finished or gap > LONGEST_GAP_SECONDS or not self._can_hang():
            self._restart(finished, now)
        else:
            self._wait(policy, now)
        return self.hang != before

    def _can_hang(self) -> bool:
        gathered = self._gathered
        return gathered.running and not gathered.is_paused and not gathered.has_ended

    def _restart(self, finished: int, now: float) -> None:
        self._finished, self._since = finished, now
        self._next_at = 0.0
        self.token, self.hang, self.at_work = "", None, ""

    def _wait(self, policy: Policy, now: float) -> None:
        waited = now - self._since
        if self.hang is not None or waited < (policy.hang_seconds or MIN_SECONDS):
            return
        limit = self._limit_seconds(policy)
        if limit is None or waited < max(limit, self._next_at):
            return
        if not self._gathered.all_reported_since(now - SILENT_SECONDS):
            self._restart(self._finished, now)
            return
        if not self.token:
            self._requests += 1
            self.token = f"{self._instance}/{self._requests}"
            self._requested_at = now
            return
        stacks = self._gathered.stacks(self.token)
        missing = len(stacks) < self._gathered.world_size
        if missing and now - self._requested_at < STACKS_SECONDS:
            return
        patience = _patience_seconds(policy, limit, stacks, self._gathered.world_size)
        if waited < patience:
            self.at_work = _described(stacks, waited, patience)
            self.token, self._next_at = "", min(waited + limit, patience)
            return
        self.hang = find_late(self._gathered.rank_steps, stacks, waited, patience)

    def _limit_seconds(self, policy: Policy) -> float | None:
        """Return the limit, or None while there is none: it is off, or too few steps were measured."""
        if policy.hang_seconds:
            return policy.hang_seconds
        measured = self._gathered.step_seconds
        if not policy.hang_steps or not measured:
            return None
        return max(MIN_SECONDS, policy.hang_steps * median(measured))


def _patience_seconds(
    policy: Policy, limit: float, stacks: Mapping[Rank, RankStack], world_size: int
) -> float:
    """Return the time without a step after which a gang whose ranks are in these places hangs."""
    works = any(s.moves for s in stacks.values())
    waiting = sum(1 for s in stacks.values() if s.waits or s.stopped)
    if not works and waiting == world_size:
        return limit
    if policy.hang_seconds:
        longest = PATIENCE * limit if works else limit
    else:
        longest = max(limit, WORKING_SECONDS if works else IDLE_SECONDS)
    return longest * policy.hang_factor


def _described(stacks: Mapping[Rank, RankStack], waited: float, patience: float) -> str:
    """Return why a gang without steps does not count as hung yet, for the log."""
    others = [s for s in stacks.values() if not s.waits and not s.stopped]
    working = [s for s in others if s.moves]
    shown = (working or others)[:1]
    where = f", such as rank {shown[0].rank}: {shown[0].stack}" if shown else ""
    state = "are at work" if working else "neither wait for others nor are at work"
    return (
        f"no rank has finished a step for {waited:.0f} s, but {len(working or others)} ranks {state}{where}; "
        f"the gang counts as hung after {patience:.0f} s; announce an evaluation or a download with "
        "Checkpointer.paused"
    )
