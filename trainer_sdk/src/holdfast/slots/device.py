"""Interface of the slots to an accelerator, and its implementation for CUDA and ROCm (torch.cuda).

Only this module uses streams, events and page-locking. An exception of torch becomes a DeviceError, so that
a failing device ends a save and not the training.

Tensors that only an optimizer's step writes are copied in parallel with training, and the next step
waits for these copies on the device. The next forward pass may already write all other tensors (running
statistics, averages, tensors whose writer is unknown). The device therefore copies them before it does
any later work of training. The host waits in neither case. An optimizer is trusted only if the hook has
seen a step of it since the last save, because replayed graphs and compiled steps do not call the hook.

The copies of a save:
 1. The training thread calls `enqueue` at the end of `save`.
 2. An optimizer's step or `wait_staged` calls `block_later_work`.
 3. This module's thread waits for the device, then calls `done`, or `failed` with the reason.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast.state.optimizers import Writers
from holdfast.state.snapshot import DeviceCopy, run_device_copies
from holdfast.state.tensors import is_tensor
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


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingCopies:
    """The copies of one save that the device may not have finished yet."""

    marks: list[Mark] = field(default_factory=list)
    copies: Sequence[DeviceCopy] = ()
    """All copies of the save. This keeps their sources alive until they have been read."""
    beside: list[tuple[DeviceCopy, Any, int]] = field(default_factory=list)
    """Copies in parallel with training. Each has the optimizer that writes its tensor, and the count of
    writes to the tensor when the copy was enqueued."""
    blocks_later_work: bool = False
    failure: str | None = None


class DeviceCopies:
    """The device copies of this process's saves.

    Call `start` in the training thread before the first save, and `close` at the end.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._changed = threading.Condition()
        self._pending: list[PendingCopies] = []
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._distrusted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._to_finish: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hook: Any = None

    def start(self) -> None:
        """Install the hook that makes every optimizer's step in this process wait for pending copies."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            # In a compiled step this must be a no-op. Such a step is not recorded, so that its optimizer
            # is not trusted.
            if not torch.compiler.is_compiling():
                self._before_step(optimizer)

        self._hook = register_optimizer_step_pre_hook(before_step)
        self._thread = threading.Thread(target=self._run, name="holdfast-device", daemon=True)
        self._thread.start()

    def enqueue(self, copies: Sequence[DeviceCopy], optimizers: Sequence[Any]) -> PendingCopies:
        """Start to copy the current values.

        Args:
            copies: The copies of this save.
            optimizers: The optimizers of the state.

        Raises:
            DeviceError: The copies cannot be started. None of them is pending then.
        """
        pending = PendingCopies(copies=copies)
        with self._changed:
            believed = [o for o in optimizers if o in self._seen and o not in self._distrusted]
            self._seen.clear()
        writers = Writers(believed)
        at_once: list[DeviceCopy] = []
        for copy in copies:
            writer = writers.of(copy.leaf)
            if writer is None:
                at_once.append(copy)
            else:
                pending.beside.append((copy, writer, copy.leaf.writes))
        try:
            if at_once:
                pending.marks.append(self.device.enqueue(at_once))
                pending.marks[0].block_later_work()
            if pending.beside:
                pending.marks.append(self.device.enqueue([copy for copy, _, _ in pending.beside]))
        except BaseException:
            self.cancel(pending)
            raise
        with self._changed:
            self._pending.append(pending)
        return pending

    def cancel(self, pending: PendingCopies) -> None:
        """Wait until no copy writes into the slot, and forget the copies. Call it instead of `when_done`."""
        for mark in pending.marks:
            try:
                mark.wait()
            except DeviceError:
                continue  # a failed copy does not write any more either
        self._remove(pending)

    def when_done(
        self, pending: PendingCopies, done: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """Call `done` or `failed` when the copies have ended, in another thread, in the order of saves."""

        def finish() -> None:
            try:
                failure = self._outcome(pending)
                if failure is None:
                    done()
                else:
                    failed(failure)
            except BaseException as error:
                # Otherwise the thread would end, and no later save would be handed over.
                logger.exception("the copies of a save from its device")
                failed(f"{type(error).__name__}: {error}")
            finally:
                self._remove(pending)

        self._to_finish.put(finish)

    def block_later_work(self) -> None:
        """Make later work on the current stream wait for all pending copies.

        This does not block the host and does not raise: if it fails for a copy, that copy's save fails.
        """
        with self._changed:
            for pending in self._pending:
                if not pending.blocks_later_work:
                    pending.failure = pending.failure or self._written(pending)
                    pending.blocks_later_work = True
                try:
                    for mark in pending.marks:
                        mark.block_later_work()
                except DeviceError as error:
                    pending.failure = pending.failure or str(error)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the slot of every save is handed over or given up. Return False at the time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_seconds)

    def close(self) -> None:
        """Remove the hook and let the thread end after the pending copies, without waiting for them."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._to_finish.put(None)

    # ------------------------------------------------------------------ inside

    def _before_step(self, optimizer: Any) -> None:
        if self.device.is_capturing():
            # A capture runs nothing, and a later replay of the graph does not call this hook.
            with self._changed:
                self._distrusted.add(optimizer)
            return
        with self._changed:
            self._seen.add(optimizer)
        self.block_later_work()

    def _run(self) -> None:
        while (finish := self._to_finish.get()) is not None:
            try:
                finish()
            except BaseException:
                logger.exception("the end of a save's copies from its device")

    def _outcome(self, pending: PendingCopies) -> str | None:
        """Wait for the copies. Return why their bytes must not be used, or None if they are valid."""
        try:
            for mark in pending.marks:
                mark.wait()
        except DeviceError as error:
            return str(error)
        with self._changed:
            if pending.failure is None and not pending.blocks_later_work:
                pending.failure = self._written(pending)
            return pending.failure

    def _written(self, pending: PendingCopies) -> str | None:
        """Return an error if a tensor was written before `block_later_work`, so that its copy may be torn.

        Its optimizer is not trusted any more.
        """
        found = [
            (copy.leaf.name, writer)
            for copy, writer, writes in pending.beside
            if copy.leaf.writes != writes
        ]
        if not found:
            return None
        self._distrusted.update(writer for _, writer in found)
        return (
            f"{len(found)} of an optimizer's tensors ({found[0][0]} ...) were written between the "
            "save and the optimizer's next step(): the copy may contain data of two steps. Call "
            "Checkpointer.wait_staged() before you write; later saves do not rely on this "
            "optimizer"
        )

    def _remove(self, pending: PendingCopies) -> None:
        with self._changed:
            if pending in self._pending:
                self._pending.remove(pending)
            self._changed.notify_all()
