"""The coordinator's ledger: levels, conflicts, the queue of uploads, and steps whose copies fall behind."""

from __future__ import annotations

from dataclasses import replace

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
    replicate,
    reported,
    shard_info,
)

from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import ReportedShard, StoredAs
from holdfast_sidecar.coordinator.ledger import Conflict, Ledger


def level(ledger: Ledger, step: int) -> Level | None:
    return ledger.steps[Step(step)].level


def test_a_step_is_local_when_every_member_has_the_manifest() -> None:
    ledger = new_ledger()
    entry = ledger.prepared(Step(5), shard_info(0), LAYOUT)
    assert not entry.complete
    assert ledger.prepared(Step(5), shard_info(1), LAYOUT).complete
    ledger.committed(Step(5), b"{}", MANIFEST_DIGEST, (shard_info(0), shard_info(1)))
    assert ledger.take(reported(0, Step(5), committed=True))
    assert not ledger.settle_local(Step(5))
    assert level(ledger, 5) is None
    assert ledger.take(reported(1, Step(5), committed=True))
    assert ledger.settle_local(Step(5))
    assert level(ledger, 5) is Level.LOCAL
    assert not ledger.settle_local(Step(5)), "only once"


def test_a_step_is_not_local_before_its_manifest_is_built() -> None:
    """The nodes may have it from the last coordinator of this round."""
    ledger = new_ledger()
    for rank in (0, 1):
        ledger.take(reported(rank, Step(5), committed=True))
    assert not ledger.settle_local(Step(5))
    ledger.committed(Step(5), b"{}", MANIFEST_DIGEST, (shard_info(0), shard_info(1)))
    assert ledger.settle_local(Step(5))


def test_a_shard_whose_layout_is_known_is_reported_without_it() -> None:
    ledger = new_ledger()
    short = replace(reported(0, Step(5), committed=True), layout=None)
    assert not ledger.take(short)
    assert ledger.steps == {}, "the last coordinator had it: the worker is asked for all shards"
    assert ledger.take(reported(0, Step(5)))
    assert ledger.take(short)
    assert ledger.steps[Step(5)].stored == {0}
    with pytest.raises(Conflict):
        ledger.take(replace(short, shard=shard_info(0, OTHER_DIGEST)))


@pytest.mark.parametrize("copies_first", [True, False], ids=["copies first", "manifest first"])
def test_replicated_needs_both_the_copies_and_the_manifest(copies_first: bool) -> None:
    ledger = new_ledger()
    if copies_first:
        for rank in (0, 1):
            ledger.prepared(Step(5), shard_info(rank), LAYOUT)
            assert not replicate(ledger, 5, rank)
        commit(ledger, 5)
        assert ledger.settle_replicated(Step(5))
    else:
        commit(ledger, 5)
        for rank in (0, 1):
            ledger.take(reported(rank, Step(5)))
        assert not replicate(ledger, 5, 0)
        assert replicate(ledger, 5, 1)
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
        ledger.take(
            ReportedShard(
                Step(5), RestartRound(1), shard_info(0, OTHER_DIGEST), LAYOUT, replicated=True
            )
        )
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
    assert {2, 3} <= set(ledger.dropped)


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


REPORTS = [
    reported(0, Step(3)),
    reported(1, Step(3)),
    reported(0, Step(3), replicated=True),
    reported(1, Step(3), replicated=True),
    replace(reported(0, Step(3)), uploaded=StoredAs()),
    replace(reported(1, Step(3)), uploaded=StoredAs()),
]


@given(st.permutations([*REPORTS, *REPORTS]))
def test_the_order_of_reports_does_not_matter_nor_their_number(
    reports: list[ReportedShard],
) -> None:
    """A late report, also of a sidecar that has ended, takes nothing back that a newer one has said."""
    ledger = new_ledger()
    news = [ledger.take(found) for found in reports]
    assert sum(news) <= len(REPORTS)
    assert not any(ledger.take(found) for found in reports), "nothing is new the second time"
    commit(ledger, 3)
    ledger.settle_replicated(Step(3))
    assert level(ledger, 3) is Level.REPLICATED
    assert ledger.uploaded(Step(3), Rank(0), SHARD_DIGEST)


def test_an_upload_that_refers_to_a_deleted_checkpoint_is_waited_for_again() -> None:
    """A repeated message about the earlier upload does not count."""
    ledger = new_ledger()
    commit(ledger, 5)
    earlier = CheckpointId(Step(3), RestartRound(0))
    referring = StoredAs(earlier, ((earlier, 9),))
    ledger.uploaded(Step(5), Rank(0), SHARD_DIGEST, referring)
    assert ledger.uploaded(Step(5), Rank(1), SHARD_DIGEST)
    ledger.request_upload(Step(5))
    ledger.uploads, _ = ledger.uploads.requested(None, ())
    ledger.upload_whole(ledger.steps[Step(5)])
    assert set(ledger.steps[Step(5)].uploaded) == {1}
    assert not ledger.uploaded(Step(5), Rank(0), SHARD_DIGEST, referring)
    assert ledger.uploaded(Step(5), Rank(0), SHARD_DIGEST)


@pytest.mark.fault("A job fails while only its pods have its newest committed step")
def test_of_an_older_round_only_the_upload_of_an_adopted_step_counts() -> None:
    ledger = new_ledger()
    older = CheckpointId(Step(5), RestartRound(0))
    durable = replace(reported(0, older.step), round=older.round, layout=None)
    uploaded = replace(durable, uploaded=StoredAs())
    assert not ledger.take(uploaded), "the step is not adopted"
    assert not ledger.steps
    ledger.adopt(older, b"{}", MANIFEST_DIGEST, (shard_info(0), shard_info(1)))
    assert not ledger.take(durable)
    assert ledger.take(uploaded)
    assert not ledger.take(uploaded)
    assert ledger.steps[older.step].uploaded.keys() == {0}
    with pytest.raises(Conflict):
        ledger.take(replace(uploaded, shard=shard_info(1, OTHER_DIGEST)))
