"""Which local steps go to the object store where steps in memory give way."""

from __future__ import annotations

from unittest.mock import Mock

from tests.sidecar.coordinator.test_choice import acknowledge, info, ledger
from tests.sidecar.upkeep.test_leftovers import CONTRACT

from holdfast_core.ids import Level, Step
from holdfast_core.messages.schema import Policy
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.coordinator.uploads import Uploads


def uploads(book: Ledger, every: int) -> Uploads:
    policy = Policy(interval_steps=1, object_every_steps=every)
    return Uploads(
        CONTRACT,
        Mock(policy=policy, last_persisted=None, round=book.round),
        Mock(),
        Mock(),
        ledger=book,
        outbox=Mock(),
        versioned=Mock(),
        pools=Mock(),
        failures=Mock(),
        clock=Mock(),
        on_change=lambda: None,
    )


def local(book: Ledger, uploaded: Uploads, step: int) -> None:
    for rank in (0, 1):
        book.prepared(Step(step), info(rank), info(rank).blake3)
    assert acknowledge(book, step) == [Level.LOCAL]
    uploaded.committed(Step(step))


def test_the_next_local_step_takes_the_place_of_one_that_was_due() -> None:
    book = ledger()
    asked = uploads(book, every=10)
    local(book, asked, 7)
    assert book.on_way_to_store == set()
    asked.steps_dropped((Step(9), Step(10), Step(20)))
    local(book, asked, 13)
    local(book, asked, 14)
    assert book.on_way_to_store == {13}


def test_steps_that_were_not_due_are_replaced_by_none() -> None:
    book = ledger()
    asked = uploads(book, every=10)
    asked.steps_dropped((Step(8), Step(9)))
    local(book, asked, 13)
    assert book.on_way_to_store == set()
    local(book, asked, 20)
    assert book.on_way_to_store == {20}
