"""A gang whose pods a Job of batch/v1 creates, with the Job controller and the kubelets of the cluster."""

from __future__ import annotations


def test_a_job_whose_pod_is_deleted_completes_with_the_bits_of_an_undisturbed_run(scenario):
    job = scenario.adopt()
    job.wait_replicated(20)
    assert job.failed_probes() == [], "a healthy start has no warnings"
    round_, members = job.round, job.status["members"]
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=1)
    job.wait_round(round_ + 1)
    expected = [members[0], round_ + 1, members[2]]
    assert job.status["members"] == expected, "only the lost worker has a new pod"
    job.wait_complete()
    recovery = job.status["recoveries"][-1]  # a busy node may fail to start a container before
    assert recovery["workers"] == [1]
    assert recovery["restoredStep"] >= 20
    job.wait_batch_job()
    scenario.finish_and_judge(job)
