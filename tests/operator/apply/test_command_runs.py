"""A pod that runs a command for a store belongs to the object that is meant, and reports to one pass."""

from __future__ import annotations

import pytest
from tests.support.clock import ManualClock
from tests.support.operator.builders import checkpoint, raw_job, raw_store
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import CheckpointStore, TrainingJob
from holdfast_operator.apply.command_runs import CommandRuns
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandOwner,
    CommandReport,
    CommandUnderway,
    StoreCommand,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import store_view
from holdfast_operator.model.ownership import Key, StoreVerb, job_key
from holdfast_operator.watch.cache import ClusterCache

NAMESPACE = "team-a"
STORE = store_view(CheckpointStore.from_dict(raw_store("main")))


def command(seed: str = "1") -> StoreCommand:
    return StoreCommand(
        StoreVerb.PROBE,
        ("do",),
        seed,
        job_key(NAMESPACE, "job"),
        {"HOLDFAST_WHAT": "this"},
        memory="512Mi",
        limit_seconds=7,
    )


@pytest.mark.parametrize("kind", ["job", "checkpoint", "store"])
async def test_a_run_from_its_start_to_its_report(kind: str) -> None:
    api, clock = FakeApi(), ManualClock()
    keys: list[Key] = []
    cluster = Cluster(api)
    cache = ClusterCache(api, clock, (), keys.append, lambda job: None)

    async def see() -> None:
        for reflector in cache.reflectors:
            await reflector.relist()

    owners: dict[str, CommandOwner] = {
        "job": TrainingJob.from_dict(raw_job()),
        "checkpoint": checkpoint(100, 0),
        "store": CheckpointStore.from_dict(raw_store("main")),
    }
    owner = owners[kind]
    runs = CommandRuns(cluster, cache, SidecarSettings("i"), clock)
    await see()
    assert await runs.look(owner, command(), STORE) is None
    assert await runs.start(owner, command(), STORE) == CommandUnderway()
    assert await runs.start(owner, command(), STORE) == CommandUnderway(), "by another operator"
    (pod,) = api.all("pods")
    assert pod["metadata"]["ownerReferences"][0]["uid"] == owner.uid
    assert pod["spec"]["activeDeadlineSeconds"] == 7
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["holdfast-sidecar", "do"]
    assert {"name": "HOLDFAST_WHAT", "value": "this"} in container["env"]
    assert container["resources"]["limits"] == {"memory": "512Mi"}

    keys.clear()
    await see()
    assert keys == [job_key(NAMESPACE, "job")]
    assert await runs.look(owner, command(), STORE) == CommandUnderway()
    clock.advance(38)
    state = await runs.look(owner, command(), STORE)
    assert isinstance(state, CommandFailed)
    assert (state.failure, "not ended" in state.message) == (CommandFailure.FAILED, True)

    ended = {"state": {"terminated": {"message": '{"text": "x", "number": 1}'}}}
    pod["status"] = {"phase": "Failed", "containerStatuses": [ended]}
    await see()
    state = await runs.look(owner, command(), STORE)
    assert isinstance(state, CommandReport)
    assert (state.text("text"), state.text("number"), state.data["number"]) == ("x", "", 1)
    assert await runs.look(owner, command("2"), STORE) is None
    assert pod["metadata"]["deletionTimestamp"], "it is the pod of another run"

    await runs.start(owner, command("2"), STORE)
    await see()
    await runs.end(owner, StoreVerb.PROBE)
    assert all(pod["metadata"]["deletionTimestamp"] for pod in api.all("pods"))
