"""Detection of what no part reports: overdue commits, and ranks that hang or are slow. No I/O, no clock.

Each part of the sidecar reports its own failures. `CommitWatch` finds saves that never
arrive, or that a part delays without an error.

While it finds commits overdue, the coordinator's state lists a failure, the log has one line,
and a metric gives the seconds without a commit.

The ranks that the others of a hanging gang wait for follow from the steps and the stacks (ADR 0014):

1. If some ranks have finished fewer steps than another one, the late ranks are among these. They need not
   all be late: a collective that lacks one rank ends on some of the others and not on the rest.
2. Among them, or among all if no rank is behind, a rank whose stack cannot be read is late: its process is
   stopped, or hangs in a system call.
3. Otherwise, if some of them wait in torch for others, those that do not are late.
4. Otherwise, all ranks that are behind are late.
5. Otherwise, if more than half of the ranks are at the same place, the others are late.
6. Otherwise, no rank is known to be late.

A gang that finishes no step hangs:

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

A rank is a straggler if it is slower than the others at the same work. All ranks of a gang have the same
step time, because they wait for each other. Each rank therefore reports what a step takes it without these
waits: the time until its batch is there, and that of its forward passes.

1. Ranks with the same number of parameters have the same work. The others, such as the stages of a
   pipeline, are not compared.
2. A rank is slow while it takes `straggler_factor` times the median of these ranks, and this costs the gang
   at least LEAST_SHARE of a step. Without the second condition, noise in very short passes would count.
3. It is a straggler after `straggler_steps` steps for which it was slow without a break.
4. It is one until it is less than half as much slower than rule 2 demands.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median, median_low

from holdfast_core.clock import Clock, stamp
from holdfast_core.ids import Level, Rank, Step, TierName
from holdfast_core.messages.codec import MAX_STRAGGLERS
from holdfast_core.messages.schema import (
    Failure,
    Interval,
    Policy,
    Progress,
    RankStack,
    RankWork,
    Straggler,
)
from holdfast_core.names import first_of
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.base.telemetry import Failures
from holdfast_sidecar.coordinator.gathered import Gathered
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry


@dataclass(frozen=True, slots=True)
class Overdue:
    """No step was committed for too long."""

    since: float
    """Monotonic seconds of the last commit or, if there is none, of the first step of the round."""
    seconds: float
    steps: int
    """Steps that every rank has finished since then."""
    intervals: int


@dataclass(frozen=True, slots=True)
class CommitInterval:
    """Steps or seconds between two saves."""

    steps: int = 1
    """Steps between two saves at least."""
    seconds: float | None = None
    """Seconds between two saves. None: the interval is a number of steps."""

    def passed(self, steps: int, seconds: float) -> int:
        """Return how many intervals are over after so many steps and seconds."""
        by_steps = steps // max(1, self.steps)
        return by_steps if self.seconds is None else min(by_steps, int(seconds / self.seconds))


def interval_of(policy: Policy, reported: Interval | None) -> CommitInterval:
    """Return the interval between the gang's saves.

    Seconds become steps only on rank 0, which reports them after its first steps. An automatic interval that
    is not reported counts as the mean time between failures, because it is never longer.

    Args:
        policy: Policy of the round.
        reported: What rank 0 has reported.
    """
    timing = policy.timing
    if timing is None:
        return CommitInterval(policy.interval_steps)
    if timing.seconds is not None:
        return CommitInterval(seconds=timing.seconds)
    known = None if reported is None else reported.seconds
    return CommitInterval(seconds=max(1.0, timing.mtbf_seconds if known is None else known))


class CommitWatch:
    """Comparison of the gang's finished steps with its commits.

    Commits are overdue only if both bounds are reached, because healthy jobs reach each of them alone: many
    intervals where steps take milliseconds and the disk cannot follow, many seconds where steps take minutes.
    """

    def __init__(self, *, intervals: int, seconds: float) -> None:
        self._intervals = intervals
        self._seconds = seconds
        self._step: Step | None = None
        """Newest step that every rank had finished at the last commit."""
        self._since = 0.0
        self._committed: Step | None = None

    def look(
        self, finished: Step | None, committed: Step | None, interval: CommitInterval, now: float
    ) -> Overdue | None:
        """Return by how much commits are overdue now, or None if they are not.

        Args:
            finished: The newest step that every rank has finished; None before the first.
            committed: The newest step of the round at level local.
            interval: The interval between saves.
            now: Monotonic seconds.
        """
        if finished is None:
            return None
        if self._step is None or committed != self._committed or finished < self._step:
            self._step, self._since, self._committed = finished, now, committed
        steps, seconds = finished - self._step, now - self._since
        intervals = interval.passed(steps, seconds)
        if intervals < self._intervals or seconds < self._seconds:
            return None
        return Overdue(self._since, seconds, steps, intervals)


NO_COMMIT = "NoCommitForTooLong"
_SUBJECT = "commits"
_SHOWN_RANKS = 8


class CommitAlarm:
    """Alarm that is active while commits are overdue."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        gathered: Gathered,
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._gathered = gathered
        self._clock = clock
        self._failures = Failures(on_change)
        self._watch = CommitWatch(
            intervals=settings.no_commit_intervals, seconds=settings.no_commit_seconds
        )
        self.seconds = 0.0
        """Seconds since the last commit or the round's first step while commits are overdue, else 0."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        return self._failures.current

    def look(self, policy: Policy) -> None:
        """Update the alarm from the current reports and commits. Call this after each report of a member."""
        gathered, newest = self._gathered, self._ledger.newest(Level.LOCAL)
        overdue = None
        if gathered.running and not gathered.done:
            committed = None if newest is None else newest.step
            now = self._clock.monotonic()
            overdue = self._watch.look(
                gathered.finished, committed, interval_of(policy, gathered.interval), now
            )
        if overdue is None:
            self.seconds = 0.0
            self._failures.healthy(_SUBJECT)
            return
        self.seconds = overdue.seconds
        step = None if newest is None else newest.step
        self._failures.note_text(
            _SUBJECT, TierName.NODE, NO_COMMIT, self._text(overdue, newest), step=step
        )

    def _text(self, overdue: Overdue, newest: StepEntry | None) -> str:
        since = stamp(self._clock.utc_now() - timedelta(seconds=overdue.seconds))
        last = "no step of this round" if newest is None else f"no step after {newest.step}"
        return (
            f"{last} was committed since {since}, while every rank finished {overdue.steps} steps "
            f"({overdue.intervals} intervals of saves): {self._missing(newest)}"
        )

    def _missing(self, newest: StepEntry | None) -> str:
        """Describe what the newest uncommitted step waits for."""
        floor = -1 if newest is None else newest.step
        waiting = [e for e in self._ledger.steps.values() if e.step > floor and not e.local]
        entry = max(waiting, key=lambda e: e.step, default=None)
        if entry is None:
            return (
                "no rank has written a newer step; check the trainers' logs for failed saves, and "
                "the nodes' disks if saves are skipped"
            )
        ranks = [Rank(r) for r in range(entry.world_size) if Rank(r) not in entry.durable]
        shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
        if not ranks:
            return (
                f"all shards of step {entry.step} are durable, but some workers do not have its "
                "manifest"
            )
        return (
            f"step {entry.step} waits for {len(ranks)} of {entry.world_size} ranks (rank {shown}); "
            "check the logs of their sidecars and trainers"
        )


_SHOWN_STACKS = 3
_NO_STACK = "its launcher sent no stack"


def find_late(
    steps: Mapping[Rank, int], stacks: Mapping[Rank, RankStack], waited: float, limit: float
) -> tuple[tuple[Rank, ...], str]:
    """Return the ranks that the others wait for in a hang, and its description.

    Args:
        steps: Number of steps that each rank has finished.
        stacks: Stack of each rank whose launcher has answered.
        waited: Seconds without a step.
        limit: Seconds after which this is a hang.
    """
    late = _late(steps, stacks)
    text = f"no rank has finished a step for {waited:.0f} s, the limit is {limit:.0f} s"
    others = [r for r in sorted(steps) if r not in late]
    if late:
        text += f"; {_names(late)} did not arrive: {_places(late, stacks)}"
    if others:
        what = "the others are" if late else "every rank is"
        text += f"; {what} in: {_places(others, stacks)}"
    return tuple(late), text


def _late(steps: Mapping[Rank, int], stacks: Mapping[Rank, RankStack]) -> list[Rank]:
    ranks = sorted(steps)
    newest = max(steps.values())
    behind = [r for r in ranks if steps[r] < newest]
    among = behind or ranks
    unknown = [r for r in among if r not in stacks or not stacks[r].is_known]
    if unknown:
        return unknown if len(unknown) < len(among) else behind
    busy = [r for r in among if not stacks[r].waits]
    if 0 < len(busy) < len(among):
        return busy
    if behind:
        return behind
    place, count = Counter(stacks[r].stack for r in ranks).most_common(1)[0]
    return [r for r in ranks if stacks[r].stack != place] if 2 * count > len(ranks) else []


def _names(ranks: list[Rank]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {first_of(ranks, _SHOWN_RANKS)}"


def _places(ranks: Iterable[Rank], stacks: Mapping[Rank, RankStack]) -> str:
    """Return where these ranks are, the places with the most ranks first."""
    counted = Counter(stacks[r].stack if r in stacks else _NO_STACK for r in ranks)
    shown = [
        place if number == 1 else f"{place} ({number} ranks)"
        for place, number in counted.most_common(_SHOWN_STACKS)
    ]
    return "; ".join(shown)


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
        self.hang = ""
        """Description of the hang. "": there is none."""
        self.late: tuple[Rank, ...] = ()
        """The ranks that the others wait for in the hang."""
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
        self.token, self.hang, self.late, self.at_work = "", "", (), ""

    def _wait(self, policy: Policy, now: float) -> None:
        waited = now - self._since
        if self.hang or waited < (policy.hang_seconds or MIN_SECONDS):
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
        self.late, self.hang = find_late(self._gathered.rank_steps, stacks, waited, patience)

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


LEAST_SHARE = 0.05
"""Part of the median step time by which a rank must delay the gang."""
_LONGEST_FACTOR = 1000.0
"""Factor of a rank whose peers take no measurable time."""
INPUT = "Input"
FORWARD = "Forward"


@dataclass(frozen=True, slots=True)
class _Slow:
    """Since when a rank is slow."""

    finished: int
    """Number of steps that it had finished."""
    step: Step
    counts: bool
    """Whether it has been slow for long enough to be a straggler."""


class StragglerWatch:
    """Compare the ranks about once a second.

    Args:
        gathered: The reports.
    """

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered
        self._slow: dict[Rank, _Slow] = {}
        self.found: tuple[Straggler, ...] = ()
        """At most MAX_STRAGGLERS ranks, those with the highest factors, by rank."""

    @property
    def ranks(self) -> list[int]:
        return [s.rank for s in self.found]

    def look(self, policy: Policy) -> bool:
        """Update `found`. Return whether it names other ranks than before.

        Args:
            policy: Has the factor and the number of steps.
        """
        before = self.ranks
        gathered = self._gathered
        if policy.straggler_factor <= 1.0 or gathered.has_ended or not gathered.running:
            self._slow, self.found = {}, ()
            return bool(before)
        steps = gathered.step_seconds
        if not steps:
            return False
        least_seconds = LEAST_SHARE * median(steps)
        progress = [p for r in gathered.reports.values() for p in r.progress]
        found = [
            straggler
            for peers in _comparable(progress)
            for straggler in self._compare(peers, policy, least_seconds)
        ]
        worst = sorted(found, key=lambda s: (-s.factor, s.rank))[:MAX_STRAGGLERS]
        self.found = tuple(sorted(worst, key=lambda s: s.rank))
        return self.ranks != before

    def _compare(
        self, peers: list[tuple[Progress, RankWork]], policy: Policy, least_seconds: float
    ) -> list[Straggler]:
        """Return the stragglers of some ranks with the same work.

        With an even number of ranks, the faster one of the two in the middle counts. So one of two ranks can
        be a straggler.
        """
        usual = median_low(_seconds(work) for _, work in peers)
        usual_input = median_low(work.input_seconds for _, work in peers)
        usual_forward = median_low(work.forward_seconds for _, work in peers)
        found = []
        for progress, work in peers:
            rank, excess = progress.rank, _seconds(work) - usual
            known = self._slow.get(rank)
            share = 0.5 if known is not None and known.counts else 1.0
            limit = share * max((policy.straggler_factor - 1.0) * usual, least_seconds)
            if excess <= 0.0 or excess < limit:
                self._slow.pop(rank, None)
                continue
            if known is None:
                known = _Slow(progress.finished, progress.step, counts=False)
            lasted = progress.finished - known.finished
            counts = known.counts or lasted >= policy.straggler_steps
            self._slow[rank] = replace(known, counts=counts)
            if counts:
                of_input = work.input_seconds - usual_input
                of_forward = work.forward_seconds - usual_forward
                factor = _LONGEST_FACTOR
                if usual > 0.0:
                    factor = min(factor, _seconds(work) / usual)
                part = INPUT if of_input > of_forward else FORWARD
                found.append(Straggler(rank, round(factor, 2), known.step, part))
        return found


def _comparable(progress: list[Progress]) -> list[list[tuple[Progress, RankWork]]]:
    """Return the ranks that measure their work, those with the same work together."""
    found = defaultdict[int, list[tuple[Progress, RankWork]]](list)
    for one in progress:
        if one.work is not None:
            found[one.work.parameters].append((one, one.work))
    return list(found.values())


def _seconds(work: RankWork) -> float:
    return work.input_seconds + work.forward_seconds
