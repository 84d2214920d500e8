"""If one rank has no free slot for a save at the interval, no rank of the gang makes that save."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.trainer.dict_store import DictStore
from tests.support.trainer.polled import PolledByHand

from holdfast.checkpoint.decisions import SaveDecisions
from holdfast.checkpoint.status import ProgressReporter, SaveStatus
from holdfast.connection.session import Session
from holdfast.gang.agreement import StepAgreement
from holdfast.gang.store import GangStore
from holdfast.places.place import Traits
from holdfast.slots.capacity import IN_A_POD
from holdfast.slots.staging import SlotRing
from holdfast_core.ids import JobUid, Rank, RestartRound, Step
from holdfast_core.messages.schema import HelloReply, Policy

ROUND = RestartRound(0)
JOB_UID = JobUid("job")


class Training:
    """Makes the save decisions of one rank of a pod. No process empties the slots that it fills."""

    def __init__(self, slots_dir: Path, policy: Policy, rank: int = 0) -> None:
        self.store = DictStore()
        session = Session(JOB_UID, Rank(rank), ROUND)
        session.hello_accepted(HelloReply(ROUND, policy))
        self.ring = SlotRing(slots_dir, Rank(rank), policy.slots)
        self.ring.ensure(4096, ROUND)
        self.status = SaveStatus(
            ProgressReporter(session, time.monotonic), lambda: "the log", raises=False
        )
        traits = Traits(
            job_uid=JOB_UID,
            peer="the sidecar",
            slots=policy.slots,
            advice=IN_A_POD,
            interval_steps=None,
            round=ROUND,
            has_nothing=False,
            knows_what_is_durable=False,
            frees_older_steps=True,
            shares_container=False,
        )
        store = GangStore(self.store)
        agreement = StepAgreement(session, store, PolledByHand(store, 2))
        self._decisions = SaveDecisions(
            agreement, session, traits, self.ring, self.status, waits=False
        )

    def saves(self, step: int) -> bool:
        """Decide about a step. Return whether it is to be saved; if so, fill a slot where one is free."""
        if not self._decisions.after_step(Step(step)).saves:
            return False
        slot = self.ring.acquire()
        self.status.found_no_slot = slot is None
        if slot is None:
            self.status.skipped += 1
        else:
            slot.begin(ROUND, Step(step), 100)
            slot.complete()
        self._decisions.slot_was_filled()
        self._decisions.foresee(Step(step + 1))
        return True


def test_the_gang_skips_a_save_for_which_this_rank_has_no_slot(tmp_path: Path) -> None:
    training = Training(tmp_path, Policy(interval_steps=2))
    assert [step for step in range(1, 9) if training.saves(step)] == [2, 4]
    assert training.status.skipped == 2
    assert training.store.values["full/0/0"] == "8"


def test_this_rank_skips_a_save_for_which_another_rank_has_no_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, Policy(interval_steps=2), rank=1)
    training.store.set("full/0/0", "4")
    assert [step for step in range(1, 7) if training.saves(step)] == [2, 6]
    assert training.status.skipped == 1
    (warning,) = [message for message in caplog.messages if "save of step" in message]
    assert "save of step 4 is skipped" in warning
    assert "no save of this run is durable yet" in warning


@pytest.mark.parametrize(
    ("is_freed", "saved", "skipped"),
    [(True, [1, 2, 3, 4, 5, 6], 0), (False, [1, 2, 3, 4], 3)],
    ids=["the sidecar frees the older step", "the sidecar frees no step"],
)
def test_with_three_slots_a_save_waits_for_one_that_becomes_free_within_the_step(
    tmp_path: Path, is_freed: bool, saved: list[int], skipped: int
) -> None:
    """All slots are busy when a step begins. If none is free at its end, the rank does not expect one
    again."""
    training = Training(tmp_path, Policy(interval_steps=1, slots=3))
    found = []
    for step in range(1, 7):
        if is_freed and not training.ring.has_free():
            min(training.ring.slots, key=lambda slot: slot.header().step or 0).abandon()
        if training.saves(step):
            found.append(step)
    assert found == saved
    assert training.status.skipped == skipped
