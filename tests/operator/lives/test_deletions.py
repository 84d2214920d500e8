"""Data of deleted Checkpoints and deleted jobs, in each state of the job and of the store.

The operator's rules, caches and writes run against an in-memory API. The pod that deletes is played: it
applies its request to a store, which is a set.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import pytest
from tests.support.api_objects import checkpoint_object, job_object, store_object
from tests.support.clock import ManualClock
from tests.support.operator.fake_api import FakeApi, Raw

from holdfast_core.api import Checkpoint
from holdfast_core.contract import DeleteContract
from holdfast_core.ids import CheckpointId, JobUid, RestartRound, Step
from holdfast_core.names import checkpoint_name
from holdfast_operator.apply.apply import JobEffects, Present
from holdfast_operator.apply.command_runs import CommandRuns
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.decide.deletions import MAX_BATCH
from holdfast_operator.decide.ends import RELEASE_SECONDS
from holdfast_operator.kube.api import ApiError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.loop.deletions import Deletions, wait_seconds
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.watch.cache import ClusterCache

NAMESPACE = "team"
UID = JobUid("11111111-0000-0000-0000-000000000001")
STAMP = "2026-05-01T12:00:00Z"
MAX_VARIABLE_BYTES = (128 << 10) - len("HOLDFAST_DELETE=") - 1
"""The kernel's limit of one string of a program's environment."""
STATES = ("complete", "failed", "suspended", "being deleted", "gone")


def condition(kind: str, *, value: str = "True") -> dict[str, str]:
    return {
        "type": kind,
        "status": value,
        "reason": "Because",
        "message": "",
        "lastTransitionTime": STAMP,
    }


@dataclass
class Bed:
    """One store, one job and the process of an operator."""

    api: FakeApi = field(default_factory=FakeApi)
    clock: ManualClock = field(default_factory=ManualClock)
    stored: set[CheckpointId] = field(default_factory=set)
    down: bool = False
    stuck: bool = False
    """The pod does not start, because a Secret is missing."""
    requests: list[DeleteContract] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()
        store = store_object("main", namespace=NAMESPACE)
        store["metadata"]["generation"] = 1
        self.api.put("checkpointstores", store)

    def restart(self) -> None:
        """Replace the process of the operator."""
        cluster = Cluster(self.api)
        self.cache = ClusterCache(self.api, self.clock, (), lambda key: None, lambda job: None)
        events = Events(cluster, self.clock)
        self.commands = CommandRuns(
            cluster, self.cache, SidecarSettings("example/sidecar:1"), self.clock
        )
        effects = JobEffects(
            cluster,
            self.cache,
            None,
            None,
            events,
            Metrics(),
            Present(self.clock),  # type: ignore[arg-type]
        )
        self.deletions = Deletions(
            cluster, self.cache, events, self.commands, effects.release_checkpoint, self.clock
        )

    # ------------------------------------------------------------------ what there is

    def job(self, state: str, **retention: Any) -> None:
        raw = job_object("gpt", namespace=NAMESPACE)
        raw["metadata"].update(uid=UID, generation=1)
        raw["spec"]["checkpoint"] |= {
            "object": {"storeRef": {"name": "main"}, "every": {"steps": 50}},
            "retention": retention,
        }
        status: dict[str, Any] = {"restartRound": 0, "members": [0], "conditions": []}
        status["lastPersisted"] = {"step": 3, "round": 0, "manifest": f"b3:{'0' * 64}"}
        match state:
            case "complete" | "failed":
                status["conditions"] = [condition(state.capitalize())]
                status["completionTime"] = STAMP
            case "suspended":
                raw["spec"]["suspend"] = True
                status["conditions"] = [condition("Suspended")]
            case "being deleted":
                raw["metadata"] |= {
                    "deletionTimestamp": STAMP,
                    "finalizers": ["foregroundDeletion"],
                }
            case "gone":
                return
        self.api.put("trainingjobs", {**raw, "status": status})

    def checkpoint(
        self, step: int, *, when: str = "Retain", quarantined: bool = False, **spec: Any
    ) -> str:
        id_ = CheckpointId(Step(step), RestartRound(0))
        name = checkpoint_name("gpt", UID, id_)
        raw = checkpoint_object(name, namespace=NAMESPACE)
        raw["spec"] = {"jobRef": {"name": "gpt"}, "step": step, **spec}
        kinds = ["Committed", "Replicated", "Persisted", "Restorable"]
        raw["status"] = {
            "phase": "Committed",
            "round": 0,
            "manifest": f"b3:{'0' * 64}",
            "jobUid": UID,
            "jobNamespace": NAMESPACE,
            "store": "main",
            "whenDeleted": when,
            "conditions": [
                *map(condition, kinds),
                condition("Quarantined", value=str(quarantined)),
            ],
        }
        if spec.get("deletionPolicy") == "DeleteData":
            raw["metadata"]["finalizers"] = [Checkpoint.FINALIZER]
        stored = self.api.put("checkpoints", raw)
        stored["status"]["objectUid"] = stored["metadata"]["uid"]
        self.api.touch(stored)
        self.stored.add(id_)
        return name

    def restore_copies(self) -> None:
        """Replace the Checkpoints by what a backup has of them, as in another cluster or a new namespace."""
        for raw in self.api.all("checkpoints", NAMESPACE):
            meta = raw["metadata"]
            self.api.remove("checkpoints", NAMESPACE, meta["name"])
            copy = {**raw, "metadata": {**meta, "uid": f"copy-{meta['name']}"}}
            self.api.put("checkpoints", copy)

    def delete(self, name: str) -> None:
        """Delete a Checkpoint as a person does."""
        path = f"/apis/holdfast.dev/v1alpha1/namespaces/{NAMESPACE}/checkpoints/{name}"
        asyncio.run(self.api.delete(path))

    def clone(self, source: str) -> None:
        raw = job_object(
            "clone", namespace=NAMESPACE, restoreFrom={"checkpointRef": {"name": source}}
        )
        self.api.put("trainingjobs", raw)

    # ------------------------------------------------------------------ time

    def run(self, seconds: float, step: float = 2.0) -> None:
        asyncio.run(self._run(seconds, step))

    async def _run(self, seconds: float, step: float) -> None:
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            for reflector in self.cache.reflectors:
                await reflector.relist()
            await self.deletions.reconcile(NAMESPACE, "main")
            self._play()
            self.clock.advance(step)

    def _play(self) -> None:
        """Play the kubelet and the command of the pods that delete."""
        for pod in self.api.all("pods", NAMESPACE):
            meta, spec = pod["metadata"], pod["spec"]
            if "deletionTimestamp" in meta:
                self.api.remove("pods", NAMESPACE, meta["name"])
            elif spec["containers"][0]["command"] == ["holdfast-sidecar", "delete"]:
                self._carry_out(pod)

    def _carry_out(self, pod: Raw) -> None:
        if self.stuck:
            waiting = {"reason": "ContainerCreating"}
            pod["status"] = {
                "phase": "Pending",
                "containerStatuses": [{"name": "delete", "state": {"waiting": waiting}}],
            }
            self.api.touch(pod)
            return
        if (pod.get("status") or {}).get("phase"):
            return
        variables = {e["name"]: e["value"] for e in pod["spec"]["containers"][0]["env"]}
        assert max(map(len, variables.values())) < MAX_VARIABLE_BYTES, (
            "no kernel starts this program"
        )
        wanted = DeleteContract.from_json(variables["HOLDFAST_DELETE"])
        assert (wanted.namespace, wanted.job_uid) == (NAMESPACE, UID)
        self.requests.append(wanted)
        report: dict[str, Any] = {"error": "UnavailableError", "message": "no answer"}
        if not self.down:
            report = {"deleted": len(wanted.checkpoints)}
            self.stored -= set(wanted.checkpoints)
            if wanted.keep is not None:
                self.stored &= set(wanted.keep)
        ended = {"message": json.dumps(report), "exitCode": int(self.down)}
        pod["status"] = {
            "phase": "Failed" if self.down else "Succeeded",
            "containerStatuses": [{"name": "delete", "state": {"terminated": ended}}],
        }
        self.api.touch(pod)

    # ------------------------------------------------------------------ what is found

    @property
    def steps(self) -> set[int]:
        """Steps of which the store has data."""
        return {id_.step for id_ in self.stored}

    @property
    def objects(self) -> set[int]:
        """Steps of which there are Checkpoint objects."""
        return {raw["spec"]["step"] for raw in self.api.all("checkpoints", NAMESPACE)}

    def events(self, reason: str) -> list[str]:
        found = self.api.all("events", NAMESPACE)
        return [raw["message"] for raw in found if raw["reason"] == reason]


@pytest.fixture
def bed() -> Iterator[Bed]:
    yield Bed()


# --------------------------------------------------------------------------- deletionPolicy


@pytest.mark.fault("A Checkpoint of a job that is over, suspended or gone is deleted")
@pytest.mark.parametrize("state", STATES)
def test_the_data_goes_with_the_object(bed: Bed, state: str) -> None:
    bed.job(state)
    gone = bed.checkpoint(1, deletionPolicy="DeleteData")
    bed.checkpoint(2)
    bed.checkpoint(3)
    bed.delete(gone)
    bed.run(20)
    assert (bed.objects, bed.steps) == ({2, 3}, {2, 3})
    assert [len(r.checkpoints) for r in bed.requests] == [1]
    assert bed.requests[0].ended is (state != "suspended")
    assert bed.events("DataDeleted")
    assert not bed.api.all("pods")


@pytest.mark.fault("A deletionPolicy is edited after the job is over, suspended or gone")
@pytest.mark.parametrize("state", STATES)
def test_the_data_goes_with_an_object_whose_policy_was_edited(bed: Bed, state: str) -> None:
    bed.job(state)
    gone = bed.checkpoint(1)
    bed.checkpoint(3)
    bed.run(4)
    raw = bed.api.objects["checkpoints", NAMESPACE, gone]
    raw["spec"]["deletionPolicy"] = "DeleteData"
    raw["metadata"]["finalizers"] = ["example.com/other"]
    bed.api.touch(raw)
    bed.run(4)
    assert raw["metadata"]["finalizers"] == ["example.com/other", Checkpoint.FINALIZER]
    raw["metadata"]["finalizers"] = [Checkpoint.FINALIZER]
    bed.delete(gone)
    bed.run(20)
    assert (bed.objects, bed.steps) == ({3}, {3})


@pytest.mark.parametrize("state", STATES)
def test_the_data_stays_with_the_policy_retain(bed: Bed, state: str) -> None:
    bed.job(state)
    gone = bed.checkpoint(1, deletionPolicy="Retain")
    bed.delete(gone)
    bed.run(20)
    assert (bed.objects, bed.steps, bed.requests) == (set(), {1}, [])


@pytest.mark.fault("A Checkpoint is deleted while its store is down, and the job has no gang")
@pytest.mark.parametrize("state", STATES)
def test_a_store_that_is_down_holds_the_object_for_ten_minutes_only(bed: Bed, state: str) -> None:
    bed.job(state)
    gone = bed.checkpoint(1, deletionPolicy="DeleteData")
    bed.delete(gone)
    bed.down = True
    bed.run(RELEASE_SECONDS - 20)
    assert bed.objects == {1}
    assert 3 < len(bed.requests) < 15, "each wait is longer than the one before"
    bed.run(60)
    assert (bed.objects, bed.steps) == (set(), {1})
    (text,) = bed.events("DataKept")
    assert "no answer" in text
    assert f"{NAMESPACE}/{UID}/" in text


def test_a_store_that_comes_back_in_time_is_used(bed: Bed) -> None:
    bed.job("gone")
    bed.delete(bed.checkpoint(1, deletionPolicy="DeleteData"))
    bed.down = True
    bed.run(200)
    bed.down = False
    bed.run(200)
    assert (bed.objects, bed.steps) == (set(), set())


@pytest.mark.fault("A job that starts from a checkpoint cannot be read when that is to be deleted")
@pytest.mark.parametrize(
    ("namespace", "by_job", "stays"),
    [(NAMESPACE, False, True), (NAMESPACE, True, True), ("a-stranger", False, False)],
)
def test_what_an_unreadable_job_starts_from_stays(
    bed: Bed, namespace: str, by_job: bool, stays: bool
) -> None:
    bed.job("gone")
    name = bed.checkpoint(1, when="DeleteData")
    source = {"checkpointRef": {"name": name, "namespace": NAMESPACE}}
    clone = job_object(
        "clone", namespace, restoreFrom={"jobRef": {"name": "gpt"}} if by_job else source
    )
    clone["spec"]["workers"] = "many"
    bed.api.put("trainingjobs", clone)
    bed.run(40)
    assert bed.steps == ({1} if stays else set())
    bed.api.remove("trainingjobs", namespace, "clone")
    bed.run(40)
    assert bed.steps == set()


@pytest.mark.fault("A store refuses deletes for two days, and then permits them")
def test_the_wait_between_attempts_has_a_limit() -> None:
    waits = [wait_seconds(n) for n in (0, 1, 2, 20, 5000)]
    assert waits == [5.0, 10.0, 20.0, 120.0, 120.0]


@pytest.mark.fault("The Secret of a store is gone when data must be deleted")
def test_a_pod_that_does_not_start_holds_nothing(bed: Bed) -> None:
    bed.job("gone")
    bed.delete(bed.checkpoint(1, deletionPolicy="DeleteData"))
    bed.stuck = True
    bed.run(RELEASE_SECONDS + 60)
    assert (bed.objects, bed.steps) == (set(), {1})
    assert "Secret" in bed.events("DataKept")[0]


@pytest.mark.fault("A namespace is deleted that has Checkpoints with deletionPolicy DeleteData")
def test_a_namespace_that_ends_is_not_held(bed: Bed) -> None:
    bed.job("gone")
    bed.delete(bed.checkpoint(1, deletionPolicy="DeleteData"))
    text = f"namespaces {NAMESPACE} is forbidden: it is being terminated: because it is being terminated"
    bed.api.refuse["POST", "pods"] = ApiError(403, "Forbidden", text)
    bed.run(10)
    assert (bed.objects, bed.steps) == (set(), {1})


@pytest.mark.fault("A webhook of the cluster fails for the pod that deletes data")
def test_a_pod_that_a_webhook_refuses_holds_nothing(bed: Bed) -> None:
    bed.job("gone")
    bed.delete(bed.checkpoint(1, deletionPolicy="DeleteData"))
    text = 'Internal error occurred: failed calling webhook "pods.example.com"'
    bed.api.refuse["POST", "pods"] = ApiError(500, "InternalError", text)
    bed.run(RELEASE_SECONDS + 60)
    assert (bed.objects, bed.steps) == (set(), {1})
    (kept,) = bed.events("DataKept")
    assert text in kept


@pytest.mark.fault("A CheckpointStore is deleted before the Checkpoints whose data it has")
def test_a_store_that_is_gone_holds_nothing(bed: Bed) -> None:
    bed.job("gone")
    bed.delete(bed.checkpoint(1, deletionPolicy="DeleteData"))
    bed.api.remove("checkpointstores", NAMESPACE, "main")
    bed.run(10)
    assert bed.objects == set()
    assert "CheckpointStore main does not exist" in bed.events("DataKept")[0]


def test_a_policy_that_is_edited_without_a_store_is_answered(bed: Bed) -> None:
    bed.job("gone")
    name = bed.checkpoint(1, deletionPolicy="DeleteData")
    del bed.api.objects["checkpoints", NAMESPACE, name]["metadata"]["finalizers"]
    bed.api.remove("checkpointstores", NAMESPACE, "main")
    bed.run(4)
    bed.delete(name)
    bed.run(10)
    assert bed.objects == set()
    assert "CheckpointStore main does not exist" in bed.events("DataKept")[0]


@pytest.mark.fault("A CheckpointStore is deleted during a deletion, created again, and read in")
def test_a_store_that_is_created_again_keeps_what_is_imported_from_it(bed: Bed) -> None:
    bed.job("gone")
    first = bed.checkpoint(1, deletionPolicy="DeleteData")
    bed.stuck = True
    bed.delete(first)
    bed.run(4)
    store = bed.api.objects["checkpointstores", NAMESPACE, "main"]
    bed.api.remove("checkpointstores", NAMESPACE, "main")
    for pod in bed.api.all("pods", NAMESPACE):  # the store owned them
        bed.api.remove("pods", NAMESPACE, pod["metadata"]["name"])
    bed.run(10)
    assert bed.events("DataKept")

    metadata = {**store["metadata"], "uid": "the-second-one"}
    bed.api.put("checkpointstores", {**store, "metadata": metadata})
    bed.checkpoint(1)
    bed.stuck = False
    bed.delete(bed.checkpoint(2, deletionPolicy="DeleteData"))
    bed.run(40)
    assert (bed.objects, bed.steps) == ({1}, {1})


@pytest.mark.fault("A CheckpointStore holds a value of a newer release")
def test_a_store_that_cannot_be_read_holds_the_object_for_ten_minutes_only(bed: Bed) -> None:
    bed.job("gone")
    bed.delete(bed.checkpoint(1, deletionPolicy="DeleteData"))
    store = bed.api.objects["checkpointstores", NAMESPACE, "main"]
    store["spec"] = {"later": {}}
    bed.api.touch(store)
    bed.run(RELEASE_SECONDS - 20)
    assert bed.objects == {1}
    bed.run(40)
    assert bed.objects == set()
    assert "cannot be read" in bed.events("DataKept")[0]


@pytest.mark.fault("A backup restores Checkpoints whose job trains in another cluster")
@pytest.mark.parametrize("when", ["DeleteData", "KeepLast"])
def test_a_copy_from_a_backup_deletes_nothing(bed: Bed, when: str) -> None:
    bed.checkpoint(1, when=when)
    copied = bed.checkpoint(2, when=when, deletionPolicy="DeleteData")
    bed.restore_copies()
    bed.run(40)
    assert (bed.objects, bed.steps, bed.requests) == ({1, 2}, {1, 2}, [])
    bed.delete(copied)
    bed.run(20)
    assert (bed.objects, bed.steps, bed.requests) == ({1}, {1, 2}, [])
    (text,) = bed.events("DataKept")
    assert "its job may train in another cluster" in text


@pytest.mark.parametrize("state", ["complete", "suspended"])
def test_a_copy_from_a_backup_of_a_job_that_is_there_deletes_its_data(bed: Bed, state: str) -> None:
    bed.job(state)
    copied = bed.checkpoint(1, deletionPolicy="DeleteData")
    bed.checkpoint(3)
    bed.restore_copies()
    bed.delete(copied)
    bed.run(20)
    assert (bed.objects, bed.steps) == ({3}, {3})


def test_a_pod_of_an_earlier_process_does_not_stay(bed: Bed) -> None:
    bed.job("gone")
    name = bed.checkpoint(1, deletionPolicy="DeleteData")
    bed.delete(name)
    bed.run(2)
    assert bed.api.all("pods")
    bed.restart()
    bed.api.remove("checkpoints", NAMESPACE, name)
    bed.run(10)
    assert not bed.api.all("pods")


def test_a_gang_that_trains_deletes_by_itself(bed: Bed) -> None:
    bed.job("running")
    bed.delete(bed.checkpoint(1, deletionPolicy="DeleteData"))
    bed.run(60)
    assert (bed.objects, bed.requests) == ({1}, [])


def test_a_suspended_job_keeps_what_it_resumes_from(bed: Bed) -> None:
    bed.job("suspended")
    for step in (2, 3):
        bed.delete(bed.checkpoint(step, deletionPolicy="DeleteData"))
    bed.run(60)
    assert bed.steps == {3}
    bed.run(RELEASE_SECONDS)
    assert (bed.objects, bed.steps) == (set(), {3})
    assert "needs it to resume" in bed.events("DataKept")[0]


def test_what_another_job_starts_from_waits_and_then_stays(bed: Bed) -> None:
    bed.job("gone")
    source = bed.checkpoint(1, deletionPolicy="DeleteData")
    bed.clone(source)
    bed.delete(source)
    bed.run(RELEASE_SECONDS + 60)
    assert (bed.objects, bed.steps, bed.requests) == (set(), {1}, [])
    assert "another job starts from it" in bed.events("DataKept")[0]


def test_a_pinned_checkpoint_goes_without_its_data(bed: Bed) -> None:
    """The pass of the job's key releases it, as an object without data (ends.release_all)."""
    bed.job("gone")
    bed.delete(bed.checkpoint(1, deletionPolicy="DeleteData", pin=True))
    bed.run(60)
    assert (bed.steps, bed.requests) == ({1}, [])


def mark_as_pruned(bed: Bed, name: str) -> None:
    bed.api.objects["checkpoints", NAMESPACE, name]["status"]["phase"] = "Deleting"


@pytest.mark.fault("A job ends between the mark of a checkpoint that retention prunes and the deed")
@pytest.mark.parametrize("state", ["complete", "suspended", "running"])
def test_what_retention_had_marked_goes_after_the_end(bed: Bed, state: str) -> None:
    """A suspended job goes on to prune when it resumes."""
    bed.job(state)
    for step in (1, 2, 3):
        mark_as_pruned(bed, bed.checkpoint(step, pin=step == 2))
    bed.run(30)
    left = {2, 3} if state == "complete" else {1, 2, 3}
    assert bed.objects == bed.steps == left


@pytest.mark.fault("The operator is restarted while a pod deletes data")
def test_a_new_process_goes_on(bed: Bed) -> None:
    bed.job("gone")
    for step in range(1, 6):
        bed.delete(bed.checkpoint(step, deletionPolicy="DeleteData"))
    for _ in range(8):
        bed.restart()
        bed.run(4)
    assert (bed.objects, bed.steps) == (set(), set())


def test_thousands_of_objects_wait_for_their_turn(bed: Bed) -> None:
    bed.job("gone")
    for step in range(1, 501):
        bed.delete(bed.checkpoint(step, deletionPolicy="DeleteData"))
    bed.run(40)
    assert (bed.objects, bed.steps) == (set(), set())
    assert [len(r.checkpoints) for r in bed.requests] == [200, 200, 100]


# --------------------------------------------------------------------------- whenDeleted


@pytest.mark.fault("A job with whenDeleted is deleted, also while no operator runs")
@pytest.mark.parametrize(
    ("policy", "left"), [("Retain", {1, 2, 3}), ("DeleteData", set()), ("KeepLast", {3})]
)
def test_what_a_deleted_job_leaves(bed: Bed, policy: str, left: set[int]) -> None:
    """The job is gone before this process looks for the first time."""
    for step in (1, 2, 3):
        bed.checkpoint(step, when=policy)
    bed.stored.add(CheckpointId(Step(9), RestartRound(0)))  # no object names it
    bed.run(30)
    assert bed.objects == left
    assert bed.steps == (left | {9} if policy == "Retain" else left)
    assert len(bed.requests) == (policy != "Retain")
    assert not bed.api.all("pods")


@pytest.mark.parametrize("policy", ["DeleteData", "KeepLast"])
def test_nothing_goes_while_the_job_exists(bed: Bed, policy: str) -> None:
    bed.job("complete", whenDeleted=policy)
    bed.checkpoint(1, when=policy)
    bed.run(60)
    assert (bed.objects, bed.requests) == ({1}, [])


@pytest.mark.parametrize("policy", ["DeleteData", "KeepLast"])
def test_pinned_and_cloned_ones_stay_as_long_as_that_is_so(bed: Bed, policy: str) -> None:
    pinned = bed.checkpoint(1, when=policy, pin=True)
    bed.clone(bed.checkpoint(2, when=policy))
    bed.checkpoint(3, when=policy)
    bed.checkpoint(4, when=policy)
    last = {4} if policy == "KeepLast" else set()
    bed.run(30)
    assert bed.objects == bed.steps == {1, 2} | last
    bed.api.remove("trainingjobs", NAMESPACE, "clone")
    raw = bed.api.objects["checkpoints", NAMESPACE, pinned]
    raw["spec"]["pin"] = False
    bed.api.touch(raw)
    bed.run(30)
    assert bed.objects == bed.steps == last


@pytest.mark.fault("A job with whenDeleted is deleted that has thousands of pinned checkpoints")
def test_a_job_with_thousands_of_pins_is_deleted_by_name(bed: Bed) -> None:
    """The names of all pins would be longer than one variable of the pod may be."""
    pins, first = 5000, 2**40
    for step in range(first, first + pins):
        bed.checkpoint(step, when="DeleteData", pin=True)
    for step in range(1, MAX_BATCH + 10):
        bed.checkpoint(step, when="DeleteData")
    bed.run(60, step=5)
    assert len(bed.objects) == len(bed.steps) == pins
    assert min(bed.steps) == first
    assert [r.ended for r in bed.requests] == [False, True]


def test_the_last_good_one_is_kept(bed: Bed) -> None:
    bed.checkpoint(1, when="KeepLast")
    bed.checkpoint(2, when="KeepLast")
    bed.checkpoint(3, when="KeepLast", quarantined=True)
    bed.run(30)
    assert bed.objects == bed.steps == {2}


@pytest.mark.fault("A CheckpointStore is created again after its job was deleted with KeepLast")
def test_the_last_one_is_kept_while_its_object_says_that_the_store_is_missing(bed: Bed) -> None:
    """The objects follow the store in the course of several passes."""
    bed.checkpoint(1, when="KeepLast")
    newest = bed.api.objects["checkpoints", NAMESPACE, bed.checkpoint(2, when="KeepLast")]
    absent = condition("Restorable", value="False") | {"reason": "StoreNotFound"}
    kept = [c for c in newest["status"]["conditions"] if c["type"] != "Restorable"]
    newest["status"]["conditions"] = [*kept, absent]
    bed.api.touch(newest)
    bed.run(30)
    assert bed.objects == bed.steps == {2}


def remembered(bed: Bed) -> int:
    """Return the number of objects that the process keeps of its deletions, without what it shares."""
    shared = (type, MethodType, FakeApi, Cluster, ClusterCache, Events, ManualClock)
    found, left = set[int](), [bed.deletions, bed.commands]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, shared):
            found.add(id(one))
            left.extend(gc.get_referents(one))
    return len(found)


@pytest.mark.fault("Jobs with whenDeleted are deleted for months")
def test_nothing_is_remembered_of_deletions_that_are_over(bed: Bed) -> None:
    sizes = []
    bed.checkpoint(1, when="KeepLast")
    for step in (2, 3, 4, 5):
        bed.checkpoint(step, when="KeepLast")
        bed.run(30)
        assert bed.objects == {step}
        sizes.append(remembered(bed))
    assert sizes[-1] == sizes[0]


def test_the_newest_object_has_the_policy(bed: Bed) -> None:
    """A user has changed it, and the job was deleted before all objects had the new one."""
    for step, policy in ((1, "DeleteData"), (2, "DeleteData"), (3, "Retain")):
        bed.checkpoint(step, when=policy)
    bed.run(60)
    assert bed.objects == bed.steps == {1, 2, 3}


@pytest.mark.fault("A job with whenDeleted is deleted while its store is down")
def test_a_store_that_is_down_is_waited_for_and_holds_nothing(bed: Bed) -> None:
    for step in (1, 2):
        bed.checkpoint(step, when="DeleteData")
    bed.down = True
    bed.run(2 * RELEASE_SECONDS)
    assert bed.objects == {1, 2}
    raw = bed.api.all("checkpoints", NAMESPACE)[0]
    assert raw["status"]["phase"] == "Deleting"
    assert not raw["metadata"].get("finalizers")
    bed.down = False
    bed.run(200)
    assert bed.objects == bed.steps == set()


def test_pods_of_the_job_end_first(bed: Bed) -> None:
    bed.checkpoint(1, when="DeleteData")
    pods: list[Any] = ["a pod that may still upload"]
    bed.cache.pods.workers = lambda namespace, uid: tuple(pods)  # type: ignore[method-assign]
    bed.run(90)
    assert (bed.objects, bed.requests) == ({1}, [])
    pods.clear()
    bed.run(60)
    assert bed.objects == set()


@pytest.mark.fault("The copies of the cluster lack a job that exists")
def test_a_job_that_only_the_api_server_knows_keeps_its_data(bed: Bed) -> None:
    bed.checkpoint(1, when="DeleteData")
    bed.job("complete", whenDeleted="DeleteData")
    bed.cache.jobs.put = lambda item: None  # type: ignore[method-assign]
    bed.run(60)
    assert (bed.objects, bed.requests) == ({1}, [])


def test_objects_without_a_policy_stay(bed: Bed) -> None:
    """Objects that were imported or restored from a backup name no policy, and their job is unknown here."""
    name = bed.checkpoint(1)
    raw = bed.api.objects["checkpoints", NAMESPACE, name]
    del raw["status"]["whenDeleted"]
    bed.run(60)
    assert bed.objects == bed.steps == {1}
