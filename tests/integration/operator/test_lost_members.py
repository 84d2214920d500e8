"""A lost pod or node begins a new round."""

from __future__ import annotations

import pytest
from tests.support.operator.operator_bed import (
    OperatorBed,
    training,
    training_job,
)

pytestmark = pytest.mark.integration


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
    phases = {k: v for k, v in recovery.items() if k.endswith("Seconds") and k != "totalSeconds"}
    assert {"detectSeconds", "backOffSeconds", "sealSeconds", "firstStepSeconds"} <= phases.keys()
    assert recovery["totalSeconds"] == pytest.approx(sum(phases.values()), abs=0.01)
    assert recovery["begunAt"]
    assert bed.status()["restarts"] == 1


def test_a_node_whose_lease_stops_is_lost(empty_bed: OperatorBed) -> None:
    """The sidecar does not answer and no kubelet confirms the pod's deletion, so the deletion is forced."""
    node = f"node-{empty_bed.namespace}"
    empty_bed.kubelet.node = node
    empty_bed.plane.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    lease = {"metadata": {"name": node}, "spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}
    empty_bed.plane.request("POST", leases, lease)
    empty_bed.start_operator()
    job = training_job()
    job["spec"]["nodeLoss"] = {"suspectAfterSeconds": 15}
    empty_bed.train(job)
    empty_bed.kubelet.kill_sidecar(empty_bed.pod(1, 0))
    empty_bed.until("round 1", lambda: empty_bed.status().get("restartRound") == 1, 60)
    assert empty_bed.status()["recoveries"][-1]["reason"] == "NodeLost"
    # Both pods are on the silent node, but worker 0 still answers: it is not lost.
    assert empty_bed.status()["members"] == [0, 1]
    empty_bed.until(
        "the pod of the lost node is deleted",
        lambda: empty_bed.pod_names() == [empty_bed.pod(0, 0), empty_bed.pod(1, 1)],
    )


def test_a_node_whose_object_was_deleted_is_lost(empty_bed: OperatorBed) -> None:
    """The lease is deleted with the Node, so it never becomes stale; the sidecar does not answer."""
    node = f"node-{empty_bed.namespace}"
    empty_bed.kubelet.node = node
    empty_bed.plane.request("POST", "/api/v1/nodes", {"metadata": {"name": node}})
    empty_bed.start_operator()
    job = training_job()
    job["spec"]["nodeLoss"] = {"suspectAfterSeconds": 15}
    empty_bed.train(job)
    empty_bed.plane.request("DELETE", f"/api/v1/nodes/{node}")
    empty_bed.kubelet.kill_sidecar(empty_bed.pod(1, 0))
    empty_bed.until("round 1", lambda: empty_bed.status().get("restartRound") == 1, 180)
    assert empty_bed.status()["recoveries"][-1]["reason"] == "NodeLost"
    assert empty_bed.status()["members"] == [0, 1]
    empty_bed.until(
        "the pod of the lost node is deleted",
        lambda: empty_bed.pod_names() == [empty_bed.pod(0, 0), empty_bed.pod(1, 1)],
    )
