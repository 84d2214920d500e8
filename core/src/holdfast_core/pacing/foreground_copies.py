"""Saves come first: while a rank copies a step into its slot, what moves in the background stands aside.

Training waits for that copy, and for nothing else that a checkpoint costs. Bytes that are written,
digested or sent meanwhile share its memory bus and its processors; a copy is short and they are not,
so they lose little by waiting for its end.
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
"""For one copy. A rank that was killed while it copied leaves its slot as it was, and what was saved
before is still to be written."""
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class _Copy:
    slot: str
    round: RestartRound | None
    step: Step


class GivingWay:
    """Of one process. Any thread may call `stand_aside`; `slots_dir` need not exist yet."""

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

    def stand_aside(self) -> float:
        """Returns when no copy is left that is worth waiting for; the seconds that this took."""
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
    """Nothing is worth failing for: whoever moves bytes does so then."""
    found: list[_Copy] = []
    try:
        names = list_slots(slots_dir)
    except OSError:
        return found
    for name in names:
        try:
            slot = SlotFile.open(slots_dir, name)
        except HoldfastError:
            continue  # its rank has taken it away
        try:
            header = slot.header()
            # Without an identity it is a restore that fills it, and nobody trains.
            if header.state is SlotState.FILLING and header.step is not None:
                found.append(_Copy(name, header.round, header.step))
        except HoldfastError:
            continue  # not written yet, or none: whoever stages it will say so
        finally:
            slot.close()
    return found
