"""The coordinator's memory: levels, conflicts, the queue to the store, what falls behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.ids import Digest, Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import Reference, ShardInfo
from holdfast_sidecar.coordinator.ledger import Conflict, Ledger
from holdfast_sidecar.save.plan import StoredAs

A, B = Digest("b3:" + "a" * 64), Digest("b3:" + "b" * 64)
MANIFEST = Digest("b3:" + "c" * 64)


def info(rank: int, digest: Digest = A) -> ShardInfo:
    return ShardInfo(Rank(rank), 100, digest, digest)


def ledger(*, workers: int = 2, expects_copies: bool = True) -> Ledger:
    names = tuple(Worker(w) for w in range(workers))
    return Ledger(RestartRound(1), workers, names, expects_copies=expects_copies)


def commit(book: Ledger, step: int) -> None:
    """Prepared by all, manifest acknowledged by all."""
    shards = []
    for worker in book.workers:
        book.prepared(Step(step), info(worker), A)
        shards.append(info(worker))
    book.committed(Step(step), b"{}", MANIFEST, tuple(shards))
    for worker in book.workers:
        book.acknowledged(Step(step), worker)


def level(book: Ledger, step: int) -> Level | None:
    return book.steps[Step(step)].level


def test_a_step_is_local_when_every_member_has_the_manifest() -> None:
    book = ledger()
    entry = book.prepared(Step(5), info(0), A)
    assert not entry.complete
    assert book.prepared(Step(5), info(1), A).complete
    book.committed(Step(5), b"{}", MANIFEST, (info(0), info(1)))
    assert not book.acknowledged(Step(5), Worker(0))
    assert level(book, 5) is None
    assert book.acknowledged(Step(5), Worker(1))
    assert level(book, 5) is Level.LOCAL
    assert not book.acknowledged(Step(5), Worker(1)), "only once"


@pytest.mark.parametrize("copies_first", [True, False], ids=["copies first", "manifest first"])
def test_replicated_needs_both_the_copies_and_the_manifest(copies_first: bool) -> None:
    book = ledger()
    if copies_first:
        for rank in (0, 1):
            book.prepared(Step(5), info(rank), A)
            assert not book.replicated(Step(5), Rank(rank), A)
        commit(book, 5)
        assert book.settle_replicated(Step(5))
    else:
        commit(book, 5)
        assert not book.replicated(Step(5), Rank(0), A)
        assert book.replicated(Step(5), Rank(1), A)
    assert level(book, 5) is Level.REPLICATED


def test_without_assigned_copies_local_implies_replicated() -> None:
    book = ledger(expects_copies=False)
    commit(book, 5)
    assert level(book, 5) is Level.REPLICATED


def test_another_digest_is_an_alarm_and_changes_nothing() -> None:
    book = ledger()
    book.prepared(Step(5), info(0), A)
    with pytest.raises(Conflict):
        book.prepared(Step(5), info(0, B), A)
    with pytest.raises(Conflict):
        book.replicated(Step(5), Rank(0), B)
    with pytest.raises(Conflict):
        book.uploaded(Step(5), Rank(0), B)
    assert book.steps[Step(5)].shards[Rank(0)].blake3 == A
    commit(book, 6)
    with pytest.raises(Conflict):
        book.committed(Step(6), b"{}", B, ())


def test_the_queue_to_the_store_is_bounded_and_drops_the_oldest_that_waits() -> None:
    book = ledger()
    for step in range(1, 6):
        commit(book, step)
    assert book.request_upload(Step(1)) is None
    assert book.next_upload() == 1
    assert book.request_upload(Step(2)) is None
    assert book.request_upload(Step(3)) is None
    assert book.request_upload(Step(3)) is None, "asked twice"
    assert book.request_upload(Step(4)) == 2
    assert book.on_way_to_store == {1, 3, 4}
    assert book.next_upload() == 1, "one at a time"
    book.upload_ended(Step(1), persisted=True)
    assert level(book, 1) is Level.PERSISTED
    assert book.next_upload() == 3
    assert book.request_upload(Step(1)) is None, "persisted already"
    assert book.on_way_to_store == {3, 4}
    assert book.give_up_uploads() == (3, 4)


def test_an_upload_is_complete_when_every_rank_has_uploaded() -> None:
    book = ledger()
    commit(book, 1)
    assert not book.uploaded(Step(1), Rank(0), A)
    assert not book.uploaded(Step(1), Rank(0), A)
    assert book.uploaded(Step(1), Rank(1), A)


def test_steps_whose_copies_fall_behind_are_given_up_in_the_middle() -> None:
    """The one being copied and the newest two stay."""
    book = ledger()
    for step in range(1, 5):
        commit(book, step)
        assert book.overtaken() == ()
    commit(book, 5)
    assert book.overtaken() == (2, 3)
    book.forget((Step(2), Step(3)))
    assert sorted(book.steps) == [1, 4, 5]
    assert [book.forgotten_manifest(Step(s)) for s in (2, 3)] == [MANIFEST, MANIFEST]


def test_what_is_on_its_way_to_the_store_is_not_forgotten() -> None:
    book = ledger()
    commit(book, 1)
    book.request_upload(Step(1))
    book.next_upload()
    book.forget((Step(1),))
    assert Step(1) in book.steps


@given(st.permutations([("p", 0), ("p", 1), ("r", 0), ("r", 1), ("u", 0), ("u", 1)]))
def test_the_order_of_words_does_not_matter(text: list[tuple[str, int]]) -> None:
    book = ledger()
    for kind, rank in text:
        match kind:
            case "p":
                book.prepared(Step(3), info(rank), A)
            case "r":
                book.replicated(Step(3), Rank(rank), A)
            case _:
                book.uploaded(Step(3), Rank(rank), A)
    commit(book, 3)
    book.settle_replicated(Step(3))
    assert level(book, 3) is Level.REPLICATED
    assert book.uploaded(Step(3), Rank(0), A)


def test_what_referred_to_something_that_is_gone_is_waited_for_again() -> None:
    """And a word from before that is repeated does not count."""
    book = ledger()
    commit(book, 5)
    referring = StoredAs(
        Reference(Step(3), RestartRound(0)), (Reference(Step(3), RestartRound(0), 9),)
    )
    book.uploaded(Step(5), Rank(0), A, referring)
    assert book.uploaded(Step(5), Rank(1), A)
    book.upload_whole(Step(5))
    assert set(book.steps[Step(5)].uploaded) == {1}
    assert not book.uploaded(Step(5), Rank(0), A, referring)
    assert book.uploaded(Step(5), Rank(0), A)
