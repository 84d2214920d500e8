"""A device without one: tensors in the host's memory count as its own, and its copies lag.

What a real device may do at any time, this one does as late as it may: it copies when somebody is
held back, or when the test says `catch_up`. A copy that should have been waited for and was not holds
the bytes of later then, in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.state.snapshot import DeviceCopy
from holdfast.state.tensors import is_tensor
from holdfast_core.errors import DeviceError

_STUCK_SECONDS = 120.0


class FakeDevice:
    """Does copies in the order in which they came, as a stream does. Change its fields at any time."""

    def __init__(self, holds: Callable[[object], bool] = is_tensor) -> None:
        self.holds = holds
        self.is_lagging = True
        """Who waits for a copy waits until it is told to catch up; False: the copy is done then."""
        self.refuses: str | None = None
        """`enqueue` raises this."""
        self.fails: str | None = None
        """Copies end with this."""
        self.refuses_to_hold_back: str | None = None
        self.refuses_pins: str | None = None
        self.captures = False
        self.pinned: dict[int, int] = {}
        """Address -> bytes."""
        self._changed = threading.Condition(threading.RLock())
        self._marks: list[FakeMark] = []

    @property
    def is_idle(self) -> bool:
        """Every copy was done."""
        return not self._marks

    def enqueue(self, copies: Sequence[DeviceCopy]) -> FakeMark:
        with self._changed:
            if self.refuses is not None:
                raise DeviceError(self.refuses)
            mark = FakeMark(self, copies)
            self._marks.append(mark)
            return mark

    def is_capturing(self) -> bool:
        return self.captures

    def pin(self, address: int, size_bytes: int) -> None:
        if self.refuses_pins is not None:
            raise DeviceError(self.refuses_pins)
        self.pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def catch_up(self) -> None:
        """Do all copies."""
        with self._changed:
            if self._marks:
                self.do_up_to(self._marks[-1])

    def do_up_to(self, last: FakeMark) -> None:
        with self._changed:
            while not last.is_done:
                mark = self._marks.pop(0)
                for copy in mark.copies:
                    copy.run()
                mark.is_done = True
            self._changed.notify_all()

    def wait_for(self, mark: FakeMark) -> None:
        with self._changed:
            if not self.is_lagging:
                self.do_up_to(mark)
            if not self._changed.wait_for(lambda: mark.is_done, _STUCK_SECONDS):
                raise AssertionError("nobody told the device to catch up")
            if self.fails is not None:
                raise DeviceError(self.fails)


@dataclass(slots=True, eq=False)
class FakeMark:
    """The host is the current stream here: to hold it back is to do the copies now."""

    device: FakeDevice
    copies: Sequence[DeviceCopy]
    is_done: bool = False

    def hold_back(self) -> None:
        if self.device.refuses_to_hold_back is not None:
            raise DeviceError(self.device.refuses_to_hold_back)
        self.device.do_up_to(self)

    def wait(self) -> None:
        self.device.wait_for(self)
