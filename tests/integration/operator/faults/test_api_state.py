"""Objects and CRDs go away, or the whole API server goes back in time (docs/faults.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.support.operator.api_proxy import ApiProxy
from tests.support.operator.operator_bed import DIGEST, OperatorBed, training, training_job
from tests.support.operator.write_rules import broken_rules

from holdfast_core.ids import RestartRound, Step
from holdfast_core.messages.schema import RestorePoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@contextmanager
def without_crd(bed: OperatorBed, plural: str) -> Iterator[None]:
    """Delete a CRD, and with it all of its objects. Create it again after the block, for later tests too."""
    path = f"{CRDS}/{plural}.holdfast.dev"
    crd = bed.plane.request("GET", path)
    bed.plane.request("DELETE", path)
    bed.until("the CRD goes", lambda: bed.is_gone(path))
    try:
        bed.until("its collection goes", lambda: bed.is_gone(bed.path(plural)))
        yield
    finally:
        kept = ("name", "annotations", "labels")
        metadata = {k: v for k, v in crd["metadata"].items() if k in kept}
        bed.plane.request("POST", CRDS, {"metadata": metadata, "spec": crd["spec"]})
        bed.until("its collection is served", lambda: not bed.is_gone(bed.path(plural)))


@pytest.mark.fault("A CRD is upgraded, or deleted and created again")
def test_a_job_that_is_created_again_after_its_crd_trains(
    gang: OperatorBed, proxy: ApiProxy
) -> None:
    """Deleting the CRD deletes the job. Its pods are left to the garbage collector, which is not here."""
    old = gang.pod_names()
    with without_crd(gang, "trainingjobs"):
        assert gang.pod_names() == old
    for name in old:
        gang.kubelet.delete_pod(name)
    gang.train()
    gang.store_at(0, 40)
    gang.lose(1)
    gang.until_recovered(1)
    assert not set(old) & set(gang.pod_names())


@pytest.mark.fault("A CRD is upgraded, or deleted and created again")
def test_records_of_commits_are_created_again_after_their_crd(
    empty_bed: OperatorBed, proxy: ApiProxy
) -> None:
    """The commit is in the job's status, so the object that was deleted with its CRD comes back."""
    bed = empty_bed
    bed.start_operator()
    bed.add_store()
    bed.train(training_job(object={"storeRef": {"name": "main"}, "every": {"steps": 10}}))
    saved = RestorePoint(Step(40), RestartRound(0), DIGEST)
    bed.kubelet.publish(bed.pod(0, 0), replace(training(3, 0, 40), last_persisted=saved))
    recorded = partial(_steps, bed)
    bed.until("the record", lambda: recorded() == [40])
    with without_crd(bed, "checkpoints"):
        assert bed.status()["lastPersisted"]["step"] == 40
    bed.until("the record is there again", lambda: recorded() == [40])
    assert bed.status()["restartRound"] == 0
    assert bed.status()["lastPersisted"]["step"] == 40
    assert bed.process.poll() is None


def _steps(bed: OperatorBed) -> list[int]:
    return [c["spec"]["step"] for c in bed.plane.request("GET", bed.path("checkpoints"))["items"]]


@pytest.mark.fault("Etcd is restored to an older copy")
@pytest.mark.parametrize("restarts", [False, True], ids=["same operator", "new operator"])
def test_a_gang_whose_round_the_api_server_has_forgotten_begins_a_higher_one(
    gang: OperatorBed, proxy: ApiProxy, tmp_path: Path, restarts: bool
) -> None:
    """etcd is restored to a copy of round 0 while round 1 trains.

    The kubelet ends the pod of round 1, which the API server does not know, and runs the pod of round 0
    again, which it knows. The sidecar of the other worker has the number of its round on its disk.
    """
    gang.plane.copy_state(tmp_path / "etcd")
    gang.lose(1)
    gang.until_recovered(1)
    survivor = gang.kubelet.sidecars[gang.pod(0, 0)]
    if restarts:
        gang.kill_operator()
    proxy.close_port()  # the operator sees the restored state when the kubelet has seen it
    gang.plane.restore_state(tmp_path / "etcd")
    assert gang.status()["restartRound"] == 0
    assert broken_rules(proxy.writes) == []
    proxy.writes.clear()  # what follows is compared with the restored state
    gang.kubelet.kill_sidecar(gang.pod(1, 1))
    again = gang.kubelet.run_again(gang.pod(1, 0))
    proxy.open_port()
    if restarts:
        gang.start_operator()
    gang.until("a round above both", lambda: gang.status()["restartRound"] >= 2)
    gang.until("worker 0 is sealed", lambda: survivor.round == gang.status()["restartRound"])
    gang.until("the restore point", lambda: gang.status().get("restorePoint"))
    assert gang.status()["restorePoint"]["step"] == 40
    for worker, birth in enumerate(gang.status()["members"]):
        name = gang.pod(worker, birth)
        gang.until("the member's pod", lambda: name in gang.pod_names())  # noqa: B023
        if name not in gang.kubelet.sidecars:
            again = gang.kubelet.run_pod(name)
    round_ = gang.status()["restartRound"]
    gang.until(
        "ROUND",
        lambda: (
            again.rounds
            and again.rounds[-1].round == round_
            and all(m.address for m in again.rounds[-1].members)
        ),
    )
    newest = replace(training(50, round_, 60), last_local=None, last_replicated=None)
    gang.kubelet.publish(gang.pod(0, 0), newest)
    gang.until("Running again", lambda: gang.condition("Running").get("status") == "True")
    assert gang.status()["restartRound"] == round_
    members = [gang.pod(w, birth) for w, birth in enumerate(gang.status()["members"])]
    assert gang.pod_names() == members
