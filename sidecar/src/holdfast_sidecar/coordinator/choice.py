"""Choose which step that waits in slots is written to the node tiers next, and which steps are dropped.

These functions are pure. The coordinator chooses for all ranks, because a step is local only when every
rank has written it, and ranks that chose independently would seldom choose the same step. What it knows of
the slots is what the reports of the workers list (`RankSaves`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast_core.ids import Level, Rank, Step
from holdfast_core.messages.schema import RankSaves
from holdfast_sidecar.coordinator.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of the steps that wait in slots."""

    chosen: Step | None = None
    """The step to write next."""
    dropped: tuple[Step, ...] = ()
    """Steps whose slots are freed, oldest first."""
    newest: Step | None = None
    """The newest waiting step that every rank has handed over. A seal would have it restored."""

    @property
    def pending(self) -> bool:
        """Whether a step that waits or waited in slots becomes local without another save."""
        return self.newest is not None or self.chosen is not None


def choose(ledger: Ledger, saves: Mapping[Rank, RankSaves], base: Step | None = None) -> Choice:
    """Return the choice that follows from the messages received so far.

    Args:
        ledger: The steps, with those that are written.
        saves: The reported saves of each rank whose worker has sent this coordinator everything it had to
            send.
        base: Step of the restore point. Ranks that count from 0 again save steps up to it, which are refused
            as parts of this round's history.
    """
    waiting = {
        step for found in saves.values() for step in found.waiting if not ledger.is_forgotten(step)
    }
    floor = -1 if base is None else base
    newest = max((s for s in waiting if s > floor and _is_complete(s, ledger, saves)), default=None)
    chosen = _chosen(ledger, saves, newest)
    local = ledger.newest(Level.LOCAL)
    newer = (newest, None if local is None else local.step)
    replaced_below = max([floor + 1, *(step for step in newer if step is not None)])
    dropped = (
        step
        for step in waiting
        if step != chosen and (step < replaced_below or _is_skipped(step, ledger, saves))
    )
    return Choice(chosen, tuple(sorted(dropped)), newest)


def _chosen(ledger: Ledger, saves: Mapping[Rank, RankSaves], newest: Step | None) -> Step | None:
    """Return the step to write next.

    An earlier choice is kept while a rank writes it or has it to write, unless another rank has lost it.
    Otherwise this is the newest step that every rank has handed over, once no rank in whose slot it waits is
    writing another step: a busy rank would have to keep the chosen step in a slot that it needs for later
    saves.
    """
    earlier = ledger.chosen
    if earlier is not None and _is_complete(earlier, ledger, saves):
        entry = ledger.steps.get(earlier)
        is_open = entry is None or not entry.local
        # A step that every rank has written may still wait for its manifest, for ever if a node cannot store
        # it. The disks that have room go on with the next step.
        if is_open and any(earlier in found.under_way for found in saves.values()):
            return earlier
    if newest is None:
        return None
    return None if any(newest in s.waiting and s.writes for s in saves.values()) else newest


def _is_complete(step: Step, ledger: Ledger, saves: Mapping[Rank, RankSaves]) -> bool:
    """Return whether every rank has the step, in a slot or on its node tier."""
    if ledger.is_forgotten(step):
        return False
    ranks = map(Rank, range(ledger.world_size))
    return all(_has(rank, step, ledger, saves) for rank in ranks)


def _is_skipped(step: Step, ledger: Ledger, saves: Mapping[Rank, RankSaves]) -> bool:
    """Return whether a rank has saved this step or a newer one, but does not have it and never will.

    Ranks save in order. While other ranks kept such a step, their slots could fill with steps that never
    become complete, and they would not save again.
    """
    return any(s.newest >= step and not _has(r, step, ledger, saves) for r, s in saves.items())


def _has(rank: Rank, step: Step, ledger: Ledger, saves: Mapping[Rank, RankSaves]) -> bool:
    entry, found = ledger.steps.get(step), saves.get(rank)
    is_durable = entry is not None and rank in entry.durable
    return is_durable or (found is not None and step in found.under_way)
