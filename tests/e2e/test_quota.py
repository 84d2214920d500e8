"""A quota of the object store is reached during training, and raised again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.driver.jobs import STORE_NAME, Job
from testbed.driver.kube import condition, wait_for
from testbed.driver.scenario import SHORT

SLOW = replace(SHORT, steps=900, sleep_per_step=0.4, state_mib=4)
"""The quota must be reached during the run, and each checkpoint must be larger than the smallest quota."""
KIND = "CheckpointStore"


def _set_quota(job: Job, quota: dict[str, str] | None) -> None:
    spec = {"quota": quota, "usage": {"every": "1m"}}
    job.kube.patch(KIND, job.namespace, STORE_NAME, {"spec": spec})


def _used(job: Job) -> int:
    """Return what the newest listing has found of the job."""
    store = job.kube.get(KIND, job.namespace, STORE_NAME) or {}
    rows = ((store.get("status") or {}).get("usage") or {}).get("jobs") or []
    return next((int(row["bytes"]) for row in rows if row["uid"] == job.uid), 0)


@pytest.mark.long  # integration/operator/test_store_usage.py and integration/sidecars show its parts
@pytest.mark.fault("A quota of the object store is reached during training")
def test_uploads_wait_for_a_quota_and_go_on_when_it_is_raised(scenario):
    """The bucket has other jobs, also larger ones, so the limit is one of the job."""
    job = scenario.start(SLOW)
    job.wait_persisted(0)
    _set_quota(job, {"perJob": "1Mi"})
    try:
        job.wait("a listing with the job", lambda: _used(job) > 0)
        held = job.wait_condition("UploadsHeld")
        assert "quota.perJob" in held["message"] and "kubectl holdfast prune" in held["message"]
        wait_for(
            "the store's condition",
            lambda: (
                condition(job.kube.get(KIND, job.namespace, STORE_NAME), "QuotaPressure").get(
                    "reason"
                )
                == "QuotaReached"
            ),
        )
        job.wait_step(int(job.status["step"]) + 40)  # an upload that was under way has ended
        before = job.status["lastPersisted"]["step"]
        replicated = int(job.status["lastReplicatedStep"])
        job.wait_replicated(replicated + 40)
        assert job.status["lastPersisted"]["step"] == before, "no upload was requested"
        assert job.round == 0
    finally:
        _set_quota(job, None)
    job.wait_condition("UploadsHeld", "False")
    job.wait_persisted(before + 1)
    assert job.round == 0, "training was not disturbed"
