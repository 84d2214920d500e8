"""Incoming copies: one writer for each shard. A copy whose connection broke is kept for its sender.

A new connection for a shard interrupts the older one and continues its copy. A sender may reconnect before
this side has detected that the old connection is dead, which may take a whole time-out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from holdfast_core.clock import Clock
from holdfast_core.errors import CapacityError, RefusedError, UnavailableError
from holdfast_core.ids import ShardRef
from holdfast_core.messages.schema import Refusal
from holdfast_core.tiers.base import CopyWriter, NodeTier

_TAKEOVER_SECONDS = 10.0
"""Longest wait for an interrupted connection to end. It may have to finish a write first."""


class BrokenTransferError(UnavailableError):
    """The connection of a copy failed. The bytes received so far are good."""


@dataclass(slots=True)
class Copy:
    """One incoming copy."""

    writer: CopyWriter
    outside: bool = False
    """Whether some of its bytes were received outside TLS."""


class Copies:
    """All incoming copies of a server. Copies with a broken connection are parked. Thread-safe."""

    def __init__(
        self, tier: NodeTier, clock: Clock, *, parked_copies: int, parked_seconds: float
    ) -> None:
        self._tier = tier
        self._parked_copies = parked_copies
        self._parked_seconds = parked_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._active: dict[ShardRef, Callable[[], None]] = {}
        """For each shard that is being received, the function that interrupts its connection."""
        self._parked: dict[tuple[ShardRef, int], tuple[Copy, float]] = {}

    def begin(self, ref: ShardRef, file_bytes: int, interrupt: Callable[[], None]) -> Copy:
        """Begin or resume a copy. An older connection for the same shard is interrupted first.

        Args:
            file_bytes: Size of the shard file. A parked copy of another size is not resumed.
            interrupt: Ends the caller's connection. Another thread may call it.

        Returns:
            The copy. The caller must end it with `end`.

        Raises:
            RefusedError: The older connection does not end in time (Busy).
            CapacityError: There is no room for the copy.
        """
        with self._lock:
            self._expire()
            if (older := self._active.get(ref)) is not None:
                older()
                if not self._ended.wait_for(lambda: ref not in self._active, _TAKEOVER_SECONDS):
                    raise RefusedError(Refusal.BUSY, f"another connection already sends {ref}")
            self._active[ref] = interrupt
            parked = self._parked.pop((ref, file_bytes), None)
        if parked is not None:
            return parked[0]
        try:
            return Copy(self._begin(ref, file_bytes))
        except BaseException:
            with self._lock:
                self._release(ref)
            raise

    def _begin(self, ref: ShardRef, file_bytes: int) -> CopyWriter:
        try:
            return self._tier.begin_copy(ref, file_bytes)
        except CapacityError:
            self.drop_all()  # parked copies must not take the space of an active one
            return self._tier.begin_copy(ref, file_bytes)

    def end(self, ref: ShardRef, file_bytes: int, parked: Copy | None) -> None:
        """End a copy that `begin` returned, and park it if `parked` is given.

        Otherwise the caller commits or aborts its writer.
        """
        with self._lock:
            self._release(ref)
            if parked is not None:
                self._parked[(ref, file_bytes)] = (parked, self._clock.monotonic())
            self._expire()

    def _release(self, ref: ShardRef) -> None:
        self._active.pop(ref, None)
        self._ended.notify_all()

    def drop_all(self) -> None:
        """Abort all parked copies."""
        with self._lock:
            copies = [copy for copy, _ in self._parked.values()]
            self._parked.clear()
        for copy in copies:
            copy.writer.abort()

    def _expire(self) -> None:
        oldest = self._clock.monotonic() - self._parked_seconds
        for key, (copy, since) in list(self._parked.items()):
            if since < oldest or len(self._parked) > self._parked_copies:
                del self._parked[key]
                copy.writer.abort()
