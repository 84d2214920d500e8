"""Which step in memory is written next, and which give way: tables over what the members said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.ids import Digest, Level, Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import DigestedShard, RankHolding, ShardInfo
from holdfast_sidecar.coordinator.choice import Choice, choose
from holdfast_sidecar.coordinator.ledger import Ledger

A, B = Digest("b3:" + "a" * 64), Digest("b3:" + "b" * 64)
MANIFEST = Digest("b3:" + "c" * 64)
FAST, SLOW = 0, 1
SLOTS = 3


def info(rank: int, digest: Digest = A) -> ShardInfo:
    return ShardInfo(Rank(rank), 100, digest, digest)


def ledger() -> Ledger:
    return Ledger(RestartRound(1), 2, (Worker(0), Worker(1)), expects_copies=True)


def held(step: int, rank: int = SLOW, digest: Digest = A, **fields: bool) -> DigestedShard:
    return DigestedShard(Step(step), info(rank, digest), A, **fields)


def says(book: Ledger, *steps: int, writing: int | None = None, rank: int = SLOW) -> None:
    """The rank holds exactly these steps."""
    book.holds(
        RankHolding(
            Rank(rank),
            tuple(held(s, rank) for s in steps),
            writing=None if writing is None else Step(writing),
        )
    )


def acknowledge(book: Ledger, *steps: int) -> list[Level | None]:
    """The manifest is built and on both nodes; what that made of each step."""
    risen = []
    for step in steps:
        book.committed(Step(step), b"{}", MANIFEST, (info(0), info(1)))
        book.acknowledged(Step(step), Worker(0))
        risen.append(book.acknowledged(Step(step), Worker(1)))
    return risen


def in_memory(book: Ledger, *steps: int, writing: int | None = None) -> None:
    """Durable at the fast rank, held by the slow one, manifest everywhere."""
    for step in steps:
        book.prepared(Step(step), info(FAST), A)
    says(book, *steps, writing=writing)
    acknowledge(book, *steps)
    assert all(book.steps[Step(s)].memory and not book.steps[Step(s)].local for s in steps)


def weigh(book: Ledger) -> Choice:
    choice = choose(book, SLOTS)
    book.chosen = choice.chosen
    book.forget(choice.dropped)
    return choice


def test_memory_first_and_local_when_every_rank_has_written() -> None:
    book = ledger()
    in_memory(book, 5)
    assert book.steps[Step(5)].level is None, "no promise yet"
    assert book.newest(Level.MEMORY) is book.steps[Step(5)]
    assert book.newest(Level.LOCAL) is None
    book.prepared(Step(5), info(SLOW), A)
    assert book.rise(Step(5)) is Level.LOCAL
    assert book.rise(Step(5)) is None, "only once"


def test_a_manifest_that_all_have_makes_no_step_local() -> None:
    """A coordinator that has just begun finds manifests; shards may be in memory only."""
    book = ledger()
    assert acknowledge(book, 5) == [None]
    book.prepared(Step(5), info(FAST), A)
    assert book.rise(Step(5)) is None
    says(book, 5)
    assert book.rise(Step(5)) is Level.MEMORY


def test_the_newest_step_is_chosen_and_older_ones_give_way_in_order() -> None:
    book = ledger()
    in_memory(book, 2, 3, 4, writing=1)
    assert weigh(book) == Choice(None, (Step(2), Step(3))), "the rank is busy: nothing is pinned"
    says(book, 4)
    assert weigh(book) == Choice(Step(4), ())


def test_the_chosen_step_stays_until_it_is_local() -> None:
    book = ledger()
    in_memory(book, 4)
    assert weigh(book).chosen == 4
    in_memory(book, 4, 5, 6, writing=4)
    assert weigh(book) == Choice(Step(4), (Step(5),))
    book.prepared(Step(4), info(SLOW), A)
    book.rise(Step(4))
    says(book, 6)
    assert weigh(book) == Choice(Step(6), ())


def test_a_choice_whose_write_failed_makes_room_for_a_newer_one() -> None:
    book = ledger()
    in_memory(book, 4)
    weigh(book)
    book.holds(RankHolding(Rank(SLOW), (held(4, failed=True),)))
    assert weigh(book) == Choice(None, ()), "it is not dropped: a seal may still write it"
    assert book.pending == (), "and nobody waits for it"
    in_memory(book, 4, 5)
    assert weigh(book) == Choice(Step(5), (Step(4),))


def test_a_step_that_a_rank_holds_no_longer_is_lost_and_another_is_chosen() -> None:
    book = ledger()
    in_memory(book, 4)
    weigh(book)
    says(book)
    assert book.newest(Level.MEMORY) is None
    assert weigh(book) == Choice(None, (Step(4),))
    in_memory(book, 5)
    assert weigh(book).chosen == 5


def test_what_is_being_digested_again_is_not_lost() -> None:
    book = ledger()
    in_memory(book, 4)
    book.holds(RankHolding(Rank(SLOW), digesting=(Step(4),)))
    assert weigh(book) == Choice(Step(4), ())


def test_what_was_stored_meanwhile_is_not_lost() -> None:
    book = ledger()
    in_memory(book, 4)
    weigh(book)
    book.holds(RankHolding(Rank(SLOW), (held(4, stored=True),)))
    assert book.rise(Step(4)) is Level.LOCAL
    says(book)
    assert not book.steps[Step(4)].lost


def test_another_digest_is_refused_and_its_step_lost() -> None:
    book = ledger()
    book.prepared(Step(4), info(FAST), A)
    says(book, 4)
    said = RankHolding(Rank(SLOW), (held(4, digest=B), held(5)))
    assert book.holds(said) == (4,)
    assert book.steps[Step(4)].lost
    assert book.steps[Step(5)].held == {SLOW}
    assert weigh(book).dropped == (4,)


def test_a_pruned_step_is_asked_to_be_dropped() -> None:
    book = ledger()
    in_memory(book, 4, 5)
    weigh(book)
    said = RankHolding(Rank(SLOW), (held(4), held(5)))
    assert book.holds(said) == (4,)
    assert Step(4) not in book.steps
    assert book.holds(said, base=Step(5)) == (4, 5)


def test_another_life_of_the_coordinator_goes_on_with_what_is_being_written() -> None:
    book = ledger()
    in_memory(book, 4, 7, writing=4)
    assert weigh(book) == Choice(Step(4), ())


def test_what_one_rank_writes_at_once_is_nobody_s_choice() -> None:
    """A rank that keeps it while it writes another would have no slot left."""
    book = ledger()
    in_memory(book, 2, 3, writing=1)
    book.holds(RankHolding(Rank(FAST), writing=Step(2)))
    assert weigh(book) == Choice(None, (Step(2),))


def test_a_step_that_only_some_ranks_have_is_never_chosen() -> None:
    book = ledger()
    says(book, 4, 5)
    assert weigh(book) == Choice(None, ())


def test_ranks_that_skipped_each_other_s_steps_save_again() -> None:
    """Nothing of what fills the slots ever becomes complete."""
    book = ledger()
    says(book, 4, 5, 6, rank=FAST)
    assert weigh(book) == Choice(None, ()), "the other rank may have them, too"
    says(book, 7, 8, 9, rank=SLOW)
    assert weigh(book) == Choice(None, (Step(4),)), "7 may still come: nobody has saved a newer one"
    says(book, 5, 6, 10, rank=FAST)
    assert weigh(book) == Choice(None, (Step(5), Step(7)))


def test_also_where_the_one_complete_step_cannot_be_written() -> None:
    book = ledger()
    in_memory(book, 4)
    book.holds(RankHolding(Rank(SLOW), tuple(held(s, failed=s == 4) for s in (4, 5, 6))))
    says(book, 7, rank=FAST)
    assert weigh(book) == Choice(None, (Step(5),))


def test_a_step_that_may_still_become_complete_is_no_skipped_one() -> None:
    book = ledger()
    book.prepared(Step(7), info(SLOW), A)
    for said in (
        RankHolding(Rank(SLOW), (held(8),), digesting=(Step(4), Step(5), Step(6))),
        RankHolding(Rank(SLOW), (held(8),), digesting=(Step(5), Step(6)), writing=Step(4)),
    ):
        book.holds(said)
        says(book, 4, 5, 6, rank=FAST)
        assert weigh(book) == Choice(None, ())
    says(book, 8)
    says(book, 4, 5, 6, rank=FAST, writing=3)
    assert weigh(book) == Choice(None, ()), "a slot comes free"


@given(st.lists(st.sampled_from(["save", "write", "fail"]), max_size=40))
def test_the_newest_in_memory_never_goes_back_and_the_choice_is_never_dropped(
    events: list[str],
) -> None:
    """In whatever order steps are saved, written and fail to be: what gives way is older than the newest
    in memory and not the choice, and the slow rank never keeps more than two."""
    book, kept, failed = ledger(), set[Step](), set[Step]()
    for number, event in enumerate(events):
        before = book.chosen
        if event == "save":
            kept.add(Step(number))
            book.prepared(Step(number), info(FAST), A)
        elif before is not None and event == "write":
            kept.discard(before)
            book.prepared(before, info(SLOW), A)
            book.rise(before)
        elif before is not None:
            failed.add(before)
        shards = tuple(held(s, failed=s in failed) for s in sorted(kept))
        book.holds(RankHolding(Rank(SLOW), shards))
        if event == "save":
            acknowledge(book, number)
        newest = book.newest(Level.MEMORY)
        choice = weigh(book)
        kept -= set(choice.dropped)
        assert choice.chosen not in choice.dropped
        assert newest is None or all(s < newest.step for s in choice.dropped)
        assert choice.dropped == tuple(sorted(choice.dropped))
        assert book.newest(Level.MEMORY) is newest
        assert len(kept) <= 2
