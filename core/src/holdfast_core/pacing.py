"""Limits of rates: background transfers must not slow training, and a peer must not be too slow.

A limit that all threads of a process share follows the times of training steps, and transfers pause while a
rank copies a step into its slot. Each process that persists a trainer's saves has one `BackgroundLimit`.
Any thread that moves bytes calls `take`. One thread calls `step_done` for each finished step.

The socket's time-out of a remote peer bounds one pause only. Without a minimum rate, a peer that sends a
byte before each time-out could hold a caller forever.
"""

from __future__ import annotations

import io
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.ids import RestartRound, Step
from holdfast_core.shm.slot_file import SlotFile, SlotState, list_slots

HEADROOM = 1.25
"""The lowest limit is this factor times the rate that finishes each checkpoint just as the next is due."""
LEAST_BYTES_PER_SECOND = float(16 << 20)
"""The limit is never below this, even where no save is due, so that saves on request come to an end."""
TOLERATED_SLOWDOWN = 0.03
"""Accepted slowdown, as a share of a quiet step. Smaller differences are noise."""
SLOWER, FASTER = 0.7, 1.25
"""Factors by which the limit falls and rises."""
OBSERVATIONS = 5
"""Number of quiet steps, and of busy steps, that a median needs."""
NO_LIMIT_ABOVE = 4.0
"""The limit is removed when it exceeds this many times the highest rate measured without a limit."""
BURST_SECONDS = 0.05
"""Seconds of unused rate that a burst may use. A longer burst would slow training."""
LONGEST_SECONDS = 1.0
"""Longest wait for one copy. A rank that is killed during a copy leaves its slot in state FILLING, and
earlier saves must still be written."""
_POLL_SECONDS = 0.002


class BackgroundLimit:
    """Rate limit of one process for background transfers, with a pause while a rank copies a save."""

    def __init__(
        self,
        slots_dir: Path,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        waited_for_copies: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Create the limit of one process, without a limit.

        Args:
            slots_dir: Directory of the slots that the trainer copies its saves into.
            waited_for_copies: Called after each wait for such a copy, with its seconds.
        """
        self._throttle = Throttle(monotonic, sleep)
        self._copy_gate = ForegroundCopyGate(slots_dir, monotonic, sleep)
        self._waited_for_copies = waited_for_copies
        self._monotonic = monotonic
        self._rate = AdaptiveRate()
        self._last: float | None = None
        self._step: int | None = None
        self._blocked_seconds = 0.0
        """Seconds for which saves had blocked training when the newest step was reported."""
        self._moved = 0
        self._bytes_each_step = 0.0
        self._is_unlimited = False

    @property
    def limit(self) -> float | None:
        """Return the present limit in bytes per second. None means no limit."""
        return None if self._is_unlimited else self._rate.limit

    def take(self, byte_count: int) -> None:
        """Block until `byte_count` more bytes may be moved: the limit allows them, and no rank copies a save.

        ForegroundCopyGate bounds the wait for a copy.
        """
        self._throttle.take(byte_count)
        if not self._is_unlimited:
            seconds = self._copy_gate.wait_for_copies()
            if seconds:
                self._waited_for_copies(seconds)

    def begin(self) -> None:
        """Start a round: apply the limit again, and count the next step as the first one."""
        self._is_unlimited = False
        self._last = self._step = None
        self._blocked_seconds = 0.0
        self._apply()

    def expect(self, bytes_each_step: float) -> None:
        """Set how many bytes this process must move per step on average. The lowest limit follows from it."""
        self._bytes_each_step = bytes_each_step

    def remove_limit(self) -> None:
        """Remove the limit and the pauses until `begin`.

        Call it while no trainer runs and the transfers are waited for.
        """
        self._is_unlimited = True
        self._apply()

    def step_done(self, step: int, blocked_seconds: float) -> None:
        """Record that `step` has ended now, and adapt the limit.

        Args:
            blocked_seconds: Seconds for which saves blocked training in this round so far. What was added
                since the step before is subtracted, because background transfers do not cause it.

        The same step may be reported again after a save that follows it.
        """
        if step == self._step:
            return
        total, blocked_seconds = blocked_seconds, blocked_seconds - self._blocked_seconds
        self._step, self._blocked_seconds = step, total
        now, moved = self._monotonic(), self._throttle.moved_bytes
        if self._last is not None:
            seconds = max(0.0, now - self._last - blocked_seconds)
            quiet = self._rate.quiet_step_seconds
            needed = 0.0 if not quiet else HEADROOM * self._bytes_each_step / quiet
            self._rate.floor = max(LEAST_BYTES_PER_SECOND, needed)
            self._rate.step(seconds, moved - self._moved)
            self._apply()
        self._last, self._moved = now, moved

    def _apply(self) -> None:
        self._throttle.set_limit(self.limit)


def bytes_each_step(
    payload_bytes: int, interval_steps: int, copies: int, object_every_steps: int | None
) -> float:
    """Return the bytes that a rank's saves move on average per step.

    They go to the node tier, to peers and to the object store.

    Args:
        interval_steps: Steps between two saves. Below 1 nothing is saved.
        copies: Copies of each shard on peers.
        object_every_steps: Steps between two uploads. None means no uploads.
    """
    if interval_steps < 1:
        return 0.0
    moved = payload_bytes * (1 + copies) / interval_steps
    return moved + (payload_bytes / object_every_steps if object_every_steps else 0.0)


class AdaptiveRate:
    """The rate at which background transfers do not slow training. Not thread-safe, no I/O.

    Each step is an observation: its duration and the bytes that were moved during it. Quiet steps, during
    which nothing was moved, show how long a step takes. If the other steps take longer, the rate falls, but
    never below the rate that checkpoints need. If they do not, it rises until there is no limit.
    """

    def __init__(self) -> None:
        self.limit: float | None = None
        """Bytes per second. None means no limit."""
        self.floor = 0.0
        """Lowest limit in bytes per second: what checkpoints need to be finished before the next one."""
        self._quiet: deque[float] = deque(maxlen=32)
        self._busy: list[tuple[float, int]] = []
        self._unlimited = 0.0

    @property
    def quiet_step_seconds(self) -> float | None:
        """Return the median duration of quiet steps. None until there are enough of them."""
        return median(self._quiet) if len(self._quiet) >= OBSERVATIONS else None

    def step(self, seconds: float, moved_bytes: int) -> None:
        """Record a step of `seconds` during which `moved_bytes` were moved, and set `limit`."""
        if moved_bytes == 0:
            self._quiet.append(seconds)
            return
        self._busy.append((seconds, moved_bytes))
        quiet = self.quiet_step_seconds
        if len(self._busy) < OBSERVATIONS or quiet is None:
            self._busy = self._busy[-OBSERVATIONS:]
            return
        slow = median(s for s, _ in self._busy) > quiet * (1 + TOLERATED_SLOWDOWN)
        rate = sum(b for _, b in self._busy) / max(1e-9, sum(s for s, _ in self._busy))
        self._busy = []
        self.limit = self._next(slow, rate)

    def _next(self, slow: bool, rate: float) -> float | None:
        if self.limit is None:
            self._unlimited = max(self._unlimited, rate)
        if slow:
            now = rate if self.limit is None else min(rate, self.limit)
            return max(self.floor, now * SLOWER)
        if self.limit is None:
            return None
        risen = max(self.floor, self.limit * FASTER)
        return None if risen > NO_LIMIT_ABOVE * self._unlimited else risen


class Throttle:
    """Shared rate limit. Callers call `take` before they move bytes. Without a limit it only counts them."""

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._limit: float | None = None
        self._paid_until = 0.0
        self._moved = 0

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that were passed to `take` since this object was created."""
        with self._lock:
            return self._moved

    def set_limit(self, bytes_per_second: float | None) -> None:
        """Set the limit. None removes it. Calls of `take` that already wait still use the old limit."""
        with self._lock:
            self._limit = bytes_per_second

    def take(self, byte_count: int) -> None:
        """Block until `byte_count` more bytes may be moved."""
        with self._lock:
            self._moved += byte_count
            if self._limit is None:
                return
            now = self._monotonic()
            begin = max(self._paid_until, now - BURST_SECONDS)
            self._paid_until = begin + byte_count / self._limit
            wait = begin - now
        if wait > 0:
            self._sleep(wait)


@dataclass(frozen=True, slots=True)
class _SlotCopy:
    slot: str
    round: RestartRound | None
    step: Step


class ForegroundCopyGate:
    """Pause for background transfers while a rank copies a step into its slot. Thread-safe.

    Training waits for that copy and for no other part of a checkpoint. Writing, digesting and sending would
    compete with it for memory bandwidth and processors. They take much longer than the copy, so they lose
    little time by waiting for its end. `slots_dir` need not exist yet.
    """

    def __init__(
        self,
        slots_dir: Path,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slots_dir = slots_dir
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._seen_at: dict[_SlotCopy, float] = {}

    def wait_for_copies(self) -> float:
        """Block while a rank copies a save, at most LONGEST_SECONDS for each copy.

        Return the seconds that this took.
        """
        if not self._must_wait():
            return 0.0
        began = self._monotonic()
        while self._must_wait():
            self._sleep(_POLL_SECONDS)
        return self._monotonic() - began

    def _must_wait(self) -> bool:
        with self._lock:
            now = self._monotonic()
            self._seen_at = {
                copy: self._seen_at.get(copy, now) for copy in _copies(self._slots_dir)
            }
            return any(now - seen < LONGEST_SECONDS for seen in self._seen_at.values())


def _copies(slots_dir: Path) -> list[_SlotCopy]:
    """Return the copies that run now.

    A slot that cannot be read counts as idle, because an error here must not stop a transfer.
    """
    found: list[_SlotCopy] = []
    try:
        names = list_slots(slots_dir)
    except OSError:
        return found
    for name in names:
        try:
            slot = SlotFile.open(slots_dir, name)
        except HoldfastError:
            continue  # its rank has removed it
        try:
            header = slot.header()
            # A slot without a step is being filled by a restore, during which no rank trains.
            if header.state is SlotState.FILLING and header.step is not None:
                found.append(_SlotCopy(name, header.round, header.step))
        except HoldfastError:
            continue  # the header is not written yet or not valid; Stage reports the latter
        finally:
            slot.close()
    return found


SLOWEST_BYTES_PER_SECOND = 64 << 10
"""Minimum rate, after the grace period."""


@dataclass(slots=True)
class MinimumRate:
    """Deadline of one answer: `grace_seconds`, and one more second for each 64 KiB received."""

    what: str
    """The answer and its sender, for error texts."""
    clock: Clock
    began: float
    """Monotonic time at which the answer began."""
    grace_seconds: float
    received_bytes: int = 0

    def left_seconds(self) -> float:
        """Return the seconds until more bytes must have arrived. Raises UnavailableError if none are left."""
        spent = self.clock.monotonic() - self.began
        left = self.grace_seconds + self.received_bytes / SLOWEST_BYTES_PER_SECOND - spent
        if left <= 0:
            raise UnavailableError(
                f"{self.what}: only {self.received_bytes} bytes in {spent:.1f} s"
            )
        return left

    def receive(
        self,
        sock: socket.socket,
        idle_seconds: float | None,
        read: Callable[[memoryview], int | None],
        buffer: memoryview,
    ) -> int | None:
        """Call `read` once, with a time-out on `sock` that respects the deadline.

        Args:
            idle_seconds: The time-out that `sock` has before the call and has again afterwards.
            read: Reads from `sock` into the buffer and returns the number of bytes.

        Raises:
            UnavailableError: The deadline has passed.
            Exception: What `read` raises.
        """
        left = self.left_seconds()
        # The deadline is nearly always further away than the idle time-out. Then the time-out need not be
        # changed, which saves two system calls for each read.
        hurried = idle_seconds is None or left < idle_seconds
        try:
            if hurried:
                sock.settimeout(left)
            count = read(buffer)
        except TimeoutError:
            if hurried:
                self.left_seconds()
            raise
        finally:
            if hurried:
                sock.settimeout(idle_seconds)
        self.received_bytes += count or 0
        return count


class RatedSocket:
    """A connected socket with the one method that http.client.HTTPResponse uses, `makefile`."""

    def __init__(self, sock: socket.socket, rate: MinimumRate) -> None:
        self._sock = sock
        self._rate = rate

    def makefile(self, mode: str) -> io.BufferedReader:
        if mode != "rb":
            raise ValueError(f"mode {mode!r}, expected 'rb'")
        return io.BufferedReader(_RatedReader(self._sock, self._rate))


class _RatedReader(io.RawIOBase):
    """Raw reader of a socket whose reads are bounded by a MinimumRate."""

    def __init__(self, sock: socket.socket, rate: MinimumRate) -> None:
        self._sock = sock
        self._rate = rate
        self._idle_seconds = sock.gettimeout()
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]  # takes any buffer
        return self._rate.receive(self._sock, self._idle_seconds, self._raw.readinto, buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
