"""Progress of a gang as its coordinator reports it."""

from __future__ import annotations

from holdfast_core.ids import Step
from holdfast_core.messages.schema import GangProgress


def progress_of(*steps: int) -> GangProgress | None:
    """Return the progress of ranks whose newest finished steps are `steps`; None without ranks."""
    if not steps:
        return None
    return GangProgress(Step(min(steps)), Step(max(steps)), sum(steps))
