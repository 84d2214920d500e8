"""Pause background transfers while a rank copies a step into its slot.

Training waits for that copy and for no other part of a checkpoint. Writing, digesting and sending would
compete with it for memory bandwidth and processors. They take much longer than the copy, so they lose
little time by waiting for its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast_core.errors import HoldfastError
from holdfast_core.ids import RestartRound, Step
from holdfast_core.shm.slot_file import SlotFile, list_slots
from holdfast_core.shm.slot_header import SlotState

LONGEST_SECONDS = 1.0
"""Longest wait for one copy. A rank that is killed during a copy leaves its slot in state FILLING, and
earlier saves must still be written."""
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class _Copy:
    slot: str
    round: RestartRound | None
    step: Step


class ForegroundCopyGate:
    """Detector of running copies, one for each process. Thread-safe. `slots_dir` need not exist yet."""

    def __init__(
        self,
        slots_dir: Path,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slots_dir = slots_dir
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._seen_at: dict[_Copy, float] = {}

    def wait_for_copies(self) -> float:
        """Block while a rank copies a save, at most LONGEST_SECONDS for each copy.

        Return the seconds that this took.
        """
        if not self._must_wait():
            return 0.0
        began = self._monotonic()
        while self._must_wait():
            self._sleep(_POLL_SECONDS)
        return self._monotonic() - began

    def _must_wait(self) -> bool:
        with self._lock:
            now = self._monotonic()
            self._seen_at = {
                copy: self._seen_at.get(copy, now) for copy in _copies(self._slots_dir)
            }
            return any(now - seen < LONGEST_SECONDS for seen in self._seen_at.values())


def _copies(slots_dir: Path) -> list[_Copy]:
    """Return the copies that run now.

    A slot that cannot be read counts as idle, because an error here must not stop a transfer.
    """
    found: list[_Copy] = []
    try:
        names = list_slots(slots_dir)
    except OSError:
        return found
    for name in names:
        try:
            slot = SlotFile.open(slots_dir, name)
        except HoldfastError:
            continue  # its rank has removed it
        try:
            header = slot.header()
            # A slot without a step is being filled by a restore, during which no rank trains.
            if header.state is SlotState.FILLING and header.step is not None:
                found.append(_Copy(name, header.round, header.step))
        except HoldfastError:
            continue  # the header is not written yet or not valid; Stage reports the latter
        finally:
            slot.close()
    return found
