"""The number of workers of a job changes: a real API server, a real operator process and played sidecars."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.operator.fake_sidecar import FakeSidecar
from tests.support.operator.operator_bed import DIGEST, OperatorBed, training, training_job
from tests.support.operator.progress import progress_of

from holdfast_core.ids import Rank, RestartRound, Step, Worker
from holdfast_core.messages.schema import CoordinatorState, DeadRank, RestorePoint

pytestmark = pytest.mark.integration

SAVED = RestorePoint(Step(60), RestartRound(0), DIGEST)


@pytest.fixture
def stored_bed(empty_bed: OperatorBed) -> OperatorBed:
    """Return a job with an object store that trains in round 0, with a running operator."""
    bed = empty_bed
    bed.start_operator()
    bed.add_store()
    bed.train(training_job(object={"storeRef": {"name": "main"}, "every": {"steps": 10}}))
    return bed


def set_workers(bed: OperatorBed, workers: int) -> None:
    path = bed.path("trainingjobs", "gpt")
    job = bed.plane.request("GET", path)
    job["spec"]["workers"] = workers
    bed.plane.request("PUT", path, job)


def resizing(bed: OperatorBed) -> tuple[Any, Any]:
    found = bed.condition("Resizing")
    return found.get("status"), found.get("reason")


def pods_of(bed: OperatorBed, round_: int, workers: int) -> list[str]:
    return [bed.pod(worker, round_) for worker in range(workers)]


def start(bed: OperatorBed, round_: int, workers: int) -> list[FakeSidecar]:
    """Run the pods of a round in which all pods are new, until each has the ROUND of this gang."""
    names = pods_of(bed, round_, workers)

    def only_these() -> bool:
        bed.kubelet.confirm_deletes()
        return bed.pod_names() == names

    bed.until(f"pods of round {round_}", only_these)
    sidecars = [bed.kubelet.run_pod(name) for name in names]
    bed.until(
        f"ROUND {round_}",
        lambda: all(s.rounds and all(m.address for m in s.rounds[-1].members) for s in sidecars),
    )
    for sidecar in sidecars:
        assert sidecar.rounds[-1].workers == workers
        assert sidecar.rounds[-1].restore_point.step == SAVED.step
    return sidecars


def of_gang(version: int, round_: int, step: int, workers: int) -> CoordinatorState:
    return replace(
        training(version, round_, step),
        progress=progress_of(*[step] * workers),
        last_local=None,
        last_replicated=None,
    )


def stop(bed: OperatorBed, workers: int) -> None:
    """Ask for this number while round 0 trains, and let its gang save and stop."""
    set_workers(bed, workers)
    bed.until("the record of the request", lambda: resizing(bed) == ("True", "Stopping"))
    coordinator = bed.kubelet.sidecars[bed.pod(0, 0)]
    bed.until("the request to stop", lambda: "stop" in [name for name, _ in coordinator.calls])
    stopped = replace(training(9, 0, 60), last_persisted=SAVED, finished=True)
    bed.kubelet.publish(bed.pod(0, 0), stopped)
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    assert bed.status()["lastPersisted"]["step"] == SAVED.step
    assert bed.status()["members"] == [1] * workers


def min_available(bed: OperatorBed) -> int:
    path = f"/apis/policy/v1/namespaces/{bed.namespace}/poddisruptionbudgets"
    [budget] = bed.plane.request("GET", path)["items"]
    return int(budget["spec"]["minAvailable"])


def test_a_job_gets_a_third_worker(stored_bed: OperatorBed) -> None:
    """The operator is killed after the round with the new number has begun."""
    bed = stored_bed
    assert min_available(bed) == 1
    stop(bed, 3)
    bed.kill_operator()
    bed.start_operator()
    start(bed, 1, 3)
    bed.until("the budget follows", lambda: min_available(bed) == 2)
    assert bed.status()["resize"] == {"round": 1, "fromWorkers": 2}
    bed.kubelet.publish(bed.pod(0, 1), of_gang(1, 1, 61, 3))
    bed.until("the resize is over", lambda: resizing(bed) == ("False", "Resized"))
    assert bed.condition("Running")["status"] == "True"
    assert bed.status()["resize"] == {"round": 1}
    assert bed.status()["readyWorkers"].endswith("/3")
    assert bed.status()["restarts"] == 0


def test_a_number_on_which_the_ranks_fail_is_refused(stored_bed: OperatorBed) -> None:
    bed = stored_bed
    stop(bed, 3)
    start(bed, 1, 3)
    error = "holdfast.errors.StateMismatchError: w.0 is a plain tensor"
    failed = replace(
        of_gang(1, 1, 60, 3), running=False, dead=(DeadRank(Rank(1), Worker(1), 1, error),)
    )
    bed.kubelet.publish(bed.pod(0, 1), failed)
    bed.until("the way back", lambda: bed.status().get("restartRound") == 2)
    start(bed, 2, 2)
    bed.kubelet.publish(bed.pod(0, 2), of_gang(1, 2, 61, 2))
    bed.until("Running", lambda: bed.condition("Running").get("status") == "True")
    assert resizing(bed) == ("False", "ResizeFailed")
    assert error in bed.condition("Resizing")["message"]
    assert bed.status()["resize"]["refusedWorkers"] == 3
    assert bed.status()["restartsCountTowardsMax"] == 0
    bed.until("the budget follows", lambda: min_available(bed) == 1)
    set_workers(bed, 2)
    bed.until("nothing to refuse", lambda: resizing(bed) == ("False", "Resized"))


def test_a_job_without_a_store_keeps_its_workers(bed: OperatorBed) -> None:
    names = bed.pod_names()
    set_workers(bed, 3)
    bed.until("the refusal", lambda: resizing(bed) == ("False", "NoObjectTier"))
    assert bed.pod_names() == names
    assert bed.status()["readyWorkers"].endswith("/2")
    bed.kubelet.publish(bed.pod(0, 0), training(10, 0, 70))
    bed.until("training goes on", lambda: bed.status().get("step") == 70)
    assert bed.status()["restartRound"] == 0
