"""The choice of a restore point, rule by rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.builders import (
    UID,
    checkpoint,
    held,
    job,
    manifest,
    manifest_digest,
    now,
    pod,
    sidecar,
    silent,
    status,
    store,
    world_of,
)

from holdfast_core.api import (
    JobCondition,
    LineageEntry,
    NameRef,
    PersistedStep,
    TrainingJobStatus,
    changed,
    on_lineage,
)
from holdfast_core.api import with_status as job_with_status
from holdfast_core.api.training_job import RestoreFromSpec
from holdfast_core.ids import CheckpointId, Digest, RestartRound, Step, Worker
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.world import back_to
from holdfast_operator.decide.restore_point import (
    MAX_LINEAGE,
    AskStore,
    Choice,
    Chosen,
    Wait,
    choose,
    extend_lineage,
)
from holdfast_operator.model.actions import ChooseRestorePoint
from holdfast_operator.model.job import JobMemory, Observed, PodView, Seen, SidecarView
from holdfast_operator.model.reasons import Reason

JUST_BEGUN = JobMemory(
    round=RestartRound(1), round_seen_at=1000.0, seen={(Seen.ANSWERING, ""): 1000.0}
)


def pick(
    state: TrainingJobStatus,
    pods: list[PodView],
    sidecars: list[SidecarView],
    *,
    waited: float = 0.0,
    **changes: object,
) -> Choice:
    base = Observed(job=job(2, state), pods=tuple(pods), sidecars=tuple(sidecars))
    return choose(world_of(replace(base, **changes), JUST_BEGUN, at=1000.0 + waited))  # type: ignore[arg-type]


def chosen_step(choice: Choice) -> int | None:
    assert isinstance(choice, Chosen), choice
    return choice.point.step


A, B, NEW_B = pod(0), pod(1), pod(1, birth=1)
FROM_THE_BEGINNING = (LineageEntry(round=RestartRound(0)),)
"""Round 0 chose its restore point, so its gang may have trained."""
SURVIVOR_AND_NEW = status(1, (0, 1), lineage=FROM_THE_BEGINNING)
"""Round 1: worker 0 survived, and worker 1 has a new pod."""
BOTH_SURVIVED = status(1, (0, 0), lineage=FROM_THE_BEGINNING)
COPIED = [held(20, 0, 0), held(20, 0, 1), held(10, 0, 0), held(10, 0, 1)]
"""The shards of a sidecar that has its own shards and worker 1's copies."""


def test_first_round_starts_from_the_beginning() -> None:
    choice = pick(status(0), [A, B], [])
    assert chosen_step(choice) is None


def test_waits_until_every_pod_is_there() -> None:
    choice = pick(status(0), [A], [])
    assert isinstance(choice, Wait)


def test_newest_complete_step() -> None:
    seen = sidecar(
        A,
        1,
        manifests=[manifest(10, 0), manifest(20, 0)],
        shards=[held(20, 0, 0), held(20, 0, 1)],
    )
    choice = pick(SURVIVOR_AND_NEW, [A, NEW_B], [seen])
    assert isinstance(choice, Chosen)
    assert (choice.point.step, choice.point.round) == (20, 0)
    assert choice.manifest == manifest_digest(20, 0)
    assert choice.reason is Reason.RESTORE_POINT_CHOSEN


def test_a_shard_with_another_digest_does_not_complete_a_step() -> None:
    wrong = replace(held(20, 0, 1), blake3=held(19, 0, 1).blake3)
    seen = sidecar(A, 1, manifests=[manifest(20, 0)], shards=[held(20, 0, 0), wrong])
    choice = pick(changed(SURVIVOR_AND_NEW, last_committed_step=Step(20)), [A, NEW_B], [seen])
    assert isinstance(choice, Wait)
    assert choice.note.reason == Reason.CHECKPOINTS_LOST


def test_shards_without_a_manifest_are_nothing() -> None:
    seen = sidecar(A, 1, manifests=[manifest(10, 0)], shards=COPIED)
    assert chosen_step(pick(SURVIVOR_AND_NEW, [A, NEW_B], [seen])) == 10


def test_an_inventory_from_before_the_seal_is_no_answer() -> None:
    early = sidecar(A, 0, manifests=[manifest(20, 0)], shards=COPIED)
    choice = pick(SURVIVOR_AND_NEW, [A, NEW_B], [early])
    assert isinstance(choice, Wait)
    assert choice.note.reason == Reason.WAITING_FOR_HOLDERS


THREE = status(1, (0, 0, 0), lineage=FROM_THE_BEGINNING)
C = pod(2)
CUT_OFF_COMMIT = [
    sidecar(
        A,
        1,
        manifests=[manifest(10, 0, 3), manifest(20, 0, 3)],
        shards=[held(s, 0, r) for s, r in ((20, 0), (20, 1), (10, 0), (10, 1), (10, 2))],
    ),
    sidecar(B, 1, manifests=[manifest(10, 0, 3)]),
]
"""Only worker 0 has the manifest of step 20, and worker 2 has a shard of it."""


@pytest.mark.parametrize(
    ("waited", "expected"), [(0.0, None), (59.0, None), (60.0, 10)], ids=["at once", "59 s", "60 s"]
)
def test_a_commit_that_was_cut_off_is_waited_for_up_to_60_seconds(
    waited: float, expected: int | None
) -> None:
    base = Observed(job=job(3, THREE), pods=(A, B, C), sidecars=(*CUT_OFF_COMMIT, silent(C, 990.0)))
    choice = choose(world_of(base, JUST_BEGUN, at=1000.0 + waited))
    if expected is None:
        assert isinstance(choice, Wait)
        assert choice.note.reason == Reason.WAITING_FOR_HOLDERS
    else:
        assert chosen_step(choice) == expected
        assert isinstance(choice, Chosen)
        assert choice.reason is Reason.HOLDER_UNREACHABLE


def test_the_60_seconds_count_from_the_first_answer() -> None:
    """After a silence of all sidecars, the others also need a moment to answer."""
    base = Observed(job=job(3, THREE), pods=(A, B, C), sidecars=(*CUT_OFF_COMMIT, silent(C, 100.0)))
    memory = replace(JUST_BEGUN, round_seen_at=100.0, seen={(Seen.ANSWERING, ""): 999.0})
    assert isinstance(choose(world_of(base, memory)), Wait)


@pytest.mark.parametrize("recorded", [None, 20], ids=["status lags", "status knows"])
def test_a_committed_step_is_never_given_up_for_silence(recorded: int | None) -> None:
    """Every survivor that answers has the manifest: the step was committed, and B has a shard of it."""
    seen = sidecar(
        A,
        1,
        manifests=[manifest(10, 0), manifest(20, 0)],
        shards=[held(20, 0, 0), held(10, 0, 0), held(10, 0, 1)],
    )
    state = changed(BOTH_SURVIVED, last_committed_step=None if recorded is None else Step(recorded))
    choice = pick(state, [A, B], [seen, silent(B, 990.0)], waited=1e6)
    assert isinstance(choice, Wait)
    assert choice.note.reason == Reason.WAITING_FOR_HOLDERS
    assert "step 20 was committed" in choice.note.message


def test_the_store_is_no_reason_to_give_up_what_silent_survivors_may_hold() -> None:
    """No earlier member answers, so the status may be hours older than the gang's newest step."""
    persisted = PersistedStep(step=Step(10), round=RestartRound(0), manifest=manifest_digest(10, 0))
    state = changed(SURVIVOR_AND_NEW, last_persisted=persisted, last_committed_step=Step(10))
    answering = sidecar(NEW_B, 1)
    choice = pick(state, [A, NEW_B], [silent(A, 100.0), answering], waited=1e6)
    assert isinstance(choice, Wait)
    assert "no survivor has" in choice.note.message


def test_silent_survivors_that_never_trained_hold_nothing() -> None:
    state = status(1, (0, 0))
    assert chosen_step(pick(state, [A, B], [sidecar(A, 1), silent(B, 900.0)])) is None


def test_a_holder_that_is_gone_is_not_waited_for() -> None:
    seen = sidecar(
        A,
        1,
        manifests=[manifest(10, 0), manifest(20, 0)],
        shards=[held(20, 0, 0), held(10, 0, 0), held(10, 0, 1)],
    )
    choice = pick(SURVIVOR_AND_NEW, [A, NEW_B], [seen])
    assert chosen_step(choice) == 10
    assert isinstance(choice, Chosen)
    assert choice.reason is Reason.SHARDS_LOST


def test_one_answer_with_a_complete_newest_step_is_enough() -> None:
    seen = sidecar(A, 1, manifests=[manifest(20, 0)], shards=COPIED)
    assert chosen_step(pick(BOTH_SURVIVED, [A, B], [seen, silent(B)])) == 20


def test_the_status_knows_of_a_newer_step_than_the_answers() -> None:
    seen = sidecar(A, 1, manifests=[manifest(10, 0)], shards=COPIED)
    state = changed(BOTH_SURVIVED, last_committed_step=Step(20))
    assert isinstance(pick(state, [A, B], [seen, silent(B)]), Wait)


def test_the_choice_waits_while_no_survivor_has_answered() -> None:
    assert isinstance(pick(BOTH_SURVIVED, [A, B], [silent(A), silent(B)]), Wait)


def test_the_persisted_commit_is_always_complete() -> None:
    state = status(
        1,
        (1, 1),
        last_persisted=PersistedStep(
            step=Step(10), round=RestartRound(0), manifest=manifest_digest(10, 0)
        ),
    )
    choice = pick(state, [pod(0, 1), NEW_B], [])
    assert isinstance(choice, Chosen)
    assert choice.point.step == 10


STORED = {manifest_digest(20, 0): CheckpointId(Step(20), RestartRound(0))}


def asked(stored: dict[Digest, CheckpointId] | None, **changes: Any) -> Choice:
    """Return the choice of a gang whose pods are all new, of which one has listed the store."""
    new_a = pod(0, 1)
    found = sidecar(new_a, 1)
    assert found.inventory is not None
    listed = replace(found, inventory=replace(found.inventory, stored=stored))
    state = status(1, (1, 1), **{"lineage": FROM_THE_BEGINNING, **changes})
    observed = Observed(
        job=job(2, state, store="main"), pods=(new_a, NEW_B), sidecars=(listed,), store=store()
    )
    return choose(world_of(observed, JUST_BEGUN, at=1000.0))


@pytest.mark.parametrize("known", [None, 10], ids=["no commit is known", "step 10 was committed"])
def test_the_store_is_asked_before_a_gang_goes_on_without_a_checkpoint(known: int | None) -> None:
    """The status has no record of a step that was persisted while the operator was away."""
    committed = None if known is None else Step(known)
    waits = asked(None, last_committed_step=committed)
    assert isinstance(waits, AskStore)
    assert waits.note.reason == Reason.WAITING_FOR_STORE
    choice = asked(STORED, last_committed_step=committed)
    assert isinstance(choice, Chosen)
    assert (choice.point.id, choice.manifest) == (
        CheckpointId(Step(20), RestartRound(0)),
        manifest_digest(20, 0),
    )


def test_a_checkpoint_of_the_store_that_is_off_the_lineage_is_not_restored() -> None:
    lineage = (LineageEntry(round=RestartRound(1)),)
    choice = asked(STORED, lineage=lineage)
    assert chosen_step(choice) is None


def test_an_older_checkpoint_object_is_better_than_waiting() -> None:
    state = status(1, (1, 1), last_committed_step=Step(20))
    choice = pick(state, [pod(0, 1), NEW_B], [], checkpoints=(checkpoint(10, 0),))
    assert chosen_step(choice) == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "Failed"},
        {"phase": "Deleting"},
        {"deleting": True},
        {"persisted": False},
        {"job": "other"},
        {"job_uid": "another-uid"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_checkpoint_objects_that_are_no_candidates(changes: dict[str, Any]) -> None:
    state = status(1, (1, 1), last_committed_step=Step(20))
    bad = checkpoint(10, 0, **changes)
    assert isinstance(pick(state, [pod(0, 1), NEW_B], [], checkpoints=(bad,)), Wait)


def test_a_persisted_checkpoint_of_another_number_of_ranks_is_a_candidate() -> None:
    """The store has all of its shards, so that the ranks can reshard it."""
    state = status(1, (1, 1), last_committed_step=Step(10))
    older = checkpoint(10, 0, world_size=4)
    choice = pick(state, [pod(0, 1), NEW_B], [], checkpoints=(older,))
    assert isinstance(choice, Chosen)
    assert choice.point.step == 10


def test_another_world_size_on_the_nodes_is_no_candidate() -> None:
    seen = sidecar(A, 1, manifests=[manifest(20, 0, world_size=3), manifest(10, 0)], shards=COPIED)
    assert chosen_step(pick(SURVIVOR_AND_NEW, [A, NEW_B], [seen])) == 10


def test_steps_that_were_trained_again_are_off_the_lineage() -> None:
    state = status(
        2,
        (0, 0),
        lineage=(
            LineageEntry(round=RestartRound(1), base=CheckpointId(Step(10), RestartRound(0))),
        ),
    )
    seen = sidecar(
        A, 2, manifests=[manifest(20, 0), manifest(10, 0), manifest(15, 1)], shards=[
            *COPIED, held(15, 1, 0), held(15, 1, 1)
        ]
    )  # fmt: skip
    assert chosen_step(pick(state, [A, B], [seen, sidecar(B, 2)])) == 15


def test_restore_from_another_jobs_checkpoint() -> None:
    source = checkpoint(1200, 2, name="other-s1200-r2", job="other", job_uid="other-uid")
    base = job(2, status(0), restore_from="other-s1200-r2", store="main")
    observed = Observed(job=base, pods=(A, B), checkpoints=(source,), store=store())
    choice = choose(world_of(observed, JUST_BEGUN))
    assert isinstance(choice, Chosen)
    point = choice.point
    assert (point.step, point.round, point.job_uid) == (1200, 2, "other-uid")
    assert point.job_namespace == "team-a"
    assert point.job_uid != UID


def test_a_checkpoint_that_a_rule_selects_is_named_in_the_event_and_the_status() -> None:
    source = checkpoint(1200, 2, name="other-s1200-r2", job="other", job_uid="other-uid")
    base = job(2, status(0, coordinator=Worker(0)), store="main")
    newest = RestoreFromSpec(job_ref=NameRef(name="other"), latest=True)
    base = changed(base, spec=changed(base.spec, restore_from=newest))
    observed = Observed(job=base, pods=(A, B), checkpoints=(source,), store=store())
    write = decide(replace(observed, memory=JUST_BEGUN), now()).status
    assert isinstance(write, ChooseRestorePoint)
    point = write.status.restore_point
    assert point is not None and (point.step, point.job_uid) == (1200, "other-uid")
    later = decide(replace(observed, job=job_with_status(base, write.status)), now(1030.0)).status
    accepted = later.status.condition(JobCondition.ACCEPTED)
    assert "began from step 1200 of round 2" in accepted.message
    assert "the newest step of job other" in accepted.message


def test_a_source_that_no_checkpoint_matches_is_waited_for() -> None:
    base = job(2, status(0), store="main")
    newest = RestoreFromSpec(job_ref=NameRef(name="other"), latest=True)
    base = changed(base, spec=changed(base.spec, restore_from=newest))
    choice = choose(world_of(Observed(job=base, pods=(A, B), store=store()), JUST_BEGUN))
    assert isinstance(choice, Wait)
    assert choice.note.reason == Reason.RESTORE_POINT_UNAVAILABLE
    assert "job other" in choice.note.message


def test_own_commits_win_over_restore_from() -> None:
    source = checkpoint(1200, 2, name="other-s1200-r2", job="other", job_uid="other-uid")
    state = SURVIVOR_AND_NEW
    seen = sidecar(A, 1, manifests=[manifest(20, 0)], shards=COPIED)
    observed = Observed(
        job=job(2, state, restore_from="other-s1200-r2"),
        pods=(A, NEW_B),
        sidecars=(seen,),
        checkpoints=(source,),
    )
    assert chosen_step(choose(world_of(observed, JUST_BEGUN))) == 20


def test_a_manifest_whose_commit_was_cut_off_does_not_block_the_beginning() -> None:
    seen = sidecar(A, 1, manifests=[manifest(10, 0)], shards=[held(10, 0, 0)])
    choice = pick(SURVIVOR_AND_NEW, [A, NEW_B], [seen])
    assert chosen_step(choice) is None
    assert isinstance(choice, Chosen)
    assert choice.reason is Reason.SHARDS_LOST


# --------------------------------------------------------------------------- lineage


def entry(round_: int, step: int | None) -> LineageEntry:
    base = None if step is None else CheckpointId(Step(step), RestartRound(0))
    return LineageEntry(round=RestartRound(round_), base=base)


@pytest.mark.parametrize(
    ("step", "round_", "expected"),
    [(10, 0, True), (11, 0, False), (50, 1, True), (31, 1, True), (51, 1, False), (99, 2, True)],
)
def test_only_steps_of_the_lineage_are_on_it(step: int, round_: int, expected: bool) -> None:
    lineage = (entry(0, None), entry(1, 10), entry(2, 50))
    assert on_lineage(CheckpointId(Step(step), RestartRound(round_)), lineage) is expected


def test_a_round_from_the_beginning_leaves_nothing_before_it() -> None:
    assert not on_lineage(CheckpointId(Step(1), RestartRound(0)), (entry(1, None),))


def test_compaction_never_lets_a_step_back_in() -> None:
    full: list[LineageEntry] = []
    compact: tuple[LineageEntry, ...] = ()
    for round_ in range(1, 4 * MAX_LINEAGE):
        step = (round_ * 7) % 40 + round_
        full.append(entry(round_, step))
        compact = extend_lineage(compact, entry(round_, step))
    assert len(compact) <= MAX_LINEAGE
    for round_ in range(4 * MAX_LINEAGE):
        for step in range(0, 5 * MAX_LINEAGE, 3):
            id_ = CheckpointId(Step(step), RestartRound(round_))
            if on_lineage(id_, compact):
                assert on_lineage(id_, tuple(full))


def test_the_merge_of_the_oldest_rounds_lets_no_step_back_in() -> None:
    """Each round restored from a newer step than the one before, so that no entry implies another one."""
    rounds = range(1, 3 * MAX_LINEAGE)
    compact: tuple[LineageEntry, ...] = ()
    for round_ in rounds:
        compact = extend_lineage(compact, entry(round_, 10 * round_))
    assert len(compact) == MAX_LINEAGE
    full = tuple(entry(round_, 10 * round_) for round_ in rounds)
    saved = [
        CheckpointId(Step(10 * round_ + more), RestartRound(round_ - 1))
        for round_ in rounds
        for more in (-5, 0, 5)
    ]
    assert [c for c in saved if on_lineage(c, compact) and not on_lineage(c, full)] == []


def based(round_: int, step: int, saved_in: int) -> LineageEntry:
    base = CheckpointId(Step(step), RestartRound(saved_in))
    return changed(entry(round_, step), base=base)


def test_a_step_that_a_lower_base_takes_off_the_lineage_stays_off() -> None:
    """Also after the rounds above it have trained."""
    compact: tuple[LineageEntry, ...] = ()
    for new in (based(2, 50, 0), based(5, 60, 2), based(7, 70, 5)):
        compact = extend_lineage(compact, new)
    assert not on_lineage(CheckpointId(Step(55), RestartRound(0)), compact)


def test_the_gang_can_go_back_to_a_higher_step_until_the_lower_round_has_trained() -> None:
    """It restored step 50 because 60 was missing or quarantined. No step comes back besides."""
    before = extend_lineage((based(2, 55, 0),), based(4, 60, 2))
    lower = extend_lineage(before, based(6, 50, 0))
    sixty, others = CheckpointId(Step(60), RestartRound(2)), CheckpointId(Step(58), RestartRound(0))
    assert not on_lineage(sixty, lower)
    for untrained in (lower, extend_lineage(lower, based(7, 50, 0))):
        again = back_to(Step(60), untrained)
        assert on_lineage(sixty, again)
        assert not on_lineage(others, again)
    trained = extend_lineage(lower, based(8, 53, 6))
    assert [e.round for e in trained] == [6, 8], "what round 6 implies is dropped now"


def test_compaction_keeps_what_the_newest_round_restored_from() -> None:
    compact: tuple[LineageEntry, ...] = ()
    for round_ in range(1, 3 * MAX_LINEAGE):
        compact = extend_lineage(compact, entry(round_, 10 * round_))
    newest = 3 * MAX_LINEAGE - 1
    saved_just_before = CheckpointId(Step(10 * newest), RestartRound(newest - 1))
    assert on_lineage(saved_just_before, compact)


STARTING = replace(pod(1, birth=1), sidecar_started=False)
"""A pod of round 1 that has an address and whose sidecar has not started."""


@pytest.mark.fault("All other pods are lost while a pod of the interrupted round starts")
@pytest.mark.parametrize(
    ("waits", "starting", "chosen_rounds", "sidecars"),
    [
        pytest.param(False, STARTING, (0,), (), id="its round ended before it had a restore point"),
        pytest.param(True, STARTING, (0, 1), (), id="its round had a restore point"),
        pytest.param(True, replace(STARTING, sidecar_started=True), (0,), (), id="it has started"),
        pytest.param(True, replace(STARTING, sidecar_restarts=1), (0,), (), id="it starts again"),
        pytest.param(
            True, STARTING, (0,), (replace(silent(STARTING), answered_at=999.0),), id="it answered"
        ),
    ],
)
def test_a_pod_of_an_interrupted_round_is_not_waited_for_if_no_rank_has_run_in_it(
    waits: bool, starting: PodView, chosen_rounds: tuple[int, ...], sidecars: tuple[SidecarView]
) -> None:
    """All other pods were lost after round 1 had begun, so the newest step is in the store."""
    persisted = PersistedStep(step=Step(20), round=RestartRound(0), manifest=manifest_digest(20, 0))
    base = CheckpointId(Step(20), RestartRound(0))
    lineage = tuple(LineageEntry(round=RestartRound(r), base=base) for r in chosen_rounds)
    state = status(2, (2, 1), lineage=lineage, last_persisted=persisted)
    choice = pick(state, [pod(0, birth=2), starting], list(sidecars))
    assert isinstance(choice, Wait) is waits
    assert waits or chosen_step(choice) == 20
