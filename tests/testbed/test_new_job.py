"""A TrainingJob exists before the operator has written its status."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from testbed.driver import metrics
from testbed.driver.jobs import Job


class OneJob:
    """The API server, with one TrainingJob and no pods."""

    def __init__(self, **status: Any) -> None:
        self.item: dict[str, Any] = {"metadata": {"name": "gpt", "uid": "u-1"}, **status}

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return self.item


@pytest.mark.parametrize("status", [{}, {"status": {}}, {"status": {"members": []}}])
def test_a_job_that_no_operator_has_seen_has_no_pods_and_no_metrics(status: dict[str, Any]) -> None:
    job = Job(OneJob(**status), "default", "gpt")  # type: ignore[arg-type]
    assert job.pod_names() == []
    assert job.round == 0
    with ThreadPoolExecutor(1) as pool:
        assert metrics.gang(job, pool).step is None


def test_members_are_named_by_worker_and_birth_round() -> None:
    job = Job(OneJob(status={"members": [0, 2]}), "default", "gpt")  # type: ignore[arg-type]
    assert [name.rsplit("-", 2)[1:] for name in job.pod_names()] == [["0", "r0"], ["1", "r2"]]
