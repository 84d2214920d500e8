"""A pod that runs a command for a store belongs to the store, and reports to the pass over it."""

from __future__ import annotations

from tests.support.clock import ManualClock
from tests.support.operator.builders import raw_store
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import CheckpointStore
from holdfast_core.contract import StoreVerb
from holdfast_operator.apply.command_runs import CommandRuns
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.model.command_pods import (
    CommandFailed,
    CommandFailure,
    CommandReport,
    CommandUnderway,
    StoreCommand,
)
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.ownership import Key, store_key
from holdfast_operator.watch.cache import ClusterCache

NAMESPACE = "team-a"
STORE = CheckpointStore.from_dict(raw_store("main"))


def command(seed: str = "1") -> StoreCommand:
    return StoreCommand(StoreVerb.DRILL, seed, "this", limit_seconds=7)


async def test_a_run_from_its_start_to_its_report() -> None:
    api, clock = FakeApi(), ManualClock()
    keys: list[Key] = []
    cluster = Cluster(api)
    cache = ClusterCache(api, clock, (), keys.append, lambda job: None)

    async def see() -> None:
        for reflector in cache.reflectors:
            await reflector.relist()

    runs = CommandRuns(cluster, cache, SidecarSettings("i"), clock)
    await see()
    assert await runs.run(STORE, command(), due=False) is None
    assert await runs.run(STORE, command()) == CommandUnderway()
    assert await runs.run(STORE, command()) == CommandUnderway(), "by another operator"
    (pod,) = api.all("pods")
    assert pod["metadata"]["ownerReferences"][0]["uid"] == STORE.uid
    assert pod["spec"]["activeDeadlineSeconds"] == 7
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["holdfast-sidecar", "drill"]
    assert {"name": "HOLDFAST_DRILL", "value": "this"} in container["env"]

    keys.clear()
    await see()
    assert keys == [store_key(NAMESPACE, "main")]
    assert await runs.run(STORE, command()) == CommandUnderway()
    clock.advance(38)
    state = await runs.run(STORE, command())
    assert isinstance(state, CommandFailed)
    assert (state.failure, "not ended" in state.message) == (CommandFailure.FAILED, True)

    ended = {"state": {"terminated": {"message": '{"text": "x", "number": 1}'}}}
    pod["status"] = {"phase": "Failed", "containerStatuses": [ended]}
    await see()
    state = await runs.run(STORE, command())
    assert isinstance(state, CommandReport)
    assert (state.text("text"), state.text("number"), state.data["number"]) == ("x", "", 1)
    assert await runs.run(STORE, command("2"), due=False) is None
    assert pod["metadata"]["deletionTimestamp"], "it is the pod of another run"

    await runs.run(STORE, command("2"))
    await see()
    await runs.end(STORE, StoreVerb.DRILL)
    assert all(pod["metadata"]["deletionTimestamp"] for pod in api.all("pods"))
