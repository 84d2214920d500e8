"""A process that begins to lead passes over all objects that its reflectors hold."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.api_objects import checkpoint_object, job_object, store_object
from tests.support.clock import ManualClock
from tests.support.operations import NOISE, operations
from tests.support.operator.builders import job as built_job
from tests.support.operator.builders import metadata
from tests.support.operator.fake_api import FakeApi

from holdfast_core.ids import RestartRound, Worker
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.ownership import Key, adoption_key, job_key, store_key
from holdfast_operator.model.render import render_pod
from holdfast_operator.watch.cache import ClusterCache

UNREADABLE = {"workers": "many"}


def adoption_object(name: str) -> dict[str, object]:
    spec = {"workers": 1, "checkpoint": {"interval": {"steps": 10}}}
    return {"metadata": {"name": name, "namespace": "team-a"}, "spec": spec}


async def test_the_keys_of_all_objects_are_queued_again() -> None:
    api, queued = FakeApi(), set[Key]()
    api.put("trainingjobs", job_object("readable"))
    api.put("trainingjobs", {**job_object("hidden"), "spec": UNREADABLE})
    api.put("checkpointadoptions", adoption_object("adopted"))
    api.put("checkpointstores", store_object("main"))
    api.put("checkpointstores", {**store_object("hidden"), "spec": {}})
    api.put("checkpoints", checkpoint_object("of-a-missing-job", jobRef={"name": "gone"}))
    api.put("checkpoints", checkpoint_object("of-a-job", jobRef={"name": "readable"}))
    cache = ClusterCache(api, ManualClock(), (), queued.add, lambda job: None)
    task = asyncio.create_task(cache.run())
    try:
        await cache.wait_synced()
        expected = {
            job_key("team-a", "readable"),
            job_key("team-a", "hidden"),
            job_key("team-a", "gone"),
            adoption_key("team-a", "adopted"),
            store_key("team-a", "main"),
            store_key("team-a", "hidden"),
        }
        assert queued == expected
        queued.clear()
        cache.enqueue_all()
        assert queued == expected
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_checkpoint_queues_its_job_and_those_that_restore_from_it() -> None:
    """The cluster may have thousands of other jobs."""
    api, queued = FakeApi(), set[Key]()
    source = {**job_object("copy")}
    source["spec"] = {**source["spec"], "restoreFrom": {"checkpointRef": {"name": "newest"}}}
    for job in (job_object("owner"), job_object("other"), source):
        api.put("trainingjobs", job)
    cache = ClusterCache(api, ManualClock(), (), queued.add, lambda job: None)
    for reflector in cache.reflectors:
        await reflector.relist()
    queued.clear()
    api.put("checkpoints", checkpoint_object("newest", jobRef={"name": "owner"}))
    for reflector in cache.reflectors:
        await reflector.relist()
    assert queued == {job_key("team-a", "owner"), job_key("team-a", "copy")}


async def test_a_store_queues_the_missing_jobs_whose_checkpoints_it_has() -> None:
    api, queued = FakeApi(), set[Key]()
    api.put("checkpointstores", store_object("main"))
    left = checkpoint_object("left", jobRef={"name": "gone"})
    api.put("checkpoints", {**left, "status": {"store": "main"}})
    cache = ClusterCache(api, ManualClock(), (), queued.add, lambda job: None)
    for reflector in cache.reflectors:
        await reflector.relist()
    queued.clear()
    api.remove("checkpointstores", "team-a", "main")
    for reflector in cache.reflectors:
        await reflector.relist()
    assert queued == {store_key("team-a", "main"), job_key("team-a", "gone")}


async def test_a_grant_queues_the_jobs_of_other_namespaces_that_need_it() -> None:
    api, queued = FakeApi(), set[Key]()
    ref = {"name": "newest", "namespace": "team-a"}
    for name, namespace in (("here", "team-a"), ("there", "team-b")):
        job = job_object(name, namespace, restoreFrom={"checkpointRef": ref})
        api.put("trainingjobs", job)
    cache = ClusterCache(api, ManualClock(), (), queued.add, lambda job: None)
    for reflector in cache.reflectors:
        await reflector.relist()
    queued.clear()
    grant = {"metadata": {"name": "g", "namespace": "team-a"}}
    api.put("checkpointgrants", {**grant, "spec": {"from": [{"namespace": "team-b"}]}})
    for reflector in cache.reflectors:
        await reflector.relist()
    assert queued == {job_key("team-b", "there")}


@pytest.mark.parametrize("plural", ["checkpoints", "checkpointstores"])
async def test_an_event_costs_the_same_beside_any_number_of_jobs_that_name_other_objects(
    plural: str,
) -> None:
    make = {"checkpoints": checkpoint_object, "checkpointstores": store_object}[plural]
    costs = []
    for number in (1, 200):
        api = FakeApi()
        for n in range(number):
            job = job_object(f"job-{n}", restoreFrom={"checkpointRef": {"name": f"source-{n}"}})
            job["spec"]["checkpoint"]["object"] = {
                "storeRef": {"name": f"store-{n}"},
                "every": {"steps": 50},
            }
            api.put("trainingjobs", job)
        item = api.put(plural, make("subject"))
        cache = ClusterCache(api, ManualClock(), (), lambda key: None, lambda job: None)
        for reflector in cache.reflectors:
            await reflector.relist()
        newer = {**item, "metadata": {**item["metadata"], "resourceVersion": "1000000"}}
        [watch] = [r for r in cache.reflectors if item["metadata"]["uid"] in r.items]
        costs.append(operations(lambda: watch.take(newer)))  # noqa: B023 - called in this turn
    assert costs[1] - costs[0] < NOISE


async def test_the_pods_of_a_missing_job_queue_its_key_and_have_no_pass() -> None:
    """An operator that starts after the deletion of a job finds its pods, which Kueue's finalizer keeps."""
    api, queued = FakeApi(), set[Key]()
    present = job_object("present")
    api.put("trainingjobs", {**present, "metadata": {**present["metadata"], "uid": "uid-present"}})
    names = {}
    for name, uid in (("gone", "uid-gone"), ("present", "uid-present"), ("present", "uid-former")):
        of = metadata(built_job(1), name=name, uid=uid)
        pod = render_pod(of, Worker(0), RestartRound(0), None, SidecarSettings("example/sidecar:1"))
        names[uid] = api.put("pods", pod)["metadata"]["name"]
    cache = ClusterCache(api, ManualClock(), (), queued.add, lambda job: None)
    for reflector in cache.reflectors:
        await reflector.relist()
    queued.clear()
    cache.enqueue_all()
    gone, here = job_key("team-a", "gone"), job_key("team-a", "present")
    assert queued == {gone, here}
    assert [p.name for p in cache.pods_without_pass(gone)] == [names["uid-gone"]]
    assert [p.name for p in cache.pods_without_pass(here)] == [names["uid-former"]]
    api.remove("pods", "team-a", names["uid-gone"])
    for reflector in cache.reflectors:
        await reflector.relist()
    queued.clear()
    cache.enqueue_all()
    assert queued == {here}
    assert cache.pods_without_pass(gone) == ()
