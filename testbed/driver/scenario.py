"""One scenario: jobs under failures, and the checks at the end of every scenario."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from testbed.driver.adopted import AdoptedJob
from testbed.driver.jobs import Job, Training, job_manifest
from testbed.driver.jobset import AdoptedJobSet
from testbed.driver.kube import Kube
from testbed.driver.oracle import compare_digests, gather, judge
from testbed.driver.trainjob import AdoptedTrainJob

SHORT = Training(workers=3, steps=80, sleep_per_step=0.3, layers=1, width=32)
"""Short training of three workers. With two, a sum would not depend on the order of its terms, which would
hide a different order. A step sleeps much longer than it computes: on a busy machine a fault comes seconds
late, and must hit the training before its end. Sleeping costs little while other scenarios run beside it."""


class Scenario:
    """Jobs of one scenario, and the checks at its end."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        reference: Callable[[Training], dict[int, str]],
        nodes: Sequence[str],
    ):
        """Create a scenario without a job.

        Args:
            kube: The cluster.
            namespace: Namespace of all jobs.
            reference: Returns the digests of an undisturbed run of a training.
            nodes: Nodes on which the pods of the namespace may run.
        """
        self.kube = kube
        self.namespace = namespace
        self.reference = reference
        self.nodes = nodes
        self.jobs: list[Job] = []

    def start(self, training: Training = SHORT, name: str = "gpt", **options: Any) -> Job:
        job = Job(self.kube, self.namespace, name)
        self.jobs.append(job)
        return job.start(job_manifest(name, self.namespace, training, **options))

    def adopt(self, training: Training = SHORT, name: str = "gpt") -> AdoptedJob:
        """Start a Job of batch/v1 whose pods are adopted."""
        job = AdoptedJob(self.kube, self.namespace, name)
        self.jobs.append(job)
        return job.start_training(training)

    def adopt_jobset(
        self, training: Training = SHORT, name: str = "gpt", *, backoff_limit: int = 10
    ) -> AdoptedJobSet:
        """Start a JobSet whose pods are adopted."""
        job = AdoptedJobSet(self.kube, self.namespace, name, backoff_limit=backoff_limit)
        self.jobs.append(job)
        job.start_training(training)
        return job

    def adopt_trainjob(self, training: Training = SHORT, name: str = "gpt") -> AdoptedTrainJob:
        """Start a TrainJob whose pods are adopted. Its runtime must exist."""
        job = AdoptedTrainJob(self.kube, self.namespace, name)
        self.jobs.append(job)
        job.start_training(training)
        return job

    def finish_and_judge(self, job: Job, training: Training = SHORT, copies: int = 1) -> None:
        """Assert that the job completes, is bit-identical to an uninterrupted run and meets I1 to I7.

        Delete it.
        """
        job.wait_complete()
        problems = compare_digests(self.reference(training), job.final_digests())
        problems += judge(gather(job, copies=copies))
        job.delete()
        assert not problems, "\n".join(problems)
