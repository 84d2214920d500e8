"""A lost pod or node begins a new round."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from tests.support.operator.operator_bed import (
    OperatorBed,
    training,
    training_job,
)

from holdfast_operator.watch.cache import LEASES_PATH

pytestmark = pytest.mark.integration


@pytest.mark.fault("A recovery is measured through a real API server")
def test_a_lost_pod_is_a_new_round_from_the_newest_complete_step(bed: OperatorBed) -> None:
    survivor = bed.store_at(0, 40)
    bed.kubelet.delete_pod(bed.pod(1, 0))
    bed.until("round 1", lambda: bed.status().get("restartRound") == 1)
    bed.until("new pod", lambda: bed.pod_names() == [bed.pod(0, 0), bed.pod(1, 1)])
    fresh = bed.kubelet.run_pod(bed.pod(1, 1))
    bed.until("restore point", lambda: bed.status().get("restorePoint"))
    status = bed.status()
    assert status["members"] == [0, 1]
    assert {k: status["restorePoint"][k] for k in ("step", "round")} == {"step": 40, "round": 0}
    assert survivor.round == 1
    bed.until("ROUND 1", lambda: fresh.rounds and all(m.address for m in fresh.rounds[-1].members))
    assert fresh.rounds[-1].restore_point.step == 40
    assert [m.pod for m in fresh.rounds[-1].members] == [bed.pod(0, 0), bed.pod(1, 1)]
    bed.kubelet.publish(bed.pod(0, 0), training(9, 1, 50))
    bed.until("Running again", lambda: bed.condition("Running").get("status") == "True")
    recovery = bed.status()["recoveries"][-1]
    assert recovery["reason"] == "PodLost"
    phases = recovery["phaseSeconds"]
    assert {"detect", "back_off", "seal", "first_step"} <= phases.keys()
    assert recovery["totalSeconds"] == pytest.approx(sum(phases.values()), abs=0.01)
    assert recovery["begunAt"]
    assert bed.status()["restarts"] == 1


def lease(node: str, second: int) -> dict[str, Any]:
    """Return a lease that was renewed at this second of a minute."""
    spec = {"renewTime": f"2026-01-01T00:00:{second % 60:02}.000000Z"}
    return {"metadata": {"name": node}, "spec": spec}


@pytest.fixture
def renew_others(empty_bed: OperatorBed) -> Iterator[Callable[[], None]]:
    """Return a function that renews the leases of 12 other nodes."""
    plane = empty_bed.plane
    paths = [f"{LEASES_PATH}/other-{n}" for n in range(12)]
    seconds = count(1)
    for path in paths:
        plane.request("POST", LEASES_PATH, lease(path.rpartition("/")[2], 0))

    def renew() -> None:
        second = next(seconds)
        for path in paths:
            found = plane.request("GET", path)
            plane.request("PUT", path, {**found, "spec": lease("", second)["spec"]})

    yield renew
    for path in paths:
        plane.request("DELETE", path)


def leases_in_doubt(bed: OperatorBed) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{bed.metrics_port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith("holdfast_leases_in_doubt "))


def test_a_lost_node_among_many_late_leases_is_found_when_the_others_are_renewed(
    empty_bed: OperatorBed, renew_others: Callable[[], None]
) -> None:
    empty_bed.plane.request("POST", LEASES_PATH, lease(empty_bed.kubelet.node, 0))
    empty_bed.start_operator()
    job = training_job()
    job["spec"]["nodeLoss"] = {"suspectAfterSeconds": 15}
    empty_bed.train(job)
    empty_bed.kubelet.kill_sidecar(empty_bed.pod(1, 0))
    empty_bed.until("the leases are in doubt", lambda: leases_in_doubt(empty_bed) >= 13)
    assert "node leases are late at the same time" in empty_bed.log()
    assert empty_bed.status()["restartRound"] == 0

    def lost_while_others_are_renewed() -> bool:
        renew_others()
        return empty_bed.status()["restartRound"] == 1

    empty_bed.until("round 1", lost_while_others_are_renewed)
    assert empty_bed.status()["recoveries"][-1]["reason"] == "NodeLost"

    def none_is_in_doubt() -> bool:
        renew_others()
        return leases_in_doubt(empty_bed) == 0

    empty_bed.until("no lease is in doubt", none_is_in_doubt)


OUT_OF_SERVICE = {
    "key": "node.kubernetes.io/out-of-service",
    "value": "nodeshutdown",
    "effect": "NoExecute",
}
DEADLOCK = {"type": "KernelDeadlock", "status": "True", "reason": "DockerHung"}


@pytest.mark.fault("A node is out of service, or a node-problem detector gives it up")
@pytest.mark.parametrize(
    ("taints", "conditions", "why"),
    [
        pytest.param(
            [OUT_OF_SERVICE],
            [],
            "has the taint node.kubernetes.io/out-of-service",
            id="out of service",
        ),
        pytest.param(
            [], [DEADLOCK], "has the condition KernelDeadlock=True", id="a node-problem detector"
        ),
    ],
)
def test_a_node_that_kubernetes_or_a_detector_gives_up_is_lost_without_its_lease(
    empty_bed: OperatorBed, taints: list[Any], conditions: list[Any], why: str
) -> None:
    """It has no lease. Worker 0 is on the same node and answers, so it is not lost."""
    node = empty_bed.kubelet.node
    path = f"/api/v1/nodes/{node}"
    found = empty_bed.plane.request("GET", path)
    empty_bed.start_operator()
    empty_bed.train(training_job())
    found["spec"]["taints"] = taints
    found = empty_bed.plane.request("PUT", path, found)
    found["status"]["conditions"] = conditions
    empty_bed.plane.request("PUT", f"{path}/status", found)
    empty_bed.kubelet.kill_sidecar(empty_bed.pod(1, 0))
    empty_bed.until("round 1", lambda: empty_bed.status().get("restartRound") == 1)
    status = empty_bed.status()
    assert status["recoveries"][-1]["reason"] == "NodeLost"
    assert status["members"] == [0, 1]
    assert why in empty_bed.condition("Restarting")["message"]
    empty_bed.until(
        "the pod of the lost node is deleted",
        lambda: empty_bed.pod_names() == [empty_bed.pod(0, 0), empty_bed.pod(1, 1)],
    )
    pods = f"/api/v1/namespaces/{empty_bed.namespace}/pods"
    fresh = empty_bed.plane.request("GET", f"{pods}/{empty_bed.pod(1, 1)}")
    # The scheduler keeps off the tainted node by itself.
    expected = node if conditions else None
    assert fresh["metadata"].get("annotations", {}).get("holdfast.dev/avoided-nodes") == expected
