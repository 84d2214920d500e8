"""All pods of all jobs fail at the same moment (docs/faults.md)."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.operator.api_proxy import ApiProxy, Refuse
from tests.support.operator.operator_bed import OperatorBed, training_job

from holdfast_core.ids import JobUid
from holdfast_core.names import pod_name

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

JOBS, WORKERS = 5, 100
ENDED = {"exitCode": 1, "reason": "Error"}


@pytest.mark.fault("All pods of many jobs fail at once")
def test_all_pods_of_many_jobs_fail_at_once(empty_bed: OperatorBed, proxy: ApiProxy) -> None:
    """The operator sees all failures in one LIST. Each job begins one round, and gets each pod once."""
    bed = empty_bed
    pods = f"/api/v1/namespaces/{bed.namespace}/pods"
    uids = []
    for number in range(JOBS):
        job = training_job()
        job["metadata"]["name"] = f"gpt-{number}"
        job["spec"]["workers"] = WORKERS
        made = bed.plane.request("POST", bed.path("trainingjobs"), job)
        uids.append((job["metadata"]["name"], JobUid(made["metadata"]["uid"])))

    def names(birth: int) -> list[str]:
        return sorted(pod_name(*job, w, birth) for job in uids for w in range(WORKERS))

    bed.start_operator()
    bed.until("all pods", lambda: bed.pod_names() == names(0), 600)
    unseen = proxy.add(
        Refuse(503, "ServiceUnavailable"),
        lambda c: c.plural == "pods" and c.verb in ("watch", "list"),
    )
    proxy.cut_watches(lambda call: call.plural == "pods")

    def fail(pod: dict[str, Any]) -> None:
        container = {
            "name": "trainer",
            "image": "x",
            "imageID": "x",
            "ready": False,
            "restartCount": 0,
            "state": {"terminated": ENDED},
        }
        status = {"phase": "Failed", "containerStatuses": [container]}
        path = f"{pods}/{pod['metadata']['name']}/status"
        bed.plane.request("PUT", path, {**pod, "status": status})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fail, bed.kubelet.pods()))
    assert bed.pod_names() == names(0)
    proxy.remove(unseen)
    bed.until("all pods of round 1", lambda: bed.pod_names() == names(1), 600)
    found = bed.plane.request("GET", bed.path("trainingjobs"))["items"]
    assert Counter(j["status"]["restartRound"] for j in found) == {1: JOBS}
    assert Counter(j["status"]["restarts"] for j in found) == {1: JOBS}
    assert bed.process.poll() is None
