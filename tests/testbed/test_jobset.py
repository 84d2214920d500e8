"""The JobSet controller is pinned once, and only its own tests build it."""

from __future__ import annotations

from testbed import tools
from testbed.driver.adopted import batch_job_manifest
from testbed.driver.jobs import Training
from testbed.driver.jobset import jobset_manifest


def test_the_tag_of_the_image_is_the_version_of_the_module():
    module = (tools.JOBSET.folder / "go.mod").read_text()
    assert f"require sigs.k8s.io/jobset {tools.JOBSET_VERSION}\n" in module


def test_no_other_target_builds_the_controller():
    assert tools.JOBSET not in tools.TOOL_SETS


def test_a_jobset_contains_the_spec_of_the_job_with_its_own_backoff_limit():
    job = batch_job_manifest("gpt", "team", Training(workers=3))
    jobset = jobset_manifest(job, backoff_limit=0, max_restarts=2)
    (workers,) = jobset["spec"]["replicatedJobs"]
    assert workers["replicas"] == 1
    assert workers["template"]["spec"] == {**job["spec"], "backoffLimit": 0}
    assert job["spec"]["backoffLimit"] == 10, "the Job itself is unchanged"
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 2}
