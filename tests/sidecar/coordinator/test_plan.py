"""The plan for the workers follows from the ledger alone, and a worker needs only what it lacks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.support.sidecar.ledgers import (
    MANIFEST_DIGEST,
    new_ledger,
    reported,
    shard_info,
    store_manifests,
)

from holdfast_core.ids import CheckpointId, Digest, Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import (
    PersistRequest,
    Plan,
    RankSaves,
    ReportedShard,
    StepOutcome,
)
from holdfast_sidecar.coordinator.ledger import Ledger
from holdfast_sidecar.coordinator.plan import abandoned_steps, lost_steps, missing, plan

ROUND = RestartRound(1)
RANKS = (0, 1, 2)
STEPS = range(5)

steps = st.sampled_from(STEPS).map(Step)


def named(step: Step) -> tuple[CheckpointId, Digest]:
    """Return how a plan names the manifest of a step."""
    return CheckpointId(step, ROUND), MANIFEST_DIGEST


plans = st.builds(
    Plan,
    st.just(ROUND),
    levels=st.dictionaries(steps, st.sampled_from(Level)).map(
        lambda found: tuple(StepOutcome(s, ROUND, level) for s, level in sorted(found.items()))
    ),
    write=st.none() | steps,
    manifests=st.sets(steps).map(lambda found: tuple(map(named, sorted(found)))),
    upload=st.none() | st.builds(PersistRequest, st.builds(CheckpointId, steps, st.just(ROUND))),
    drop=st.sets(steps).map(lambda found: tuple(sorted(found))),
)


@dataclass
class Played:
    """A worker that does what each plan says."""

    levels: set[StepOutcome] = field(default_factory=set)
    write: Step | None = None
    manifests: tuple[tuple[CheckpointId, Digest], ...] = ()
    uploads: set[PersistRequest] = field(default_factory=set)
    dropped: set[Step] = field(default_factory=set)

    def take(self, found: Plan | None) -> Played:
        if found is not None:
            self.levels.update(found.levels)
            self.write = found.write
            self.manifests = found.manifests
            self.uploads.update({found.upload} - {None})
            self.dropped.update(found.drop)
        return self


@given(plans, plans)
def test_a_worker_that_is_sent_what_it_lacks_has_done_the_whole_plan(before: Plan, now: Plan):
    worker = Played().take(before).take(missing(now, before))
    assert worker == Played().take(before).take(now)


@given(plans)
def test_a_worker_that_has_the_plan_is_sent_nothing(now: Plan):
    assert missing(now, now) is None


@given(plans, plans)
def test_a_plan_that_arrives_twice_changes_nothing(before: Plan, now: Plan):
    lacks = missing(now, before)
    assert Played().take(before).take(lacks).take(lacks) == Played().take(before).take(lacks)


@given(plans)
def test_a_process_that_has_just_started_is_sent_the_whole_plan(now: Plan):
    assert Played().take(missing(now, Plan(ROUND))) == Played().take(now)


tables = st.dictionaries(
    st.tuples(st.sampled_from(RANKS), steps), st.booleans(), max_size=len(RANKS) * len(STEPS)
).map(lambda found: [reported(r, s, replicated=copied) for (r, s), copied in found.items()])


def settled(ledger: Ledger) -> Plan:
    """Return the plan after the members have stored every manifest that can be built."""
    complete = [step for step, entry in sorted(ledger.steps.items()) if entry.complete]
    store_manifests(ledger, *complete)
    for step in complete:
        ledger.settle_replicated(step)
    return plan(ledger)


@given(tables, st.data())
def test_the_order_and_the_number_of_the_reports_do_not_matter(
    table: list[ReportedShard], data: Any
):
    """A coordinator that has just started needs one round of reports, in any order."""
    once, often = new_ledger(workers=len(RANKS)), new_ledger(workers=len(RANKS))
    for shard in table:
        once.take(shard)
    for shard in [*data.draw(st.permutations(table)), *data.draw(st.permutations(table))]:
        often.take(shard)
    assert settled(often) == settled(once)


@given(tables, st.sets(steps), st.sets(steps), st.data())
def test_the_listed_steps_that_a_rank_lacks_are_lost_in_any_order_of_reports(
    table: list[ReportedShard], listed: set[Step], under_way: set[Step], data: Any
):
    ledger = new_ledger(workers=len(RANKS))
    saves = {Rank(2): RankSaves(Rank(2), Step(4), tuple(sorted(under_way)))}
    ledger.listed |= listed
    for shard in data.draw(st.permutations(table)):
        ledger.take(shard)
    held = {(s.step, s.shard.rank) for s in table} | {(s, 2) for s in under_way}
    expected = {s for s in listed if any((s, rank) not in held for rank in RANKS)}
    found = [lost_steps(ledger, saves, (Rank(rank),)) for rank in data.draw(st.permutations(RANKS))]
    assert {step for one in found for step in one} == expected
    assert set(lost_steps(ledger, saves, map(Rank, RANKS))) == expected
    given_up = abandoned_steps(ledger, saves, map(Rank, RANKS))
    assert listed.isdisjoint(given_up), "they are committed"


def build(ledger: Ledger) -> None:
    """Build the manifest of each complete step, as a coordinator does."""
    for step, entry in ledger.steps.items():
        if entry.complete and entry.manifest is None:
            ledger.committed(step, b"{}", MANIFEST_DIGEST, tuple(map(shard_info, RANKS)))


@given(st.sets(st.tuples(st.sampled_from(RANKS), steps)), st.data())
def test_every_step_becomes_local_whatever_the_nodes_have_and_whoever_restarts(
    stored: set[tuple[int, Step]], data: Any
):
    """Each worker stores what its plan names, in any order. A worker or the coordinator may start anew."""
    ledger = new_ledger(workers=len(RANKS))
    plans = dict.fromkeys(RANKS, Plan(ROUND))
    for _ in range(30):
        build(ledger)
        for step in tuple(ledger.steps):
            ledger.settle_local(step)
        rank = data.draw(st.sampled_from(RANKS))
        match data.draw(st.sampled_from(["report", "take", "store", "restart", "new coordinator"])):
            case "report":
                for step in map(Step, STEPS):
                    ledger.take(reported(rank, step, committed=(rank, step) in stored))
            case "take":
                now = plan(ledger, is_first=rank == 0)
                plans[rank] = missing(now, plans[rank]) or plans[rank]
            case "store":
                stored |= {(rank, checkpoint.step) for checkpoint, _ in plans[rank].manifests}
            case "restart":
                plans[rank] = Plan(ROUND)
            case "new coordinator":
                ledger = new_ledger(workers=len(RANKS))
    for _ in range(3):  # then all goes on without failures
        for rank in RANKS:
            stored |= {
                (rank, checkpoint.step)
                for checkpoint, _ in plan(ledger, is_first=rank == 0).manifests
            }
            for step in map(Step, STEPS):
                ledger.take(reported(rank, step, committed=(rank, step) in stored))
            build(ledger)
            for step in tuple(ledger.steps):
                ledger.settle_local(step)
    assert {r.step for r in plan(ledger).levels} == set(STEPS)
    assert plan(ledger).manifests == (), "no worker stores them again"


def test_the_coordinators_own_node_stores_a_manifest_before_the_others():
    ledger = new_ledger(workers=len(RANKS))
    for rank in RANKS:
        ledger.take(reported(rank, Step(1)))
    build(ledger)
    assert plan(ledger).manifests == ()
    assert plan(ledger, is_first=True).manifests == (named(Step(1)),)
    ledger.take(reported(0, Step(1), committed=True))
    assert plan(ledger).manifests == (named(Step(1)),)


@given(tables)
def test_a_new_plan_of_the_same_reports_is_the_same(table: list[ReportedShard]):
    ledger = new_ledger(workers=len(RANKS))
    for shard in table:
        ledger.take(shard)
    assert settled(ledger) == settled(ledger)
    assert {r.step for r in plan(ledger).levels} == {
        step for step, entry in ledger.steps.items() if len(entry.durable) == len(RANKS)
    }


def test_dropped_steps_have_no_level_and_a_step_that_is_uploaded_stays():
    ledger = new_ledger()
    for step in map(Step, (1, 2)):
        for rank in (0, 1):
            ledger.take(reported(rank, step, replicated=True))
    settled(ledger)
    ledger.request_upload(Step(2))
    ledger.uploads, _ = ledger.uploads.requested(None, (), compress=False)
    ledger.forget((Step(1), Step(2)))
    assert plan(ledger) == Plan(
        ROUND,
        levels=(StepOutcome(Step(2), ROUND, Level.REPLICATED),),
        upload=PersistRequest(CheckpointId(Step(2), ROUND)),
        drop=(Step(1),),
    )
