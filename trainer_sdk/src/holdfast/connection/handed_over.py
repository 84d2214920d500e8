"""The saves that a rank handed over to its sidecar or persister, and what became of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from holdfast.base.handle import SaveHandle
from holdfast.slots.staging import Slot
from holdfast_core.errors import FormatError
from holdfast_core.ids import Level
from holdfast_core.messages.schema import (
    NO_OBJECT_TIER,
    OVERTAKEN,
    STORE_TAKEN,
    LevelReached,
    SaveFailed,
    Stage,
)
from holdfast_core.shm.slot_file import SlotState

_MAX_HANDLES = 64
"""Number of saves to keep. Levels of older saves may be reached very late, or never."""


@dataclass(slots=True)
class HandedOver:
    """A save that was handed over, with its slot and its handle."""

    stage: Stage
    slot: Slot
    handle: SaveHandle
    is_repeated: bool = False
    """Whether the step was handed over before in this round. The other side acknowledges it only when its
    bytes are known to be those of the earlier save, or when no shard of the earlier save is left."""
    acknowledged: bool = False

    @property
    def state(self) -> SlotState | None:
        """The slot's state, or None where the slot holds another save by now or is not mapped."""
        try:
            header = self.slot.header()
        except (FormatError, ValueError):
            return None
        is_its = (header.step, header.round) == (self.stage.step, self.stage.round)
        return header.state if is_its else None


class HandedOverSaves:
    """The newest saves of a rank. Thread-safe.

    Args:
        peer: Name of the other side for error messages.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.changed = threading.Condition()
        """Notified when a save is settled or acknowledged. Its lock protects the session, too."""
        self._saves: dict[tuple[int, int], list[HandedOver]] = {}
        """The saves of each step and round, oldest first. A step may be saved more than once."""
        self._deferred_handle: SaveHandle | None = None
        self._deferred: HandedOver | None = None

    def all(self) -> list[HandedOver]:
        with self.changed:
            return [save for same in self._saves.values() for save in same]

    def all_settled(self) -> bool:
        return all(s.handle.settled for s in self.all())

    def was_acknowledged(self, handle: SaveHandle) -> bool:
        """Return whether the other side has acknowledged this save."""
        return any(s.handle is handle and s.acknowledged for s in self.all())

    def add(self, save: HandedOver) -> None:
        with self.changed:
            same = self._saves.setdefault((save.stage.step, save.stage.round), [])
            save.is_repeated = bool(same)
            same.append(save)
            self._forget_old()

    def note(self, message: LevelReached | SaveFailed) -> None:
        """Record a level, or a failure."""
        for save in self._of(message.step, message.round):
            if isinstance(message, LevelReached):
                save.handle.reach(message.level)
            else:
                _note_failed(save.handle, message)
        self.settled()

    def acknowledge(self, save: HandedOver) -> None:
        """Record that the other side has taken the save.

        A repeated save then has the levels of the earlier saves of its step. They were reported before. If
        a newer step has replaced the step, it has replaced this save, too.
        """
        save.acknowledged = True
        if not save.is_repeated:
            return
        key = save.stage.step, save.stage.round
        with self.changed:
            replaced = [other for other in self._saves.get(key, []) if other.handle.overtaken]
        for other in (*self._of(*key), *replaced):
            save.handle.adopt(other.handle)

    def settled(self) -> None:
        """Wake those who wait for saves."""
        with self.changed:
            self.changed.notify_all()

    def report_no_more_uploads(self, why: str) -> None:
        """Record that no report arrives any more that a save so far is in the object store.

        Otherwise `wait("persisted")` would wait forever.
        """
        for save in self.all():
            save.handle.report_no_more(Level.PERSISTED, why)

    def defer(self, handle: SaveHandle) -> None:
        """Keep the slot of this save until it is handed over or dropped. Only one save can be deferred."""
        with self.changed:
            self._deferred_handle = handle

    def keep_if_deferred(self, save: HandedOver) -> bool:
        """Keep the slot of a deferred save. Return False if the save is not deferred."""
        with self.changed:
            if save.handle is not self._deferred_handle:
                return False
            self._deferred = save
            return True

    def take_deferred(self) -> tuple[SaveHandle | None, HandedOver | None]:
        """Return the deferred save, which is deferred no more. Its slot may not be full yet."""
        with self.changed:
            found = self._deferred_handle, self._deferred
            self._deferred_handle, self._deferred = None, None
            return found

    def drop_deferred(self, why: str) -> None:
        """Drop the deferred save and free its slot. It counts as overtaken, not as failed."""
        handle, save = self.take_deferred()
        if handle is not None:
            handle.overtaken = True
            handle.report_no_more(Level.LOCAL, why)
        if save is not None:
            save.slot.abandon()

    def _of(self, step: int, round_: int) -> list[HandedOver]:
        """Return the saves that a message about this step means.

        These are the saves whose bytes are those of the step's shard. A save that failed before a later one
        of its step was handed over is not among them.
        """
        with self.changed:
            same = self._saves.get((step, round_), [])
            return [
                save
                for save in same
                if (save.acknowledged or not save.is_repeated)
                and (save is same[-1] or save.handle.durable or not save.handle.settled)
            ]

    def _forget_old(self) -> None:
        """Drop the oldest saves above the limit, settled ones first.

        An unsettled save that is dropped has failed: its outcome did not arrive before that of many later
        saves.
        """
        while len(kept := self.all()) > _MAX_HANDLES:
            save = next((s for s in kept if s.handle.settled), kept[0])
            key = (save.stage.step, save.stage.round)
            self._saves[key].remove(save)
            if not self._saves[key]:
                del self._saves[key]
            save.handle.fail(
                Level.LOCAL,
                f"{self._peer} did not report the outcome of this save, nor of {_MAX_HANDLES} "
                "later saves",
            )


def _note_failed(handle: SaveHandle, message: SaveFailed) -> None:
    why = f"{message.reason}: {message.message}"
    handle.overtaken |= message.reason == OVERTAKEN
    handle.lost_its_store |= message.reason == STORE_TAKEN
    if message.reason in (NO_OBJECT_TIER, OVERTAKEN):
        handle.report_no_more(message.level, why)
    else:
        handle.fail(message.level, why)
