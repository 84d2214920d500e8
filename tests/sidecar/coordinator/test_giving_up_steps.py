"""Which steps can no longer be committed, and which record remains of the steps that are gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.sidecar.ledgers import LAYOUT, commit, new_ledger, replicate, shard_info
from tests.support.sidecar.rounds import round_message

from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import Failure, Policy, RankSaves, RestorePoint, WorkerReport
from holdfast_sidecar.coordinator.gathered import Gathered
from holdfast_sidecar.coordinator.ledger import MAX_FORGOTTEN, Forgotten, Ledger
from holdfast_sidecar.coordinator.plan import abandoned_steps, steps_to_prune
from holdfast_sidecar.upkeep.prune import protected_steps


def saves(newest: int, *under_way: int) -> dict[Rank, RankSaves]:
    """Return the saves of rank 1, for which the others wait."""
    return {Rank(1): RankSaves(Rank(1), Step(newest), tuple(map(Step, under_way)))}


BOTH = (Rank(0), Rank(1))


def written_by_rank_0(*steps: int) -> Ledger:
    ledger = new_ledger()
    for step in steps:
        ledger.prepared(Step(step), shard_info(0), LAYOUT)
    return ledger


@pytest.mark.fault("A rank fails or skips a step that others hold")
@pytest.mark.parametrize(
    ("reported", "gone"),
    [
        pytest.param({}, (), id="the rank has reported nothing"),
        pytest.param(saves(20, 10, 20), (), id="it is writing them"),
        pytest.param(saves(20, 20), (10,), id="one failed or was skipped"),
        pytest.param(saves(40), (10, 20, 30, 40), id="all failed"),
        pytest.param(saves(30, 20), (10, 30), id="a newer one may fail first"),
        pytest.param(saves(5), (), id="it has not handed them over yet"),
    ],
)
def test_a_step_that_a_rank_no_longer_saves_is_given_up(
    reported: dict[Rank, RankSaves], gone: tuple[int, ...]
) -> None:
    assert abandoned_steps(written_by_rank_0(10, 20, 30, 40), reported, BOTH) == gone


@pytest.mark.fault("A step below a replicated one is incomplete")
def test_an_incomplete_step_below_a_replicated_one_is_pruned() -> None:
    ledger = written_by_rank_0(10, 30)
    commit(ledger, 20)
    replicate(ledger, 20, 0, 1)
    assert ledger.newest(Level.REPLICATED) is not None
    assert steps_to_prune(ledger, round_message(), (), None) == (10,)


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        pytest.param({}, (10,), id="nothing of this step is kept"),
        pytest.param({"pinned": (Step(10),)}, (), id="pinned by the user"),
        pytest.param(
            {"quarantined": (RestorePoint(Step(10), RestartRound(0)),)},
            (),
            id="a quarantined checkpoint of an older round has it",
        ),
    ],
)
def test_an_incomplete_step_is_not_pruned_with_a_checkpoint_that_must_stay(
    fields: dict[str, Any], gone: tuple[int, ...]
) -> None:
    """Members delete a step, and with it the checkpoints of all rounds."""
    ledger = written_by_rank_0(10)
    commit(ledger, 20)
    replicate(ledger, 20, 0, 1)
    assert steps_to_prune(ledger, round_message(1, **fields), (), None) == gone


def test_a_replicated_step_stays_while_newer_ones_wait_for_their_copies() -> None:
    """Newer local steps are lost with one node, so they do not take the place of a replicated one."""
    ledger = new_ledger()
    for step in (10, 20, 30, 40):
        commit(ledger, step)
    replicate(ledger, 10, 0, 1)
    policy = Policy(interval_steps=1, keep_last=2)
    assert steps_to_prune(ledger, round_message(1, policy=policy), (), None) == ()
    replicate(ledger, 40, 0, 1)
    assert steps_to_prune(ledger, round_message(1, policy=policy), (), None) == ()
    replicate(ledger, 30, 0, 1)
    assert steps_to_prune(ledger, round_message(1, policy=policy), (), None) == (10, 20)


def test_a_step_that_may_be_unreadable_goes_when_a_newer_one_is_replicated() -> None:
    ledger = new_ledger()
    held = round_message(1, policy=Policy(interval_steps=1, keep_last=2))
    for step in (10, 20):
        commit(ledger, step)
        replicate(ledger, step, 0, 1)
    assert steps_to_prune(ledger, held, (), None, lost={Step(30)}) == ()
    assert steps_to_prune(ledger, held, (), None, lost={Step(15)}) == (15,)


def test_a_complete_step_is_never_given_up() -> None:
    ledger = new_ledger()
    commit(ledger, 10)
    assert abandoned_steps(ledger, saves(40), BOTH, pressed=True) == ()


def test_without_room_only_the_newest_steps_of_a_silent_rank_are_kept() -> None:
    ledger = written_by_rank_0(*range(10, 90, 10))
    assert abandoned_steps(ledger, {}, BOTH) == ()
    assert abandoned_steps(ledger, {}, BOTH, pressed=True) == (10, 20, 30, 40)
    assert abandoned_steps(ledger, saves(20, 10, 20), BOTH, pressed=True) == (30, 40), (
        "it writes two"
    )


def report(*failures: Failure) -> WorkerReport:
    rank = RankSaves(Rank(1), Step(40))
    return WorkerReport(RestartRound(1), Worker(1), saves=(rank,), failures=failures)


def test_failures_name_their_worker_and_a_full_node_sets_pressed() -> None:
    members = Gathered(frozenset({Worker(0), Worker(1)}), 2, 0.0)
    assert not members.pressed
    full = Failure(Step(3), TierName.NODE, "NodeVolumeFull", "no room")
    members.receive(report(full), 1.0)
    assert members.failures == (replace(full, worker=Worker(1)),)
    assert members.pressed


# --------------------------------------------------------------------------- steps that are gone


@pytest.mark.fault("Steps of a long job go, and the coordinator remembers some of each")
def test_the_memory_of_deleted_steps_is_bounded() -> None:
    gone = Forgotten()
    last = 4 * MAX_FORGOTTEN
    for step in range(last):
        gone.add(Step(step), pruned=True)
    assert all(gone.has(Step(s), ()) for s in range(last))
    assert not gone.has(Step(7), [Step(7)]), "a held step may be as old as any"
    assert not gone.has(Step(last), ())
    assert Step(7) not in gone.pruned, "why it is gone is not known any more: nothing is deleted"
    assert gone.pruned == tuple(range(last - MAX_FORGOTTEN, last))


@pytest.mark.fault("A checkpoint is unpinned when the nodes have deleted a thousand newer ones")
def test_an_old_step_that_goes_after_many_newer_ones_is_deleted() -> None:
    """So does the newest persisted step where a thousand steps follow it before the next one is uploaded."""
    ledger = new_ledger()
    commit(ledger, 0)
    ledger.forget(tuple(map(Step, range(1, MAX_FORGOTTEN + 2))))
    ledger.forget((Step(0),))
    assert Step(0) in ledger.dropped
    assert ledger.is_forgotten(Step(0))


def test_a_step_that_a_member_lost_is_gone_and_not_deleted_elsewhere() -> None:
    ledger = new_ledger()
    commit(ledger, 10)
    commit(ledger, 20)
    ledger.forget((Step(10),), pruned=False)
    ledger.forget((Step(20),))
    assert [ledger.is_forgotten(Step(s)) for s in (10, 20)] == [True, True]
    assert ledger.dropped == (20,)


def test_a_step_on_its_way_to_the_store_is_not_pruned_on_the_nodes() -> None:
    """This also holds if the step is pruned because copies fall behind and not by the retention."""
    ledger = new_ledger()
    commit(ledger, 10)
    ledger.request_upload(Step(10))
    ledger.forget((Step(10),))
    assert Step(10) in ledger.steps
    ledger.upload_ended(ledger.steps[Step(10)], persisted=False)
    ledger.forget((Step(10),))
    assert ledger.is_forgotten(Step(10))


def test_the_restore_point_is_protected_until_a_newer_step_of_the_round_is_committed() -> None:
    held = round_message(2, restore_point=RestorePoint(Step(5), RestartRound(0)), pinned=(Step(2),))
    older = CheckpointId(Step(9), RestartRound(0))
    newer = CheckpointId(Step(6), held.round)
    assert protected_steps(held, [older]) == {2, 5}
    assert protected_steps(held, [older, newer]) == {2}
