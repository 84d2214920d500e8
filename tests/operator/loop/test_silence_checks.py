"""Which jobs are checked between their passes: those that are disturbed always, the others in turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from tests.support.clock import ManualClock
from tests.support.operator.builders import job, metadata, pod
from tests.support.operator.fake_api import FakeApi

from holdfast_core.api import Gang
from holdfast_core.ids import JobUid
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.loop.observe import (
    JOBS_PER_TICK,
    TICK_SECONDS,
    SilenceChecks,
    confirm,
)
from holdfast_operator.model.job import PodView
from holdfast_operator.watch.cache import JobIndex
from holdfast_operator.watch.nodes import NodeLeases

JOBS = 3 * JOBS_PER_TICK
TICKS = 6


class Pods:
    """One worker of each job, for the cache and for the observer."""

    def __call__(self, job: Gang) -> tuple[PodView, ...]:
        return self.workers(job.namespace, job.uid)

    def workers(self, namespace: str, job_uid: JobUid) -> tuple[PodView, ...]:
        return (pod(0, node=f"node-{job_uid}"),)


@dataclass
class World:
    """The cache, the observer and the sidecars that the checks ask. Job n runs on node n."""

    silent_sidecars: set[str] = field(default_factory=set)
    late_nodes: set[str] = field(default_factory=set)
    checked: Counter[str] = field(default_factory=Counter)
    leases: NodeLeases = field(default_factory=NodeLeases)

    def __post_init__(self) -> None:
        self.lease_watch, self.contact_since = self, 0.0
        self.jobs, self.pods = JobIndex(), Pods()
        for n in range(JOBS):
            gang = metadata(job(), name=f"job-{n}", uid=str(n))
            self.jobs.put(gang)

    def all_answer(self, uid: JobUid) -> bool:
        return uid not in self.silent_sidecars

    def disturbed_nodes(self, jobs: object) -> set[str]:
        return self.late_nodes

    def follow_sidecars(self, job: Gang, pods: object) -> None:
        self.checked[job.uid] += 1

    def silent_nodes(self, job: Gang, pods: object) -> frozenset[str]:
        return frozenset()

    unproven_nodes = silent_nodes


async def checked(world: World) -> Counter[str]:
    """Return how often each job is checked in TICKS ticks."""
    clock = ManualClock()
    played = cast("Any", world)
    checks = SilenceChecks(played, played, played, played, clock, played, played)
    task = asyncio.create_task(checks.run())
    for _ in range(TICKS):
        await asyncio.sleep(0)
        clock.advance(TICK_SECONDS)
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return world.checked


async def test_undisturbed_jobs_take_turns() -> None:
    found = await checked(World())
    assert len(found) == JOBS
    assert set(found.values()) == {TICKS * JOBS_PER_TICK // JOBS}


async def test_a_job_with_a_silent_sidecar_or_a_late_node_is_checked_in_each_tick() -> None:
    found = await checked(World(silent_sidecars={"7"}, late_nodes={"node-8"}))
    assert found["7"] == found["8"] == TICKS
    assert found["9"] == TICKS * JOBS_PER_TICK // JOBS


def server(node: str, renewed: str | None = "t0") -> FakeApi:
    """Return an API server with one node, and with its lease unless `renewed` is None."""
    api = FakeApi()
    api.put("nodes", {"metadata": {"name": node}})
    if renewed is not None:
        lease = {"name": node, "namespace": "kube-node-lease"}
        api.put("leases", {"metadata": lease, "spec": {"renewTime": renewed}})
    return api


async def confirmed(leases: NodeLeases, clock: ManualClock, api: FakeApi) -> bool:
    """Return whether node a is silent after a direct read, while the watches deliver nothing."""
    clock.advance(20)
    await confirm("a", leases, Cluster(api), clock)
    return leases.is_silent("a", 20.0, clock.monotonic(), None)


@pytest.mark.fault("A Node object is deleted while the watch of nodes delivers nothing")
async def test_a_node_that_is_gone_is_confirmed_without_its_watch() -> None:
    clock, leases = ManualClock(), NodeLeases()
    leases.miss("a", clock.monotonic())
    assert await confirmed(leases, clock, server("b"))


async def test_a_node_that_exists_is_not_confirmed_to_be_gone() -> None:
    clock, leases = ManualClock(), NodeLeases()
    leases.miss("a", clock.monotonic())
    assert not await confirmed(leases, clock, server("a"))


async def test_a_stale_lease_is_confirmed_unless_it_was_renewed() -> None:
    for renewed, silent in (("t0", True), ("t1", False), (None, False)):
        clock, leases = ManualClock(), NodeLeases()
        leases.observe("a", "t0", clock.monotonic())
        found = await confirmed(leases, clock, server("a", renewed))
        assert found is silent, renewed
