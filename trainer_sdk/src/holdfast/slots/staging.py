"""The ring of slots in shared memory, into which a step's bytes are copied while training waits.

Slots are allocated and touched before the first step, so that a save costs only one copy. A slot that the
sidecar still reads is never written. If all slots are busy, the save is skipped and counted.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from holdfast.slots.capacity import (
    IN_A_POD,
    SlotAdvice,
    VolumeFullError,
    allocation_lock,
    require_room,
)
from holdfast.slots.prefault import prefault
from holdfast_core.errors import CapacityError, DeviceError, FormatError
from holdfast_core.ids import Rank, RestartRound, Step
from holdfast_core.shm.slot_file import (
    HEADER_BYTES,
    STATE_OFFSET,
    SlotHeader,
    SlotState,
    pack_state,
    slot_name,
)

_PAGE_BYTES = 4096
_TWO_THREADS_FROM_BYTES = 16 << 20
_POLL_SECONDS = 0.002
_SPARE_INDEX = 100
_LENT_INDEX = 999

logger = logging.getLogger(__name__)

Jobs = Sequence[tuple[int, Callable[[], object]]]


class Pinner(Protocol):
    """The part of a device that page-locks memory into which the device copies."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Page-lock the memory. Raises DeviceError."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        ...


class Slot:
    """One mapped slot file. Only its rank writes the payload, and only while it is FREE or FILLING."""

    def __init__(
        self, path: Path, index: int, memory: mmap.mmap, rank: Rank, identity: tuple[int, int]
    ) -> None:
        """Make a slot of mapped memory. `identity` is the device and inode number of the mapped file."""
        self.path = path
        self._identity = identity
        self.index = index
        self._memory = memory
        self._rank = rank
        self._bytes: np.ndarray[Any, Any] = np.frombuffer(memory, dtype=np.uint8)
        self._unpin: Callable[[], None] | None = None
        self.kept: Any = None
        """Views into the payload that the saver keeps from save to save. `close` drops them."""
        self.capacity_bytes = len(memory) - HEADER_BYTES
        self.is_touched = False

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def payload(self) -> np.ndarray[Any, Any]:
        return self._bytes[HEADER_BYTES:]

    def is_lost(self) -> bool:
        """Return whether the file was removed or replaced, for example by a tmp cleaner or by RemoveIPC.

        Processes that open it by its name then do not see what this process writes.
        """
        try:
            found = self.path.stat()
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._identity

    @property
    def is_closed(self) -> bool:
        """Whether this process cannot see the slot any more, because `close` has unmapped it."""
        return self._memory.closed

    def header(self) -> SlotHeader:
        return SlotHeader.unpack(self._memory[:HEADER_BYTES])

    def begin(self, round_: RestartRound, step: Step, payload_bytes: int) -> None:
        """Change the state from FREE to FILLING, and write the round and step of the copy to the header."""
        self._write(SlotState.FILLING, round_, step, payload_bytes)

    def complete(self) -> None:
        """Change the state from FILLING to FULL. This must be the last write of a save."""
        self._set_state(SlotState.FULL)

    def abandon(self) -> None:
        """Set the state to FREE, and clear the round and the step in the header."""
        self._write(SlotState.FREE, None, None, 0)

    def prefault(self) -> None:
        """Prefault all pages of the slot. Its contents do not change. Raises CapacityError, OSError."""
        _touch(self._memory, self.path, len(self._memory))
        self.is_touched = True

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None

    def pin(self, pinner: Pinner) -> None:
        """Page-lock the slot until `close`. Raises DeviceError."""
        address = self._bytes.ctypes.data
        pinner.pin(address, len(self._memory))
        self._unpin = partial(pinner.unpin, address)

    def close(self) -> None:
        """Unmap the slot, or leave that to the last view into the payload if there are any.

        No device may copy into the slot any more.
        """
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.kept = None
        self._bytes = np.empty(0, dtype=np.uint8)
        try:
            self._memory.close()
        except BufferError:
            return

    def _write(
        self, state: SlotState, round_: RestartRound | None, step: Step | None, payload_bytes: int
    ) -> None:
        header = SlotHeader(
            state, self._rank, self.capacity_bytes, round_, step, payload_bytes
        ).pack()
        # The state becomes FILLING before round and step change, so that no reader trusts them.
        self._set_state(SlotState.FILLING)
        rest = STATE_OFFSET + len(pack_state(state))
        self._memory[:STATE_OFFSET] = header[:STATE_OFFSET]
        self._memory[rest : len(header)] = header[rest:]
        self._set_state(state)

    def _set_state(self, state: SlotState) -> None:
        word = pack_state(state)
        self._memory[STATE_OFFSET : STATE_OFFSET + len(word)] = word


class SlotRing:
    """The slots of one rank. Not thread-safe: only the training thread uses it.

    The ring has a thread of its own that touches pages in the background.

    Args:
        directory: Directory of the slot files.
        rank: This rank.
        count: Number of slots.
        advice: Texts for errors about missing room.
        spare: Directory for the slots if `directory` has no room. Saves are slower with it.
        is_ours: Whether this process still holds `directory`. Called before removed slots are created
            again.
    """

    def __init__(
        self,
        directory: Path,
        rank: Rank,
        count: int,
        advice: SlotAdvice = IN_A_POD,
        spare: Path | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self.directory = directory
        """Directory of the slot files: the one of the constructor, or `spare`."""
        self._spare = spare
        self._is_ours = is_ours
        self.lost = 0
        """Number of slots that other programs have removed so far."""
        self._advice = advice
        self._rank = rank
        self._count = count
        self._slots: list[Slot] = []
        self._last = -1
        self._pinner: Pinner | None = None
        self._toucher: ThreadPoolExecutor | None = None
        self._touched: Future[None] | None = None

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots. This process writes only into a slot that `acquire` has returned."""
        return tuple(self._slots)

    @property
    def capacity_bytes(self) -> int:
        """Payload bytes that every slot can hold, or 0 without slots."""
        return min((slot.capacity_bytes for slot in self._slots), default=0)

    def pin_with(self, pinner: Pinner) -> None:
        """Page-lock all current and later slots.

        If that fails, it is logged once and not tried again. Device copies then block the training thread.
        """
        self._join()
        self._pinner = pinner
        self._pin()

    def ensure(self, capacity_bytes: int, round_: RestartRound, *, to_fill: bool = False) -> None:
        """Make sure that every slot is mapped, touched and holds at least `capacity_bytes`.

        Slots of an earlier process of this rank are reused with their contents: their memory is already
        touched, and a restore may find its bytes there.

        Args:
            capacity_bytes: Payload bytes of each slot.
            round_: Current round. A FULL or OWNED slot of another round is replaced by a new file.
            to_fill: Leave new slots untouched, because another process fills them for a restore. The
                restore does not have to wait for memory that only saves need. Do not use it where that
                process is in another container, which would be charged for the memory.

        Raises:
            CapacityError: There is not enough room. It is raised before anything is allocated. If the
                volume fills up later, the next call or `acquire` raises it.
        """
        try:
            self._ensure(capacity_bytes, round_, to_fill=to_fill)
        except VolumeFullError as error:
            if self._spare is None or self.directory == self._spare:
                raise CapacityError(str(error)) from error  # the public error class
            logger.warning("slots are in %s, and saves are slower: %s", self._spare, error)
            self._discard()
            self.directory = self._spare
            self._ensure(capacity_bytes, round_, to_fill=to_fill)

    def _discard(self) -> None:
        """Close and remove the slots of the directory. Readers keep the files that they have open."""
        for slot in self._slots:
            slot.close()
        self._slots = []
        if self._is_ours():
            for index in range(self._count):
                self._path(index).unlink(missing_ok=True)

    def _ensure(self, capacity_bytes: int, round_: RestartRound, *, to_fill: bool) -> None:
        capacity_bytes = _whole_pages(capacity_bytes)
        if self.has_lost():
            self._close_lost()
        if len(self._slots) == self._count and all(
            slot.capacity_bytes >= capacity_bytes for slot in self._slots
        ):
            if not to_fill and self._toucher is None:
                self._join()
            return
        self._await_toucher()
        kept = {slot.index: slot for slot in self._slots if slot.capacity_bytes >= capacity_bytes}
        for slot in self._slots:
            if slot.index not in kept:
                slot.close()
        self._slots = []
        self.directory.mkdir(mode=0o2770, parents=True, exist_ok=True)
        for index in range(self._count):
            if index not in kept:
                adopted = self._adopt(index, capacity_bytes, round_)
                if adopted is not None:
                    kept[index] = adopted
        missing = [index for index in range(self._count) if index not in kept]
        try:
            with allocation_lock(self.directory):
                for index in missing:
                    self._path(index).unlink(missing_ok=True)
                if missing:
                    size = len(missing) * (HEADER_BYTES + capacity_bytes)
                    left = require_room(self.directory, size, self._count, self._advice)
                    logger.info(
                        "%d slots of %.1f MiB each in %s take %.1f MiB of memory; %s",
                        self._count,
                        capacity_bytes / 2**20,
                        self.directory,
                        self._count * (HEADER_BYTES + capacity_bytes) / 2**20,
                        left,
                    )
                descriptors = {i: _create(self._path(i), capacity_bytes) for i in missing}
            for index, descriptor in descriptors.items():
                kept[index] = self._open(self._path(index), index, descriptor)
        finally:
            self._slots = [kept[index] for index in sorted(kept)]
        if not to_fill:
            self._join()

    @contextmanager
    def lent(self, capacity_bytes: int) -> Iterator[Slot]:
        """Lend a slot that does not belong to the ring and is removed afterwards.

        The slots of the ring keep what they hold. Raises CapacityError if there is no room for it.
        """
        name, capacity_bytes = slot_name(self._rank, _LENT_INDEX), _whole_pages(capacity_bytes)
        directories = [self.directory]
        if self._spare is not None and self._spare not in directories:
            directories.append(self._spare)
        for directory in directories:  # a reader looks for the name in both
            (directory / name).unlink(missing_ok=True)
        for directory in directories:
            directory.mkdir(mode=0o2770, parents=True, exist_ok=True)
            path = directory / name
            try:
                with allocation_lock(directory):
                    require_room(directory, HEADER_BYTES + capacity_bytes, 1, self._advice)
                    descriptor = _create(path, capacity_bytes)
            except VolumeFullError as error:
                if directory == directories[-1]:
                    raise CapacityError(str(error)) from error  # the public error class
                continue
            break
        slot = self._open(path, _LENT_INDEX, descriptor)
        try:
            slot.prefault()
            yield slot
        finally:
            slot.close()
            path.unlink(missing_ok=True)

    def has_lost(self) -> bool:
        """Return whether `ensure` has to create lost slots again. No device may copy into them then."""
        return any(slot.is_lost() for slot in self._slots)

    def _close_lost(self) -> None:
        """Close the lost slots. Readers keep the files that they have open.

        Raises VolumeFullError where another process holds the directory by now: two processes that shared
        slots would save each other's bytes.
        """
        self._await_toucher()
        lost = [slot for slot in self._slots if slot.is_lost()]
        self.lost += len(lost)
        logger.warning(
            "%d of %d slots were removed from %s by another program and are created again; a save "
            "in one of them may be lost. Find the program that cleans this directory "
            "(systemd-tmpfiles, RemoveIPC of logind)",
            len(lost),
            len(self._slots),
            self.directory,
        )
        for slot in lost:
            slot.close()
        self._slots = [slot for slot in self._slots if slot not in lost]
        if self.directory != self._spare and not self._is_ours():
            raise VolumeFullError(f"{self.directory} is now used by another process")

    def touch_meanwhile(self) -> None:
        """Start to touch the untouched slots in a thread.

        The first save, but not the first step after a restore, waits for that thread.
        """
        untouched = [slot for slot in self._slots if not slot.is_touched]
        if untouched and self._toucher is None:
            self._toucher = ThreadPoolExecutor(1, thread_name_prefix="holdfast-touch")
            self._touched = self._toucher.submit(_touch_all, untouched)

    def has_free(self) -> bool:
        """Return whether `acquire` would find a slot now. Only this rank's own saves acquire slots."""
        return any(slot.header().state is SlotState.FREE or slot.is_lost() for slot in self._slots)

    def acquire(
        self, wait_seconds: float = 0.0, while_busy: Callable[[], object] = lambda: None
    ) -> Slot | None:
        """Return a FREE slot, or None when all slots stay busy for `wait_seconds`.

        The slot that was used last is chosen only if no other one is free. `while_busy` is called again and
        again during the wait, which ends with its exception. Raises CapacityError: see `ensure`.
        """
        self._join()
        deadline = time.monotonic() + wait_seconds
        while True:
            for slot in sorted(self._slots, key=lambda slot: slot.index == self._last):
                if slot.header().state is SlotState.FREE:
                    self._last = slot.index
                    return slot
            if time.monotonic() >= deadline:
                return None
            while_busy()
            time.sleep(_POLL_SECONDS)

    def find(self, name: str) -> Slot:
        """Return the slot called `name`. Raises FormatError if this ring has none."""
        for slot in self._slots:
            if slot.name == name:
                return slot
        raise FormatError(f"slot {name!r} is none of {[slot.name for slot in self._slots]}")

    def close(self) -> None:
        """Close all slots. Their files stay."""
        try:
            self._await_toucher()
        except CapacityError as error:  # the slots are not needed any more
            logger.warning("%s", error)
        for slot in self._slots:
            slot.close()
        self._slots = []

    def _join(self) -> None:
        """Touch all slots and wait for that.

        Raises CapacityError if the volume is full, and drops the slots that could not be touched.
        """
        self.touch_meanwhile()
        self._await_toucher()

    def _await_toucher(self) -> None:
        """Wait for the thread of `touch_meanwhile`, if it runs. Raises what `_join` raises."""
        touched, toucher = self._touched, self._toucher
        if touched is None or toucher is None:
            return
        self._touched = self._toucher = None
        toucher.shutdown()
        try:
            touched.result()
        finally:
            for slot in self._slots:
                if not slot.is_touched:
                    slot.path.unlink(missing_ok=True)
                    slot.close()
            self._slots = [slot for slot in self._slots if slot.is_touched]
        self._pin()

    def _pin(self) -> None:
        for slot in self._slots:
            if self._pinner is None or slot.is_pinned:
                continue
            try:
                slot.pin(self._pinner)
            except DeviceError as error:
                self._pinner = None
                logger.warning("training waits while saves copy from the device: %s", error)

    def _path(self, index: int) -> Path:
        # The names in the spare directory differ, because the reader looks for a name in both.
        number = _SPARE_INDEX + index if self.directory == self._spare else index
        return self.directory / slot_name(self._rank, number)

    def _adopt(self, index: int, capacity_bytes: int, round_: RestartRound) -> Slot | None:
        """Reuse a slot file of an earlier process if it is large enough and no reader may still use it."""
        path = self._path(index)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            header = SlotHeader.unpack(os.pread(descriptor, HEADER_BYTES, 0))
            if header.capacity_bytes + HEADER_BYTES != size:
                return None
            if header.capacity_bytes < capacity_bytes:
                return None
            if header.state in (SlotState.FULL, SlotState.OWNED) and header.round != round_:
                # A late reader keeps the old file. The caller creates a new file of this name.
                return None
            slot = Slot(path, index, _map(descriptor, size), self._rank, _identity(descriptor))
            if header.state is SlotState.FILLING:
                slot.abandon()
            return slot
        except (FormatError, OSError, ValueError):
            return None
        finally:
            os.close(descriptor)

    def _open(self, path: Path, index: int, descriptor: int) -> Slot:
        """Map a new slot file and write its header. The other pages are not touched yet."""
        size = os.fstat(descriptor).st_size
        try:
            memory, identity = _map(descriptor, size), _identity(descriptor)
            _touch(memory, path, HEADER_BYTES)
        except (CapacityError, OSError):
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        slot = Slot(path, index, memory, self._rank, identity)
        slot.abandon()
        return slot


class Copier:
    """Runs copies in the calling thread and in one helper. Two threads saturate the memory bus."""

    def __init__(self) -> None:
        self._helper: ThreadPoolExecutor | None = None

    def run(self, jobs: Jobs) -> None:
        """Run all copies and wait for them. Raises what a copy raised."""
        total = sum(size for size, _ in jobs)
        if total < _TWO_THREADS_FROM_BYTES or len(jobs) < 2:
            run_all(jobs)
            return
        half, taken = 0, 0
        while half < len(jobs) and taken + jobs[half][0] // 2 < total // 2:
            taken += jobs[half][0]
            half += 1
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="holdfast-copy")
        other = self._helper.submit(run_all, jobs[half:])
        try:
            run_all(jobs[:half])
        finally:
            other.result()

    def close(self) -> None:
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = None


def run_all(jobs: Jobs) -> None:
    """Run all copies in the calling thread."""
    for _, copy in jobs:
        copy()


def _create(path: Path, capacity_bytes: int) -> int:
    """Create the file of a slot, which must not exist, and return its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o660)
    os.fchmod(descriptor, 0o660)  # the sidecar may have another uid and the same group
    os.ftruncate(descriptor, HEADER_BYTES + capacity_bytes)
    return descriptor


def _whole_pages(size: int) -> int:
    return size + -size % _PAGE_BYTES


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _map(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _touch(memory: mmap.mmap, path: Path, size_bytes: int) -> None:
    """Prefault the memory. Raises CapacityError where there is no room, and OSError."""
    try:
        prefault(memory, path, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        raise CapacityError(
            f"slot {path} of {len(memory)} bytes: the volume became full: {error.strerror}; raise "
            "the size of the shared memory volume"
        ) from error


def _touch_all(slots: Iterable[Slot]) -> None:
    for slot in slots:
        slot.prefault()
