"""Which step that waits in slots is written next, and which are dropped, given what the workers report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.sidecar.ledgers import LAYOUT, commit, new_ledger, shard_info

from holdfast_core.ids import Rank, Step
from holdfast_core.messages.schema import RankSaves
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.coordinator.plan import SlotChoice, choose

FAST, SLOW = 0, 1


def saves(rank: int, *waiting: int, writing: int | None = None, newest: int = 0) -> RankSaves:
    """Return what a rank reports that has these steps in its slots, and no others."""
    waits = tuple(map(Step, waiting))
    under_way = waits if writing is None else (Step(writing), *waits)
    return RankSaves(
        Rank(rank),
        Step(max((*under_way, newest))),
        tuple(sorted(under_way)),
        waits,
        writes=writing is not None,
    )


def weigh(ledger: Ledger, *reported: RankSaves) -> SlotChoice:
    """Choose as the coordinator does. The fast rank has nothing in its slots unless it is reported."""
    found = {Rank(FAST): RankSaves(Rank(FAST), Step(0)), **{s.rank: s for s in reported}}
    choice = choose(ledger, found)
    ledger.chosen = choice.chosen
    ledger.forget(choice.dropped)
    return choice


def written(ledger: Ledger, *steps: int, rank: int = FAST) -> None:
    """Let the rank have the steps on its node tier."""
    for step in steps:
        ledger.prepared(Step(step), shard_info(rank), LAYOUT)


def test_the_newest_step_is_chosen_and_older_ones_are_dropped_in_order() -> None:
    ledger = new_ledger()
    written(ledger, 2, 3, 4)
    busy = weigh(ledger, saves(SLOW, 2, 3, 4, writing=1))
    assert busy == SlotChoice(None, (Step(2), Step(3)), Step(4)), (
        "the rank is busy: nothing is pinned"
    )
    assert weigh(ledger, saves(SLOW, 4)) == SlotChoice(Step(4), (), Step(4))


def test_a_written_step_that_lacks_its_manifest_holds_up_no_other_one() -> None:
    """A node that cannot store a manifest would otherwise stop all later saves of the round."""
    ledger = new_ledger()
    written(ledger, 4)
    assert weigh(ledger, saves(SLOW, 4)).chosen == 4
    written(ledger, 4, rank=SLOW)
    written(ledger, 5)
    assert weigh(ledger, saves(SLOW, 5)).chosen == 5


def test_steps_up_to_the_restore_point_are_dropped() -> None:
    """A script that counts from 0 after a restore saves them. No report of such a shard is accepted."""
    waiting = {Rank(rank): saves(rank, 2, 3) for rank in (FAST, SLOW)}
    assert choose(new_ledger(), waiting, base=Step(2)) == SlotChoice(Step(3), (Step(2),), Step(3))
    assert choose(new_ledger(), waiting, base=Step(9)) == SlotChoice(None, (Step(2), Step(3)), None)


def test_the_chosen_step_stays_until_it_is_local() -> None:
    ledger = new_ledger()
    written(ledger, 4)
    assert weigh(ledger, saves(SLOW, 4)).chosen == 4
    written(ledger, 5, 6)
    choice = weigh(ledger, saves(SLOW, 5, 6, writing=4))
    assert choice == SlotChoice(Step(4), (Step(5),), Step(6))
    commit(ledger, 4)
    assert weigh(ledger, saves(SLOW, 6)) == SlotChoice(Step(6), (), Step(6))


def test_a_choice_whose_write_failed_makes_room_for_a_newer_one() -> None:
    ledger = new_ledger()
    written(ledger, 4, 5)
    weigh(ledger, saves(SLOW, 4))
    assert weigh(ledger, saves(SLOW, 5, newest=5)).chosen == 5


def test_a_step_that_a_rank_has_no_longer_is_dropped_by_the_others() -> None:
    ledger = new_ledger()
    assert weigh(ledger, saves(FAST, 4), saves(SLOW, 4)).chosen == 4
    lost = weigh(ledger, saves(FAST, 4), saves(SLOW, newest=4))
    assert lost == SlotChoice(None, (Step(4),), None)


def test_a_dropped_step_is_not_chosen_again() -> None:
    """A report that is older than the drop still lists it."""
    ledger = new_ledger()
    written(ledger, 4, 5)
    assert weigh(ledger, saves(SLOW, 4, 5, writing=3)).dropped == (4,)
    assert weigh(ledger, saves(SLOW, 4)) == SlotChoice(None, (), None)


def test_a_step_that_one_rank_writes_at_once_is_not_chosen() -> None:
    """A rank that keeps this step while it writes another one would have no slot left."""
    ledger = new_ledger()
    written(ledger, 3)
    choice = weigh(ledger, saves(SLOW, 2, 3, writing=1), saves(FAST, writing=2))
    assert choice == SlotChoice(None, (Step(2),), Step(3))


def test_a_step_that_only_some_ranks_have_is_never_chosen() -> None:
    ledger = new_ledger()
    assert weigh(ledger, saves(SLOW, 4, 5)) == SlotChoice()
    found = {Rank(SLOW): saves(SLOW, 4, 5)}
    assert choose(new_ledger(), found) == SlotChoice(), "the other rank has not reported yet"


def test_steps_that_another_rank_skipped_are_dropped_so_that_saves_continue() -> None:
    """None of the steps that fill the slots ever becomes complete."""
    ledger = new_ledger()
    skipped = weigh(ledger, saves(FAST, 4, 5, 6), saves(SLOW, 7, 8, 9))
    assert skipped.dropped == (4, 5, 6)
    assert weigh(ledger, saves(FAST, 10), saves(SLOW, 7, 8, 9)).dropped == (7, 8, 9)


def test_a_step_that_may_still_become_complete_is_not_dropped() -> None:
    ledger = new_ledger()
    assert weigh(ledger, saves(FAST, 4, 5, 6), saves(SLOW, 4, 5, writing=3)).dropped == (4,)
    assert weigh(ledger, saves(FAST, 5, 6), saves(SLOW, 5, writing=3)).dropped == ()


@given(st.lists(st.sampled_from(["save", "write", "fail"]), max_size=40))
def test_the_newest_complete_step_is_never_dropped(events: list[str]) -> None:
    """Steps are saved, written and fail in any order. Each dropped step is older than the newest step that
    every rank has and is not the chosen one, and the slow rank never keeps more than two."""
    ledger, kept, newest = new_ledger(), set[Step](), Step(0)
    for number, event in enumerate(events, 1):
        before = ledger.chosen
        if event == "save":
            newest = Step(number)
            kept.add(newest)
            written(ledger, number)
        elif before is not None:
            kept.discard(before)
            if event == "write":
                commit(ledger, before)
        choice = weigh(ledger, saves(SLOW, *sorted(kept), newest=newest))
        assert choice.chosen not in choice.dropped
        assert choice.newest == max(kept, default=None)
        assert all(choice.newest is not None and s < choice.newest for s in choice.dropped)
        kept -= set(choice.dropped)
        assert len(kept) <= 2
