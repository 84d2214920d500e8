"""The controllers of other job kinds are pinned once, and only the tests of adopted pods build them."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed import controllers, tools
from testbed.config import Bed
from testbed.controllers import CONTROLLERS, JOBSET, TRAINER, Controller
from testbed.driver.adopted import batch_job_manifest
from testbed.driver.jobs import Training
from testbed.driver.jobset import jobset_manifest
from testbed.driver.trainjob import trainjob_manifest


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda c: c.name)
def test_the_tag_of_the_image_is_the_version_of_the_module(controller: Controller):
    module = (controller.tools.folder / "go.mod").read_text()
    assert f"require {controller.module} {controller.version}\n" in module
    assert controller.tag.endswith(f":{controller.version}")


def test_trainer_is_built_for_the_jobset_that_runs():
    module = (TRAINER.tools.folder / "go.mod").read_text()
    assert f"sigs.k8s.io/jobset {JOBSET.version} // indirect\n" in module


@pytest.mark.parametrize("controller", CONTROLLERS, ids=lambda c: c.name)
def test_no_other_target_builds_the_controller(controller: Controller):
    assert controller.tools not in tools.TOOL_SETS


def test_a_controller_is_removed_before_the_one_that_it_needs(tmp_path: Path):
    bed = Bed(tmp_path, local=True)
    installed = [step.name for step in controllers.install_steps(bed, TRAINER)]
    assert installed.index("jobset controller") < installed.index("trainer controller")
    removed = [step.name for step in controllers.remove_steps(bed, TRAINER)]
    assert removed == ["remove trainer", "remove jobset"]


def test_a_jobset_contains_the_spec_of_the_job_with_its_own_backoff_limit():
    job = batch_job_manifest("gpt", "team", Training(workers=3))
    jobset = jobset_manifest(job, backoff_limit=0, max_restarts=2)
    (workers,) = jobset["spec"]["replicatedJobs"]
    assert workers["replicas"] == 1
    assert workers["template"]["spec"] == {**job["spec"], "backoffLimit": 0}
    assert job["spec"]["backoffLimit"] == 10, "the Job itself is unchanged"
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 2}


def test_a_trainjob_names_the_runtime_of_the_chart_and_no_label():
    job = trainjob_manifest("gpt", "team", Training(workers=3))
    assert job["spec"]["runtimeRef"] == {"name": "holdfast-torch"}
    assert job["spec"]["trainer"]["numNodes"] == 3
    assert "labels" not in job["metadata"]
