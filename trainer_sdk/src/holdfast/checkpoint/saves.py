"""The saves of one rank, in the order in which the script makes them.

A loop that is left early saves its last step without handing it over. It is not known at that moment
whether an exception left the loop, or whether the script will roll back. A later call keeps or drops the
save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from holdfast.base.handle import SaveHandle
from holdfast.checkpoint.decisions import SaveDecisions
from holdfast.checkpoint.saving import Saver
from holdfast.checkpoint.status import SaveStatus
from holdfast.connection.session import Session
from holdfast.places.place import Place
from holdfast.places.waiting import wait_connected
from holdfast.training.inexact_data import inexact_data
from holdfast.training.loop import Position
from holdfast_core.errors import SaveFailedError, UnavailableError
from holdfast_core.ids import Level, Step

logger = logging.getLogger(__name__)

_BUSY_WAIT_SECONDS = 600.0
_LEAVE_WAIT_SECONDS = 30.0
"""Time to wait for a free slot when a loop is left. An exception that left it should not be delayed for
long."""


class Saves:
    """Makes the saves of one rank. Only the training thread uses it."""

    def __init__(
        self,
        place: Place,
        session: Session,
        saver: Saver,
        decisions: SaveDecisions,
        status: SaveStatus,
        position: Position,
    ) -> None:
        self.have_begun = False
        """Whether a save was started since the folder was opened or rolled back. The same on every rank."""
        self.last: Step | None = None
        """The last step that was saved, until it is rolled back or dropped."""
        self._place = place
        self._session = session
        self._saver = saver
        self._decisions = decisions
        self._status = status
        self._position = position
        self._left: SaveHandle | None = None
        """The held save of a loop that was left early."""
        self._left_error: Exception | None = None
        self._has_looked_at_data = False

    def save(
        self, step: Step, state: Mapping[str, Any], *, waits: bool, is_important: bool
    ) -> SaveHandle:
        """Save `step`. A failure raises only if the script asked for it.

        Args:
            step: Number of optimizer steps done.
            state: The state.
            waits: Wait for a free slot.
            is_important: Wait for the connection as well: nothing follows this save soon.

        Raises ConfigError where this run may not save.
        """
        self._place.take_for_training()
        self.hand_over_left()
        handle = SaveHandle(step, self._session.current_round, self._saving)
        slot_seconds = _BUSY_WAIT_SECONDS if waits else 0.0
        self._start(handle, state, slot_seconds, _BUSY_WAIT_SECONDS if is_important else 0.0)
        if not self._has_looked_at_data:
            self._has_looked_at_data = True
            for line in inexact_data(state) if self._session.rank == 0 else ():
                logger.warning(line)
        return handle

    def save_left(self, step: Step, state: Mapping[str, Any]) -> None:
        """Save the last step of a loop that was left early, and hold that save."""
        self._left = SaveHandle(step, self._session.current_round, self._saving)
        self._session.saves.defer(self._left)
        try:
            self._place.take_for_training()
            self._start(self._left, state, _LEAVE_WAIT_SECONDS, _LEAVE_WAIT_SECONDS)
        except Exception as error:  # noqa: BLE001 - Python would only print it; `close` raises it
            self._left_error = error

    @property
    def left_step(self) -> Step | None:
        """Step of the held save."""
        return None if self._left is None else self._left.step

    def hand_over_left(self) -> None:
        """Hand over the held save. Raise the error of that save, if any."""
        error = self.take_left_error()
        if self._left is not None:
            self._left = None
            self._session.hand_over_deferred()
        if error is not None:
            raise error

    def take_left_error(self) -> Exception | None:
        """Return the error of the held save once."""
        error, self._left_error = self._left_error, None
        return error

    def drop_left(self, why: str) -> None:
        """Drop the held save."""
        if self._left is not None:
            self._left = self._left_error = self.last = None
            self._session.saves.drop_deferred(f"dropped: {why}")

    def roll_back(self) -> None:
        """Forget the saves of the steps that the ranks repeat."""
        self.have_begun = False
        self.last = None

    def _saving(self) -> AbstractContextManager[None]:
        return self._status.progress.paused("a save")

    def _start(
        self,
        handle: SaveHandle,
        state: Mapping[str, Any],
        slot_seconds: float,
        connection_seconds: float,
    ) -> None:
        with self._saving():  # the end of the pause reports the step and the time of the save
            self._make(handle, state, slot_seconds, connection_seconds)
        self._decisions.slot_was_filled()
        self._decisions.foresee(Step(handle.step + 1))

    def _make(
        self,
        handle: SaveHandle,
        state: Mapping[str, Any],
        slot_seconds: float,
        connection_seconds: float,
    ) -> None:
        step = handle.step
        started = time.monotonic()
        self.have_begun = True
        self._position.trained(step)
        try:
            self._position.saved(state)
            self._status.count_older_failures()
            self._place.keep_for_training()
            if connection_seconds:
                wait_connected(self._session, self._place, connection_seconds, may_close=False)
            self._hand_over(handle, state, slot_seconds)
            self.last = step
        except SaveFailedError:
            raise
        # A state's own code may raise any exception, and a failed save must not end training.
        except Exception as error:  # noqa: BLE001 - see above
            handle.fail(Level.LOCAL, f"{type(error).__name__}: {error}")
            self._status.count_failure(error, step)
        finally:
            self._status.ended(step, time.monotonic() - started)

    def _hand_over(self, handle: SaveHandle, state: Mapping[str, Any], wait_seconds: float) -> None:
        if self._saver.save(handle, state, wait_seconds):
            self._status.handed_over(handle)
            return
        self._status.found_no_slot = True
        if wait_seconds:
            raise UnavailableError(
                f"save of step {handle.step}: no slot became free within {wait_seconds:g} s: "
                f"{self._place.where_to_look}"
            )
        self._status.no_slot(handle)
