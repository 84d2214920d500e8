"""The kind cluster of the test bed with Holdfast installed by Helm. Failures include logs and events.

Each test gets its own namespace that enforces Pod Security `restricted`, so that tests can run side by side.
Tests marked `node_faults` break nodes, or cut off all pods of nodes. They have a pool of nodes of their own,
with a lock, and are in one file, so that no process waits for it. They run beside tests on the nodes of the
other pool. Tests marked `alone` disrupt what all tests share: operator and chart. The uninterrupted reference
run is made once for each image and arithmetic, and every scenario is compared with its bits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import subprocess
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed import faults
from testbed.config import FAULTS, POOLS, SHARED, current_bed
from testbed.driver import install
from testbed.driver.jobs import Job, Training, job_manifest, prepare_namespace
from testbed.driver.kube import Kube, kubeconfig_path
from testbed.driver.local_volumes import local_volumes
from testbed.driver.scenario import Scenario
from testbed.images import image_label

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build/e2e"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.e2e)
        item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session")
def kube() -> Kube:
    return Kube()


@pytest.fixture(scope="session")
def installed(kube: Kube, testrun_uid: str) -> Kube:
    """Install the release, once for all processes of a test run, and end the faults of a killed run."""
    installed_by = WORK / "installed-by"
    with _one_at_a_time("install"):
        if not installed_by.exists() or installed_by.read_text() != testrun_uid:
            faults.heal_nodes()
            install.ensure_installed(kube)
            installed_by.write_text(testrun_uid)
    return kube


@pytest.fixture(scope="module")
def installed_again(kube: Kube) -> Iterator[None]:
    """Install the release with the values of all scenarios after the module, even if a test failed."""
    yield
    install.ensure_installed(kube)


@pytest.fixture
def nodes_back() -> Iterator[None]:
    """Restore all nodes after the scenario, and wait until they are Ready."""
    yield
    faults.heal_nodes()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the pool of nodes for the pods of the test. One test at a time has the pool `faults`."""
    if request.node.get_closest_marker("node_faults"):
        with _one_at_a_time(f"pool-{FAULTS}"):
            yield FAULTS
    else:
        yield SHARED


@pytest.fixture
def namespace(installed: Kube, pool: str, request: pytest.FixtureRequest) -> Iterator[str]:
    with installed.new_namespace(_namespace_of(request.node), pool=pool) as name:
        prepare_namespace(installed, name, pool=pool)
        yield name


def _namespace_of(test: pytest.Item) -> str:
    """Return the same name in each run, which no other test has, also if their names begin alike."""
    words = re.sub(r"[^a-z0-9]+", "-", test.name.lower())[:32].strip("-")
    return f"e2e-{words}-{zlib.crc32(test.nodeid.encode()):08x}"


@pytest.fixture
def scenario(
    installed: Kube,
    namespace: str,
    reference: Callable[[Training], dict[int, str]],
    pool: str,
) -> Iterator[Scenario]:
    it = Scenario(installed, namespace, reference, POOLS[pool])
    yield it
    for job in it.jobs:
        job.close()


@pytest.fixture
def storage_class(installed, namespace, scenario) -> Iterator[str]:
    """A storage class of this test, with volumes on each node."""
    with local_volumes(installed, namespace, scenario.nodes):
        yield namespace


@pytest.fixture(scope="session")
def reference(installed: Kube) -> Callable[[Training], dict[int, str]]:
    """Return the digests of an uninterrupted run of the same arithmetic, on the same cluster and image."""

    def digests(training: Training) -> dict[int, str]:
        name = "reference-" + "-".join(map(str, training.arithmetic))
        image = image_label(current_bed(), "holdfast/trainer-gpt:dev")
        assert image, "there is no trainer's image: `make cluster-up` builds it"
        known = WORK / f"{name}-{image}.json"
        with _one_at_a_time(name):
            if not known.exists():
                found = _calm_run(installed, name, training)
                known.write_text(json.dumps(found))
            return {int(rank): digest for rank, digest in json.loads(known.read_text()).items()}

    return digests


def _calm_run(kube: Kube, name: str, training: Training) -> dict[int, str]:
    space = "e2e-reference"
    with _one_at_a_time(space):
        prepare_namespace(kube, space, pool=SHARED)
    job = Job(kube, space, name)
    if kube.get("TrainingJob", space, job.name) is not None:
        job.delete()
    calm = replace(training, sleep_per_step=0.0)
    job.start(job_manifest(job.name, space, calm, object_every=None, copies=0))
    job.wait_complete()
    digests = job.final_digests()
    job.delete()
    return digests


@contextlib.contextmanager
def _one_at_a_time(what: str) -> Iterator[None]:
    """Hold a lock among the parallel test processes."""
    WORK.mkdir(parents=True, exist_ok=True)
    with open(WORK / f"{what}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        namespace = getattr(item, "funcargs", {}).get("namespace")
        kube = getattr(item, "funcargs", {}).get("installed")
        if kube is not None:
            folder = WORK / re.sub(r"\W+", "-", item.name)
            _collect(kube, namespace, folder)
            report.sections.append(("collected", f"logs and events are in {folder}"))


def _collect(kube: Kube, namespace: str | None, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    spaces = [install.NAMESPACE] + ([namespace] if namespace else [])
    for space in spaces:
        for pod in kube.pods(space):
            name = pod["metadata"]["name"]
            containers = pod["spec"].get("initContainers", []) + pod["spec"]["containers"]
            for container in containers:
                for previous in (False, True):
                    text = kube.logs(space, name, container["name"], previous=previous)
                    suffix = ".previous" if previous else ""
                    if not previous or not text.startswith("(no log"):
                        (folder / f"{space}.{name}.{container['name']}{suffix}.log").write_text(
                            text
                        )
        for kind in (
            "events",
            "trainingjobs,checkpointadoptions,checkpoints,checkpointstores,checkpointgrants",
            "pods",
        ):
            kubectl = [f"{install.testbed_bin()}/kubectl", "--kubeconfig", kubeconfig_path()]
            done = subprocess.run(
                [*kubectl, "-n", space, "get", kind, "-o", "yaml"],
                capture_output=True,
                text=True,
            )
            (folder / f"{space}.{kind.split(',')[0]}.yaml").write_text(done.stdout + done.stderr)
