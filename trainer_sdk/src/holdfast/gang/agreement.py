"""Agreement of all ranks on the steps to save and on the last step, without an additional collective.

Saves at the interval follow from the step number. For a request (save now, stop) the order is:
 1. Before rank 0 starts step s + 1, it writes `at/<lap>/<s+1>` into the round's store and reads it back,
    so that the store has the value.
 2. All ranks do step s + 1. No rank leaves the collective of that step before rank 0 has entered it.
 3. After its own step s + 1, every rank reads `at/<lap>/<s+1>`. All ranks read the same value.
A rank that was asked to stop by a signal writes `stop-wanted` into the store for rank 0.

Ranks agree in the same way to leave a save out, because a step is committed only if every rank saved it.
Ranks that decided alone would seldom skip the same steps. A rank without a free slot writes
`full/<lap>/<parity>` before it starts step s + 1. After that step all ranks read this key.

The values are signed with the secret of the round (see `gang.store`), so that only its ranks can request
a stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.connection.session import Session
from holdfast.gang.store import GangStore
from holdfast_core.ids import Rank

_STOP_REQUESTED = "stop-wanted"
_FULL = "full"
_SAVE = "save"
_STOP = "stop"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks must do after a step, in addition to saves at the interval."""

    save: bool = False
    stop: bool = False


class StepAgreement:
    """Agreement of the ranks during a run of steps.

    Call `begin` before the first step, and `after_step` once after each step, on every rank.

    Args:
        session: Receives this rank's requests to save or stop.
        store: The gang's store, or None for a gang of one rank.
        rank: This rank.
    """

    def __init__(self, session: Session, store: GangStore | None, rank: Rank) -> None:
        self._session = session
        self._store = store
        self._rank = rank
        self._lap = 0
        """Number of rollbacks so far. It keeps the keys apart when the ranks repeat steps."""
        self._published_stop = False
        self._posted_stop = False

    def roll_back(self) -> None:
        """Forget what was agreed for the steps that the ranks repeat. Every rank must call it."""
        self._lap += 1
        self._published_stop = self._posted_stop = False

    def begin(self, step: int) -> None:
        """Publish this rank's requests when `step` steps are done and the next one is about to start."""
        if self._store is not None:
            self._exchange_requests(self._store, step + 1)

    def after_step(self, step: int) -> Verdict:
        """Return the verdict for `step`, and publish this rank's requests for the next step."""
        if self._store is None:
            save = self._session.take_save_request()
            return Verdict(save, self._session.stop_requested)
        word = self._store.read(self._at(step))
        if word != _STOP:
            self._exchange_requests(self._store, step + 1)
        return Verdict(word == _SAVE, word == _STOP)

    def leave_out(self, step: int) -> None:
        """Before `step` starts, publish that this rank has no slot for its save."""
        if self._store is not None:
            self._store.publish(self._full(step), str(step))

    def is_left_out(self, step: int) -> bool:
        """Return whether a rank had no slot when `step` started. Then no rank saves it.

        The answer is the same on every rank.
        """
        if self._store is None:
            return False
        return self._store.read(self._full(step)) == str(step)

    def _exchange_requests(self, store: GangStore, step: int) -> None:
        if self._rank != 0:
            if self._session.stop_requested and not self._published_stop:
                self._published_stop = True
                store.publish(_STOP_REQUESTED, "1")
            return
        save = self._session.take_save_request()
        if self._posted_stop:
            return
        stop = self._session.stop_requested or store.read(_STOP_REQUESTED) is not None
        if save or stop:
            store.publish(self._at(step), _STOP if stop else _SAVE)
            self._posted_stop = stop

    def _at(self, step: int) -> str:
        return f"at/{self._lap}/{step}"

    def _full(self, step: int) -> str:
        """Return the key of `step`, one of two that alternate.

        No rank writes the key for step s + 2 before all ranks have read it after step s.
        """
        return f"{_FULL}/{self._lap}/{step % 2}"
