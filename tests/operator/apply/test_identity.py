"""Namespace, name and controller decide which job owns an object. An object that exists is not owned for
that reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.clock import ManualClock
from tests.support.operator.builders import (
    UID,
    checkpoint,
    metadata,
    raw_job,
    raw_store,
)
from tests.support.operator.fake_api import FakeApi, Raw

from holdfast_core.api import CheckpointStatus, TrainingJob
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import CheckpointId, RestartRound, Step, Worker
from holdfast_core.names import checkpoint_name, job_prefix, pod_name
from holdfast_operator.apply.apply import JobEffects, Present
from holdfast_operator.apply.command_runs import CommandRuns
from holdfast_operator.apply.reports import Reports
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.decide.stores import probe_command
from holdfast_operator.kube.api import ApiError, NameTakenError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.loop.stores import Stores
from holdfast_operator.model import labels
from holdfast_operator.model.actions import DesiredObject
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import Unreadable
from holdfast_operator.model.ownership import Key, job_key
from holdfast_operator.model.render import render_checkpoint, render_pod, render_service
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.sidecars.certificates import Certificates, JobGoneError, ca_secret_name
from holdfast_operator.sidecars.client import SidecarClient
from holdfast_operator.watch.cache import ClusterCache

NAMESPACE = "team-a"
OTHER_UID = "99999999-2222-3333-4444-555555555555"
POD = pod_name("job", UID, 0, 0)
COMMIT = CheckpointId(Step(100), RestartRound(0))


def rendered(job: TrainingJob) -> Raw:
    return render_pod(job, Worker(0), RestartRound(0), None, SidecarSettings("i"))


class Edge:
    """The operator's edges over an in-memory API that contains one job."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.raw = self.api.put("trainingjobs", raw_job())
        self.job = TrainingJob.from_dict(self.raw)
        self.clock = ManualClock()
        self.keys: list[Key] = []
        self.gone: list[str] = []
        self.cluster = Cluster(self.api)
        self.cache = ClusterCache(
            self.api,
            self.clock,
            (),
            self.keys.append,
            lambda job: self.gone.append(job.uid),
        )
        self.certificates = Certificates(self.cluster, "holdfast-system")
        metrics = Metrics()
        sidecars = Sidecars(
            SidecarClient(),
            self.certificates.client,
            self.clock,
            self.keys.append,
            metrics.unexpected,
        )
        self.effects = JobEffects(
            self.cluster,
            self.cache,
            sidecars,
            self.certificates,
            Events(self.cluster, self.clock),
            metrics,
            Present(self.clock),
        )

    async def look(self) -> None:
        """Bring every watch up to date."""
        for reflector in self.cache.reflectors:
            await reflector.relist()

    def pods(self) -> list[str]:
        return sorted(p.name for p in self.cache.pods.workers(self.job.namespace, self.job.uid))

    def events(self) -> list[str]:
        return [e["reason"] for e in self.api.all("events")]


# --------------------------------------------------------------------------- pods are not adopted


def _other_namespace(pod: Raw) -> None:
    pod["metadata"]["namespace"] = "mallory"


def _no_owner(pod: Raw) -> None:
    del pod["metadata"]["ownerReferences"]


def _owner(**changes: Any) -> Callable[[Raw], None]:
    def change(pod: Raw) -> None:
        pod["metadata"]["ownerReferences"][0].update(changes)

    return change


def _name(name: str) -> Callable[[Raw], None]:
    def change(pod: Raw) -> None:
        pod["metadata"]["name"] = name

    return change


@pytest.mark.fault("A user creates pods with the labels of a job's workers")
@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(_other_namespace, id="another namespace"),
        pytest.param(_no_owner, id="labels alone"),
        pytest.param(_owner(controller=False), id="an owner that is no controller"),
        pytest.param(_owner(controller="true"), id="a controller that is no boolean"),
        pytest.param(_owner(kind="CheckpointStore"), id="another kind"),
        pytest.param(_owner(apiVersion="apps/v1", kind="TrainingJob"), id="another group"),
        pytest.param(_owner(apiVersion="holdfast.dev.evil/v1"), id="a group that looks like ours"),
        pytest.param(_owner(uid=OTHER_UID), id="another uid"),
        pytest.param(_owner(name="other"), id="another job's name"),
        pytest.param(_name("job-0-r0"), id="a name without the digest"),
        pytest.param(_name(f"{POD}-copy"), id="a longer name"),
        pytest.param(_name(f"x{POD}"), id="a name with something before"),
    ],
)
async def test_a_forged_pod_is_ignored(forge: Callable[[Raw], None]) -> None:
    edge = Edge()
    body = rendered(edge.job)
    forge(body)
    edge.api.put("pods", body)
    await edge.look()
    edge.keys.clear()
    assert edge.pods() == []
    body["status"] = {"phase": "Failed"}
    edge.api.put("pods", body)
    await edge.look()
    own = [k for k in edge.keys if (k.namespace, k.name) == (NAMESPACE, "job")]
    assert own == [], "a forged pod does not even wake the job"
    assert "DELETE" not in [method for method, _ in edge.api.requests]


@pytest.mark.fault("Labels of a real pod are changed or removed")
async def test_labels_neither_make_nor_break_a_worker() -> None:
    edge = Edge()
    body = rendered(edge.job)
    body["metadata"]["labels"] = {labels.MANAGED_BY: labels.MANAGED_BY_VALUE}
    edge.api.put("pods", body)
    await edge.look()
    (found,) = edge.cache.pods.workers(edge.job.namespace, edge.job.uid)
    assert (found.worker, found.birth_round) == (0, 0)


@pytest.mark.fault("A user creates thousands of forged pods")
async def test_forged_pods_are_counted_and_reported_once_for_each_namespace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    edge = Edge()
    for index in range(50):
        body = rendered(edge.job)
        body["metadata"].update(namespace="mallory", name=f"forged-{index}")
        edge.api.put("pods", body)
    await edge.look()
    await edge.look()
    assert edge.cache.pods.foreign_count() == 50
    reported = [r for r in caplog.records if "ignores it" in r.getMessage()]
    assert len(reported) == 1
    for pod in list(edge.api.all("pods")):
        edge.api.remove("pods", "mallory", pod["metadata"]["name"])
    await edge.look()
    assert edge.cache.pods.foreign_count() == 0


# --------------------------------------------------------------------------- exists is not ours


@pytest.mark.fault("A foreign pod has the name of a worker's")
async def test_a_create_meets_its_own_pod_and_no_other() -> None:
    edge = Edge()
    body = rendered(edge.job)
    first = await edge.cluster.create_owned(body)
    again = await edge.cluster.create_owned(body)
    assert (again.uid, again.existed) == (first.uid, True)
    pod = edge.api.objects["pods", NAMESPACE, POD]
    pod["metadata"]["ownerReferences"][0]["uid"] = OTHER_UID
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(NameTakenError, match=f"{POD}.*is being deleted.*{OTHER_UID}"):
        await edge.cluster.create_owned(body)
    assert await edge.effects.pod_is_gone(edge.job, POD), "the job itself has no such pod"


@pytest.mark.fault("A foreign Service has the name of the gang's")
async def test_a_foreign_service_is_reported_and_does_not_stop_the_job() -> None:
    edge = Edge()
    body = render_service(edge.job)
    edge.api.put("services", {**body, "metadata": {**body["metadata"], "ownerReferences": []}})
    service = DesiredObject(body)
    await edge.effects.put(edge.job, service)
    assert edge.events() == ["NameTaken"]
    assert edge.effects.is_present(edge.job, service)
    assert (
        edge.api.objects["services", NAMESPACE, body["metadata"]["name"]]["metadata"][
            "ownerReferences"
        ]
        == []
    )


def record() -> CheckpointStatus:
    return checkpoint(100, 0).status


def checkpoint_body(job: TrainingJob, name: str) -> Raw:
    return render_checkpoint(job, name, COMMIT.step, record())


def without_status(body: Raw) -> Raw:
    """Return the body as the API server stores it before the write of its status."""
    return {k: v for k, v in body.items() if k != "status"}


@pytest.mark.fault("An operator dies between a Checkpoint and its status")
async def test_a_record_is_repaired_where_an_operator_died_before_its_status() -> None:
    edge = Edge()
    name = checkpoint_name("job", UID, COMMIT)
    body = checkpoint_body(edge.job, name)
    edge.api.put("checkpoints", without_status(body))
    await edge.effects.put(edge.job, DesiredObject(body))
    written = edge.api.objects["checkpoints", NAMESPACE, name]["status"]
    assert (written["phase"], written["jobUid"]) == ("Committed", UID)


@pytest.mark.fault("A newer CRD adds a field to the jobRef of a Checkpoint")
async def test_a_field_that_a_newer_crd_adds_to_job_ref_does_not_hide_a_record() -> None:
    edge = Edge()
    name = checkpoint_name("job", UID, COMMIT)
    body = checkpoint_body(edge.job, name)
    newer = {"jobRef": {"name": "job", "namespace": "team"}, "step": COMMIT.step}
    edge.api.put("checkpoints", {**without_status(body), "spec": newer})
    await edge.effects.put(edge.job, DesiredObject(body))
    assert edge.api.objects["checkpoints", NAMESPACE, name]["status"]["phase"] == "Committed"


@pytest.mark.fault("A foreign Checkpoint has the name of a record")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"status": {"phase": "Committed", "jobUid": OTHER_UID}}, id="another job's"),
        pytest.param(
            {"status": {"phase": "Committed", "jobUid": UID, "manifest": "b3:x"}}, id="another save"
        ),
        pytest.param({"spec": {"jobRef": {"name": "other"}, "step": 100}}, id="another job's name"),
        pytest.param({"spec": {"jobRef": {"name": "job"}, "step": 90}}, id="another step"),
        pytest.param({"spec": {"jobRef": {"name": "job"}}}, id="a request"),
    ],
)
async def test_a_foreign_checkpoint_is_neither_taken_nor_overwritten(change: Raw) -> None:
    edge = Edge()
    name = checkpoint_name("job", UID, COMMIT)
    body = checkpoint_body(edge.job, name)
    there = edge.api.put("checkpoints", {**without_status(body), **change})
    before = dict(there)
    with pytest.raises(NameTakenError, match=name):
        await edge.effects.put(edge.job, DesiredObject(body))
    assert edge.api.objects["checkpoints", NAMESPACE, name] == before
    assert edge.events() == ["NameTaken"]


# --------------------------------------------------------------------------- unreadable objects


async def test_an_unreadable_job_is_not_gone_and_goes_on_when_it_can_be_read() -> None:
    edge = Edge()
    await edge.look()
    edge.raw["status"]["phase"] = "Hibernating"
    edge.api.touch(edge.raw)
    await edge.look()
    assert edge.cache.jobs.get(job_key(NAMESPACE, "job")) is None
    hidden = edge.cache.unreadable.get("TrainingJob", NAMESPACE, "job")
    assert hidden.problem.startswith("status.phase: Input should be")
    assert hidden.problem.endswith("found 'Hibernating'")
    assert edge.gone == []
    assert edge.cache.job_uids() == {UID}
    edge.raw["status"] = {}
    edge.api.touch(edge.raw)
    await edge.look()
    assert edge.cache.jobs.get(job_key(NAMESPACE, "job")) is not None
    assert edge.cache.unreadable_objects() == ()
    edge.raw["status"]["phase"] = "Hibernating"
    await edge.look()
    edge.api.remove("trainingjobs", NAMESPACE, "job")
    await edge.look()
    assert edge.gone == [UID], "deleted while it could not be read"
    assert edge.cache.job_uids() == set()


@pytest.mark.fault("An unreadable job is deleted, or created again")
async def test_a_job_created_again_while_the_old_one_could_not_be_read() -> None:
    edge = Edge()
    edge.raw["status"]["phase"] = "Hibernating"
    await edge.look()
    again = raw_job()
    again["metadata"]["uid"] = OTHER_UID
    edge.api.put("trainingjobs", again)
    await edge.look()
    found = edge.cache.jobs.get(job_key(NAMESPACE, "job"))
    assert found.uid == OTHER_UID
    assert edge.gone == [UID]
    assert edge.cache.job_uids() == {OTHER_UID}


async def test_unreadable_pods_and_checkpoints_belong_to_their_job() -> None:
    edge = Edge()
    edge.api.put("pods", {**rendered(edge.job), "status": {"phase": "Paused"}})
    name = checkpoint_name("job", UID, COMMIT)
    edge.api.put("checkpoints", {**checkpoint_body(edge.job, name), "status": {"round": "x"}})
    await edge.look()
    assert len(edge.cache.unreadable_objects()) == 2
    (pod,) = edge.cache.pods.unreadable(NAMESPACE, UID)
    assert (pod.name, pod.problem) == (POD, "ValueError: 'Paused' is not a valid PodPhase")
    (found,) = edge.cache.unreadable.of("Checkpoint", NAMESPACE, job_prefix("job", UID))
    assert (found.name, found.problem.partition(":")[0]) == (name, "status.round")
    edge.api.remove("pods", NAMESPACE, POD)
    edge.api.remove("checkpoints", NAMESPACE, name)
    await edge.look()
    assert edge.cache.pods.unreadable(NAMESPACE, UID) == ()
    assert edge.cache.unreadable.of("Checkpoint", NAMESPACE, job_prefix("job", UID)) == ()


# --------------------------------------------------------------------------- authorities


CA = ("secrets", "holdfast-system", ca_secret_name(UID))


@pytest.mark.fault("A call for a deleted job arrives late")
async def test_an_authority_is_created_for_leaves_and_never_by_a_late_call() -> None:
    edge = Edge()
    with pytest.raises(HoldfastError, match="does not exist"):
        await edge.certificates.client(UID)
    assert edge.api.all("secrets") == []
    await edge.certificates.round_data(edge.job, [POD])
    assert CA in edge.api.objects
    await edge.certificates.client(UID)
    edge.api.remove("trainingjobs", NAMESPACE, "job")
    await edge.certificates.forget(UID)
    with pytest.raises(HoldfastError, match="does not exist"):
        await edge.certificates.client(UID)
    with pytest.raises(JobGoneError):
        await edge.certificates.round_data(edge.job, [POD])
    assert edge.api.all("secrets") == []


class DeletedMeanwhile(FakeApi):
    """An API in which the job is replaced by another one of its name while its authority is being created."""

    async def post(self, path: str, body: Any, params: Any = None) -> Any:
        answer = await super().post(path, body, params)
        if path.endswith("/secrets"):
            self.put("trainingjobs", {**raw_job(), "metadata": {**AGAIN}})
        return answer


AGAIN = {"name": "job", "namespace": NAMESPACE, "uid": OTHER_UID}


@pytest.mark.fault("A job is deleted while its authority is created")
async def test_an_authority_whose_job_went_meanwhile_is_deleted_again() -> None:
    api = DeletedMeanwhile()
    job = TrainingJob.from_dict(api.put("trainingjobs", raw_job()))
    certificates = Certificates(Cluster(api), "holdfast-system")
    with pytest.raises(JobGoneError):
        await certificates.round_data(job, [POD])
    assert api.all("secrets") == []


@pytest.mark.fault("Authorities of deleted jobs are left behind while a watch lags")
async def test_the_sweep_finds_what_is_left_and_spares_what_a_stale_watch_misses() -> None:
    edge = Edge()
    await edge.certificates.round_data(edge.job, [POD])
    vanished = metadata(edge.job, uid=OTHER_UID)
    edge.api.put("trainingjobs", {**raw_job(), "metadata": {**AGAIN, "name": "gone"}})
    await edge.certificates.round_data(metadata(vanished, name="gone"), [POD])
    edge.api.remove("trainingjobs", NAMESPACE, "gone")
    refused = metadata(edge.job, namespace="closed", name="kept", uid="0" * 36)
    meta = {"name": "kept", "namespace": "closed", "uid": refused.uid}
    edge.api.put("trainingjobs", {**raw_job(), "metadata": meta})
    await edge.certificates.round_data(refused, [POD])
    edge.api.closed.add("closed")
    another = {"name": "token", "namespace": "holdfast-system"}
    edge.api.put("secrets", {"metadata": another})
    with pytest.raises(ApiError, match="closed"):
        await edge.certificates.sweep(set())
    kept = {ca_secret_name(UID), ca_secret_name(refused.uid), "token"}
    assert edge.api.names("secrets") == kept


async def test_problem_is_bounded() -> None:
    edge = Edge()
    edge.raw["spec"]["checkpoint"]["interval"]["steps"] = "x" * 100_000
    edge.raw["status"] = {"phase": "y" * 100_000}
    await edge.look()
    (hidden,) = edge.cache.unreadable_objects()
    assert isinstance(hidden, Unreadable)
    assert len(hidden.problem) <= 500
    assert hidden.problem.startswith("spec.checkpoint.interval.steps: ")


# --------------------------------------------------------------------------- reports


@pytest.mark.fault("A job is unreadable while its condition is written")
async def test_an_unreadable_job_names_the_field_and_keeps_the_rest_of_its_status() -> None:
    edge = Edge()
    newer = {"type": "Paused", "status": "True", "reason": "New", "lastTransitionTime": "x"}
    edge.raw["status"] = {"phase": "Hibernating", "conditions": [newer], "naps": 3}
    reports = Reports(edge.cluster, Events(edge.cluster, edge.clock), edge.clock)
    for _ in range(3):
        await edge.look()
        (hidden,) = edge.cache.unreadable_objects()
        await reports.report(hidden)
    assert edge.events() == ["CannotRead"]
    status = edge.raw["status"]
    assert (status["phase"], status["naps"], status["conditions"][0]) == (
        "Hibernating",
        3,
        newer,
    )
    (condition,) = status["conditions"][1:]
    assert (condition["type"], condition["status"]) == ("Readable", "False")
    assert condition["message"].startswith("status.phase: Input should be")
    assert len([m for m, _ in edge.api.requests if m == "PATCH"]) == 1


@pytest.mark.parametrize("conditions", ["broken", [1, 2], {"a": 1}])
async def test_conditions_that_are_no_list_of_conditions_are_left_alone(conditions: Any) -> None:
    edge = Edge()
    edge.raw["status"] = {"conditions": conditions}
    reports = Reports(edge.cluster, Events(edge.cluster, edge.clock), edge.clock)
    await edge.look()
    (hidden,) = edge.cache.unreadable_objects()
    await reports.report(hidden)
    assert edge.raw["status"] == {"conditions": conditions}
    assert edge.events() == ["CannotRead"]


@pytest.mark.fault("A foreign pod has the name of a store's probe")
async def test_a_foreign_pod_with_the_name_of_a_probe_is_reported_on_the_store() -> None:
    edge = Edge()
    raw = raw_store("main")
    raw["status"] = {}
    edge.api.put("checkpointstores", raw)
    await edge.look()
    store = edge.cache.stores.get(NAMESPACE, "main")
    assert store is not None
    name = probe_command(store).pod_name(store)
    forged = {"name": name, "namespace": NAMESPACE, "labels": {}}
    edge.api.put("pods", {"metadata": forged})
    events = Events(edge.cluster, edge.clock)
    commands = CommandRuns(edge.cluster, edge.cache, SidecarSettings("i"), edge.clock)
    stores = Stores(edge.cluster, edge.cache, events, commands, Metrics(), edge.clock)
    await stores.reconcile(NAMESPACE, "main")
    (reported,) = edge.api.all("checkpointstores")[0]["status"]["conditions"]
    assert (reported["status"], reported["reason"]) == ("False", "ProbeRefused")
    assert name in reported["message"]
    assert name in edge.api.names("pods", NAMESPACE)
