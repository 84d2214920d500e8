"""The coordinator's ledger: levels, conflicts, the queue of uploads, and steps whose copies fall behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sidecar.ledgers import (
    LAYOUT,
    MANIFEST_DIGEST,
    OTHER_DIGEST,
    SHARD_DIGEST,
    commit,
    new_ledger,
    shard_info,
)

from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import Reference
from holdfast_core.store.rules import StoredAs
from holdfast_sidecar.coordinator.ledger import Conflict, Ledger


def level(ledger: Ledger, step: int) -> Level | None:
    return ledger.steps[Step(step)].level


def test_a_step_is_local_when_every_member_has_the_manifest() -> None:
    ledger = new_ledger()
    entry = ledger.prepared(Step(5), shard_info(0), LAYOUT)
    assert not entry.complete
    assert ledger.prepared(Step(5), shard_info(1), LAYOUT).complete
    ledger.committed(Step(5), b"{}", MANIFEST_DIGEST, (shard_info(0), shard_info(1)))
    assert not ledger.acknowledged(Step(5), Worker(0))
    assert level(ledger, 5) is None
    assert ledger.acknowledged(Step(5), Worker(1))
    assert level(ledger, 5) is Level.LOCAL
    assert not ledger.acknowledged(Step(5), Worker(1)), "only once"


@pytest.mark.parametrize("copies_first", [True, False], ids=["copies first", "manifest first"])
def test_replicated_needs_both_the_copies_and_the_manifest(copies_first: bool) -> None:
    ledger = new_ledger()
    if copies_first:
        for rank in (0, 1):
            ledger.prepared(Step(5), shard_info(rank), LAYOUT)
            assert not ledger.replicated(Step(5), Rank(rank), SHARD_DIGEST)
        commit(ledger, 5)
        assert ledger.settle_replicated(Step(5))
    else:
        commit(ledger, 5)
        assert not ledger.replicated(Step(5), Rank(0), SHARD_DIGEST)
        assert ledger.replicated(Step(5), Rank(1), SHARD_DIGEST)
    assert level(ledger, 5) is Level.REPLICATED


def test_without_assigned_copies_local_implies_replicated() -> None:
    ledger = new_ledger(expects_copies=False)
    commit(ledger, 5)
    assert level(ledger, 5) is Level.REPLICATED


def test_another_digest_is_an_alarm_and_changes_nothing() -> None:
    ledger = new_ledger()
    ledger.prepared(Step(5), shard_info(0), LAYOUT)
    with pytest.raises(Conflict):
        ledger.prepared(Step(5), shard_info(0, OTHER_DIGEST), LAYOUT)
    with pytest.raises(Conflict):
        ledger.replicated(Step(5), Rank(0), OTHER_DIGEST)
    with pytest.raises(Conflict):
        ledger.uploaded(Step(5), Rank(0), OTHER_DIGEST)
    assert ledger.steps[Step(5)].shards[Rank(0)].blake3 == SHARD_DIGEST
    commit(ledger, 6)
    with pytest.raises(Conflict):
        ledger.committed(Step(6), b"{}", OTHER_DIGEST, ())


def test_a_persisted_step_is_not_queued_again() -> None:
    ledger = new_ledger()
    for step in range(1, 5):
        commit(ledger, step)
        assert ledger.request_upload(Step(step)) == (2 if step == 4 else None)
    assert ledger.on_way_to_store == {1, 3, 4}
    ledger.upload_ended(ledger.steps[Step(1)], persisted=True)
    assert level(ledger, 1) is Level.PERSISTED
    assert ledger.request_upload(Step(1)) is None
    assert ledger.on_way_to_store == {3, 4}


def test_an_older_step_that_is_uploaded_keeps_its_own_round() -> None:
    """A sweep and the retention look for the checkpoint that is being uploaded by its round, too."""
    ledger = new_ledger()
    older = CheckpointId(Step(1), RestartRound(ledger.round - 1))
    ledger.adopt(older, b"{}", SHARD_DIGEST, (shard_info(0), shard_info(1)))
    ledger.request_upload(Step(1))
    assert ledger.uploads.wanted == (older,)


def test_an_upload_is_complete_when_every_rank_has_uploaded() -> None:
    ledger = new_ledger()
    commit(ledger, 1)
    assert not ledger.uploaded(Step(1), Rank(0), SHARD_DIGEST)
    assert not ledger.uploaded(Step(1), Rank(0), SHARD_DIGEST)
    assert ledger.uploaded(Step(1), Rank(1), SHARD_DIGEST)


def test_steps_whose_copies_fall_behind_are_given_up_in_the_middle() -> None:
    """The step that is being copied and the newest two steps are kept."""
    ledger = new_ledger()
    for step in range(1, 5):
        commit(ledger, step)
        assert ledger.overtaken() == ()
    commit(ledger, 5)
    assert ledger.overtaken() == (2, 3)
    ledger.forget((Step(2), Step(3)))
    assert sorted(ledger.steps) == [1, 4, 5]
    assert all(ledger.is_pruned(Step(s)) for s in (2, 3))


def test_without_room_only_the_step_that_is_being_copied_waits_for_its_copies() -> None:
    """Giving it up too would throw away the only step that can become replicated soon."""
    ledger = new_ledger()
    for step in range(1, 4):
        commit(ledger, step)
    assert ledger.overtaken(pressed=True) == (2, 3)
    ledger.forget((Step(2), Step(3)))
    assert ledger.overtaken(pressed=True) == ()


def test_what_is_on_its_way_to_the_store_is_not_forgotten() -> None:
    ledger = new_ledger()
    commit(ledger, 1)
    ledger.request_upload(Step(1))
    ledger.forget((Step(1),))
    assert Step(1) in ledger.steps


@given(st.permutations([("p", 0), ("p", 1), ("r", 0), ("r", 1), ("u", 0), ("u", 1)]))
def test_the_order_of_messages_does_not_matter(text: list[tuple[str, int]]) -> None:
    ledger = new_ledger()
    for kind, rank in text:
        match kind:
            case "p":
                ledger.prepared(Step(3), shard_info(rank), LAYOUT)
            case "r":
                ledger.replicated(Step(3), Rank(rank), SHARD_DIGEST)
            case _:
                ledger.uploaded(Step(3), Rank(rank), SHARD_DIGEST)
    commit(ledger, 3)
    ledger.settle_replicated(Step(3))
    assert level(ledger, 3) is Level.REPLICATED
    assert ledger.uploaded(Step(3), Rank(0), SHARD_DIGEST)


def test_an_upload_that_refers_to_a_deleted_checkpoint_is_waited_for_again() -> None:
    """A repeated message about the earlier upload does not count."""
    ledger = new_ledger()
    commit(ledger, 5)
    referring = StoredAs(
        Reference(Step(3), RestartRound(0)), (Reference(Step(3), RestartRound(0), 9),)
    )
    ledger.uploaded(Step(5), Rank(0), SHARD_DIGEST, referring)
    assert ledger.uploaded(Step(5), Rank(1), SHARD_DIGEST)
    ledger.request_upload(Step(5))
    ledger.uploads, _ = ledger.uploads.requested(ledger.round, None, ())
    ledger.upload_whole(ledger.steps[Step(5)])
    assert set(ledger.steps[Step(5)].uploaded) == {1}
    assert not ledger.uploaded(Step(5), Rank(0), SHARD_DIGEST, referring)
    assert ledger.uploaded(Step(5), Rank(0), SHARD_DIGEST)
