"""What staging needs of an accelerator, and how CUDA (and ROCm, which torch calls so too) does it.

The only place that knows streams, events and page-locking. Decides nothing: which copies may go on
beside training is `device_copies`' to say. What torch raises becomes a DeviceError, so that a device
that fails ends a save and not the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.state.snapshot import DeviceCopy
from holdfast.state.tensors import is_tensor, torch_module
from holdfast_core.errors import DeviceError

_REGISTER_PORTABLE = 1
"""For all devices of the process, not for the current one alone."""


class Mark(Protocol):
    """A point behind some copies. Thread-safe."""

    def hold_back(self) -> None:
        """What the calling thread's current streams are given from now on runs after the copies.
        Does not block the host. Raises DeviceError."""
        ...

    def wait(self) -> None:
        """Block the calling thread until the copies are done. Raises DeviceError when they failed."""
        ...


class Device(Protocol):
    """The accelerators of this process."""

    def holds(self, source: object) -> bool:
        """Whether it is a tensor in the memory of one of them."""
        ...

    def enqueue(self, copies: Sequence[DeviceCopy]) -> Mark:
        """Start the copies behind all that the current streams were given, beside what they are
        given next. Raises DeviceError; none of these copies is under way then."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph, whose replay will call no hook."""
        ...

    def pin(self, address: int, size_bytes: int) -> None:
        """Lock the pages of this memory for copies that do not block. Raises DeviceError."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`, with no copy under way there. Never raises."""
        ...


def find_device() -> Device | None:
    """None while the process has not used an accelerator that is known here: then no tensor of a
    state can be on one."""
    torch = torch_module()
    if torch is None or not torch.cuda.is_initialized():
        return None
    return CudaDevice()


@dataclass(frozen=True, slots=True)
class _CudaMark:
    events: tuple[tuple[Any, Any], ...]
    """Device, and the event recorded behind the copies from it."""

    def hold_back(self) -> None:
        with _translated("making the current stream wait for the copies of a save"):
            for device, event in self.events:
                _cuda().current_stream(device).wait_event(event)

    def wait(self) -> None:
        with _translated("waiting for the copies of a save"):
            for device, event in self.events:
                # A thread's first call would else make a context on device 0, whatever the rank's.
                with _cuda().device(device):
                    event.synchronize()


class CudaDevice:
    """One side stream a device."""

    def __init__(self) -> None:
        self._streams: dict[Any, Any] = {}

    def holds(self, source: object) -> bool:
        return is_tensor(source) and bool(source.is_cuda)  # type: ignore[attr-defined]

    def enqueue(self, copies: Sequence[DeviceCopy]) -> Mark:
        by_device: dict[Any, list[DeviceCopy]] = {}
        for copy in copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        try:
            with _translated("copying a state from its device"):
                return _CudaMark(tuple((d, self._start(d, c)) for d, c in by_device.items()))
        except BaseException:
            for device in by_device:
                stream = self._streams.get(device)
                if stream is not None:
                    with contextlib.suppress(RuntimeError):
                        stream.synchronize()
            raise

    def _start(self, device: Any, copies: Sequence[DeviceCopy]) -> Any:
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = _cuda().Stream(device)
        side.wait_stream(_cuda().current_stream(device))
        with _cuda().stream(side):
            for copy in copies:
                copy.run()
            # blocking: whoever waits for it sleeps, and takes no core from the trainer's threads.
            event = _cuda().Event(blocking=True)
            event.record(side)
        return event

    def is_capturing(self) -> bool:
        return bool(_cuda().is_current_stream_capturing())

    def pin(self, address: int, size_bytes: int) -> None:
        with _translated("page-locking a slot"):
            runtime = _cuda().cudart()
            code = runtime.cudaHostRegister(address, size_bytes, _REGISTER_PORTABLE)
        if int(code) != 0:
            _forget_last_error()
            raise DeviceError(
                f"page-locking {size_bytes} bytes: cudaHostRegister answered {int(code)} "
                f"({runtime.cudaGetErrorString(code)})"
            )

    def unpin(self, address: int) -> None:
        with contextlib.suppress(RuntimeError):  # at the end of a process the runtime may be gone
            if int(_cuda().cudart().cudaHostUnregister(address)) != 0:
                _forget_last_error()


def _cuda() -> Any:
    """torch.cuda, which is only partly typed, and imported only when there is something to do."""
    import torch

    return torch.cuda


def _forget_last_error() -> None:
    """The runtime keeps the error of a call and gives it to whoever asks next, which is the launch
    of some kernel of the training: let that be one of ours."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """What torch raises for a device's errors is a RuntimeError of one kind or another."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{doing}: {type(error).__name__}: {error}") from error
