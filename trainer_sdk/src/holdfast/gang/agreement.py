"""Which step is saved, which is the last: agreed by all ranks, without a collective of our own.

With an interval it follows from the step. For a request (save now, stop) the order is:
 1. rank 0, before it starts step s + 1: writes `at/<lap>/<s+1>` into the round's store and reads it back,
    so that the store has it;
 2. all: do step s + 1, whose collective nobody leaves before rank 0 entered it;
 3. every rank, after its own step s + 1: looks for `at/<lap>/<s+1>`. All see the same.
A rank that was asked to stop by a signal leaves `stop-wanted` in the store for rank 0.

Leaving a save out is agreed the same way, because a step is committed only if every rank saved it:
ranks that skip each on its own would seldom skip the same steps. A rank without a free slot writes
`full/<lap>/<parity>` before it starts step s + 1; after that step all ranks look for it.

The values are signed with the secret of the round (gang_store): only ranks of it can ask for a stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.connection.session import Session
from holdfast.gang.store import GangStore
from holdfast_core.ids import Rank

_STOP_WANTED = "stop-wanted"
_FULL = "full"
_SAVE = "save"
_STOP = "stop"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do after this step, besides what the interval says."""

    save: bool = False
    stop: bool = False


class StepAgreement:
    """Call `begin` before the first step and `after_step` once after each, on every rank.

    `lap`: how often the ranks rolled back. They do the same steps again then, and what was agreed
    before must not count.
    """

    def __init__(self, session: Session, store: GangStore | None, rank: Rank, lap: int = 0) -> None:
        self._session = session
        self._store = store
        self._rank = rank
        self._lap = lap
        self._told_stop = False
        self._posted_stop = False

    def begin(self, step: int) -> None:
        """`step` optimizer steps are done; the next one is about to start."""
        if self._store is not None:
            self._ask(self._store, step + 1)

    def after_step(self, step: int) -> Verdict:
        if self._store is None:
            save = self._session.take_save_request()
            return Verdict(save, self._session.stop_wanted)
        word = self._store.read(self._at(step))
        if word != _STOP:
            self._ask(self._store, step + 1)
        return Verdict(word == _SAVE, word == _STOP)

    def leave_out(self, step: int) -> None:
        """This rank has no slot for the save after `step`, which is about to start."""
        if self._store is not None:
            self._store.publish(self._full(step), str(step))

    def is_left_out(self, step: int) -> bool:
        """Some rank had no slot when `step` started: no rank saves it. The same on every rank."""
        if self._store is None:
            return False
        return self._store.read(self._full(step)) == str(step)

    def _ask(self, store: GangStore, step: int) -> None:
        if self._rank != 0:
            if self._session.stop_wanted and not self._told_stop:
                self._told_stop = True
                store.publish(_STOP_WANTED, "1")
            return
        save = self._session.take_save_request()
        if self._posted_stop:
            return
        stop = self._session.stop_wanted or store.read(_STOP_WANTED) is not None
        if save or stop:
            store.publish(self._at(step), _STOP if stop else _SAVE)
            self._posted_stop = stop

    def _at(self, step: int) -> str:
        return f"at/{self._lap}/{step}"

    def _full(self, step: int) -> str:
        """Two keys in turn: no rank writes for step s + 2 before all have looked after step s."""
        return f"{_FULL}/{self._lap}/{step % 2}"
