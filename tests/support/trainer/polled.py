"""Proposals of one rank without a thread: the test calls `poll`."""

from __future__ import annotations

from holdfast.gang.agreement import Proposals


class PolledByHand(Proposals):
    def start(self) -> None:
        """Start no thread."""
