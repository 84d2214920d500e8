"""Loss of the operator, during which training continues."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.driver import install
from testbed.driver.kube import Kube, wait_for
from testbed.driver.scenario import SHORT


@pytest.mark.alone
def test_a_recovery_continues_after_the_operator_is_killed(scenario, installed: Kube):
    """The operator is killed after CAS 1, after the seal, and after CAS 2. Its successor continues."""
    # Ranks may train on for 15 s while no operator leads, and the last loss must hit the run, too.
    job = scenario.start(replace(SHORT, sleep_per_step=0.7))
    phases = {
        "CAS 1": lambda before: job.round > before,
        "the seal": lambda before: job.metric(0, "holdfast_restart_round").get("", 0) > before,
        "CAS 2": lambda before: job.round > before and "restorePoint" in job.status,
    }
    for name, reached in phases.items():
        job.wait_step(job.live_step() + 10)
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
