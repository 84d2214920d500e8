"""Copies on their way in: one writer a shard; one whose connection broke waits for its sender.

The newest connection for a shard is the one that counts: a sender comes back before this side has
noticed that its last connection is dead, which may take as long as a time-out.
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
"""For a connection that was interrupted to end: a write of its bytes, at most."""


class BrokenTransferError(UnavailableError):
    """The connection failed, not the disk: what arrived is good."""


@dataclass(slots=True)
class Copy:
    """A copy on its way in."""

    writer: CopyWriter
    outside: bool = False
    """Some of its bytes came outside TLS."""


class Copies:
    """Copies on their way in: at most one writer a shard, broken ones parked for their senders."""

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
        """By what a connection that receives a shard is interrupted."""
        self._parked: dict[tuple[ShardRef, int], tuple[Copy, float]] = {}

    def begin(self, ref: ShardRef, file_bytes: int, interrupt: Callable[[], None]) -> Copy:
        """An older connection for this shard is interrupted, and its copy taken over. Raises
        RefusedError Busy where it does not end; CapacityError."""
        with self._lock:
            self._expire()
            if (older := self._active.get(ref)) is not None:
                older()
                if not self._ended.wait_for(lambda: ref not in self._active, _TAKEOVER_SECONDS):
                    raise RefusedError(Refusal.BUSY, f"another connection sends {ref} already")
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
            self.drop_all()  # what nobody came back for must not keep a live copy out
            return self._tier.begin_copy(ref, file_bytes)

    def end(self, ref: ShardRef, file_bytes: int, parked: Copy | None) -> None:
        with self._lock:
            self._release(ref)
            if parked is not None:
                self._parked[(ref, file_bytes)] = (parked, self._clock.monotonic())
            self._expire()

    def _release(self, ref: ShardRef) -> None:
        self._active.pop(ref, None)
        self._ended.notify_all()

    def drop_all(self) -> None:
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
