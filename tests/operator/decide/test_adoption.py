"""A gang whose pods another controller creates: which pod is which worker, and what Holdfast leaves to it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.support.operator.builders import sidecar
from tests.support.operator.decisions import of_kind

from holdfast_core.api import CheckpointAdoption, JobCondition, changed
from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.decide.decide import decide
from holdfast_operator.decide.facts.spec import owner_of_job
from holdfast_operator.model.actions import Action, BeginRound, WriteStatus
from holdfast_operator.model.job import Now, Observed, OwnerView, PodPhase, PodView, Seen
from holdfast_operator.model.ownership import AdoptedPods, certificates_prefix

NOW = Now(1000.0, datetime(2026, 1, 1, tzinfo=UTC))
KIND = OwnerView("Job gpt creates a lost pod again", loses_all_copies=False)
UNKIND = OwnerView(
    "JobSet gpt deletes all pods", loses_all_copies=True, remedy="set a backoffLimit above 0"
)


def adoption(**status: Any) -> CheckpointAdoption:
    return CheckpointAdoption.from_dict(
        {
            "metadata": {"name": "gpt", "namespace": "team", "uid": "u", "resourceVersion": "1"},
            "spec": {"workers": 2, "checkpoint": {"interval": {"steps": 10}}},
            "status": status,
        }
    )


def pod(worker: int, uid: str, created: str = "2026-01-01T00:00:00Z", **changes: Any) -> PodView:
    base = PodView(
        name=f"gpt-{worker}-{uid}",
        uid=uid,
        worker=Worker(worker),
        birth_round=RestartRound(0),
        phase=PodPhase.RUNNING,
        ip="10.0.0.1",
        node="node-a",
        sidecar_started=True,
        identity=f"worker-{worker}",
        created=created,
    )
    return replace(base, **changes)


def chosen(job: CheckpointAdoption, *pods: PodView, lost: str = "") -> list[tuple[str, int]]:
    found = AdoptedPods(job).members(pods, frozenset({lost}))
    return [(p.uid, p.birth_round) for p in found]


def actions(job: CheckpointAdoption, *pods: PodView, owner: OwnerView | None) -> tuple[Action, ...]:
    seen = AdoptedPods(job).members(pods, frozenset())
    return decide(Observed(job=job, pods=seen, owner=owner), NOW).actions


RECORD = {"worker": 0, "uid": "a", "birth": 3}


def test_the_recorded_pod_is_the_worker_even_if_a_newer_one_claims_its_index() -> None:
    job = adoption(restartRound=3, members=[3, 3], pods=[RECORD])
    assert chosen(job, pod(0, "a"), pod(0, "b", "2026-01-02T00:00:00Z")) == [("a", 3)]


def test_a_pod_that_replaced_a_recorded_one_waits_for_the_next_round() -> None:
    assert chosen(adoption(restartRound=3, members=[3, 3], pods=[RECORD]), pod(0, "b")) == []
    assert chosen(adoption(restartRound=4, members=[4, 3], pods=[RECORD]), pod(0, "b")) == [
        ("b", 4)
    ]


def test_the_newest_living_pod_on_a_living_node_becomes_the_worker() -> None:
    job = adoption(restartRound=4, members=[4, 4])
    old, new = pod(0, "a"), pod(0, "b", "2026-01-02T00:00:00Z")
    assert chosen(job, new, old) == [("b", 4)]
    assert chosen(job, replace(new, terminating=True), old) == [("a", 4)]
    assert chosen(job, replace(new, node="node-b"), old, lost="node-b") == [("a", 4)]


def test_a_pod_of_an_index_that_the_gang_lacks_is_no_worker() -> None:
    assert chosen(adoption(restartRound=0, members=[0, 0]), pod(2, "a")) == []


def test_the_first_round_needs_no_pod_and_lets_pods_be_injected() -> None:
    [begun] = [a for a in actions(adoption(), owner=None) if isinstance(a, BeginRound)]
    status = begun.status
    assert status.members == (0, 0)
    assert status.model_dump()["injection"]["certificates"] == "gpt-n3kysr-holdfast-certs-"


def test_pods_are_recorded_before_a_round_names_them() -> None:
    job = adoption(restartRound=0, members=[0, 0], restorePoint={}, coordinator=0)
    [write] = [a for a in actions(job, pod(0, "a"), owner=KIND) if isinstance(a, WriteStatus)]
    assert write.status.model_dump()["pods"] == ({"worker": 0, "uid": "a", "birth": 0},)
    assert write.status.is_true(JobCondition.ADOPTED)


def test_no_pod_is_recorded_before_its_controller_is_known() -> None:
    job = adoption(restartRound=0, members=[0, 0], restorePoint={}, coordinator=0)
    assert actions(job, pod(0, "a"), owner=None) == ()


def test_without_a_store_a_controller_that_deletes_all_pods_is_refused() -> None:
    job = adoption(restartRound=0, members=[0, 0], restorePoint={}, coordinator=0)
    [write] = [a for a in actions(job, pod(0, "a"), owner=UNKIND) if isinstance(a, WriteStatus)]
    assert write.status.model_dump()["pods"] == ()
    found = write.status.condition(JobCondition.ADOPTED)
    assert found.is_false
    assert "set checkpoint.object" in found.message
    assert found.message.endswith("or set a backoffLimit above 0")


@pytest.mark.parametrize("restore_point", [None, {}], ids=["sealed", "running"])
def test_the_operator_neither_creates_nor_deletes_pods_of_another_controller(
    restore_point: dict[str, Any] | None,
) -> None:
    status: dict[str, Any] = {"restartRound": 0, "members": [0, 0], "coordinator": 0}
    job = adoption(**status) if restore_point is None else adoption(**status, restorePoint={})
    found = actions(job, owner=None)
    assert bool(of_kind(found, "create Secret"))
    assert not of_kind(found, "create Pod", "create Service")
    complete = adoption(**status, restorePoint={})
    done = complete.status.with_condition("Failed", True, "R", "", NOW.utc)
    over = changed(complete, status=done)
    assert not of_kind(actions(over, pod(0, "a"), owner=KIND), "delete Pod")


@pytest.mark.parametrize(
    ("spec", "owners", "loses_all", "part"),
    [
        ({"backoffLimit": 0}, ["JobSet"], True, "JobSet set deletes all pods"),
        ({"backoffLimit": 0}, [], True, "fails, which deletes the remaining pods"),
        ({"backoffLimit": 3}, ["JobSet"], False, "After 3 failed pods all pods are deleted"),
        ({}, [], False, "backoffLimit 6"),
        ({"backoffLimit": 0, "backoffLimitPerIndex": 1}, [], False, "index by index"),
    ],
    ids=["JobSet without retries", "Job without retries", "JobSet", "defaults", "per index"],
)
def test_what_the_restart_policy_of_a_job_costs(
    spec: dict[str, Any], owners: list[str], loses_all: bool, part: str
) -> None:
    references = [{"kind": kind, "name": "set", "controller": True} for kind in owners]
    found = owner_of_job({"metadata": {"name": "gpt", "ownerReferences": references}, "spec": spec})
    assert found.loses_all_copies is loses_all
    assert part in found.cost


def test_the_wait_for_a_new_pod_of_the_other_controller_is_no_time_of_the_seal() -> None:
    """A Job creates the pod after a back-off. The survivors were sealed long before."""
    job = adoption(
        restartRound=1,
        members=[0, 1],
        pods=[RECORD | {"birth": 0}, {"worker": 1, "uid": "gone", "birth": 0}],
    )
    survivor = pod(0, "a")
    seen = AdoptedPods(job).members((survivor,), frozenset())
    observed = Observed(job=job, pods=seen, sidecars=(sidecar(survivor, 1),), owner=KIND)
    memory = decide(observed, NOW).memory
    assert memory.seen_at(Seen.SEALED) == NOW.monotonic
    assert memory.seen_at(Seen.SCHEDULED) is None


def test_the_secrets_of_two_adoptions_of_one_name_differ() -> None:
    """An orphaning delete leaves those of the former adoption."""
    first, second = adoption(), adoption()
    second = changed(second, metadata=changed(second.metadata, uid="another"))
    assert certificates_prefix(first) != certificates_prefix(second)
