"""Agreement of all ranks on the steps to save and on the last step, without an additional collective.

 * Saves at the interval follow from the step number and need no agreement. If rank 0 measures the interval,
   it proposes the number of steps when that changes, and all ranks use it after the same step.
 * For a request (save now, stop) a rank proposes a step ahead; see `gang.proposals`. Rank 0 receives the
   requests of the operator, and every rank may have received a signal to stop.
 * A step is committed only if every rank saved it, and ranks that decided alone would seldom skip the same
   steps. A rank without a free slot therefore vetoes the next save:
    1. It writes `full/<lap>/<parity>` before it starts the step at which the save is due.
    2. No rank leaves the collective of that step before all ranks have entered it.
    3. After the step, every rank reads this key. All ranks read the same value.

Reading vetoes costs a request of every rank at each save. Ranks therefore read them at the first saves of
a run, and later only while a proposal for `Purpose.VETO` lasts. A rank whose slots are all busy makes one.
A rank whose slots fill up when no vetoes are read skips its save alone, until its proposal is accepted.

The values are signed with the secret of the round (see `gang.store`), so that only its ranks can request
a stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.connection.session import Session
from holdfast.gang.proposals import Proposals, Purpose
from holdfast.gang.store import GangStore

_VETOED_SAVES = 16
"""Saves at the interval for which one proposal lets the ranks veto."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks must do after a step, in addition to saves at the interval."""

    save: bool = False
    stop: bool = False
    interval_steps: int | None = None
    """The interval from the next step on. None: it stays as it is."""


class StepAgreement:
    """Agreement of the ranks during a run of steps.

    Call `begin` before the first step, and `after_step` once after each step, on every rank.

    Args:
        session: Receives this rank's requests to save or stop.
        store: The gang's store, or None for a gang of one rank.
        proposals: The gang's proposals, or None for a gang of one rank.
    """

    def __init__(
        self, session: Session, store: GangStore | None, proposals: Proposals | None
    ) -> None:
        self._session = session
        self._store = store
        self._proposals = proposals
        self._lap = 0
        """Number of rollbacks so far. It keeps the keys apart when the ranks repeat steps."""
        self._save_requested = False
        self._has_stopped = False
        self._interval_steps: int | None = None
        """The interval that a gang of one rank uses from the next step on, if it changes."""
        self._vetoes: tuple[int, int] | None = None
        """Vetoes of saves after the first of these steps are read, up to the second one."""

    def close(self) -> None:
        """End the polling thread."""
        if self._proposals is not None:
            self._proposals.close()

    def roll_back(self) -> None:
        """Forget what was agreed for the steps that the ranks repeat. Every rank must call it."""
        self._lap += 1
        self._has_stopped = False
        self._interval_steps = None
        self._vetoes = None
        if self._proposals is not None:
            self._proposals.roll_back()

    def begin(self, step: int, interval_steps: int) -> None:
        """Start to agree when `step` steps are done and the next one is about to start."""
        if self._proposals is None:
            return
        if self._vetoes is None:
            self._vetoes = step, step + _VETOED_SAVES * interval_steps
        self._proposals.begin(step)
        self._proposals.start()
        self._propose_requests(self._proposals)

    def after_step(self, step: int) -> Verdict:
        """Return the verdict for `step`, which is the same on every rank."""
        if self._proposals is None:
            save = self._session.requests.take_save()
            interval_steps, self._interval_steps = self._interval_steps, None
            return Verdict(save, self._session.requests.stop, interval_steps)
        # A request that has arrived by now is met by a save after this step.
        self._save_requested |= self._session.requests.take_save()
        accepted = self._proposals.reach(step)
        verdict = Verdict()
        if accepted is not None:
            match accepted.purpose:
                case Purpose.SAVE:
                    verdict = Verdict(save=True)
                    self._save_requested = False
                case Purpose.STOP:
                    verdict = Verdict(stop=True)
                    self._has_stopped = True
                case Purpose.VETO:
                    self._extend_vetoes(accepted.step, accepted.argument)
                case Purpose.INTERVAL:
                    steps = max(1, accepted.argument)
                    verdict = Verdict(interval_steps=steps)
                    self._extend_vetoes(accepted.step, _VETOED_SAVES * steps)
        self._propose_requests(self._proposals)
        return verdict

    def propose_interval(self, steps: int) -> None:
        """Let all ranks save every `steps` steps. Call it after each step until the verdict says so."""
        if self._proposals is None:
            self._interval_steps = steps
        elif not self._has_stopped:
            self._proposals.propose(Purpose.INTERVAL, steps)

    def veto(self, due: int, next_step: int, interval_steps: int) -> None:
        """Before `next_step` starts, make the gang leave out the save of step `due`, if it is that step.

        Call it before each step while this rank has no free slot.

        Args:
            due: The next step at which a save is due by the interval.
            next_step: The step that is about to start.
            interval_steps: Steps between saves.
        """
        if self._store is None or self._proposals is None:
            return
        if due == next_step and self._may_veto(due):
            self._store.publish(self._full(due), str(due))
        if not self._may_veto(due + _VETOED_SAVES // 2 * interval_steps):
            self._proposals.propose(Purpose.VETO, _VETOED_SAVES * interval_steps)

    def is_vetoed(self, step: int) -> bool:
        """Return whether a rank had no slot when `step` started. Then no rank saves it.

        The answer is the same on every rank.
        """
        if self._store is None or not self._may_veto(step):
            return False
        return self._store.read(self._full(step)) == str(step)

    def _propose_requests(self, proposals: Proposals) -> None:
        if self._has_stopped:
            return
        if self._session.requests.stop:
            proposals.propose(Purpose.STOP)
        elif self._save_requested:
            proposals.propose(Purpose.SAVE)

    def _may_veto(self, step: int) -> bool:
        return self._vetoes is not None and self._vetoes[0] < step <= self._vetoes[1]

    def _extend_vetoes(self, step: int, steps: int) -> None:
        """Read vetoes for `steps` steps after `step`."""
        first, until = step, step + steps
        if self._vetoes is not None and step <= self._vetoes[1]:
            first, until = self._vetoes[0], max(until, self._vetoes[1])
        self._vetoes = first, until

    def _full(self, step: int) -> str:
        """Return the key of `step`, one of two that alternate.

        No rank writes the key for step s + 2 before all ranks have read it after step s.
        """
        return f"full/{self._lap}/{step % 2}"
