"""Which local steps are uploaded to the object store."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.ledgers import LAYOUT, new_ledger, shard_info, store_manifests

from holdfast_core.ids import RestartRound, Step
from holdfast_core.messages.schema import Policy, RestorePoint
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.coordinator.uploads import GangUploads


class Hand:
    """A clock that stands still until the test moves it."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


def message(policy: Policy, *, hold: bool = False, **fields: Any) -> Any:
    """Return the parts of a ROUND message that uploads depend on."""
    return Mock(policy=policy, hold_uploads=hold, quarantined=(), **fields)


def uploads(
    ledger: Ledger,
    *,
    every: int | None = None,
    seconds: int | None = None,
    restored: int | None = None,
    last: RestorePoint | None = None,
    clock: Hand | None = None,
) -> GangUploads:
    policy = Policy(interval_steps=1, object_every_steps=every, object_every_seconds=seconds)
    point = RestorePoint() if restored is None else RestorePoint(Step(restored), RestartRound(0))
    return GangUploads(
        CONTRACT,
        message(policy, round=ledger.round, last_persisted=last, restore_point=point),
        Mock(),
        ledger=ledger,
        versioned=Mock(),
        pools=Mock(),
        failures=Mock(),
        clock=clock or Hand(),
        on_change=lambda: None,
    )


def local(ledger: Ledger, uploaded: GangUploads, step: int) -> None:
    for rank in (0, 1):
        ledger.prepared(Step(step), shard_info(rank), LAYOUT)
    assert store_manifests(ledger, step) == [True]
    uploaded.committed(Step(step))


def queued(ledger: Ledger, uploaded: GangUploads, *steps: int) -> list[int]:
    """Return which of these steps are queued when they become local, in this order."""
    found = []
    for step in steps:
        before = set(ledger.on_way_to_store)
        local(ledger, uploaded, step)
        if ledger.on_way_to_store - before:
            found.append(step)
    return found


def test_the_first_local_step_at_or_after_each_multiple_is_uploaded() -> None:
    """Steps between them may have been skipped, dropped from memory or not saved at all."""
    ledger = new_ledger()
    asked = uploads(ledger, every=10)
    assert queued(ledger, asked, 7, 13, 14, 19, 20, 29, 47, 50) == [7, 13, 20, 47, 50]


@pytest.mark.parametrize("interval", [{"every": 1000}, {"seconds": 3600}], ids=["steps", "time"])
def test_the_first_committed_step_is_uploaded_at_once(interval: dict[str, int]) -> None:
    """Until then, pods that are lost together can take all steps with them."""
    ledger = new_ledger()
    assert queued(ledger, uploads(ledger, **interval), 5, 6, 7) == [5]


@pytest.mark.parametrize("restored", [None, 5], ids=["started over", "restarted"])
def test_the_first_committed_step_of_a_later_round_is_uploaded_at_once(
    restored: int | None,
) -> None:
    """ROUND names no step of the store that a gang which started over continues from."""
    ledger = new_ledger()
    asked = uploads(ledger, seconds=3600, restored=restored)
    assert queued(ledger, asked, 6, 7, 8) == [6]


def test_an_upload_that_was_requested_takes_no_multiple_away() -> None:
    ledger = new_ledger()
    asked = uploads(ledger, every=10, restored=5, last=RestorePoint(Step(5), RestartRound(0)))
    asked.ask_after(Step(13))
    assert queued(ledger, asked, 10, 17, 18, 20) == [10, 17, 20]


def test_each_request_has_the_first_step_above_it_uploaded() -> None:
    """A later request takes the save of an earlier one not away, and one save may fulfil both."""
    ledger = new_ledger()
    asked = uploads(ledger, every=100, restored=5, last=RestorePoint(Step(5), RestartRound(0)))
    asked.ask_after(Step(7))
    asked.ask_after(Step(8))
    assert queued(ledger, asked, 8, 9, 10) == [8, 9]
    asked.ask_after(Step(11))
    asked.ask_after(Step(12))
    assert queued(ledger, asked, 13, 14) == [13]


ROUND_0 = RestorePoint(Step(20), RestartRound(0))


@pytest.mark.parametrize(
    ("restored", "last", "expected"),
    [
        pytest.param(25, ROUND_0, [30], id="the store has the multiple"),
        pytest.param(35, ROUND_0, [36], id="the upload of step 30 was lost"),
        pytest.param(15, ROUND_0, [20], id="restored before the newest step in the store"),
        pytest.param(5, None, [6, 10], id="the store has nothing"),
        pytest.param(15, None, [16, 20], id="the first upload was lost"),
        pytest.param(None, None, [1, 10], id="nothing was restored"),
    ],
)
def test_the_first_upload_after_a_restart(
    restored: int | None, last: RestorePoint | None, expected: list[int]
) -> None:
    ledger = new_ledger()
    asked = uploads(ledger, every=10, restored=restored, last=last)
    first = (restored or 0) + 1
    assert queued(ledger, asked, *range(first, expected[-1] + 1)) == expected


def test_a_coordinator_that_takes_over_a_round_goes_on_with_its_uploads() -> None:
    ledger = new_ledger()
    last = RestorePoint(Step(30), ledger.round)
    asked = uploads(ledger, every=10, restored=5, last=last)
    assert queued(ledger, asked, 30, 31, 39, 40) == [40]


def test_uploads_by_time_begin_with_the_first_save() -> None:
    ledger, clock = new_ledger(), Hand()
    asked = uploads(ledger, seconds=60, clock=clock)
    assert queued(ledger, asked, 1, 2) == [1]
    clock.seconds += 59.0
    assert queued(ledger, asked, 3) == []
    clock.seconds += 1.0
    assert queued(ledger, asked, 4, 5) == [4]


def test_nothing_is_uploaded_without_an_interval() -> None:
    ledger = new_ledger()
    assert queued(ledger, uploads(ledger), 1, 10, 100) == []


@pytest.mark.fault("A quota of the object store is reached while steps wait for it")
def test_while_uploads_are_held_the_newest_step_waits_alone() -> None:
    """Others could not be pruned, and would take the room of the next saves."""
    ledger, policy = new_ledger(), Policy(interval_steps=1, object_every_steps=1)
    uploaded = uploads(ledger, every=1)
    for step in (1, 2, 3):
        local(ledger, uploaded, step)
    assert ledger.on_way_to_store == {1, 2, 3}
    uploaded.policy(message(policy, hold=True))
    assert ledger.on_way_to_store == {3}
    for step in (4, 5):
        local(ledger, uploaded, step)
        assert ledger.on_way_to_store == {step}
    uploaded.policy(message(policy))
    local(ledger, uploaded, 6)
    assert ledger.on_way_to_store == {5, 6}


@pytest.mark.fault("A quota of the object store is reached during an upload")
def test_an_upload_under_way_ends_although_uploads_are_held() -> None:
    ledger, policy = new_ledger(), Policy(interval_steps=1, object_every_steps=1)
    uploaded = uploads(ledger, every=1)
    for step in (1, 2):
        local(ledger, uploaded, step)
    ledger.uploads, _ = ledger.uploads.requested(None, ())
    uploaded.policy(message(policy, hold=True))
    for step in (3, 4):
        local(ledger, uploaded, step)
    assert ledger.on_way_to_store == {1, 4}
    assert ledger.uploads.request is not None and ledger.uploads.request.checkpoint.step == 1
