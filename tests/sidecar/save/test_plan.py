"""The next actions of a worker with its own shards: tables, and that the plan always becomes empty."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.format.rank_layout import LayoutDigests
from holdfast_core.ids import Digest, JobUid, Rank, RestartRound, ShardRef, Step, Worker
from holdfast_core.messages.schema import ShardInfo, StoredAs
from holdfast_sidecar.save.plan import (
    Action,
    OwnShard,
    ShardKey,
    Verb,
    expects_commit,
    idle,
    next_actions,
    startable,
    table,
)

DIGEST = Digest("b3:" + "0" * 64)
ONE, TWO = Worker(1), Worker(2)


def shard(step: int = 7, rank: int = 0, **fields: object) -> OwnShard:
    ref = ShardRef(JobUid("job"), Step(step), RestartRound(0), Rank(rank), DIGEST)
    made = OwnShard(
        ref,
        ShardInfo(Rank(rank), 10, DIGEST, DIGEST),
        DIGEST,
        digests=LayoutDigests(DIGEST, DIGEST, DIGEST),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


KEY = ShardKey(Step(7), RestartRound(0), Rank(0))


def test_a_new_shard_is_described_and_copied_once_it_is_committed() -> None:
    assert next_actions([shard(digests=None)], (ONE, TWO)) == (Action(Verb.DESCRIBE, KEY),)
    assert next_actions([shard(digests=None, committed=True)], (ONE, TWO)) == (
        Action(Verb.DESCRIBE, KEY),
        Action(Verb.COPY, KEY, ONE),
        Action(Verb.COPY, KEY, TWO),
    )


def test_a_manifest_is_expected_for_the_newest_step_alone() -> None:
    assert not expects_commit([])
    assert expects_commit([shard(step=7, committed=True), shard(step=8)])
    assert not expects_commit([shard(step=7), shard(step=8, committed=True)])
    assert not expects_commit([shard(reported=False)])


def listed(
    *shards: OwnShard, targets: tuple[Worker, ...] = (ONE, TWO)
) -> list[tuple[int, bool, bool]]:
    return [(s.step, s.replicated, s.uploaded is not None) for s in table(shards, targets, 2)]


def test_the_table_says_replicated_when_every_target_has_the_shard() -> None:
    half = shard(committed=True, copied=frozenset({ONE}))
    assert next_actions([half], (ONE, TWO)) == (Action(Verb.COPY, KEY, TWO),)
    assert listed(half) == [(7, False, False)]
    assert listed(shard(copied=frozenset({ONE, TWO}))) == [(7, True, False)]


def test_without_targets_nothing_is_reported_as_replicated() -> None:
    assert next_actions([shard(committed=True)], ()) == ()
    assert listed(shard(committed=True), targets=()) == [(7, False, False)]


def test_the_table_lists_the_newest_shards_that_the_coordinator_is_to_know() -> None:
    assert listed(shard(step=9), shard(step=7), shard(step=8)) == [
        (8, False, False),
        (9, False, False),
    ]
    assert (
        listed(shard(reported=False), shard(step=8, digests=None), shard(step=9, pruned=True)) == []
    )


def test_an_uploaded_shard_of_the_restore_point_is_listed_too() -> None:
    """The end of a job uploads the restore point of a round that never trained."""
    again = shard(reported=False, digests=None, committed=True, upload_requested=True)
    assert listed(again, targets=()) == []
    assert listed(replace(again, uploaded=StoredAs()), targets=()) == [(7, False, True)]


def test_a_pruned_shard_is_deleted_and_nothing_else_is_done_with_it() -> None:
    gone = shard(pruned=True, committed=True, digests=None, upload_requested=True)
    assert next_actions([gone], (ONE,)) == (Action(Verb.DELETE, KEY),)


def test_a_shard_of_the_restore_point_is_copied_and_never_reported() -> None:
    again = shard(reported=False, committed=True)
    assert next_actions([again], (ONE,)) == (Action(Verb.COPY, KEY, ONE),)
    assert next_actions([replace(again, copied=frozenset({ONE}))], (ONE,)) == ()
    assert idle([again], (ONE,)), "it delays no end of a process"


def test_an_upload_waits_to_be_asked_for() -> None:
    assert next_actions([shard()], ()) == ()
    assert next_actions([shard(upload_requested=True)], ()) == (Action(Verb.UPLOAD, KEY),)
    uploaded = shard(upload_requested=True, uploaded=StoredAs())
    assert next_actions([uploaded], ()) == ()
    assert listed(uploaded) == [(7, False, True)]


def test_one_copy_a_target_and_one_upload_at_a_time_oldest_first() -> None:
    upload_requested = [
        shard(step=9, committed=True, upload_requested=True),
        shard(step=8, committed=True, upload_requested=True),
    ]
    actions = next_actions(upload_requested, (ONE, TWO))
    chosen = startable(actions, frozenset())
    assert [(a.verb, a.key.step, a.target) for a in chosen] == [
        (Verb.COPY, 8, ONE),
        (Verb.COPY, 8, TWO),
        (Verb.UPLOAD, 8, None),
    ]
    assert startable(actions, frozenset(chosen)) == ()
    assert [a.target for a in startable(actions, frozenset(chosen[1:]))] == [ONE]


@given(
    steps=st.lists(st.integers(0, 20), unique=True, max_size=6),
    targets=st.sets(st.sampled_from([ONE, TWO]), max_size=2),
    upload_requested=st.sets(st.integers(0, 20)),
    order=st.randoms(use_true_random=False),
)
def test_doing_what_is_planned_comes_to_rest(
    steps: list[int], targets: set[Worker], upload_requested: set[int], order: object
) -> None:
    """In every order in which actions end, the plan becomes empty and idle."""
    shards = {
        s: shard(step=s, digests=None, committed=True, upload_requested=s in upload_requested)
        for s in steps
    }
    goal = tuple(sorted(targets))
    for _ in range(len(steps) * 6 + 1):
        actions = startable(next_actions(shards.values(), goal), frozenset())
        if not actions:
            break
        action = order.choice(actions)  # type: ignore[attr-defined]
        before = shards[action.key.step]
        match action.verb:
            case Verb.DESCRIBE:
                after = replace(before, digests=LayoutDigests(DIGEST, DIGEST, DIGEST))
            case Verb.COPY:
                after = replace(before, copied=before.copied | {action.target})
            case Verb.UPLOAD:
                after = replace(before, uploaded=StoredAs())
        shards[action.key.step] = after
    assert idle(shards.values(), goal)
    for step, done in shards.items():
        assert done.digests is not None
        assert done.copied == targets
        assert (done.uploaded is not None) == (step in upload_requested)
