"""Which step in memory is written next, and which steps are dropped, given the reports of the members."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.sidecar.ledgers import (
    LAYOUT,
    LAYOUTS,
    OTHER_DIGEST,
    SHARD_DIGEST,
    acknowledge,
    new_ledger,
    shard_info,
)

from holdfast_core.ids import Digest, Level, Rank, Step
from holdfast_core.messages.schema import DigestedShard, RankBuffered
from holdfast_sidecar.coordinator.choice import Choice, choose
from holdfast_sidecar.coordinator.ledger import Ledger

FAST, SLOW = 0, 1
SLOTS = 3


def buffered(
    step: int, rank: int = SLOW, digest: Digest = SHARD_DIGEST, **fields: bool
) -> DigestedShard:
    return DigestedShard(Step(step), shard_info(rank, digest), SHARD_DIGEST, **fields)


def holds_steps(ledger: Ledger, *steps: int, writing: int | None = None, rank: int = SLOW) -> None:
    """Report that the rank has exactly these steps in memory."""
    ledger.update_buffered(
        RankBuffered(
            Rank(rank),
            tuple(buffered(s, rank) for s in steps),
            writing=None if writing is None else Step(writing),
        ),
        LAYOUTS,
    )


def in_memory(ledger: Ledger, *steps: int, writing: int | None = None) -> None:
    """Let the fast rank write the steps, keep them in memory at the slow rank, and acknowledge the
    manifests."""
    for step in steps:
        ledger.prepared(Step(step), shard_info(FAST), LAYOUT)
    holds_steps(ledger, *steps, writing=writing)
    acknowledge(ledger, *steps)
    assert all(ledger.steps[Step(s)].memory and not ledger.steps[Step(s)].local for s in steps)


def weigh(ledger: Ledger) -> Choice:
    choice = choose(ledger, SLOTS)
    ledger.chosen = choice.chosen
    ledger.forget(choice.dropped)
    return choice


def test_a_step_is_in_memory_first_and_local_when_every_rank_has_written_it() -> None:
    ledger = new_ledger()
    in_memory(ledger, 5)
    assert ledger.steps[Step(5)].level is None, "no promise yet"
    assert ledger.newest(Level.MEMORY) is ledger.steps[Step(5)]
    assert ledger.newest(Level.LOCAL) is None
    ledger.prepared(Step(5), shard_info(SLOW), LAYOUT)
    assert ledger.rise(Step(5)) is Level.LOCAL
    assert ledger.rise(Step(5)) is None, "only once"


def test_a_manifest_on_every_node_does_not_make_a_step_local() -> None:
    """A coordinator that has just started finds manifests, but the shards may be in memory only."""
    ledger = new_ledger()
    assert acknowledge(ledger, 5) == [None]
    ledger.prepared(Step(5), shard_info(FAST), LAYOUT)
    assert ledger.rise(Step(5)) is None
    holds_steps(ledger, 5)
    assert ledger.rise(Step(5)) is Level.MEMORY


def test_the_newest_step_is_chosen_and_older_ones_are_dropped_in_order() -> None:
    ledger = new_ledger()
    in_memory(ledger, 2, 3, 4, writing=1)
    assert weigh(ledger) == Choice(None, (Step(2), Step(3))), "the rank is busy: nothing is pinned"
    holds_steps(ledger, 4)
    assert weigh(ledger) == Choice(Step(4), ())


def test_the_chosen_step_stays_until_it_is_local() -> None:
    ledger = new_ledger()
    in_memory(ledger, 4)
    assert weigh(ledger).chosen == 4
    in_memory(ledger, 4, 5, 6, writing=4)
    assert weigh(ledger) == Choice(Step(4), (Step(5),))
    ledger.prepared(Step(4), shard_info(SLOW), LAYOUT)
    ledger.rise(Step(4))
    holds_steps(ledger, 6)
    assert weigh(ledger) == Choice(Step(6), ())


def test_a_choice_whose_write_failed_makes_room_for_a_newer_one() -> None:
    ledger = new_ledger()
    in_memory(ledger, 4)
    weigh(ledger)
    ledger.update_buffered(RankBuffered(Rank(SLOW), (buffered(4, failed=True),)), LAYOUTS)
    assert weigh(ledger) == Choice(None, ()), "it is not dropped: a seal may still write it"
    assert ledger.pending == (), "and nothing waits for it"
    in_memory(ledger, 4, 5)
    assert weigh(ledger) == Choice(Step(5), (Step(4),))


def test_a_step_that_a_rank_holds_no_longer_is_lost_and_another_is_chosen() -> None:
    ledger = new_ledger()
    in_memory(ledger, 4)
    weigh(ledger)
    holds_steps(ledger)
    assert ledger.newest(Level.MEMORY) is None
    assert weigh(ledger) == Choice(None, (Step(4),))
    in_memory(ledger, 5)
    assert weigh(ledger).chosen == 5


def test_a_step_that_is_digested_again_is_not_lost() -> None:
    ledger = new_ledger()
    in_memory(ledger, 4)
    ledger.update_buffered(RankBuffered(Rank(SLOW), digesting=(Step(4),)), LAYOUTS)
    assert weigh(ledger) == Choice(Step(4), ())


def test_a_step_that_was_stored_meanwhile_is_not_lost() -> None:
    ledger = new_ledger()
    in_memory(ledger, 4)
    weigh(ledger)
    ledger.update_buffered(RankBuffered(Rank(SLOW), (buffered(4, stored=True),)), LAYOUTS)
    assert ledger.rise(Step(4)) is Level.LOCAL
    holds_steps(ledger)
    assert not ledger.steps[Step(4)].lost


def test_another_digest_is_refused_and_its_step_lost() -> None:
    ledger = new_ledger()
    ledger.prepared(Step(4), shard_info(FAST), LAYOUT)
    holds_steps(ledger, 4)
    report = RankBuffered(Rank(SLOW), (buffered(4, digest=OTHER_DIGEST), buffered(5)))
    assert ledger.update_buffered(report, LAYOUTS) == (4,)
    assert ledger.steps[Step(4)].lost
    assert ledger.steps[Step(5)].buffered == {SLOW}
    assert weigh(ledger).dropped == (4,)


def test_a_pruned_step_is_asked_to_be_dropped() -> None:
    ledger = new_ledger()
    in_memory(ledger, 4, 5)
    weigh(ledger)
    report = RankBuffered(Rank(SLOW), (buffered(4), buffered(5)))
    assert ledger.update_buffered(report, LAYOUTS) == (4,)
    assert Step(4) not in ledger.steps
    assert ledger.update_buffered(report, LAYOUTS, base=Step(5)) == (4, 5)


def test_a_restarted_coordinator_keeps_the_step_that_is_being_written() -> None:
    ledger = new_ledger()
    in_memory(ledger, 4, 7, writing=4)
    assert weigh(ledger) == Choice(Step(4), ())


def test_a_step_that_one_rank_writes_at_once_is_not_chosen() -> None:
    """A rank that keeps this step while it writes another one would have no slot left."""
    ledger = new_ledger()
    in_memory(ledger, 2, 3, writing=1)
    ledger.update_buffered(RankBuffered(Rank(FAST), writing=Step(2)), LAYOUTS)
    assert weigh(ledger) == Choice(None, (Step(2),))


def test_a_step_that_only_some_ranks_have_is_never_chosen() -> None:
    ledger = new_ledger()
    holds_steps(ledger, 4, 5)
    assert weigh(ledger) == Choice(None, ())


def test_steps_that_other_ranks_skipped_are_dropped_so_that_saves_continue() -> None:
    """None of the steps that fill the slots ever becomes complete."""
    ledger = new_ledger()
    holds_steps(ledger, 4, 5, 6, rank=FAST)
    assert weigh(ledger) == Choice(None, ()), "the other rank may have them, too"
    holds_steps(ledger, 7, 8, 9, rank=SLOW)
    assert weigh(ledger) == Choice(None, (Step(4),)), (
        "7 may still become complete: no rank has saved a newer one"
    )
    holds_steps(ledger, 5, 6, 10, rank=FAST)
    assert weigh(ledger) == Choice(None, (Step(5), Step(7)))


def test_skipped_steps_are_dropped_although_the_complete_one_cannot_be_written() -> None:
    ledger = new_ledger()
    in_memory(ledger, 4)
    ledger.update_buffered(
        RankBuffered(Rank(SLOW), tuple(buffered(s, failed=s == 4) for s in (4, 5, 6))), LAYOUTS
    )
    holds_steps(ledger, 7, rank=FAST)
    assert weigh(ledger) == Choice(None, (Step(5),))


def test_a_step_that_may_still_become_complete_is_not_dropped() -> None:
    ledger = new_ledger()
    ledger.prepared(Step(7), shard_info(SLOW), LAYOUT)
    for report in (
        RankBuffered(Rank(SLOW), (buffered(8),), digesting=(Step(4), Step(5), Step(6))),
        RankBuffered(Rank(SLOW), (buffered(8),), digesting=(Step(5), Step(6)), writing=Step(4)),
    ):
        ledger.update_buffered(report, LAYOUTS)
        holds_steps(ledger, 4, 5, 6, rank=FAST)
        assert weigh(ledger) == Choice(None, ())
    holds_steps(ledger, 8)
    holds_steps(ledger, 4, 5, 6, rank=FAST, writing=3)
    assert weigh(ledger) == Choice(None, ()), "a slot comes free"


@given(st.lists(st.sampled_from(["save", "write", "fail"]), max_size=40))
def test_the_newest_in_memory_never_goes_back_and_the_choice_is_never_dropped(
    events: list[str],
) -> None:
    """Steps are saved, written and fail in any order. Each dropped step is older than the newest step in
    memory and is not the chosen one, and the slow rank never keeps more than two."""
    ledger, kept, failed = new_ledger(), set[Step](), set[Step]()
    for number, event in enumerate(events):
        before = ledger.chosen
        if event == "save":
            kept.add(Step(number))
            ledger.prepared(Step(number), shard_info(FAST), LAYOUT)
        elif before is not None and event == "write":
            kept.discard(before)
            ledger.prepared(before, shard_info(SLOW), LAYOUT)
            ledger.rise(before)
        elif before is not None:
            failed.add(before)
        shards = tuple(buffered(s, failed=s in failed) for s in sorted(kept))
        ledger.update_buffered(RankBuffered(Rank(SLOW), shards), LAYOUTS)
        if event == "save":
            acknowledge(ledger, number)
        newest = ledger.newest(Level.MEMORY)
        choice = weigh(ledger)
        kept -= set(choice.dropped)
        assert choice.chosen not in choice.dropped
        assert newest is None or all(s < newest.step for s in choice.dropped)
        assert choice.dropped == tuple(sorted(choice.dropped))
        assert ledger.newest(Level.MEMORY) is newest
        assert len(kept) <= 2
