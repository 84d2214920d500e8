"""Choose which step in shared memory is written to the node tiers next, and which steps are dropped.

These functions are pure. The coordinator chooses for all ranks, because a step is local only when every
rank has written it, and ranks that chose independently would seldom choose the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.ids import Level, Rank, Step
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry


@dataclass(frozen=True, slots=True)
class Choice:
    """The buffered step to write next, and the steps to drop."""

    chosen: Step | None
    dropped: tuple[Step, ...]
    """Steps to drop, oldest first."""


def choose(ledger: Ledger, slots: int) -> Choice:
    """Return the choice that follows from the messages received so far.

    Args:
        slots: Number of slots of each rank.
    """
    chosen = _chosen(ledger)
    stuck = _stuck(ledger, slots)
    newest = ledger.newest(Level.MEMORY)
    dropped = [
        entry.step
        for entry in ledger.steps.values()
        if not entry.local
        and (
            entry.lost
            or entry.step in stuck
            or (
                newest is not None
                and entry.step < newest.step
                and entry.step != chosen
                and entry.buffered
            )
        )
    ]
    return Choice(chosen, tuple(sorted(dropped)))


def _chosen(ledger: Ledger) -> Step | None:
    """Return the step to write next.

    An earlier choice is kept as long as it can become local. Otherwise this is the newest step at level
    memory, once no rank that buffers it is writing another step: a busy rank would have to keep the chosen
    step in a slot that it needs for later saves.
    """
    earlier = None if ledger.chosen is None else ledger.steps.get(ledger.chosen)
    if earlier is None:
        # A buffered step that is being written was chosen by an earlier instance of the coordinator.
        under_way = [e for e in ledger.steps.values() if _is_open(e) and _is_written(e, ledger)]
        earlier = max(under_way, key=lambda e: e.step, default=None)
    if (
        earlier is not None
        and _is_open(earlier)
        and (earlier.memory or _is_written(earlier, ledger))
    ):
        return earlier.step
    newest = ledger.newest(Level.MEMORY)
    if newest is None or not _is_open(newest):
        return None
    return None if any(rank in ledger.writing for rank in newest.buffered) else newest.step


def _is_open(entry: StepEntry) -> bool:
    """Return whether a rank buffers the step, which can still become local and is not yet."""
    return bool(entry.buffered) and not (entry.local or entry.lost or entry.failed)


def _is_written(entry: StepEntry, ledger: Ledger) -> bool:
    """Return whether a rank that buffers the step is writing it.

    A rank that writes a step without buffering it first does not count: no coordinator chose that step.
    """
    return any(ledger.writing.get(rank) == entry.step for rank in entry.buffered)


def _stuck(ledger: Ledger, slots: int) -> frozenset[Step]:
    """Return the steps to drop so that ranks whose slots are all occupied can save again.

    A rank without a free slot skips a step that other ranks buffer. If each rank skips different steps, no
    step becomes complete, none is written, and a rank whose slots are full of such steps never saves
    again. The result has the oldest skipped step of each such rank.
    """
    found = set[Step]()
    skipped: dict[Step, bool] = {}
    for rank, named in ledger.named.items():
        entries = [ledger.steps[s] for s in named if s in ledger.steps]
        goes_on = rank in ledger.writing or any(e.complete and not e.failed for e in entries)
        if len(entries) >= slots and not goes_on:
            for entry in entries:
                if entry.step not in skipped:
                    skipped[entry.step] = _is_skipped(entry, ledger)
            found.update(sorted(e.step for e in entries if skipped[e.step])[:1])
    return frozenset(found)


def _is_skipped(entry: StepEntry, ledger: Ledger) -> bool:
    """Return whether a rank has saved a newer step but not this one. It never will: ranks save in order."""
    newer = [e for e in ledger.steps.values() if e.step > entry.step]
    for number in range(entry.world_size):
        rank = Rank(number)
        under_way = ledger.named.get(rank, frozenset()) | {ledger.writing.get(rank)}
        if rank in entry.shards or entry.step in under_way:
            continue
        if any(rank in e.shards for e in newer):
            return True
    return False
