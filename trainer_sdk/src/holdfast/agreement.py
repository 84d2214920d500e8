"""Which step is saved, which is the last: agreed by all ranks, without a collective of our own.

With an interval it follows from the step. For a request (save now, stop) the order is:
 1. rank 0, before it starts step s + 1: writes `at/<s+1>` into the round's store and reads it back,
    so that the store has it;
 2. all: do step s + 1, whose collective nobody leaves before rank 0 entered it;
 3. every rank, after its own step s + 1: looks for `at/<s+1>`. All see the same.
A rank that was asked to stop by a signal leaves `stop-wanted` in the store for rank 0.

Leaving a save out is agreed the same way, because a step is committed only if every rank saved it:
ranks that skip each on its own would seldom skip the same steps. A rank without a free slot writes
`full/<parity>` before it starts step s + 1; after that step all ranks look for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.gang_store import GangStore
from holdfast.session import Session
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
    """Call `begin` before the first step and `after_step` once after each, on every rank."""

    def __init__(self, session: Session, store: GangStore | None, rank: Rank) -> None:
        self._session = session
        self._store = store
        self._rank = rank
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
        key = f"at/{step}"
        word = self._store.get(key).decode() if self._store.check([key]) else ""
        if word != _STOP:
            self._ask(self._store, step + 1)
        return Verdict(word == _SAVE, word == _STOP)

    def leave_out(self, step: int) -> None:
        """This rank has no slot for the save after `step`, which is about to start."""
        if self._store is not None:
            key = _full(step)
            self._store.set(key, str(step))
            self._store.get(key)

    def is_left_out(self, step: int) -> bool:
        """Some rank had no slot when `step` started: no rank saves it. The same on every rank."""
        if self._store is None:
            return False
        key = _full(step)
        return self._store.check([key]) and self._store.get(key).decode() == str(step)

    def _ask(self, store: GangStore, step: int) -> None:
        if self._rank != 0:
            if self._session.stop_wanted and not self._told_stop:
                self._told_stop = True
                store.set(_STOP_WANTED, "1")
            return
        save = self._session.take_save_request()
        if self._posted_stop:
            return
        stop = self._session.stop_wanted or store.check([_STOP_WANTED])
        if save or stop:
            key = f"at/{step}"
            store.set(key, _STOP if stop else _SAVE)
            store.get(key)
            self._posted_stop = stop


def _full(step: int) -> str:
    """Two keys in turn: nobody writes for step s + 2 before everybody has looked after step s."""
    return f"{_FULL}/{step % 2}"
