"""Loss of the object store or the operator, during which training continues."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed import faults
from testbed.driver import install
from testbed.driver.kube import Kube, wait_for
from testbed.driver.scenario import SHORT


@pytest.mark.node_faults
def test_training_continues_while_the_store_is_down(scenario):
    """Only the pods on the nodes of this test do not reach the store."""
    job = scenario.start()
    job.wait_step(5)
    with faults.store_down(nodes=scenario.nodes):
        step = job.wait_step(30)
        condition = job.wait_condition("RemoteTierHealthy", "False", 90)
        assert condition["message"], "the error of the store or the network"
        assert step >= 30, "training went on"
    job.wait_condition("RemoteTierHealthy", "True", 120)
    scenario.finish_and_judge(job)


@pytest.mark.alone
def test_a_recovery_continues_after_the_operator_is_killed(scenario, installed: Kube):
    """The operator is killed after CAS 1, after the seal, and after CAS 2. Its successor continues."""
    job = scenario.start(replace(SHORT, sleep_per_step=0.2))  # the last loss must hit the run, too
    phases = {
        "CAS 1": lambda before: job.round > before,
        "the seal": lambda before: job.metric(0, "holdfast_restart_round").get("", 0) > before,
        "CAS 2": lambda before: job.round > before and "restorePoint" in job.status,
    }
    for name, reached in phases.items():
        job.wait_step(job.live_step() + 15)
        before = job.round
        scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=0)
        wait_for(
            name,
            lambda r=reached, b=before: r(b),
            timeout_seconds=60,
            describe=job.describe,
            every_seconds=0.02,
        )
        install.kill_operator(installed)
        job.wait_round(before + 1, 180)
    scenario.finish_and_judge(job)
