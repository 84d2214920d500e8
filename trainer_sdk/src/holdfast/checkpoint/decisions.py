"""Decides after each step whether all ranks save it, and whether the training stops."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.status import SaveStatus
from holdfast.connection.session import Session
from holdfast.gang.agreement import StepAgreement, Verdict
from holdfast.places.place import Traits
from holdfast.slots.staging import SlotRing
from holdfast_core.ids import Step


def interval_of(traits: Traits, session: Session) -> int:
    """Return the optimizer steps between saves. 0 means that ranks save only on request."""
    if traits.interval_steps is not None:
        return traits.interval_steps
    return 0 if session.policy is None else session.policy.interval_steps


@dataclass(frozen=True, slots=True)
class Decision:
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
        self._verdict: tuple[Step, Verdict] | None = None
        self._left_out: Step | None = None

    def begin(self, step: int) -> None:
        """Publish this rank's requests when `step` steps are done and the next one is about to start."""
        self._has_begun = True
        self._agreement.begin(step, self._interval)

    def after_step(self, step: Step) -> Decision:
        """Decide about `step`, which is done. A second call for the same step decides the same."""
        if not self._has_begun:
            self.begin(step - 1)
        if self._verdict is None or self._verdict[0] != step:
            self._verdict = (step, self._agreement.after_step(step))
        verdict = self._verdict[1]
        self.stopping = self.stopping or verdict.stop
        is_requested = verdict.save or verdict.stop
        is_due = self._next_due(step) == step and (is_requested or not self._is_left_out(step))
        if not (is_due or is_requested):
            self.foresee(Step(step + 1))
        return Decision(is_due or is_requested, is_requested)

    def foresee(self, step: Step) -> None:
        """Before `step` starts, veto the next save if this rank would have no slot for it.

        A save that streams always has slots: it replaces those that an interrupted save has left.
        """
        due = None if self._waits or self._traits.streams else self._next_due(step)
        if due is None or self._has_slot:
            return
        # Only a save fills a slot, so that a free one stays free until the next save.
        self._has_slot = not self._ring.slots or self._ring.has_free()
        if not self._has_slot and not self._may_get_free():
            self._agreement.veto(due, step, self._interval)

    def slot_was_filled(self) -> None:
        """Record that a save has taken a slot."""
        self._has_slot = False

    def roll_back(self) -> None:
        """Forget the steps that the ranks repeat."""
        self._has_begun = False
        self._verdict = self._left_out = None
        self._agreement.roll_back()

    @property
    def _interval(self) -> int:
        return interval_of(self._traits, self._session)

    def _next_due(self, step: int) -> int | None:
        """Return the first step from `step` on at which a save is due by the interval, if there is one."""
        interval = self._interval
        return None if interval <= 0 else -(-step // interval) * interval

    def _may_get_free(self) -> bool:
        """Return whether the other process is expected to free a slot before the next step ends.

        If the previous save found no slot, this expectation was wrong.
        """
        policy = self._session.policy
        keeps = policy is not None and policy.memory_level_enabled
        return keeps and self._traits.frees_older_steps and not self._status.found_no_slot

    def _is_left_out(self, step: Step) -> bool:
        if self._waits or not self._agreement.is_vetoed(step):
            return False
        if self._left_out != step:
            self._left_out = step
            self._status.left_out(step)
        return True
