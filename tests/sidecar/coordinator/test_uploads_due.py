"""Which local steps are uploaded to the object store when steps that were due are dropped from memory."""

from __future__ import annotations

from unittest.mock import Mock

from tests.support.sidecar.contracts import CONTRACT
from tests.support.sidecar.ledgers import LAYOUT, acknowledge, new_ledger, shard_info

from holdfast_core.ids import Level, Step
from holdfast_core.messages.schema import Policy
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.coordinator.uploads import Uploads


def uploads(ledger: Ledger, every: int) -> Uploads:
    policy = Policy(interval_steps=1, object_every_steps=every)
    return Uploads(
        CONTRACT,
        Mock(policy=policy, last_persisted=None, round=ledger.round),
        Mock(),
        ledger=ledger,
        outbox=Mock(),
        versioned=Mock(),
        pools=Mock(),
        failures=Mock(),
        clock=Mock(),
        on_change=lambda: None,
    )


def local(ledger: Ledger, uploaded: Uploads, step: int) -> None:
    for rank in (0, 1):
        ledger.prepared(Step(step), shard_info(rank), LAYOUT)
    assert acknowledge(ledger, step) == [Level.LOCAL]
    uploaded.committed(Step(step))


def test_the_next_local_step_takes_the_place_of_one_that_was_due() -> None:
    ledger = new_ledger()
    asked = uploads(ledger, every=10)
    local(ledger, asked, 7)
    assert ledger.on_way_to_store == set()
    asked.steps_dropped((Step(9), Step(10), Step(20)))
    local(ledger, asked, 13)
    local(ledger, asked, 14)
    assert ledger.on_way_to_store == {13}


def test_steps_that_were_not_due_are_replaced_by_none() -> None:
    ledger = new_ledger()
    asked = uploads(ledger, every=10)
    asked.steps_dropped((Step(8), Step(9)))
    local(ledger, asked, 13)
    assert ledger.on_way_to_store == set()
    local(ledger, asked, 20)
    assert ledger.on_way_to_store == {20}
