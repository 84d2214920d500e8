"""A training with a fake device, whose copies run when the test lets them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until
from tests.support.trainer.slot_files import SlotCopy, slot_of, slots_below
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast.slots.device import DeviceCopies
from holdfast.state.snapshot import DeviceCopy, read_payload, run_device_copies
from holdfast.state.tensors import is_tensor
from holdfast_core.errors import DeviceError
from holdfast_core.messages.schema import Stage
from holdfast_core.shm.slot_file import SlotHeader

_STUCK_SECONDS = HANG_SECONDS


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


WEIGHT = torch.full((4, 3), 7.0)
MEAN = torch.full((4,), 7.0)


class Net(torch.nn.Module):
    """A module with a parameter, and a buffer that forward changes, as in batch norm."""

    mean: torch.Tensor

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.register_buffer("mean", MEAN.clone())

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            self.mean += 1
        return self.weight.sum()


class WatchedCopies(DeviceCopies):
    """Device copies that count the threads that wait for them."""

    waiting = 0

    def wait(self, timeout_seconds: float | None = None) -> bool:
        self.waiting += 1
        try:
            return super().wait(timeout_seconds)
        finally:
            self.waiting -= 1


class Training:
    """A model, its optimizer and a Checkpointer with a fake device. One step was done, so that the
    Checkpointer has a record of the optimizer; then weight and mean were set to WEIGHT and MEAN."""

    def __init__(
        self,
        sidecar: WatchedSidecar,
        ckpt: holdfast.Checkpointer,
        shard: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> None:
        self.sidecar = sidecar
        self.ckpt = ckpt
        self.device = FakeDevice()
        self.net = Net(shard(WEIGHT))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.net, "optim": self.optimizer, "n": 3}
        self.copies = WatchedCopies(self.device)
        ckpt.open()
        assert ckpt._opened is not None
        ckpt._opened.saver.use(self.copies)  # a Checkpointer itself only looks for CUDA devices
        self._slots_dir = ckpt._opened.ring.directory
        self.step()
        with torch.no_grad():
            self.net.weight.copy_(shard(WEIGHT))
            self.net.mean.copy_(MEAN)

    def step(self) -> None:
        self.net.forward().backward()  # type: ignore[no-untyped-call]  # torch does not type it
        self.optimizer.step()
        self.optimizer.zero_grad()

    def header(self, step: int) -> SlotHeader | None:
        """Return the header of the slot that contains `step`."""
        slot = self._slot(step)
        return None if slot is None else slot.header

    def saved(self, step: int) -> Saved:
        """Return the contents of the slot of `step`. The next save does not overwrite them."""
        slot = self._slot(step)
        assert slot is not None
        payload = read_payload(slot.payload[: slot.header.payload_bytes])
        model = payload["model"]
        momentum = payload["optim"]["state"][0]["momentum_buffer"]
        return Saved(model["weight"], model["mean"], momentum, payload)

    def momentum(self) -> torch.Tensor:
        buffer: torch.Tensor = self.optimizer.state[self.net.weight]["momentum_buffer"]
        return buffer

    @property
    def staged(self) -> list[int]:
        return [message.step for message in self.sidecar.messages(Stage)]

    @property
    def slots(self) -> list[SlotCopy]:
        return slots_below(self._slots_dir)

    def _slot(self, step: int) -> SlotCopy | None:
        return slot_of(self._slots_dir, step)


@dataclass(frozen=True)
class Saved:
    weight: torch.Tensor
    mean: torch.Tensor
    momentum: torch.Tensor
    payload: dict[str, Any]


def blocked(training: Training) -> bool:
    """Return whether a thread waits for the copies."""
    return training.copies.waiting > 0


def until_blocked(thread: Thread, training: Training) -> None:
    """Wait until the thread waits for the copies. Fail if it ends without waiting."""
    until(lambda: blocked(training) or not thread.is_alive(), "the thread")
    assert thread.is_alive()


def catch_up_when_blocked(training: Training) -> None:
    until(lambda: blocked(training), "the main thread")
    training.device.catch_up()


def write(tensor: torch.Tensor, value: float) -> None:
    """Write in a way that torch counts."""
    with torch.no_grad():
        tensor.fill_(value)


def write_unseen(tensor: torch.Tensor, value: float) -> None:
    """Write in a way that torch does not count."""
    tensor.data.fill_(value)
