"""What is left of a job that is gone: in this process, and in what its Checkpoints say."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.support.api_objects import checkpoint_object, store_object
from tests.support.clock import ManualClock
from tests.support.operator.builders import NAMESPACE, UID, raw_job
from tests.support.operator.fake_api import FakeApi

from holdfast_operator.base.metrics import Metrics
from holdfast_operator.base.settings import Settings
from holdfast_operator.kube.leadership import LeaseThread
from holdfast_operator.loop.controller import Controller
from holdfast_operator.model.job import JobMemory
from holdfast_operator.model.ownership import job_key
from holdfast_operator.watch.reflector import Reflector

ENDED = "1970-01-01T00:00:00Z"


class Leader(LeaseThread):
    """The part in an election of a process that leads."""

    def __init__(self) -> None:
        self.gained = asyncio.Event()  # nothing is queued

    @property
    def leads(self) -> bool:
        return True


def over() -> dict[str, Any]:
    """Return a job that is over, and whose time after the end has passed."""
    kinds = {"reason": "R", "message": "", "lastTransitionTime": ENDED}
    raw = raw_job(2)
    raw["metadata"]["uid"] = UID
    raw["spec"]["ttlSecondsAfterFinished"] = 0
    raw["status"] = {
        "restartRound": 0,
        "members": [0, 0],
        "completionTime": ENDED,
        "conditions": [{"type": "Complete", "status": "True", **kinds}],
        "goodput": {"ratio": 0.5},
    }
    return raw


def controller_of(api: FakeApi, metrics: Metrics | None = None) -> Controller:
    settings = Settings("example/sidecar:1", "holdfast-system", "holdfast", "operator-0")
    return Controller(settings, api, Leader(), ManualClock(), metrics or Metrics())


def memories() -> int:
    """Return the number of memories of jobs that have begun a round, in this process."""
    gc.collect()
    found = (o for o in gc.get_objects() if isinstance(o, JobMemory))
    return sum(memory.round is not None for memory in found)


class PromptApi(FakeApi):
    """An API whose watches deliver a deletion before the reply to the request that caused it."""

    watches: Sequence[Reflector[Any]] = ()

    async def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Any:
        reply = await super().delete(path, options)
        for watch in self.watches:
            await watch.relist()
        return reply


@pytest.mark.fault("A job is deleted during a pass over it, for example by its TTL")
async def test_nothing_is_kept_of_a_job_that_is_deleted_during_its_pass() -> None:
    api, metrics, before = PromptApi(), Metrics(), memories()
    controller = controller_of(api, metrics)
    api.put("trainingjobs", over())
    api.watches = controller.watches
    for watch in controller.watches:
        await watch.relist()
    await controller.handle(job_key(NAMESPACE, "job"))
    assert api.names("trainingjobs") == set()
    assert memories() == before
    labels = {"namespace": NAMESPACE, "job": "job"}
    assert metrics.registry.get_sample_value("holdfast_job_sidecars_unreachable", labels) is None


def left_behind(persisted: str, restorable: str = "True", reason: str = "R") -> dict[str, Any]:
    """Return a Checkpoint, as its job has last described it."""
    given = {"reason": reason, "message": "", "lastTransitionTime": ENDED}
    values = {"Committed": "True", "Persisted": persisted, "Restorable": restorable}
    raw = checkpoint_object("saved", namespace=NAMESPACE)
    raw["spec"] = {"jobRef": {"name": "job"}, "step": 40}
    raw["status"] = {
        "phase": "Committed",
        "round": 0,
        "jobUid": UID,
        "store": "main",
        "conditions": [{"type": kind, "status": value, **given} for kind, value in values.items()],
    }
    return raw


@pytest.mark.fault("A job without an object store is deleted, and perhaps created again")
@pytest.mark.parametrize("present", [None, UID, "another-uid"])
async def test_a_checkpoint_that_went_with_its_job_is_not_restorable(present: str | None) -> None:
    api = FakeApi()
    controller = controller_of(api)
    saved = api.put("checkpoints", left_behind("False"))
    if present is not None:
        job = over()
        del job["spec"]["ttlSecondsAfterFinished"]
        job["metadata"]["uid"] = present
        api.put("trainingjobs", job)
    for watch in controller.watches:
        if present != UID or watch.collection.name != "jobs":  # a watch may lag
            await watch.relist()
    await controller.handle(job_key(NAMESPACE, "job"))
    found = {c["type"]: (c["status"], c["reason"]) for c in saved["status"]["conditions"]}
    expected = ("True", "R") if present == UID else ("False", "PodsGone")
    assert found["Restorable"] == expected


def probed(available: str) -> dict[str, Any]:
    raw = store_object("main", namespace=NAMESPACE)
    raw["metadata"]["generation"] = 1
    given = {"reason": "R", "message": "", "lastTransitionTime": ENDED}
    conditions = [{"type": "Available", "status": available, **given}]
    raw["status"] = {"observedGeneration": 1, "conditions": conditions}
    return raw


@pytest.mark.fault("A CheckpointStore is deleted, or is down, when the job is gone")
@pytest.mark.parametrize(
    ("before", "available", "after"),
    [
        (("True", "Persisted"), None, ("False", "StoreNotFound")),
        (("True", "Persisted"), "False", ("Unknown", "StoreUnavailable")),
        (("True", "Persisted"), "True", ("True", "Persisted")),
        (("True", "Persisted"), "Unknown", ("True", "Persisted")),
        (("False", "StoreNotFound"), "True", ("True", "Persisted")),
        (("Unknown", "StoreUnavailable"), "True", ("True", "Persisted")),
        (("False", "Damaged"), None, ("False", "Damaged")),
        (("False", "CheckpointMissing"), "True", ("False", "CheckpointMissing")),
    ],
)
async def test_a_checkpoint_that_outlives_its_job_follows_its_store(
    before: tuple[str, str], available: str | None, after: tuple[str, str]
) -> None:
    api = FakeApi()
    controller = controller_of(api)
    saved = api.put("checkpoints", left_behind("True", *before))
    if available is not None:
        api.put("checkpointstores", probed(available))
    for watch in controller.watches:
        await watch.relist()
    await controller.handle(job_key(NAMESPACE, "job"))
    found = {c["type"]: (c["status"], c["reason"]) for c in saved["status"]["conditions"]}
    assert found["Restorable"] == after
