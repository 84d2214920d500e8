from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.ids import CheckpointId, Level, RestartRound, Step, age_of
from holdfast_core.retention import (
    MIN_KEPT,
    BestMode,
    Committed,
    KeepBest,
    RetentionPolicy,
    RetentionReason,
    RetentionState,
    plan_retention,
)

NOON = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def at(step: int, round_: int = 0) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(round_))


def committed(
    *steps: int, round: int = 0, level: Level = Level.REPLICATED
) -> tuple[Committed, ...]:
    return tuple(Committed(at(step, round), level) for step in steps)


def state(
    items: tuple[Committed, ...],
    *,
    keep_last: int | None = 2,
    round: int | None = 0,
    needed: dict[RetentionReason, Collection[CheckpointId]] | None = None,
    **fields: Any,
) -> RetentionState:
    policy = RetentionPolicy(keep_last=keep_last)
    of_round = None if round is None else RestartRound(round)
    return replace(RetentionState(items, policy, needed or {}, round=of_round), **fields)


def needs(**steps: int) -> dict[RetentionReason, Collection[CheckpointId]]:
    """Return the need of one step of round 0 for each reason."""
    return {RetentionReason[name.upper()]: (at(step),) for name, step in steps.items()}


CASES = {
    "nothing committed": (state(()), []),
    "fewer than are kept": (state(committed(10, 20)), []),
    "older ones go": (state(committed(10, 20, 30, 40)), [10, 20]),
    "keep_last 3": (state(committed(10, 20, 30, 40), keep_last=3), [10]),
    "keep_last 1, as in a folder": (state(committed(10, 20, 30), keep_last=1), [10, 20]),
    "all": (state(committed(10, 20, 30), keep_last=None), []),
    "a later round is newer, whatever its steps are": (
        state(committed(10, 20, 30) + committed(11, 12, round=1), round=None),
        [10, 20, 30],
    ),
    "nothing while it is held": (state(committed(10, 20, 30), held=True), []),
    "local ones do not protect": (
        state(committed(10, 20, 30) + committed(40, 50, level=Level.LOCAL)),
        [10],
    ),
    "local ones protect without copies": (
        state(committed(10, 20, 30, level=Level.LOCAL), protecting_level=Level.LOCAL),
        [10],
    ),
    "persisted ones protect": (state(committed(10, 20, 30, level=Level.PERSISTED)), [10]),
    "one protected is not enough": (
        state(committed(10, 20, level=Level.LOCAL) + committed(30)),
        [],
    ),
    "nothing goes before the round's first replicated commit": (
        state(committed(10, 20, 30, 40), round=1),
        [],
    ),
    "a local commit of the round is not enough": (
        state(
            committed(10, 20, 30) + committed(40, round=1, level=Level.LOCAL),
            round=1,
        ),
        [],
    ),
    "after the round's first replicated commit": (
        state(committed(10, 20, 30) + committed(40, round=1), round=1),
        [10, 20],
    ),
    "restore point stays": (state(committed(10, 20, 30, 40), needed=needs(restore_point=10)), [20]),
    "pinned stays": (state(committed(10, 20, 30, 40), needed=needs(pinned=20)), [10]),
    "uploading stays": (state(committed(10, 20, 30, 40), needed=needs(uploading=10)), [20]),
    "newest persisted stays": (
        state(committed(10, 20, 30, 40), needed=needs(newest_persisted=20)),
        [10],
    ),
}


@pytest.mark.parametrize(("given_state", "pruned"), CASES.values(), ids=CASES.keys())
def test_the_steps_that_the_policy_does_not_keep_are_pruned(
    given_state: RetentionState, pruned: list[int]
) -> None:
    plan = plan_retention(given_state)
    assert sorted(verdict.checkpoint.step for verdict in plan.prune) == pruned
    assert list(plan.prune_steps) == pruned


def test_every_verdict_names_its_reason() -> None:
    plan = plan_retention(
        state(
            committed(10, 20, 30, 40, 50, 60) + committed(70, level=Level.LOCAL),
            needed=needs(restore_point=10, pinned=20, uploading=30),
        )
    )
    assert [(v.checkpoint.step, v.reason) for v in plan.keep] == [
        (70, RetentionReason.NEWER_THAN_KEPT),
        (60, RetentionReason.KEEP_LAST),
        (50, RetentionReason.KEEP_LAST),
        (30, RetentionReason.UPLOADING),
        (20, RetentionReason.PINNED),
        (10, RetentionReason.RESTORE_POINT),
    ]
    assert [(v.checkpoint.step, v.reason) for v in plan.prune] == [(40, RetentionReason.SUPERSEDED)]


def test_a_step_that_one_round_keeps_is_not_pruned_by_step() -> None:
    items = committed(10) + committed(10, 20, 30, round=1)
    plan = plan_retention(state(items, round=1, needed=needs(restore_point=10)))
    assert [v.checkpoint for v in plan.prune] == [at(10, 1)]
    assert plan.prune_steps == ()


def times(*hours: float, metrics: dict[int, float] | None = None) -> tuple[Committed, ...]:
    """Return checkpoints of steps 10, 20 and so on, committed so many hours before noon."""
    values = metrics or {}
    return tuple(
        Committed(
            at(10 * (index + 1)),
            Level.PERSISTED,
            NOON - timedelta(hours=ago),
            {"loss": values[10 * (index + 1)]} if 10 * (index + 1) in values else {},
        )
        for index, ago in enumerate(hours)
    )


HOUR, NAN = timedelta(hours=1), float("nan")
RULES = {
    "each 30 steps, the first at or after a multiple": (
        RetentionPolicy(1, every_steps=30),
        times(9, 8, 7, 6, 5, 4, 3, 2),
        [30, 60, 80],
    ),
    "each 25 steps": (
        RetentionPolicy(1, every_steps=25),
        times(9, 8, 7, 6, 5, 4, 3, 2),
        [30, 50, 80],
    ),
    "each 2 h of UTC, the first of each": (
        RetentionPolicy(1, every=2 * HOUR),
        times(6, 5.5, 5, 4, 2.5, 1, 0.5),
        [10, 40, 60, 70],
    ),
    "a time after the commit": (
        RetentionPolicy(1, keep_for=3 * HOUR),
        times(5, 3, 2.9, 1),
        [30, 40],
    ),
    "a commit in the future has no age": (
        RetentionPolicy(1, keep_for=3 * HOUR),
        times(-24, 4, 3, 1),
        [10, 40],
    ),
    "the newest of the last hours that have one": (
        RetentionPolicy(1, hourly=3),
        times(9.5, 9.2, 4.9, 4.1, 0.5, 0.2),
        [20, 40, 60],
    ),
    "the newest of the last days that have one": (
        RetentionPolicy(1, daily=2),
        times(60, 50, 40, 20, 13, 3, 1),
        [50, 70],
    ),
    "the lowest values": (
        RetentionPolicy(1, best=KeepBest("loss", BestMode.MIN, 2)),
        times(5, 4, 3, 2, 1, metrics={10: 0.3, 20: 0.1, 30: 0.2, 40: 0.9}),
        [20, 30, 50],
    ),
    "the highest value, the older one of two": (
        RetentionPolicy(1, best=KeepBest("loss", BestMode.MAX)),
        times(5, 4, 3, 2, 1, metrics={10: 0.9, 20: 0.9, 30: 0.2}),
        [10, 50],
    ),
    "values that are no numbers are never the best": (
        RetentionPolicy(1, best=KeepBest("loss", BestMode.MAX, 2)),
        times(5, 4, 3, 2, 1, metrics={10: NAN, 20: float("inf"), 30: -4.0}),
        [30, 50],
    ),
    "a metric that no script reported": (
        RetentionPolicy(1, best=KeepBest("accuracy", BestMode.MAX, 2)),
        times(5, 4, 3, metrics={10: 1.0}),
        [30],
    ),
}


@pytest.mark.parametrize(("policy", "items", "kept"), RULES.values(), ids=RULES.keys())
def test_each_rule_keeps(
    policy: RetentionPolicy, items: tuple[Committed, ...], kept: list[int]
) -> None:
    plan = plan_retention(RetentionState(items, policy, now=NOON))
    assert sorted(v.checkpoint.step for v in plan.keep) == kept
    assert {v.reason for v in plan.prune} == {RetentionReason.SUPERSEDED}


def test_a_rule_about_times_needs_the_time() -> None:
    with pytest.raises(ValueError, match="present time"):
        plan_retention(RetentionState(times(2, 1), RetentionPolicy(daily=1)))


def test_only_needs_keep_what_is_off_the_lineage_or_quarantined() -> None:
    off = tuple(replace(c, on_lineage=False) for c in times(9, 8))
    on = tuple(replace(c, checkpoint=at(c.checkpoint.step, 1)) for c in times(7, 6, 5, 4))
    needed = {
        RetentionReason.CLONED: (at(10),),
        RetentionReason.QUARANTINED: (at(40, 1),),
    }
    plan = plan_retention(RetentionState(off + on, RetentionPolicy(2), needed))
    assert [(str(v.checkpoint), v.reason) for v in plan.keep] == [
        ("s40-r1", RetentionReason.QUARANTINED),
        ("s30-r1", RetentionReason.KEEP_LAST),
        ("s20-r1", RetentionReason.KEEP_LAST),
        ("s10-r0", RetentionReason.CLONED),
    ]
    assert [(str(v.checkpoint), v.reason) for v in plan.prune] == [
        ("s10-r1", RetentionReason.SUPERSEDED),
        ("s20-r0", RetentionReason.OFF_LINEAGE),
    ]


CHECKPOINTS = st.builds(at, st.integers(0, 40), st.integers(0, 3))
METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(), max_size=2)
NEEDS = [
    RetentionReason.PINNED,
    RetentionReason.BEING_READ,
    RetentionReason.CLONED,
    RetentionReason.QUARANTINED,
    RetentionReason.UPLOADING,
    RetentionReason.RESTORE_POINT,
    RetentionReason.NEWEST_PERSISTED,
]
DURATIONS = st.none() | st.integers(1, 200).map(lambda hours: timedelta(hours=hours))
TIMES = st.integers(-5, 300).map(lambda hours: NOON - timedelta(hours=hours))
POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.none() | st.integers(1, 5),
    every_steps=st.none() | st.integers(1, 20),
    every=DURATIONS,
    keep_for=DURATIONS,
    hourly=st.integers(0, 3),
    daily=st.integers(0, 3),
    best=st.none()
    | st.builds(
        KeepBest,
        st.sampled_from(["loss", "accuracy", "other"]),
        st.sampled_from(BestMode),
        st.integers(1, 3),
    ),
)
STATES = st.builds(
    RetentionState,
    committed=st.lists(
        st.builds(
            Committed,
            CHECKPOINTS,
            st.sampled_from(Level),
            st.none() | TIMES,
            METRICS,
            st.booleans(),
        ),
        max_size=15,
        unique_by=lambda c: c.checkpoint,
    ).map(tuple),
    policy=POLICIES,
    needed=st.dictionaries(st.sampled_from(NEEDS), st.lists(CHECKPOINTS, max_size=3), max_size=4),
    now=st.just(NOON),
    protecting_level=st.sampled_from([Level.LOCAL, Level.REPLICATED]),
    round=st.none() | st.integers(0, 3).map(RestartRound),
    held=st.booleans(),
)


@given(STATES, st.randoms(use_true_random=False))
def test_every_plan_keeps_what_must_be_kept(
    given_state: RetentionState, order: random.Random
) -> None:
    plan = plan_retention(given_state)
    every = {c.checkpoint for c in given_state.committed}
    pruned = {v.checkpoint for v in plan.prune}
    kept = {v.checkpoint for v in plan.keep}
    assert pruned | kept == every
    assert not pruned & kept
    for needed in given_state.needed.values():
        assert not pruned & set(needed)
    if pruned:
        assert not given_state.held
        levels = {Level.LOCAL: 1, Level.REPLICATED: 2, Level.PERSISTED: 3}
        apart = given_state.needed.get(RetentionReason.QUARANTINED, ())
        protecting = sorted(
            (
                c.checkpoint
                for c in given_state.committed
                if levels[c.level] >= levels[given_state.protecting_level]
                and c.on_lineage
                and c.checkpoint not in apart
            ),
            key=age_of,
        )
        assert given_state.round in (None, *(c.round for c in protecting))
        keep_last = given_state.policy.keep_last
        assert len(protecting) >= min(MIN_KEPT, keep_last or MIN_KEPT)
        assert kept >= set(protecting[-keep_last:] if keep_last else protecting)

    shuffled = list(given_state.committed)
    order.shuffle(shuffled)
    assert plan_retention(replace(given_state, committed=tuple(shuffled))) == plan
    left = tuple(c for c in given_state.committed if c.checkpoint in kept)
    assert plan_retention(replace(given_state, committed=left)).prune == ()


PRESSED = {
    "the older half goes, and nothing below is needed": (
        state(committed(10, 20, 30, 40, 50), keep_last=5, pressed=True),
        [10, 20],
    ),
    "one of two": (state(committed(10, 20), pressed=True), [10]),
    "never the newest": (state(committed(10), pressed=True), []),
    "never the newest that protects": (
        state(committed(10, 20) + committed(30, level=Level.LOCAL), pressed=True),
        [10],
    ),
    "nothing without one that protects": (
        state(committed(10, 20, level=Level.LOCAL), pressed=True),
        [],
    ),
    "held and uploading stay": (
        state(
            committed(10, 20, 30),
            keep_last=3,
            needed=needs(pinned=10, uploading=20),
            pressed=True,
        ),
        [],
    ),
    "the newest persisted one is in the store": (
        state(committed(10, 20), needed=needs(newest_persisted=10), pressed=True),
        [10],
    ),
    "below a restore point that was read": (
        state(
            committed(10, 20),
            round=1,
            needed=needs(restore_point=20),
            restored=True,
            pressed=True,
        ),
        [10],
    ),
    "not below one that was not read yet": (
        state(committed(10, 20), round=1, needed=needs(restore_point=20), pressed=True),
        [],
    ),
    "the restore point goes when a newer one protects": (
        state(
            committed(20) + committed(30, round=1),
            round=1,
            needed=needs(restore_point=20),
            pressed=True,
        ),
        [20],
    ),
}


@pytest.mark.fault("A volume is so full that retention would delete what protects")
@pytest.mark.parametrize(("given_state", "pruned"), PRESSED.values(), ids=PRESSED.keys())
def test_a_full_node_prunes_more_steps(given_state: RetentionState, pruned: list[int]) -> None:
    plan = plan_retention(given_state)
    assert sorted(verdict.checkpoint.step for verdict in plan.prune) == pruned
    assert len(plan.prune) + len(plan.keep) == len(given_state.committed)
