"""Helm: install, upgrade under a running job, uninstall and install again.

All scenarios share the release, so the fixture `installed_again` restores it at the end.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from kubernetes import client
from testbed.config import HANG_SECONDS, SHARED
from testbed.driver import install
from testbed.driver.command_line import run_holdfast
from testbed.driver.jobs import Training, store_manifest
from testbed.driver.kube import PLURALS, Kube, Object, is_true, kubeconfig_path, show, wait_for

LONG = Training(workers=2, steps=4000, sleep_per_step=0.05)
"""Long enough to be still training at the end of each test."""

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("installed_again")]


def operator_spec(kube: Kube) -> dict:
    name = wait_for("a Ready operator", lambda: install.operator_pod(kube))
    return kube.pod(install.NAMESPACE, name)["spec"]


def kubectl(*arguments: str) -> str:
    command = [f"{install.testbed_bin()}/kubectl", "--kubeconfig", kubeconfig_path(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def custom_resources(kube: Kube) -> list[str]:
    names = {f"{plural}.holdfast.dev" for plural in PLURALS.values()}
    listed = client.ApiextensionsV1Api(kube.api).list_custom_resource_definition()
    return sorted(
        c["metadata"]["name"] for c in kube.plain(listed)["items"] if c["metadata"]["name"] in names
    )


def finalizers(kube: Kube, namespace: str) -> dict[str, list[str]]:
    """Return the finalizers of our objects.

    Without an operator, an object with a finalizer is never deleted.
    """
    return {
        f"{kind}/{item['metadata']['name']}": item["metadata"]["finalizers"]
        for kind in PLURALS
        for item in kube.items(kind, namespace)
        if item["metadata"].get("finalizers")
    }


def test_an_upgrade_does_not_affect_a_running_job(scenario, installed):
    job = scenario.start(LONG, name="under-upgrade")
    job.wait_round(0)
    step = job.wait_step(15)
    pods = {p["metadata"]["uid"] for p in job.pods()}
    before = install.operator_pod(installed)

    install.upgrade("--set-string", "operator.logLevel=debug")
    after = wait_for(
        "another operator pod",
        lambda: (p := install.operator_pod(installed)) != before and p,
    )
    environment = operator_spec(installed)["containers"][0]["env"]
    assert {"name": "HOLDFAST_LOG_LEVEL", "value": "debug"} in environment, after

    job.wait_step(step + 15)
    persisted = job.wait_persisted(20)["step"]
    job.wait_persisted(persisted + 20)
    assert {p["metadata"]["uid"] for p in job.pods()} == pods, "no pod was replaced"
    assert job.round == 0, "a new operator is no reason for a new round"
    job.delete()


def test_the_restricted_policy_admits_the_operator_pod(installed):
    """The operator's pod spec is created again in a namespace that enforces `restricted`."""
    with installed.new_namespace("e2e-restricted", pool=SHARED) as space:
        spec = operator_spec(installed)
        spec.pop("nodeName", None)
        spec["serviceAccountName"] = spec["serviceAccount"] = "default"
        spec["automountServiceAccountToken"] = False
        ours = {v["name"] for v in spec["volumes"] if v["name"].startswith("kube-api-access")}
        spec["volumes"] = [v for v in spec["volumes"] if v["name"] not in ours]
        for container in spec["containers"]:
            mounts = container["volumeMounts"]
            container["volumeMounts"] = [m for m in mounts if m["name"] not in ours]
        wait_for(
            "the namespace's service account",
            lambda: installed.core.list_namespaced_service_account(space).items,
        )
        body = {"metadata": {"name": "operator"}, "spec": spec}
        installed.core.create_namespaced_pod(space, body, dry_run="All")


def test_the_notes_print_commands_that_work(installed):
    notes = install.helm("get", "notes", install.RELEASE)
    commands = [w.strip() for w in notes.splitlines() if w.strip().startswith("kubectl ")]
    printed = "\n".join(commands)
    assert "rollout status deployment/holdfast" in printed, notes
    assert "helm uninstall" in notes and "keeps the CRDs" in notes
    for command in commands:
        if "-w" in command.split() or " delete " in command:
            continue
        assert kubectl(*command.split()[1:]), f"{command} printed nothing"
    assert set(PLURALS.values()) <= {
        line.split()[0]
        for line in kubectl("api-resources", "--categories", "holdfast").splitlines()
    }


@pytest.mark.fault("The API server warns of an expression in an admission policy of the chart")
def test_doctor_finds_nothing_to_mend_in_the_admission_policies(installed, namespace):
    """The controller manager checks the types of all expressions some time after an installation."""
    wait_for("the type check of every policy", lambda: all(map(_is_checked, _policies())))
    found = run_holdfast(namespace, "doctor", "-o", "json")
    checks = {check["name"]: check for check in json.loads(found.stdout)}
    assert checks["admission policies"]["level"] == "ok", checks["admission policies"]


def _policies() -> list[Object]:
    label = f"app.kubernetes.io/instance={install.RELEASE}"
    listed = json.loads(kubectl("get", "validatingadmissionpolicy", "-l", label, "-o", "json"))
    assert listed["items"], "the chart has policies"
    return listed["items"]


def _is_checked(policy: Object) -> bool:
    checked = policy.get("status", {}).get("observedGeneration")
    return checked == policy["metadata"]["generation"]


@pytest.mark.long
def test_a_reinstalled_operator_takes_over_the_jobs_of_the_one_before(scenario, kube):
    job = scenario.start(LONG, name="orphan")
    doomed = scenario.start(LONG, name="doomed")
    for each in (job, doomed):
        each.wait_round(0)
        each.wait_persisted(20)
    pods = {p["metadata"]["uid"] for p in job.pods()}

    install.helm("uninstall", install.RELEASE, *install.WAIT)
    assert custom_resources(kube) == sorted(f"{p}.holdfast.dev" for p in PLURALS.values())
    wait_for("the operator to go", lambda: not kube.pods(install.NAMESPACE))
    leftovers = json.loads(
        kubectl(
            "get",
            "clusterrole,clusterrolebinding,validatingadmissionpolicy,"
            "validatingadmissionpolicybinding",
            *("-l", f"app.kubernetes.io/instance={install.RELEASE}", "-o", "json"),
        )
    )["items"]
    assert leftovers == [], "nothing of the release is left in the cluster's scope but CRDs"
    assert finalizers(kube, scenario.namespace) == {}, "no operator is left to remove a finalizer"

    step = job.wait_step(25)
    job.wait_step(step + 15)
    assert {p["metadata"]["uid"] for p in job.pods()} == pods, "training needs no operator"
    doomed.delete()
    assert kube.get("TrainingJob", scenario.namespace, "doomed") is None, "deletable all the same"

    # A namespace with a job, a store and checkpoints can be deleted without an operator.
    with kube.new_namespace(f"{scenario.namespace}-b", pool=SHARED) as other:
        kube.create(store_manifest(other))
    kube.wait_namespace_gone(other)

    install.ensure_installed(kube)
    persisted = job.status["lastPersisted"]["step"]
    job.wait_persisted(persisted + 20)
    assert {p["metadata"]["uid"] for p in job.pods()} == pods
    assert job.round == 0, "away and back is no reason for a new round"
    assert is_true(job.read(), "Running"), show(job.status)
    scenario.kube.delete_pod(scenario.namespace, job.pod_name(1), grace_seconds=1)
    job.wait_round(1)
    job.delete()
