"""A pod gets its store when it is created, so no pod is created while the CheckpointStore is absent."""

from __future__ import annotations

import pytest
from tests.support.operator.builders import job, now, pod, sidecar, status, store
from tests.support.operator.decisions import created_pods, of_kind

from holdfast_core.api import CheckpointStore, JobCondition
from holdfast_core.ids import Worker
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.actions import WriteStatus
from holdfast_operator.model.job import Observed, StoreView, Unreadable
from holdfast_operator.model.reasons import Reason

SURVIVOR = pod(0)
REPLACED = job(2, status(1, (0, 1)), store="main")


def recovery(found: StoreView | None, *hidden: Unreadable) -> Observed:
    """Return a world in which worker 1 has lost its pod and round 1 is to create another one."""
    return Observed(
        job=REPLACED,
        pods=(SURVIVOR,),
        sidecars=(sidecar(SURVIVOR, 1),),
        store=found,
        unreadable=hidden,
    )


HIDDEN = Unreadable(
    CheckpointStore.KIND, "team-a", "main", "uid-of-it", "spec.s3.endpoint: unknown value"
)


@pytest.mark.fault("A store is deleted while a pod is replaced")
@pytest.mark.parametrize(
    ("observed", "reason"),
    [
        pytest.param(recovery(None), Reason.STORE_NOT_FOUND, id="absent"),
        pytest.param(recovery(None, HIDDEN), Reason.CANNOT_READ, id="cannot be read"),
    ],
)
def test_the_gang_waits_for_the_store_and_reports_it(observed: Observed, reason: Reason) -> None:
    decision = decide(observed, now())
    assert not of_kind(decision.actions, "create Pod")
    (write,) = [a for a in decision.actions if isinstance(a, WriteStatus)]
    found = write.status.condition(JobCondition.RUNNING)
    assert (found.status, found.reason) == ("False", reason)
    assert "no pod is created without it" in found.message


@pytest.mark.fault("A store's server is down during a recovery")
@pytest.mark.parametrize("available", [True, None, False], ids=["works", "not probed", "down"])
def test_a_store_that_is_there_delays_nothing(available: bool | None) -> None:
    """The store's server may be down: a sidecar retries by itself."""
    decision = decide(recovery(store(available=available)), now())
    assert [p.worker for p in created_pods(decision.actions)] == [Worker(1)]


def test_a_job_without_a_store_needs_none() -> None:
    observed = Observed(
        job=job(2, status(1, (0, 1))), pods=(SURVIVOR,), sidecars=(sidecar(SURVIVOR, 1),)
    )
    assert [p.worker for p in created_pods(decide(observed, now()).actions)] == [1]
