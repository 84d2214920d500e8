"""A gang whose pods a TrainJob creates, with the controllers of Kubeflow Trainer and JobSet.

The TrainJobs use the ClusterTrainingRuntime of the chart. `make e2e-trainer` runs these tests. Each training
ends with the bits of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from testbed.driver.kube import Kube
from testbed.driver.scenario import SHORT
from testbed.driver.trainjob import AdoptedTrainJob, training_runtime

TRAINING = replace(SHORT, steps=100, sleep_per_step=0.3)

pytestmark = pytest.mark.trainer


@pytest.fixture(scope="module", autouse=True)
def runtime(installed: Kube) -> Iterator[None]:
    if not AdoptedTrainJob.OWNER.is_served(installed.api):
        pytest.skip("no Trainer controller runs: `make e2e-trainer` builds and installs it")
    with training_runtime(installed):
        yield


@pytest.mark.fault("A pod of an adopted TrainJob is lost")
def test_a_lost_pod_of_a_trainjob_is_created_again_alone(scenario):
    job = scenario.adopt_trainjob(TRAINING)
    job.wait_replicated(20)
    adopted = job.wait_condition("Adopted")["message"]
    assert adopted.startswith("Job gpt-node-0 (backoffLimit 100) creates a lost pod again")
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=1)
    job.wait_round(1)
    assert job.status["members"] == [0, 1, 0], "only the lost worker has a new pod"
    job.wait_complete()
    (recovery,) = job.status["recoveries"]
    print({k: recovery.get(k) for k in sorted(recovery)})
    assert recovery["workers"] == [1]
    assert recovery["restoredStep"] >= 20
    job.wait_batch_job()
    scenario.finish_and_judge(job, TRAINING)


@pytest.mark.fault("A TrainJob is suspended and resumed, twice")
def test_a_suspended_trainjob_continues_from_the_step_that_it_saved_last(scenario):
    """It is suspended twice. All pods are deleted each time, so that only the store has the step."""
    training = replace(TRAINING, steps=200)
    job = scenario.adopt_trainjob(training)
    persisted = job.wait_persisted(20)["step"]
    for _ in range(2):
        round_, before = job.round, {pod["uid"] for pod in job.status["pods"]}
        job.suspend()
        job.resume()
        job.wait_round(round_ + 1)
        assert not {pod["uid"] for pod in job.status["pods"]} & before
        recovery = job.status["recoveries"][-1]
        print({k: recovery.get(k) for k in sorted(recovery)})
        assert recovery["restoredStep"] >= persisted
        assert recovery["lostSteps"] == 0, "the pods ended before the last step was in the store"
        persisted = job.wait_persisted(recovery["restoredStep"] + 20)["step"]
    job.wait_complete()
    job.wait_batch_job()
    scenario.finish_and_judge(job, training)
