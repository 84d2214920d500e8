"""The plan: what the workers are to do next and which levels their steps have reached. Pure functions.

A plan follows from the ledger alone and is the same for all workers, except that a pod is released in its
turn. It is always the whole plan. A worker is sent what it lacks of it, so a plan that was lost needs no
repetition, and one that is applied twice changes nothing.
"""

from __future__ import annotations

from holdfast_core.messages.schema import LevelReached, Plan
from holdfast_sidecar.coordinator.ledger import Ledger


def plan(ledger: Ledger, *, released: bool = False) -> Plan:
    """Return the whole plan for a worker.

    Args:
        ledger: How far the steps of the round are.
        released: The worker's pod may end.
    """
    steps = sorted(ledger.steps.items())
    request = ledger.uploads.request
    known = None if request is None else ledger.steps.get(request.step)
    return Plan(
        ledger.round,
        levels=tuple(
            LevelReached(step, entry.round, entry.level)
            for step, entry in steps
            if entry.level is not None
        ),
        write=ledger.chosen,
        upload=request if known is not None and known.local else None,
        drop=ledger.dropped,
        released=released,
    )


def missing(wanted: Plan, known: Plan) -> Plan | None:
    """Return the part of a plan that a worker lacks. None: nothing.

    Args:
        wanted: The whole plan.
        known: The whole plan that the worker has acknowledged last.
    """
    levels, dropped = frozenset(known.levels), frozenset(known.drop)
    found = Plan(
        wanted.round,
        levels=tuple(level for level in wanted.levels if level not in levels),
        write=wanted.write,
        upload=None if wanted.upload == known.upload else wanted.upload,
        drop=tuple(step for step in wanted.drop if step not in dropped),
        released=wanted.released and not known.released,
    )
    return None if found == Plan(wanted.round, write=known.write) else found
