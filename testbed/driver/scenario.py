"""One scenario: jobs under failures, and the judgement that every scenario ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.driver.jobs import Job, Training, job_manifest
from testbed.driver.kube import Kube
from testbed.driver.oracle import compare_digests, gather, judge, leaks_after_delete

SHORT = Training(workers=3, steps=80, sleep_per_step=0.1, layers=1, width=32)
"""Three workers: with two, a + b commutes and would hide an order that differs. Steps sleep more than
they compute: a scenario needs time to strike in, and leaves the processors to the one beside it."""


class Scenario:
    """One job under a scenario, and the judgement that every scenario ends with."""

    def __init__(self, kube: Kube, namespace: str, reference: Callable[[Training], dict[int, str]]):
        self.kube = kube
        self.namespace = namespace
        self.reference = reference
        self.jobs: list[Job] = []

    def start(self, training: Training = SHORT, name: str = "gpt", **options: Any) -> Job:
        job = Job(self.kube, self.namespace, name)
        self.jobs.append(job)
        return job.start(job_manifest(name, self.namespace, training, **options))

    def finish_and_judge(self, job: Job, training: Training = SHORT, copies: int = 1) -> None:
        """Complete, bit-identical, I1-I7."""
        job.wait_complete()
        problems = compare_digests(self.reference(training), job.final_digests())
        problems += judge(gather(job, copies=copies))
        job.delete()
        problems += leaks_after_delete(self.kube, self.namespace, job.name)
        assert not problems, "\n".join(problems)
