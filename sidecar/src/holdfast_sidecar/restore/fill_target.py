"""The slot that one fill writes: from the first byte until the fill is over or another is in its place.

A thread cannot be cancelled: one that waits for a slow disk or peer may wake in the next round, when
the slot is another fill's, or holds what the rank saves. Whatever a fill writes passes through here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast_core.errors import RefusedError
from holdfast_core.ids import Rank
from holdfast_core.messages.schema import Refusal
from holdfast_core.shm.slot_file import SlotFile
from holdfast_core.shm.slot_header import SlotHeader


class FillTarget:
    """reshard.assemble.Target. Owns the slot's descriptor; from any thread."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._stopped: str | None = None
        self._slot: SlotFile | None = None

    def stop(self, why: str) -> None:
        """Nothing is written any more when this returns, and the descriptor is closed: under the
        lock, since its number may be another file's at once. The first reason counts."""
        with self._lock:
            if self._stopped is None:
                self._stopped = why
            slot, self._slot = self._slot, None
            if slot is not None:
                slot.close()

    def check(self) -> None:
        """Raises RefusedError (BUSY) once it is stopped."""
        with self.writing():
            return

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The body runs before a `stop` or not at all. Raises as `check` does."""
        with self._lock:
            if self._stopped is not None:
                raise RefusedError(
                    Refusal.BUSY, f"the fill of rank {self._rank} was stopped: {self._stopped}"
                )
            yield

    def take(self, slot: SlotFile) -> None:
        """Writes go there from here on. The slot is closed by this object, also if this raises."""
        try:
            with self.writing():
                old, self._slot = self._slot, slot
        except BaseException:
            slot.close()
            raise
        if old is not None:
            old.close()

    def header(self) -> SlotHeader:
        with self.writing():
            return self._open.header()

    def write_header(self, header: SlotHeader) -> None:
        with self.writing():
            self._open.write_header(header)

    def write_payload(self, offset: int, data: memoryview) -> None:
        with self.writing():
            self._open.write_payload(offset, data)

    @property
    def _open(self) -> SlotFile:
        if self._slot is None:
            raise ValueError("FillTarget: take() a slot first")
        return self._slot
