"""Record of the steps of a round that were pruned or given up.

Without it, a member that repeats its messages would bring such a step back. Its size is bounded, because a
round may last for months.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.ids import Step

MAX_FORGOTTEN = 1024
"""Steps that are recorded individually. Of the older ones only the highest number is kept: a step up to that
number counts as forgotten unless it exists."""


class Forgotten:
    """Bounded record of forgotten steps."""

    def __init__(self) -> None:
        self._steps: dict[Step, bool] = {}
        """Whether the shards of each step are to be deleted."""
        self._below = Step(-1)

    def add(self, step: Step, *, pruned: bool) -> None:
        """Record a step.

        Args:
            pruned: Shards of the step are to be deleted wherever they still appear.
        """
        self._steps[step] = pruned
        while len(self._steps) > MAX_FORGOTTEN:
            oldest = min(self._steps)
            del self._steps[oldest]
            self._below = max(self._below, oldest)

    @property
    def pruned(self) -> tuple[Step, ...]:
        """The recorded steps whose shards are to be deleted."""
        return tuple(step for step, pruned in self._steps.items() if pruned)

    def has(self, step: Step, known: Iterable[Step]) -> bool:
        """Return whether a step is forgotten.

        Args:
            known: The steps that exist. They may be older than any recorded step.
        """
        return step in self._steps or (step <= self._below and step not in known)

    def is_pruned(self, step: Step) -> bool:
        """Return whether the step's shards are to be deleted.

        This is False if the step is no longer recorded individually: nothing is deleted without a reason.
        """
        return self._steps.get(step, False)
