"""What a pass sees of Checkpoints that jobs of other namespaces start from."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.support.api_objects import checkpoint_object, job_object, store_object
from tests.support.clock import ManualClock
from tests.support.operator.fake_api import FakeApi
from tests.support.operator.nothing import Nothing

from holdfast_operator.loop.observe import Observer
from holdfast_operator.model.job import JobMemory, Observed
from holdfast_operator.model.ownership import job_key
from holdfast_operator.watch.cache import ClusterCache

REF = {"name": "src", "namespace": "team-a"}
GRANT = {
    "metadata": {"name": "g", "namespace": "team-a"},
    "spec": {"from": [{"namespace": "team-b", "jobs": ["clone"]}], "to": [{"name": "src"}]},
}


async def observed(namespace: str, name: str, *others: tuple[str, dict[str, Any]]) -> Observed:
    """Return what a pass over a job sees beside its Checkpoint, its clone and these objects."""
    api = FakeApi()
    api.put("trainingjobs", job_object("owner", "team-a"))
    api.put("trainingjobs", job_object("clone", "team-b", restoreFrom={"checkpointRef": REF}))
    api.put("checkpoints", checkpoint_object("src", "team-a", jobRef={"name": "owner"}))
    for plural, raw in others:
        api.put(plural, raw)
    cache = ClusterCache(api, ManualClock(), (), lambda key: None, lambda job: None)
    for reflector in cache.reflectors:
        await reflector.relist()
    nothing = cast(Any, Nothing())
    job = cache.jobs.get(job_key(namespace, name))
    assert job is not None
    return Observer(cache, nothing, nothing, nothing, ManualClock()).observe(job, JobMemory())


@pytest.mark.fault("The retention of a job meets a clone in another namespace")
async def test_a_granted_clone_of_another_namespace_keeps_its_source() -> None:
    found = await observed("team-a", "owner", ("checkpointgrants", GRANT))
    assert found.cloned == {"src"}


async def test_a_clone_without_a_grant_keeps_nothing() -> None:
    """Otherwise a tenant could fill the store of another one by naming its Checkpoints."""
    assert (await observed("team-a", "owner")).cloned == frozenset()


async def test_a_job_is_named_in_its_own_namespace_only() -> None:
    """A job of the same name in another namespace keeps nothing here."""
    source = {"jobRef": {"name": "owner"}, "latest": True}
    others = [
        ("checkpointgrants", GRANT),
        ("trainingjobs", job_object("clone", "team-b", restoreFrom=source)),
    ]
    assert (await observed("team-a", "owner", *others)).cloned == frozenset()
    assert (await observed("team-b", "clone", *others)).source is None


async def test_the_clone_sees_its_source_only_with_a_grant() -> None:
    refused = (await observed("team-b", "clone")).foreign
    assert (refused.granted, refused.checkpoint) == (False, None)
    granted = (await observed("team-b", "clone", ("checkpointgrants", GRANT))).foreign
    assert (granted.granted, granted.checkpoint.name) == (True, "src")


async def test_a_checkpoint_of_the_same_name_in_the_own_namespace_is_another_one() -> None:
    own = checkpoint_object("src", "team-b", jobRef={"name": "clone"})
    found = await observed("team-b", "clone", ("checkpoints", own))
    assert found.foreign is not None and found.foreign.checkpoint is None
    assert found.checkpoints[0].namespace == "team-b"


async def test_the_places_are_those_of_the_stores_of_the_other_namespace() -> None:
    stores = [
        ("checkpointstores", store_object(name, "team-a", bucket=name)) for name in ("one", "two")
    ]
    grant = ("checkpointgrants", GRANT)
    unknown = (await observed("team-b", "clone", grant, *stores)).foreign
    assert {place.split("/")[1] for place in unknown.places} == {"one", "two"}
    stored = {
        "storeRef": {"name": "two"},
        "jobUid": "u",
        "jobNamespace": "team-a",
        "round": 0,
        "manifest": "b3:" + "0" * 64,
        "bytes": 1,
        "worldSize": 1,
    }
    imported = checkpoint_object("src", "team-a", step=5, stored=stored)
    imported["status"] = {"store": "two"}  # the operator has recorded it
    known = (await observed("team-b", "clone", grant, *stores, ("checkpoints", imported))).foreign
    assert {place.split("/")[1] for place in known.places} == {"two"}
