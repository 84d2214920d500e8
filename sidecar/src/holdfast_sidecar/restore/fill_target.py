"""Guard around the slot that one fill writes, which stops the writes when the fill ends or is replaced.

A thread cannot be cancelled. One that waits for a slow disk or peer may continue in the next round, when
the slot belongs to another fill or holds a save of the rank. Every write of a fill therefore goes through
this guard.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast_core.errors import RefusedError
from holdfast_core.ids import Rank
from holdfast_core.messages.schema import Refusal
from holdfast_core.shm.slot_file import SlotFile, SlotHeader


class FillTarget:
    """Target of one fill, which owns the descriptor of its slot. Thread-safe.

    It implements `reshard.assemble.PayloadSink`.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._stopped: str | None = None
        self._slot: SlotFile | None = None

    def stop(self, why: str) -> None:
        """Forbid all further writes and close the slot's descriptor. Waits for a write under way.

        The descriptor is closed while the lock is held, because its number may be reused for another file
        immediately. A second call keeps the first reason.
        """
        with self._lock:
            if self._stopped is None:
                self._stopped = why
            slot, self._slot = self._slot, None
            if slot is not None:
                slot.close()

    def check(self) -> None:
        """Raise RefusedError (BUSY) if the target was stopped."""
        with self.writing():
            return

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock during the body, so that it runs entirely before any `stop`.

        Raises RefusedError (BUSY) instead if the target was stopped.
        """
        with self._lock:
            if self._stopped is not None:
                raise RefusedError(
                    Refusal.BUSY, f"the fill of rank {self._rank} was stopped: {self._stopped}"
                )
            yield

    def take(self, slot: SlotFile) -> None:
        """Direct all further writes to `slot`, and close the slot before it.

        The target owns the slot from this call on, and closes it even if this raises.
        """
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
