"""What a Checkpointer has between `open` and `close`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from holdfast.base.options import Options
from holdfast.base.settings import RankSettings
from holdfast.checkpoint.decisions import SaveDecisions
from holdfast.checkpoint.restoring import Peeker, Restorer
from holdfast.checkpoint.saving import Saver, Saves
from holdfast.checkpoint.status import SaveStatus
from holdfast.connection.session import Session
from holdfast.gang.agreement import Proposals, StepAgreement
from holdfast.gang.store import connect_store
from holdfast.places.place import Place
from holdfast.slots.staging import SlotRing
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.snapshot import Snapshots
from holdfast.training.loop import Position
from holdfast_core.ids import Step
from holdfast_core.shm.shared_files import LayoutFiles

logger = logging.getLogger(__name__)

_COPIES_SECONDS = 120.0
"""Time that `close` waits for copies from a device. A device may hang in a collective forever."""
_COPIES_AFTER_ERROR_SECONDS = 10.0


class Opened:
    """The parts of a connected rank. They are made together and closed together."""

    def __init__(
        self,
        options: Options,
        settings: RankSettings,
        place: Place,
        session: Session,
        status: SaveStatus,
        position: Position,
    ) -> None:
        """Open the place and make the parts. The session does not connect before the place starts.

        Raises ConfigError when a gang of several ranks has no store.
        """
        self._place = place
        self._session = session
        self._status = status
        store = connect_store(settings)
        directories = place.open(store)
        rank, traits = settings.rank, place.traits
        layouts = LayoutFiles(directories.layouts)
        self.ring = SlotRing(
            directories.slots,
            rank,
            traits.slots,
            traits.advice,
            directories.spare_slots,
            place.holds_slots,
        )
        self._snapshots = Snapshots(rank)
        """A restore in a running process needs no second look at the structure that saves have recorded."""
        self._strict = options.strict
        self.saver = Saver(session, self.ring, layouts, self._snapshots)
        self.agreement = StepAgreement(
            session, store, None if store is None else Proposals(store, settings.world_size)
        )
        self.decisions = SaveDecisions(
            self.agreement,
            session,
            traits,
            self.ring,
            status,
            waits=options.waits,
        )
        self.saves = Saves(
            place, session, self.saver, self.decisions, status, position, waits=options.waits
        )
        self.restorer = Restorer(settings, place, session, self.ring, layouts)
        self.peeker = Peeker(settings, session, self.ring, layouts, self.restorer, store)

    def restore_target(self, state: Mapping[str, Any]) -> RestoreTarget:
        """Return what this rank needs from a checkpoint for `state`."""
        return RestoreTarget(state, self._snapshots, strict=self._strict)

    def roll_back(self, step: Step | None) -> None:
        """Make `step`, or the newest committed step, the restore point. Every rank must call it.

        The next restore request is then answered with that checkpoint.
        """
        self.restorer.roll_back(step)
        self._status.progress.rolled_back()
        self.saves.roll_back()
        self.decisions.roll_back()

    def close(self, *, wait: bool) -> Exception | None:
        """Finish the saves and release everything. Return the error of the last saves, if any."""
        left_error = self.saves.take_left_error()
        self.saves.hand_over_left()
        self._status.progress.send()
        self.agreement.close()
        copies_seconds = _COPIES_SECONDS if wait else _COPIES_AFTER_ERROR_SECONDS
        copied = self.saver.wait(copies_seconds)
        if wait:
            self._place.wait_for_saves(self._session)
        failure = self._status.count_last(
            lambda handle: self._place.is_safe(self._session, handle, waited=wait)
        )
        self._session.close()
        self._session.saves.report_no_more_uploads(
            "the Checkpointer was closed before this was reported: wait for it before close()"
        )
        self.saver.close()
        if copied:
            self.ring.close()
        else:  # the device may still write into the slots, so they stay mapped until the process ends
            logger.warning(
                "a save is lost: its copies from the device were not done within %s s",
                copies_seconds,
            )
        self._place.close(wait=wait)
        return left_error or failure
