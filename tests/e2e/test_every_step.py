"""Every step is saved, and one node's disk is too slow for that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed import faults
from testbed.driver.kube import wait_for
from testbed.driver.scenario import SHORT

NODE_DIR = "/holdfast/node"
SLOW_BYTES_PER_SECOND = 200_000
"""Writing a shard takes some seconds, and a step takes half a second."""


@pytest.mark.fault("The disk is a hundred times slower than a step")
def test_a_slow_disk_keeps_the_newest_step_in_slots(scenario):
    training = replace(SHORT, sleep_per_step=0.5)  # long enough for a status that is up to 10 s old
    job = scenario.start(training, interval=1, slots=3, object_every=None)
    job.wait_step(10)
    assert job.failed_probes() == [], "a healthy start has no warnings"

    def dropped() -> bool:
        found = job.metric(job.status["coordinator"], "holdfast_steps_overtaken")
        return sum(found.values()) >= 1

    slow = (scenario.namespace, job.pod_name(1), "holdfast-sidecar", NODE_DIR)
    with faults.slow_disk(*slow, SLOW_BYTES_PER_SECOND):
        wait_for(
            "a step that was dropped for a newer one",
            dropped,
            describe=job.describe,
        )
        # Without the steps in slots, the gang would go back to the newest step on all nodes.
        step = job.status.get("lastCommittedStep", 0)
        job.wait_step(max(step, job.live_step("holdfast_newest_step{")) + 2)
        faults.kill_process(scenario.namespace, job.pod_name(2), "trainer", match="holdfast-rank")
        job.wait_round(1)
        status = job.status
    assert status["restorePoint"]["step"] > step, "the newest step that all had handed over"
    assert status["members"] == [0, 0, 0]
    scenario.finish_and_judge(job, training)
