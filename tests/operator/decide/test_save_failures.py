"""The status names why saves fail, and where to look."""

from __future__ import annotations

import pytest
from tests.support.operator.builders import job, now, pod, sidecar, status

from holdfast_core.api import JobCondition, RestorePointStatus
from holdfast_core.ids import RestartRound, Step, TierName, Worker
from holdfast_core.messages.schema import CoordinatorState, Failure
from holdfast_operator.decide.decide import decide
from holdfast_operator.model.actions import WriteStatus
from holdfast_operator.model.job import Observed

FULL = Failure(Step(30), TierName.NODE, "NodeVolumeFull", "needs 5 bytes, 2 available", Worker(1))
OVERDUE = Failure(Step(20), TierName.NODE, "NoCommitForTooLong", "no step after 20 was committed")


@pytest.mark.fault("A job commits nothing for several intervals")
@pytest.mark.fault("A volume is full on one node of a gang")
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (FULL, "worker 1 on node node-1: needs 5 bytes, 2 available"),
        (OVERDUE, "no step after 20 was committed"),
    ],
    ids=["a full node", "no commit for too long"],
)
def test_the_condition_names_what_is_wrong_and_where(failure: Failure, message: str) -> None:
    pods = (pod(0), pod(1))
    running = status(0, (0, 0), restore_point=RestorePointStatus(), coordinator=Worker(0))
    observed = Observed(
        job=job(workers=2, status=running),
        pods=pods,
        sidecars=tuple(sidecar(p, 0, version=1) for p in pods),
        coordinator=CoordinatorState(5, RestartRound(0), running=True, failures=(failure,)),
    )
    (write,) = [a for a in decide(observed, now(1)).actions if isinstance(a, WriteStatus)]
    found = write.status.condition(JobCondition.LAST_CHECKPOINT_SUCCEEDED)
    assert (found.status, found.reason, found.message) == ("False", failure.reason, message)
