"""Interface of the slots to an accelerator, and its implementation for CUDA and ROCm (torch.cuda).

Only this module uses streams, events and page-locking. `device_copies` decides which copies run in
parallel with training. An exception of torch becomes a DeviceError, so that a failing device ends a save
and not the training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.state.copying import DeviceCopy, run_device_copies
from holdfast.state.tensors import is_tensor, torch_module
from holdfast_core.errors import DeviceError

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices of the process, not only the current one."""


class Mark(Protocol):
    """Marks the end of some copies. Thread-safe."""

    def block_later_work(self) -> None:
        """Make later work on the calling thread's current streams wait for the copies.

        This does not block the host. Raises DeviceError.
        """
        ...

    def wait(self) -> None:
        """Block the calling thread until the copies are done. Raises DeviceError when they failed."""
        ...


class Device(Protocol):
    """The accelerators of this process."""

    def holds(self, source: object) -> bool:
        """Return whether `source` is a tensor in the memory of one of them."""
        ...

    def enqueue(self, copies: Sequence[DeviceCopy]) -> Mark:
        """Start the copies after all earlier work of the current streams, in parallel with later work.

        Raises DeviceError; then none of these copies is pending.
        """
        ...

    def is_capturing(self) -> bool:
        """Return whether the current stream captures a graph. Its replay does not call hooks."""
        ...

    def pin(self, address: int, size_bytes: int) -> None:
        """Page-lock this memory, for copies that do not block the host. Raises DeviceError."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`. No copy into the memory may be pending. This does not raise."""
        ...


def find_device() -> Device | None:
    """Return the process's device, or None while the process has not used a supported accelerator.

    In that case no tensor of a state can be on one.
    """
    torch = torch_module()
    if torch is None or not torch.cuda.is_initialized():
        return None
    return CudaDevice()


@dataclass(frozen=True, slots=True)
class _CudaMark:
    events: tuple[tuple[Any, Any], ...]
    """Each device, and the event recorded after the copies from it."""

    def block_later_work(self) -> None:
        with _translated("making the current stream wait for the copies of a save"):
            for device, event in self.events:
                _cuda().current_stream(device).wait_event(event)

    def wait(self) -> None:
        with _translated("waiting for the copies of a save"):
            for device, event in self.events:
                # Without this, a thread's first call would create a context on device 0.
                with _cuda().device(device):
                    event.synchronize()


class CudaDevice:
    """The CUDA devices of this process, with one side stream each for copies."""

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
            run_device_copies(copies, non_blocking=True)
            # blocking=True: a thread that waits for the event sleeps and does not use a core.
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
                f"page-locking {size_bytes} bytes: cudaHostRegister returned {int(code)} "
                f"({runtime.cudaGetErrorString(code)})"
            )

    def unpin(self, address: int) -> None:
        # At the end of a process the runtime may be unloaded.
        with contextlib.suppress(RuntimeError):
            if int(_cuda().cudart().cudaHostUnregister(address)) != 0:
                _forget_last_error()


def _cuda() -> Any:
    """Return torch.cuda. It has few types, and it is imported only when it is needed."""
    import torch

    return torch.cuda


def _forget_last_error() -> None:
    """Clear the runtime's last error by a small operation.

    The runtime would otherwise report the error at the next kernel launch of the training.
    """
    import torch

    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Turn a RuntimeError, which torch raises for errors of a device, into a DeviceError."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{doing}: {type(error).__name__}: {error}") from error
