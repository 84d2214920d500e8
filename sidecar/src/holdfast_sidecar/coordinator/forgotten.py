"""Steps of a round that are gone, so that a member that repeats itself does not bring them back. Bounded:
a round may last for months.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_core.ids import Digest, Step

MAX_FORGOTTEN = 1024
"""Steps that are remembered one by one. Of older ones only the newest is: what is not above it, and
not known otherwise, is gone."""


class Forgotten:
    def __init__(self) -> None:
        self._steps: dict[Step, tuple[Digest | None, bool]] = {}
        self._below = Step(-1)

    def add(self, step: Step, manifest: Digest | None, *, pruned: bool) -> None:
        """`pruned`: its shards are to be deleted wherever they still appear."""
        self._steps[step] = (manifest, pruned)
        while len(self._steps) > MAX_FORGOTTEN:
            oldest = min(self._steps)
            del self._steps[oldest]
            self._below = max(self._below, oldest)

    def has(self, step: Step, known: Iterable[Step]) -> bool:
        """`known`: the steps that exist, which may be as old as any."""
        return step in self._steps or (step <= self._below and step not in known)

    def manifest(self, step: Step) -> Digest | None:
        return self._steps.get(step, (None, False))[0]

    def is_pruned(self, step: Step) -> bool:
        """False also where it is not remembered any more: nothing is deleted without knowing why."""
        return self._steps.get(step, (None, False))[1]
