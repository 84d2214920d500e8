"""Cost of what the operator does for one object, beside many others that tenants may create.

All jobs and stores share one event loop. A cost of one object that grows with the number of the others is
quadratic for all of them together. The tests count operations and queued passes, and read no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
from tests.support.api_objects import checkpoint_object, job_object, store_object
from tests.support.clock import ManualClock
from tests.support.operations import NOISE, operations
from tests.support.operator.fake_api import FakeApi
from tests.support.operator.nothing import Nothing

from holdfast_core.api import CheckpointAdoption, TrainingJob
from holdfast_core.clock import stamp
from holdfast_core.names import job_prefix
from holdfast_operator.apply.command_runs import CommandRuns
from holdfast_operator.base.metrics import Metrics
from holdfast_operator.loop.observe import Observer
from holdfast_operator.loop.stores import Stores
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import JobMemory
from holdfast_operator.model.ownership import Key, KeyKind, adoption_key, job_key
from holdfast_operator.watch.cache import ClusterCache

NUMBER = 50
STORE = {"object": {"storeRef": {"name": "main"}, "every": {"steps": 50}}}
PROBED = "2026-05-01T11:55:00Z"
KINDS = {
    TrainingJob.PLURAL: (job_object, job_key),
    CheckpointAdoption.PLURAL: (
        lambda name: {
            **job_object(name),
            "kind": CheckpointAdoption.KIND,
            "spec": {"workers": 1, "checkpoint": {"interval": {"steps": 10}}},
        },
        adoption_key,
    ),
}
"""Builder of an object, and of its key, for each kind of gang."""


def gang(plural: str, name: str, at: int = 0) -> dict[str, Any]:
    """Return a gang of this kind that uses store `main`, created `at` minutes after midnight."""
    make, _ = KINDS[plural]
    item = make(name)
    item["spec"]["checkpoint"] |= STORE
    item["metadata"]["creationTimestamp"] = f"2026-05-01T{at // 60:02}:{at % 60:02}:00Z"
    return item


def probed_store(**status: Any) -> dict[str, Any]:
    """Return a store that a probe found available, with changes of its status."""
    condition = {
        "type": "Available",
        "status": "True",
        "reason": "Probed",
        "message": "the probe succeeded",
        "lastTransitionTime": PROBED,
    }
    times = {"lastProbe": PROBED, "lastListing": stamp(ManualClock().utc_now())}
    known = {"observedGeneration": 1, "conditions": [condition], **times}
    item = store_object("main")
    item["metadata"]["generation"] = 1
    return {**item, "status": {**known, **status}}


async def listed(api: FakeApi, enqueue: Callable[[Key], None] = lambda key: None) -> ClusterCache:
    cache = ClusterCache(api, ManualClock(), (), enqueue, lambda job: None)
    for reflector in cache.reflectors:
        await reflector.relist()
    return cache


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing, so that no event loop adds operations."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits for something")


class Left:
    """An object with a finalizer in Python that only the collector of garbage finds."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(1000):
            pass


def test_finalizers_of_what_other_tests_have_left_do_not_count() -> None:
    def call() -> list[list[int]]:
        return [[] for _ in range(50_000)]  # enough for a collection

    clean = operations(call)
    Left()
    assert operations(call) == clean


@pytest.mark.fault(
    "Tenants create thousands of jobs, adoptions, stores, or Checkpoints that cannot be read"
)
@pytest.mark.parametrize("plural", KINDS)
async def test_a_pass_costs_the_same_beside_any_number_of_checkpoints_that_cannot_be_read(
    plural: str,
) -> None:
    costs = []
    for number in (NUMBER, 4 * NUMBER):
        api = FakeApi()
        api.put(plural, gang(plural, "subject"))
        for n in range(number):
            of = {"name": f"job-{n}"}
            hidden = checkpoint_object(f"job-{n}-abcdef-s5-r0", jobRef=of)
            api.put("checkpoints", {**hidden, "spec": {"jobRef": of, "pin": "perhaps"}})
        cache = await listed(api)
        assert len(cache.unreadable_objects()) == number
        nothing = cast(Any, Nothing())
        observer = Observer(cache, nothing, nothing, nothing, ManualClock())
        (job,) = cache.jobs.all()
        observer.observe(job, JobMemory())  # the first call fills caches of the interpreter
        costs.append(operations(lambda: observer.observe(job, JobMemory())))  # noqa: B023
    assert costs[1] - costs[0] < NOISE


async def test_a_checkpoint_that_cannot_be_read_is_part_of_the_pass_over_its_job() -> None:
    api = FakeApi()
    job = api.put(
        "trainingjobs", job_object("subject", restoreFrom={"checkpointRef": {"name": "a"}})
    )
    uid = job["metadata"]["uid"]
    (read,) = (await listed(api)).jobs.all()
    names = ["a", "b", *(f"{p}-s5-r0" for p in (job_prefix("subject", read.uid), "subject-000000"))]
    for name in names:
        hidden = checkpoint_object(name)
        api.put("checkpoints", {**hidden, "spec": {**hidden["spec"], "pin": "perhaps"}})
    assert uid == read.uid
    nothing = cast(Any, Nothing())
    observer = Observer(await listed(api), nothing, nothing, nothing, ManualClock())
    found = observer.observe(read, JobMemory()).unreadable
    assert {u.name for u in found} == {names[0], names[2]}


async def test_a_job_that_starts_from_another_one_sees_and_keeps_its_checkpoints() -> None:
    api = FakeApi()
    newest = {"jobRef": {"name": "other"}, "latest": True}
    api.put("trainingjobs", job_object("clone", restoreFrom=newest))
    api.put("trainingjobs", job_object("other"))
    api.put("trainingjobs", job_object("third"))
    (other,) = (j for j in (await listed(api)).jobs.all() if j.name == "other")
    for step in (5, 10):
        saved = checkpoint_object(f"other-s{step}-r0", jobRef={"name": "other"}, step=step)
        persisted = {
            "type": "Persisted",
            "status": "True",
            "reason": "Persisted",
            "message": "",
            "lastTransitionTime": PROBED,
        }
        known = {"phase": "Committed", "round": 0, "jobUid": other.uid, "manifest": "b3:1"}
        api.put("checkpoints", {**saved, "status": {**known, "conditions": [persisted]}})
    nothing = cast(Any, Nothing())
    cache = await listed(api)
    observer = Observer(cache, nothing, nothing, nothing, ManualClock())
    found = {j.name: observer.observe(j, JobMemory()) for j in cache.jobs.all()}
    assert {c.name for c in found["clone"].checkpoints} == {"other-s5-r0", "other-s10-r0"}
    assert found["clone"].source is not None and found["clone"].source.name == "other"
    assert found["other"].cloned == {"other-s10-r0"}
    assert (found["third"].cloned, found["third"].checkpoints) == (frozenset(), ())


@pytest.mark.fault(
    "Tenants create thousands of jobs, adoptions, stores, or Checkpoints that cannot be read"
)
@pytest.mark.parametrize("plural", KINDS)
async def test_a_pass_over_a_store_costs_the_same_beside_any_number_of_gangs_that_start(
    plural: str,
) -> None:
    costs = []
    for number in (NUMBER, 4 * NUMBER):
        api = FakeApi()
        api.put("checkpointstores", probed_store())
        for n in range(number):
            api.put(plural, gang(plural, f"job-{n}", at=n))
        cache = await listed(api)
        nothing = cast(Any, Nothing())
        clock = ManualClock()
        commands = CommandRuns(nothing, cache, SidecarSettings("image:1"), clock)
        stores = Stores(nothing, cache, nothing, commands, Metrics(), clock)
        finished(stores.reconcile("team-a", "main"))
        costs.append(operations(lambda: finished(stores.reconcile("team-a", "main"))))  # noqa: B023
    assert costs[1] - costs[0] < NOISE


@pytest.mark.fault(
    "Tenants create thousands of jobs, adoptions, stores, or Checkpoints that cannot be read"
)
@pytest.mark.parametrize("plural", KINDS)
async def test_a_probe_queues_the_gangs_of_its_store_only_if_its_result_has_changed(
    plural: str,
) -> None:
    """Each new job makes a probe due. N jobs would otherwise have N passes for each of N probes."""
    queued = set[Key]()
    api = FakeApi()
    api.put("checkpointstores", probed_store())
    _, key = KINDS[plural]
    gangs = {key("team-a", f"job-{n}") for n in range(NUMBER)}
    for n in range(NUMBER):
        api.put(plural, gang(plural, f"job-{n}"))
    cache = await listed(api, queued.add)

    async def after(store: dict[str, Any]) -> set[Key]:
        known = api.objects["checkpointstores", "team-a", "main"]
        known.update({k: v for k, v in store.items() if k != "metadata"})
        api.touch(known)
        queued.clear()
        for reflector in cache.reflectors:
            await reflector.relist()
        assert KeyKind.STORE in {k.kind for k in queued}
        return {k for k in queued if k.kind is not KeyKind.STORE}

    assert await after(probed_store(lastProbe="2026-05-01T11:56:00Z")) == set()
    assert await after(probed_store(lastProbe="2026-05-01T11:57:00Z", conditions=[])) == gangs
    assert await after(probed_store()) == gangs
    assert await after({**probed_store(), "spec": store_object(bucket="other")["spec"]}) == gangs
    assert await after({**probed_store(), "spec": {}}) == gangs, "it cannot be parsed"
    assert await after(probed_store()) == gangs


async def test_the_newest_start_is_that_of_the_gangs_that_still_wait() -> None:
    api = FakeApi()
    for n in range(3):
        api.put("trainingjobs", gang("trainingjobs", f"job-{n}", at=n))
    cache = await listed(api)

    async def newest() -> str | None:
        for reflector in cache.reflectors:
            await reflector.relist()
        found = cache.jobs.newest_start("team-a", "main")
        return None if found is None else f"{found:%H:%M}"

    assert await newest() == "00:02"
    begun = api.objects["trainingjobs", "team-a", "job-2"]
    begun["status"] = {"restartRound": 0}
    api.touch(begun)
    assert await newest() == "00:01"
    api.remove("trainingjobs", "team-a", "job-1")
    assert await newest() == "00:00"
    api.remove("trainingjobs", "team-a", "job-0")
    assert await newest() is None
    assert cache.jobs.newest_start("team-a", "other") is None
