"""Which step that lies in shared memory is written to the node tiers next, and which give way. Pure.

One coordinator chooses for all: ranks that chose each on its own would seldom choose the same step, and
a step is local only when every rank has written it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.ids import Level, Rank, Step
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry


@dataclass(frozen=True, slots=True)
class Choice:
    chosen: Step | None
    dropped: tuple[Step, ...]
    """In order, oldest first; never the chosen one."""


def choose(ledger: Ledger, slots: int) -> Choice:
    """What follows from what the members said so far; asked again after every word. `slots`: of a
    rank."""
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
                and entry.held
            )
        )
    ]
    return Choice(chosen, tuple(sorted(dropped)))


def _chosen(ledger: Ledger) -> Step | None:
    """The earlier choice as long as it can become local. Else the newest step at level memory, once no
    rank that holds it writes another: a choice that a busy rank has to keep takes a slot from it, which
    it needs for the steps to come."""
    earlier = None if ledger.chosen is None else ledger.steps.get(ledger.chosen)
    if earlier is None:
        # Another life of the coordinator chose it.
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
    return None if any(rank in ledger.writing for rank in newest.held) else newest.step


def _is_open(entry: StepEntry) -> bool:
    """It is held somewhere, and every such rank may still write it."""
    return bool(entry.held) and not (entry.local or entry.lost or entry.failed)


def _is_written(entry: StepEntry, ledger: Ledger) -> bool:
    """By a rank that held it. One that was written at once was chosen by nobody."""
    return any(ledger.writing.get(rank) == entry.step for rank in entry.held)


def _stuck(ledger: Ledger, slots: int) -> frozenset[Step]:
    """Ranks that found no slot skipped steps that others hold, each rank other ones. Nothing of that
    ever becomes complete, so nothing is written: a rank that has all its slots full of it would never
    save again. The oldest such step of each such rank."""
    found = set[Step]()
    for rank, named in ledger.named.items():
        entries = [ledger.steps[s] for s in named if s in ledger.steps]
        goes_on = rank in ledger.writing or any(e.complete and not e.failed for e in entries)
        if len(entries) >= slots and not goes_on:
            skipped = [e.step for e in entries if _is_skipped(e, ledger)]
            found.update(sorted(skipped)[:1])
    return frozenset(found)


def _is_skipped(entry: StepEntry, ledger: Ledger) -> bool:
    """A rank has saved a newer one, and this one not: ranks save in order."""
    newer = [e for e in ledger.steps.values() if e.step > entry.step]
    for number in range(entry.world_size):
        rank = Rank(number)
        under_way = ledger.named.get(rank, frozenset()) | {ledger.writing.get(rank)}
        if rank in entry.shards or entry.step in under_way:
            continue
        if any(rank in e.shards for e in newer):
            return True
    return False
