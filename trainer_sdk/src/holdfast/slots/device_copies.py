"""Copies from a device into a slot that go on while training does: whose bytes must stay till when.

What only an optimizer's step writes is copied beside training, and the next step is held back. All
else (running statistics, averages, anything whose writer is not known) may be written by the next
forward pass already, so the device finishes it before it does what training gives it next. The host
waits for neither. An optimizer is believed only if the hook saw it step since the last save: a
replayed graph and a compiled step call no hook.

Life of a save's copies:
 1. training thread: `enqueue`, at the end of `save`.
 2. whoever steps an optimizer, or calls `wait_staged`: `hold_back`.
 3. this module's thread: waits for the device, then calls `done`, or `failed` with the reason.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.slots.device import Device, Mark
from holdfast.state.snapshot import DeviceCopy
from holdfast.state.writers import Writers
from holdfast_core.errors import DeviceError

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingCopies:
    """The copies of one save that the device may not have done yet."""

    marks: list[Mark] = field(default_factory=list)
    copies: Sequence[DeviceCopy] = ()
    """All of them: their sources must live until they were read."""
    beside: list[tuple[DeviceCopy, Any, int]] = field(default_factory=list)
    """Those that go on beside training: with the optimizer, and the count of writes so far."""
    is_held_back: bool = False
    failure: str | None = None


class DeviceCopies:
    """`start` it before the first save, in the training thread; `close` it."""

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
        """From now on every step of every optimizer in this process is held back by pending copies."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            # Traced into a compiled step, this is nothing: such a step is not seen, and not believed.
            if not torch.compiler.is_compiling():
                self._before_step(optimizer)

        self._hook = register_optimizer_step_pre_hook(before_step)
        self._thread = threading.Thread(target=self._run, name="holdfast-device", daemon=True)
        self._thread.start()

    def enqueue(self, copies: Sequence[DeviceCopy], optimizers: Sequence[Any]) -> PendingCopies:
        """Start to copy the values of this moment. `optimizers`: those of the state.

        Raises DeviceError; none of the copies is under way then."""
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
                pending.marks[0].hold_back()
            if pending.beside:
                pending.marks.append(self.device.enqueue([copy for copy, _, _ in pending.beside]))
        except BaseException:
            self.cancel(pending)
            raise
        with self._changed:
            self._pending.append(pending)
        return pending

    def cancel(self, pending: PendingCopies) -> None:
        """Nothing writes into the slot any more when this returns. Instead of `when_done`."""
        for mark in pending.marks:
            try:
                mark.wait()
            except DeviceError:
                continue  # a copy that failed writes no more either
        self._remove(pending)

    def when_done(
        self, pending: PendingCopies, done: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """One of the two is called, in another thread, in the order of the saves."""

        def finish() -> None:
            try:
                failure = self._outcome(pending)
                if failure is None:
                    done()
                else:
                    failed(failure)
            except BaseException as error:
                # It would end the thread, and no later save would be handed over.
                logger.exception("the copies of a save from its device")
                failed(f"{type(error).__name__}: {error}")
            finally:
                self._remove(pending)

        self._to_finish.put(finish)

    def hold_back(self) -> None:
        """What the current stream is given from now on runs after all pending copies. Does not block
        the host and raises nothing: a copy that cannot be waited for is a save that fails."""
        with self._changed:
            for pending in self._pending:
                if not pending.is_held_back:
                    pending.failure = pending.failure or self._written(pending)
                    pending.is_held_back = True
                try:
                    for mark in pending.marks:
                        mark.hold_back()
                except DeviceError as error:
                    pending.failure = pending.failure or str(error)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Every save's copies are done and its slot is handed over, or given up."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_seconds)

    def close(self) -> None:
        """Does not wait: see `wait`."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._to_finish.put(None)

    # ------------------------------------------------------------------ inside

    def _before_step(self, optimizer: Any) -> None:
        if self.device.is_capturing():
            # Nothing runs now, and what runs at a replay is held back by nobody.
            with self._changed:
                self._distrusted.add(optimizer)
            return
        with self._changed:
            self._seen.add(optimizer)
        self.hold_back()

    def _run(self) -> None:
        while (finish := self._to_finish.get()) is not None:
            try:
                finish()
            except BaseException:
                logger.exception("the end of a save's copies from its device")

    def _outcome(self, pending: PendingCopies) -> str | None:
        """Waits. Why the bytes must not be used; None when they are the step's."""
        try:
            for mark in pending.marks:
                mark.wait()
        except DeviceError as error:
            return str(error)
        with self._changed:
            if pending.failure is None and not pending.is_held_back:
                pending.failure = self._written(pending)
            return pending.failure

    def _written(self, pending: PendingCopies) -> str | None:
        """What somebody wrote before he was held back: the bytes may be of two steps then."""
        found = [
            (copy.leaf.name, writer)
            for copy, writer, writes in pending.beside
            if copy.leaf.writes != writes
        ]
        if not found:
            return None
        self._distrusted.update(writer for _, writer in found)
        return (
            f"{len(found)} of an optimizer's tensors ({found[0][0]} ...) were written between the save "
            "and the optimizer's next step(): the copy may be of two steps. Call "
            "Checkpointer.wait_staged() before you write; later saves do not rely on this optimizer"
        )

    def _remove(self, pending: PendingCopies) -> None:
        with self._changed:
            if pending in self._pending:
                self._pending.remove(pending)
            self._changed.notify_all()
