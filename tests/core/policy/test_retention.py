from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_core.ids import CheckpointId, Level, RestartRound, Step
from holdfast_core.retention import (
    MIN_KEPT,
    Committed,
    RetentionReason,
    RetentionState,
    plan_retention,
)


def at(step: int, round_: int = 0) -> CheckpointId:
    return CheckpointId(Step(step), RestartRound(round_))


def committed(
    *steps: int, round: int = 0, level: Level = Level.REPLICATED
) -> tuple[Committed, ...]:
    return tuple(Committed(at(step, round), level) for step in steps)


def state(items: tuple[Committed, ...], **fields: Any) -> RetentionState:
    return replace(RetentionState(items, RestartRound(0), keep_last=2), **fields)


CASES = {
    "nothing committed": (state(()), []),
    "fewer than are kept": (state(committed(10, 20)), []),
    "older ones go": (state(committed(10, 20, 30, 40)), [10, 20]),
    "keep_last 3": (state(committed(10, 20, 30, 40), keep_last=3), [10]),
    "keep_last 1 keeps two": (state(committed(10, 20, 30), keep_last=1), [10]),
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
        state(committed(10, 20, 30, 40), round=RestartRound(1)),
        [],
    ),
    "a local commit of the round is not enough": (
        state(
            committed(10, 20, 30) + committed(40, round=1, level=Level.LOCAL),
            round=RestartRound(1),
        ),
        [],
    ),
    "after the round's first replicated commit": (
        state(committed(10, 20, 30) + committed(40, round=1), round=RestartRound(1)),
        [10, 20],
    ),
    "restore point stays": (state(committed(10, 20, 30, 40), restore_point=at(10)), [20]),
    "pinned stays": (state(committed(10, 20, 30, 40), pinned=frozenset({Step(20)})), [10]),
    "uploading stays": (state(committed(10, 20, 30, 40), uploading=frozenset({at(10)})), [20]),
    "newest persisted stays": (state(committed(10, 20, 30, 40), newest_persisted=at(20)), [10]),
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
            restore_point=at(10),
            pinned=frozenset({Step(20)}),
            uploading=frozenset({at(30)}),
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
    plan = plan_retention(state(items, round=RestartRound(1), restore_point=at(10, 0)))
    assert [v.checkpoint for v in plan.prune] == [at(10, 1)]
    assert plan.prune_steps == ()


CHECKPOINTS = st.builds(at, st.integers(0, 40), st.integers(0, 3))
STATES = st.builds(
    RetentionState,
    committed=st.lists(
        st.builds(Committed, CHECKPOINTS, st.sampled_from(Level)),
        max_size=15,
        unique_by=lambda c: c.checkpoint,
    ).map(tuple),
    round=st.integers(0, 3).map(RestartRound),
    keep_last=st.integers(0, 5),
    protecting_level=st.sampled_from([Level.LOCAL, Level.REPLICATED]),
    restore_point=st.none() | CHECKPOINTS,
    pinned=st.frozensets(st.integers(0, 40).map(Step), max_size=4),
    uploading=st.frozensets(CHECKPOINTS, max_size=4),
    newest_persisted=st.none() | CHECKPOINTS,
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
    assert len(kept) >= min(MIN_KEPT, len(every))
    if every:
        assert max(every) in kept
    assert given_state.restore_point not in pruned
    assert given_state.newest_persisted not in pruned
    assert not pruned & given_state.uploading
    assert not {c.step for c in pruned} & given_state.pinned
    if pruned:
        levels = {Level.LOCAL: 1, Level.REPLICATED: 2, Level.PERSISTED: 3}
        protected = [
            c.checkpoint
            for c in given_state.committed
            if levels[c.level] >= levels[given_state.protecting_level]
        ]
        assert any(c.round == given_state.round for c in protected)
        assert sum(c > max(pruned) for c in protected) >= max(MIN_KEPT, given_state.keep_last) or (
            len(protected) <= max(MIN_KEPT, given_state.keep_last)
        )

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
            pinned=frozenset({Step(10)}),
            uploading=frozenset({at(20)}),
            pressed=True,
        ),
        [],
    ),
    "the newest persisted one is in the store": (
        state(committed(10, 20), newest_persisted=at(10), pressed=True),
        [10],
    ),
    "below a restore point that was read": (
        state(
            committed(10, 20),
            round=RestartRound(1),
            restore_point=at(20),
            restored=True,
            pressed=True,
        ),
        [10],
    ),
    "not below one that was not read yet": (
        state(committed(10, 20), round=RestartRound(1), restore_point=at(20), pressed=True),
        [],
    ),
    "the restore point goes when a newer one protects": (
        state(
            committed(20) + committed(30, round=1),
            round=RestartRound(1),
            restore_point=at(20),
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
