"""Commits that a failure has interrupted are finished before the restore point is chosen (ADR 0018)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import (
    UID,
    held,
    job,
    manifest,
    manifest_digest,
    pod,
    sidecar,
    silent,
    status,
    uncommitted,
    world_of,
)
from tests.support.operator.decisions import of_kind
from tests.support.operator.life import Life
from tests.support.operator.oracle import broken_rules

from holdfast_core.api import LineageEntry, TrainingJobStatus, changed
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, RestartRound, Step
from holdfast_core.messages.schema import UncommittedShard
from holdfast_operator.decide import decide, restore_point
from holdfast_operator.decide.facts.world import World
from holdfast_operator.decide.restore_point import Choice, Chosen, InterruptedCommit, Wait
from holdfast_operator.model.job import JobMemory, Observed, PodView, Seen, SidecarView
from holdfast_operator.model.reasons import Reason

A, B, NEW_B = pod(0), pod(1), pod(1, birth=1)
LINEAGE = (
    LineageEntry(
        round=RestartRound(0),
        base=CheckpointId(Step(5), RestartRound(0)),
        base_manifest=manifest_digest(5, 0),
    ),
)
BOTH_SURVIVED = status(1, (0, 0), lineage=LINEAGE)
"""Round 1: the pods of round 0 are there, so a rank has failed."""
JUST_BEGUN = JobMemory(
    round=RestartRound(1), round_seen_at=1000.0, seen={(Seen.ANSWERING, ""): 1000.0}
)


def answer(of: PodView, *shards: UncommittedShard, round_: int = 1) -> SidecarView:
    """Return a sidecar with checkpoint 10, which is committed, and these shards without a manifest."""
    worker = of.worker
    return sidecar(
        of,
        round_,
        manifests=[manifest(10, 0)],
        shards=[held(10, 0, worker)],
        uncommitted=shards,
    )


def world(
    *sidecars: SidecarView,
    pods: tuple[PodView, ...] = (A, B),
    state: TrainingJobStatus = BOTH_SURVIVED,
    waited: float = 0.0,
) -> World:
    seen = Observed(job=job(2, state), pods=pods, sidecars=sidecars)
    return world_of(seen, JUST_BEGUN, at=1000.0 + waited)


def choose(*sidecars: SidecarView, waited: float = 0.0, **parts: Any) -> Choice:
    return restore_point.choose(world(*sidecars, waited=waited, **parts))


def chosen_step(choice: Choice) -> int | None:
    assert isinstance(choice, Chosen), choice
    return choice.point.step


COMPLETE = (answer(A, uncommitted(20, 0, 0)), answer(B, uncommitted(20, 0, 1)))
"""Both workers have written their shard of step 20."""


def test_a_step_whose_shards_are_all_there_is_committed_first() -> None:
    choice = choose(*COMPLETE)
    assert isinstance(choice, InterruptedCommit)
    assert choice.id == CheckpointId(Step(20), RestartRound(0))
    assert "interrupted the commit of step 20" in choice.note.message


def test_the_manifest_is_the_one_that_the_coordinator_would_have_built() -> None:
    choice = choose(*COMPLETE)
    assert isinstance(choice, InterruptedCommit)
    found = parse_manifest_of(choice.manifest.encode(), UID, choice.id)
    assert found.parent == manifest_digest(5, 0)
    assert found.world_size == 2
    shards = [uncommitted(20, 0, rank).shard for rank in (0, 1)]
    assert [(s.rank, s.blake3, s.chunk_table) for s in found.shards] == [
        (s.rank, s.blake3, s.chunk_table) for s in shards
    ]


def test_members_are_sent_the_manifest_and_no_restore_point_is_chosen() -> None:
    decision = decide.choose(world(*COMPLETE))
    sent = of_kind(decision.actions, "call /v1/finish-commit")
    assert [(a.worker, a.pod_uid) for a in sent] == [(0, A.uid), (1, B.uid)]
    message = sent[0].message
    assert message.round == 1
    parse_manifest_of(message.manifest.encode(), UID, CheckpointId(Step(20), RestartRound(0)))


def test_once_one_member_lists_the_manifest_the_step_is_chosen() -> None:
    finished = sidecar(A, 1, manifests=[manifest(10, 0), manifest(20, 0)], shards=[held(20, 0, 0)])
    other = replace(
        COMPLETE[1], inventory=replace(_inventory(COMPLETE[1]), shards=(held(20, 0, 1),))
    )
    assert chosen_step(choose(finished, other)) == 20


def _inventory(of: SidecarView) -> Any:
    assert of.inventory is not None
    return of.inventory


def test_the_choice_waits_for_a_survivor_that_still_writes_its_shard() -> None:
    """Without the wait the step would be given up for the moment that the write takes."""
    copied = replace(
        COMPLETE[0],
        inventory=replace(_inventory(COMPLETE[0]), shards=(held(10, 0, 0), held(10, 0, 1))),
    )
    choice = choose(copied, silent(B, None))
    assert isinstance(choice, Wait)
    assert choice.note.reason == Reason.WAITING_FOR_HOLDERS
    assert "step 20" in choice.note.message
    assert chosen_step(choose(copied, silent(B, None), waited=60.0)) == 10


def test_a_refused_manifest_delays_the_choice_for_60_seconds_at_most() -> None:
    assert isinstance(choose(*COMPLETE, waited=59.0), InterruptedCommit)
    assert chosen_step(choose(*COMPLETE, waited=60.0)) == 10


@pytest.mark.parametrize(
    "other",
    [
        answer(B),
        answer(B, uncommitted(21, 0, 1)),
        answer(B, uncommitted(20, 0, 1, world_size=3)),
        answer(B, uncommitted(20, 0, 0)),
        answer(B, uncommitted(20, 0, 1), uncommitted(20, 0, 1)),
    ],
    ids=["none", "another step", "another number of ranks", "another rank", "two of one rank"],
)
def test_an_incomplete_step_is_not_finished(other: SidecarView) -> None:
    assert chosen_step(choose(COMPLETE[0], other)) == 10


def test_a_sidecar_that_sends_nonsense_does_not_stop_the_choice() -> None:
    item = uncommitted(20, 0, 1)
    other = replace(item, shard=replace(item.shard, blake3=Digest("nonsense")))
    assert chosen_step(choose(COMPLETE[0], answer(B, other))) == 10


def test_a_lost_pod_ends_an_interrupted_commit_at_once() -> None:
    """Its shard is gone, and nobody waits for the new pod because of it."""
    state = status(1, (0, 1), lineage=LINEAGE)
    copied = replace(
        COMPLETE[0],
        inventory=replace(_inventory(COMPLETE[0]), shards=(held(10, 0, 0), held(10, 0, 1))),
    )
    assert chosen_step(choose(copied, pods=(A, NEW_B), state=state)) == 10


def test_the_newest_of_two_interrupted_steps_is_finished() -> None:
    choice = choose(
        answer(A, uncommitted(15, 0, 0), uncommitted(20, 0, 0)),
        answer(B, uncommitted(15, 0, 1), uncommitted(20, 0, 1)),
    )
    assert isinstance(choice, InterruptedCommit) and choice.id.step == 20


def test_a_step_that_only_some_have_does_not_hide_an_older_one() -> None:
    choice = choose(
        answer(A, uncommitted(15, 0, 0), uncommitted(20, 0, 0)), answer(B, uncommitted(15, 0, 1))
    )
    assert isinstance(choice, InterruptedCommit) and choice.id.step == 15


def test_an_older_step_than_the_newest_checkpoint_is_left_alone() -> None:
    old = (answer(A, uncommitted(9, 0, 0)), answer(B, uncommitted(9, 0, 1)))
    assert chosen_step(choose(*old)) == 10


def test_leftovers_of_an_earlier_round_are_left_alone() -> None:
    """They are off the lineage: the round after them has trained these steps again."""
    lineage = (
        *LINEAGE,
        LineageEntry(round=RestartRound(1), base=CheckpointId(Step(10), RestartRound(0))),
    )
    state = status(2, (0, 0), lineage=lineage)
    found = (
        answer(A, uncommitted(20, 0, 0), round_=2),
        answer(B, uncommitted(20, 0, 1), round_=2),
    )
    assert chosen_step(choose(*found, state=state)) == 10


def test_a_quarantined_step_is_not_finished() -> None:
    apart = CheckpointId(Step(20), RestartRound(0))
    assert chosen_step(choose(*COMPLETE, state=changed(BOTH_SURVIVED, quarantined=(apart,)))) == 10


def test_before_the_first_restore_point_there_is_nothing_to_finish() -> None:
    choice = choose(*COMPLETE, state=status(1, (0, 0)))
    assert not isinstance(choice, InterruptedCommit)


# --------------------------------------------------------------------------- whole lives


def dies_while_saving(life: Life, phase: int) -> CheckpointId:
    """Let a rank die when the save of a step has come this far. Return the step."""
    life.run(40)

    def is_there(_: TrainingJobStatus) -> bool:
        run = life.cluster.gang.run
        return run is not None and run.saving is not None and run.saving[1] == phase

    life.run(30, until=is_there)
    run = life.cluster.gang.run
    life.rank_dies()
    return run.saving[0]


@pytest.mark.fault("A rank dies when its gang has written a step that has no manifest yet")
@pytest.mark.parametrize(
    ("phase", "lost_interval"),
    [(0, True), (1, False), (2, False), (3, False)],
    ids=["no shard", "all shards", "manifest at the coordinator", "committed"],
)
@pytest.mark.parametrize("restarts", [False, True], ids=["same operator", "operator restarts"])
def test_a_rank_that_dies_after_its_gang_has_written_a_step_costs_no_interval(
    phase: int, lost_interval: bool, restarts: bool
) -> None:
    life = Life()
    saved = dies_while_saving(life, phase)
    if restarts:  # with a status that does not name the step, between any two calls
        for _ in range(10):
            life.run(1)
            life.restart()
    life.run(60, until=lambda s: s.restore_point is not None and s.restart_round == 1)
    point = life.status.restore_point
    assert point.step == saved.step - (5 if lost_interval else 0)
    life.run(60)
    assert life.status.is_true("Running")
    assert broken_rules(life.cluster, copies=1) == []


def test_a_pod_that_is_lost_while_its_gang_saves_costs_the_interval() -> None:
    life = Life()
    saved = dies_while_saving(life, 1)
    life.cluster.lose_pod(life.pod(1))
    life.run(60, until=lambda s: s.restore_point is not None and s.restart_round == 1)
    assert life.status.restore_point.step == saved.step - 5
    assert broken_rules(life.cluster, copies=1) == []
