"""What a driver reads of a TrainingJob that has no status yet, and of one that has just become complete."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from testbed.driver import metrics
from testbed.driver.digests import MARK
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


class EndedJob(OneJob):
    """A job of two ranks, of which rank 1 prints no digest. The line of rank 0 is late in its log."""

    def __init__(self) -> None:
        super().__init__(status={"members": [0, 0]})
        self.looks = 0

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        self.looks += 1
        names = Job(self, namespace, "gpt").pod_names()  # type: ignore[arg-type]
        phases = ("Running" if self.looks < 3 else "Succeeded", "Failed")
        return [
            {"metadata": {"name": name}, "status": {"phase": phase}}
            for name, phase in zip(names, phases, strict=True)
        ]

    def logs(self, namespace: str, pod: str, container: str) -> str:
        is_there = self.looks > 1 and pod.endswith("-0-r0")
        return f'{MARK}: "abc", "rank": 0}}\n' if is_there else "step 80\n"


def test_the_last_lines_of_a_log_are_waited_for_until_the_pods_have_ended() -> None:
    server = EndedJob()
    job = Job(server, "default", "gpt")  # type: ignore[arg-type]
    assert job.final_digests() == {0: "abc"}
    assert server.looks == 3
