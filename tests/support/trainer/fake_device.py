"""Device double: it treats tensors in host memory as its own, and its copies lag.

A real device may copy at any time; this one copies as late as possible, when a caller is held back or the
test calls `catch_up`. If code fails to wait for a copy, the copy therefore holds later bytes in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.state.copying.target import DeviceCopy, run_device_copies
from holdfast.state.tensors import is_tensor
from holdfast_core.errors import DeviceError

_STUCK_SECONDS = 120.0


class FakeDevice:
    """Device that executes copies in order, as a stream does. Tests may change its fields at any time."""

    def __init__(self, holds: Callable[[object], bool] = is_tensor) -> None:
        self.holds = holds
        self.is_lagging = True
        """Whether a wait for a copy blocks until `catch_up`. If False, the wait executes the copy."""
        self.refuses: str | None = None
        """Message of the DeviceError that `enqueue` raises."""
        self.fails: str | None = None
        """Message of the DeviceError with which each wait for a copy ends."""
        self.refuses_to_block: str | None = None
        self.refuses_pins: str | None = None
        self.captures = False
        self.capture_checks = 0
        """Number of calls of `is_capturing`."""
        self.pinned: dict[int, int] = {}
        """Size in bytes of each pinned range, by address."""
        self._changed = threading.Condition(threading.RLock())
        self._marks: list[FakeMark] = []

    @property
    def is_idle(self) -> bool:
        """Whether all copies are done."""
        return not self._marks

    def enqueue(self, copies: Sequence[DeviceCopy]) -> FakeMark:
        with self._changed:
            if self.refuses is not None:
                raise DeviceError(self.refuses)
            mark = FakeMark(self, copies)
            self._marks.append(mark)
            return mark

    def is_capturing(self) -> bool:
        self.capture_checks += 1
        return self.captures

    def pin(self, address: int, size_bytes: int) -> None:
        if self.refuses_pins is not None:
            raise DeviceError(self.refuses_pins)
        self.pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def catch_up(self) -> None:
        """Execute all pending copies."""
        with self._changed:
            if self._marks:
                self.do_up_to(self._marks[-1])

    def do_up_to(self, last: FakeMark) -> None:
        with self._changed:
            while not last.is_done:
                mark = self._marks.pop(0)
                run_device_copies(mark.copies, non_blocking=False)
                mark.is_done = True
            self._changed.notify_all()

    def wait_for(self, mark: FakeMark) -> None:
        with self._changed:
            if not self.is_lagging:
                self.do_up_to(mark)
            if not self._changed.wait_for(lambda: mark.is_done, _STUCK_SECONDS):
                raise AssertionError("the test did not let the device catch up")
            if self.fails is not None:
                raise DeviceError(self.fails)


@dataclass(slots=True, eq=False)
class FakeMark:
    """Position in the device's stream.

    The host takes the place of the current stream, so `block_later_work` executes the copies immediately.
    """

    device: FakeDevice
    copies: Sequence[DeviceCopy]
    is_done: bool = False

    def block_later_work(self) -> None:
        if self.device.refuses_to_block is not None:
            raise DeviceError(self.device.refuses_to_block)
        self.device.do_up_to(self)

    def wait(self) -> None:
        self.device.wait_for(self)
