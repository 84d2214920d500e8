"""Decides after each step whether all ranks save it, and whether the training stops."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from holdfast.checkpoint.measured_interval import MeasuredInterval
from holdfast.checkpoint.status import SaveStatus
from holdfast.connection.session import Session
from holdfast.gang.agreement import StepAgreement
from holdfast.places.place import Traits
from holdfast.slots.staging import SlotRing
from holdfast_core.ids import Step
from holdfast_core.messages.schema import Interval

logger = logging.getLogger(__name__)


def interval_of(traits: Traits, session: Session) -> int:
    """Return the optimizer steps between saves. 0 means that ranks save only on request."""
    if traits.interval_steps is not None:
        return traits.interval_steps
    return 0 if session.policy is None else session.policy.interval_steps


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps at which saves are due by the interval: `interval_steps` steps apart, from `first` on."""

    first: int
    interval_steps: int
    """0 means that no save is due."""

    def next_due(self, step: int) -> int | None:
        """Return the first step from `step` on at which a save is due, if there is one."""
        if self.interval_steps <= 0:
            return None
        return self.first + -(-(step - self.first) // self.interval_steps) * self.interval_steps

    def changed(self, step: int, interval_steps: int) -> Schedule:
        """Return the schedule after `step`, with another interval since the last save that was due."""
        if self.interval_steps <= 0:
            return Schedule(self.first, interval_steps)
        passed = (step - self.first) // self.interval_steps * self.interval_steps
        return Schedule(self.first + passed, interval_steps)


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """What this rank does after a step. All ranks decide the same."""

    saves: bool
    is_requested: bool
    """Whether a save or a stop was requested. Such a save waits for a free slot."""


class SaveDecisions:
    """The decisions of one rank. Only the training thread uses it.

    Args:
        agreement: Agreement with the other ranks.
        session: Session, whose policy may have the interval.
        traits: Traits of the place.
        ring: Slots of this rank.
        status: Counts the saves that are left out.
        waits: Whether saves wait for a free slot, so that none is left out.
    """

    def __init__(
        self,
        agreement: StepAgreement,
        session: Session,
        traits: Traits,
        ring: SlotRing,
        status: SaveStatus,
        *,
        waits: bool,
    ) -> None:
        self.stopping = False
        """Whether the gang was asked to stop."""
        self._agreement = agreement
        self._session = session
        self._traits = traits
        self._ring = ring
        self._status = status
        self._waits = waits
        self._has_begun = False
        self._has_slot = False
        """Whether a slot is known to be free."""
        timing = traits.timing
        self._measured = None if timing is None else MeasuredInterval(timing)
        self._schedule = Schedule(0, 0)
        """Schedule of a measured interval."""
        self._skipped = 0
        self._decided: tuple[Step, SaveDecision] | None = None
        self._left_out: Step | None = None

    def begin(self, step: int) -> None:
        """Publish this rank's requests when `step` steps are done and the next one is about to start."""
        self._has_begun = True
        self._agreement.begin(step, self._interval_steps)
        if self._measured is not None:
            self._measured.begin(time.monotonic(), self._status.blocked_seconds)
            if self._schedule.interval_steps == 0:
                self._schedule = Schedule(step, 0)

    def after_step(self, step: Step) -> SaveDecision:
        """Decide about `step`, which is done. A second call for the same step decides the same."""
        if not self._has_begun:
            self.begin(step - 1)
        if self._decided is None or self._decided[0] != step:
            self._decided = step, self._decide(step)
        return self._decided[1]

    def _decide(self, step: Step) -> SaveDecision:
        verdict = self._agreement.after_step(step)
        self._propose_interval()
        self.stopping = self.stopping or verdict.stop
        is_requested = verdict.save or verdict.stop
        is_due = self._next_due(step) == step and (is_requested or not self._is_left_out(step))
        if verdict.interval_steps is not None:
            self._change_interval(step, verdict.interval_steps)
        if not (is_due or is_requested):
            self.foresee(Step(step + 1))
        return SaveDecision(is_due or is_requested, is_requested)

    def was_requested(self, step: Step) -> bool:
        """Return whether a save or a stop was requested for `step`, the last one that was decided."""
        decided = self._decided
        return decided is not None and decided[0] == step and decided[1].is_requested

    def foresee(self, step: Step) -> None:
        """Before `step` starts, veto the next save if this rank would have no slot for it."""
        due = None if self._waits else self._next_due(step)
        if due is None or self._has_slot:
            return
        # Only a save fills a slot, so that a free one stays free until the next save.
        self._has_slot = not self._ring.slots or self._ring.has_free()
        if not self._has_slot and not self._may_get_free():
            self._agreement.veto(due, step, self._interval_steps)

    def slot_was_filled(self) -> None:
        """Record that a save has taken a slot."""
        self._has_slot = False

    def roll_back(self) -> None:
        """Forget the steps that the ranks repeat."""
        self._has_begun = False
        self._decided = self._left_out = None
        self._schedule = Schedule(0, 0)  # rank 0 proposes the interval again
        self._agreement.roll_back()

    @property
    def interval(self) -> Interval:
        """The interval between saves, and what it follows from."""
        if self._measured is None:
            return Interval(self._interval_steps)
        return self._measured.report(self._interval_steps)

    @property
    def _interval_steps(self) -> int:
        return self._current_schedule.interval_steps

    @property
    def _current_schedule(self) -> Schedule:
        if self._measured is not None:
            return self._schedule
        return Schedule(0, interval_of(self._traits, self._session))

    def _next_due(self, step: int) -> int | None:
        """Return the first step from `step` on at which a save is due by the interval, if there is one."""
        return self._current_schedule.next_due(step)

    def _propose_interval(self) -> None:
        """Measure the step that is done. On rank 0, propose another interval if it is wanted."""
        if self._measured is None:
            return
        skipped, self._skipped = self._skipped, self._status.skipped
        self._measured.step_done(
            time.monotonic(),
            self._status.blocked_seconds,
            saved=self._status.skipped == skipped,
        )
        self._status.progress.interval = self._measured.report(self._schedule.interval_steps)
        wanted = self._measured.wanted(self._schedule.interval_steps)
        if wanted is not None and self._session.rank == 0:
            self._agreement.propose_interval(wanted)

    def _change_interval(self, step: Step, interval_steps: int) -> None:
        """Use another interval from the next step on: no rank could veto a save of this step by it."""
        self._schedule = self._schedule.changed(step, interval_steps)
        if self._session.rank == 0:
            logger.info("from step %d on: %s", step + 1, self.interval)

    def _may_get_free(self) -> bool:
        """Return whether the other process is expected to free a slot before the next step ends.

        If the previous save found no slot, this expectation was wrong.
        """
        policy = self._session.policy
        keeps = policy is not None and policy.keeps_newest
        return keeps and self._traits.frees_older_steps and not self._status.found_no_slot

    def _is_left_out(self, step: Step) -> bool:
        if self._waits or not self._agreement.is_vetoed(step):
            return False
        if self._left_out != step:
            self._left_out = step
            self._status.left_out(step)
        return True
