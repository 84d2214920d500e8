"""The queue of checkpoints for the object store, which a gang's coordinator and a folder's persister use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.ids import CheckpointId, RestartRound, Step, age_of
from holdfast_core.messages.schema import PersistRequest, RestorePoint, StoredAs
from holdfast_core.store.rules import MAX_WAITING, UploadQueue

ROUND = RestartRound(2)
REFERRING = StoredAs(CheckpointId(Step(3), ROUND), ((CheckpointId(Step(3), ROUND), 9),))


def at(step: int, round_: int = ROUND) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(round_))


def queue_of(*steps: int) -> UploadQueue:
    return UploadQueue(tuple(map(at, steps)))


def test_the_oldest_checkpoint_that_waits_is_left_out() -> None:
    queue, left_out = queue_of(1, 2, 3).added(at(4))
    assert (queue, left_out) == (queue_of(1, 3, 4), at(2))


def test_a_checkpoint_is_added_once() -> None:
    assert queue_of(1, 2).added(at(2)) == (queue_of(1, 2), None)


def test_a_checkpoint_of_an_older_round_waits_before_newer_ones() -> None:
    queue, _ = queue_of(1, 2).added(at(9, 1))
    assert queue.wanted == (at(1), at(9, 1), at(2))


@given(st.lists(st.integers(0, 20)))
def test_the_queue_is_bounded_and_never_leaves_out_the_one_that_is_uploaded(
    steps: list[int],
) -> None:
    queue, left_out = UploadQueue(), set[CheckpointId]()
    for step in steps:
        first = queue.first
        queue, dropped = queue.added(at(step))
        left_out |= set() if dropped is None else {dropped}
        assert queue.first == (first or at(step))
        assert len(queue.wanted) <= 1 + MAX_WAITING
        assert list(queue.wanted[1:]) == sorted(queue.wanted[1:], key=age_of)
    assert {*queue.wanted, *left_out} == set(map(at, steps))


def test_the_next_checkpoint_follows_with_a_request_of_its_own() -> None:
    queue, request = queue_of(5, 6).requested(None, (), compress=True)
    assert request == PersistRequest(at(5), compress=True)
    assert queue.added(at(7))[0].request == request
    assert queue.without(at(6)).request == request
    assert queue.without(at(5)) == queue_of(6)


def test_uploads_are_compared_with_the_newest_earlier_checkpoint_of_the_store() -> None:
    stored = (at(3), at(4), at(9, 1), at(5), at(6))
    assert queue_of(5).base(stored) == at(4)
    assert queue_of(2).base(stored) == at(9, 1)
    assert queue_of(2).base((at(2), at(3))) is None
    assert UploadQueue().base(stored) is None


def test_an_upload_with_references_does_not_count_after_the_request_for_whole_shards() -> None:
    older = (CheckpointId(Step(1), ROUND),)
    queue, _ = queue_of(5, 6).requested(RestorePoint(Step(3), ROUND), older, compress=True)
    assert queue.counts(at(5), REFERRING)
    whole = queue.requested_whole()
    assert whole.request == PersistRequest(at(5), whole=True)
    assert not whole.counts(at(5), REFERRING)
    assert whole.counts(at(5), StoredAs())
    assert whole.counts(at(6), REFERRING), "the request is for the first checkpoint only"
    assert whole.without(at(5)).counts(at(5), REFERRING)
