"""The cache of sidecars against real TLS servers: what a pass reads after what happened."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from tests.support.operator.fake_sidecar import FakeSidecar
from tests.support.servers.ports import free_port

from holdfast_core.clock import SystemClock
from holdfast_core.contract import operator_dns_name, peer_dns_name
from holdfast_core.ids import Digest, JobUid, RestartRound, Step, Worker
from holdfast_core.messages.schema import (
    Ask,
    Certificate,
    CoordinatorState,
    Member,
    Policy,
    Prune,
    RestorePoint,
    Round,
)
from holdfast_operator.model.job import PodPhase, PodView, Reachable, SidecarView
from holdfast_operator.model.keys import Key, job_key
from holdfast_operator.sidecars.calls import Sidecars, back_off_seconds
from holdfast_operator.sidecars.certificates import (
    Leaf,
    client_context,
    new_authority,
    new_leaf,
    renewal_context,
)
from holdfast_operator.sidecars.client import SidecarClient

UID = JobUid("0c0ffee0-0000-4000-8000-000000000000")
KEY = job_key("team", "gpt")
NOW = datetime.now(UTC)
AUTHORITY = new_authority(UID)


class Identity:
    def __init__(self) -> None:
        leaf = new_leaf(AUTHORITY, operator_dns_name(UID), NOW)
        self._context = client_context(AUTHORITY, leaf)
        self._renewal = renewal_context(AUTHORITY, leaf)

    async def client(self, job_uid: JobUid) -> ssl.SSLContext:
        return self._context

    async def renewal_client(self, job_uid: JobUid) -> ssl.SSLContext:
        return self._renewal

    async def renewed(self, job_uid: JobUid, pod: str) -> Certificate:
        leaf = new_leaf(AUTHORITY, peer_dns_name(pod, UID), NOW)
        return Certificate(leaf.certificate, leaf.key)


def pod_view(worker: int, birth: int = 0, **changes: object) -> PodView:
    view = PodView(
        name=f"gpt-{worker}-r{birth}",
        uid=f"uid-{worker}-{birth}",
        worker=Worker(worker),
        birth_round=RestartRound(birth),
        phase=PodPhase.RUNNING,
        ip=f"127.66.0.{worker + 1}",
        node="node-a",
        sidecar_started=True,
    )
    return replace(view, **changes)  # type: ignore[arg-type]  # a builder of tests


def leaf_of(pod: PodView, age: timedelta = timedelta()) -> Leaf:
    return new_leaf(AUTHORITY, peer_dns_name(pod.name, UID), NOW - age)


class RecordingClock(SystemClock):
    """Real time, until `stopped` is set."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.stopped: float | None = None

    def monotonic(self) -> float:
        return super().monotonic() if self.stopped is None else self.stopped

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await super().sleep(seconds)


@dataclass
class Bench:
    sidecars: Sidecars
    port: int
    enqueued: list[Key] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    clock: RecordingClock = field(default_factory=RecordingClock)
    defects: list[Exception] = field(default_factory=list)
    """Each is raised once by what takes the news, as a defect of the operator would be."""
    servers: dict[int, FakeSidecar] = field(default_factory=dict)

    async def serve(self, pod: PodView, leaf: Leaf | None = None) -> FakeSidecar:
        server = FakeSidecar(pod.worker, pod.name, pod.birth_round)
        leaf = leaf or leaf_of(pod)
        await server.start(pod.ip or "", self.port, AUTHORITY.certificate, leaf)
        self.servers[pod.worker] = server
        return server

    def follow(
        self,
        *pods: PodView,
        round_: int = 0,
        coordinator: int | None = None,
        suspects: frozenset[str] = frozenset(),
    ) -> None:
        self.sidecars.follow(
            KEY,
            UID,
            RestartRound(round_),
            pods,
            None if coordinator is None else Worker(coordinator),
            suspects,
            ranks=8,
        )

    def view(self, pod: PodView) -> SidecarView:
        return next(v for v in self.sidecars.views(UID) if v.pod_uid == pod.uid)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110 - several caches, no event for all
                await asyncio.sleep(0.01)


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    port = free_port()
    client = SidecarClient(port)
    await client.start()
    keys: list[Key] = []
    errors: list[str] = []
    defects: list[Exception] = []

    def enqueue(key: Key) -> None:
        if defects:
            raise defects.pop()
        keys.append(key)

    clock = RecordingClock()
    sidecars = Sidecars(client, Identity(), clock, enqueue, errors.append)
    found = Bench(sidecars, port, keys, errors, clock, defects)
    try:
        yield found
    finally:
        await found.sidecars.close()
        await client.close()
        for server in found.servers.values():
            await server.close()


def round_message(round_: int, version: int) -> Round:
    return Round(
        round=RestartRound(round_),
        version=version,
        restore_point=RestorePoint(),
        coordinator=Worker(0),
        store_host=Worker(0),
        workers=1,
        members=(Member(Worker(0), "gpt-0-r0", "127.66.0.1"),),
        copies=(),
        policy=Policy(interval_steps=10),
    )


async def test_first_contact_brings_the_inventory() -> None:
    async with bench() as b:
        pod = pod_view(0)
        await b.serve(pod)
        b.follow(pod)
        assert b.view(pod).reachable is Reachable.UNKNOWN
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        inventory = b.view(pod).inventory
        assert inventory is not None
        assert inventory.pod == "gpt-0-r0"
        assert b.enqueued == [KEY]


async def test_two_failures_make_it_unreachable_and_an_answer_reachable_again() -> None:
    async with bench() as b:
        pod = pod_view(0)
        b.follow(pod)
        await b.until(lambda: bool(b.sidecars.views(UID)))

        def retry() -> bool:
            b.sidecars.seal(UID, pod.uid, RestartRound(1))
            return b.view(pod).reachable is Reachable.NO

        await b.until(retry)
        assert b.view(pod).unreachable_since is not None
        server = await b.serve(pod)

        def sealed() -> bool:
            b.sidecars.seal(UID, pod.uid, RestartRound(1))
            return b.view(pod).sealed_round == 1

        await b.until(sealed)
        assert b.view(pod).reachable is Reachable.YES
        assert b.view(pod).unreachable_since is None
        assert server.round == 1


@pytest.mark.parametrize(
    ("failures", "silent_seconds", "pause"),
    [
        (1, 0.0, 0.25),
        (2, 1.0, 0.5),
        (3, 2.0, 1.0),
        (50, 55.0, 1.0),
        (90, 180.0, 3.0),
        (4000, 86_400.0, 10.0),
        (1, 86_400.0, 0.25),
    ],
)
def test_a_silent_sidecar_is_called_less_and_less_often(
    failures: int, silent_seconds: float, pause: float
) -> None:
    assert back_off_seconds(failures, silent_seconds) == pause


async def test_pass_never_waits_and_never_calls_twice_at_once() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        b.follow(pod)
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        for _ in range(50):
            b.sidecars.seal(UID, pod.uid, RestartRound(1))
        await b.until(lambda: b.view(pod).sealed_round == 1)
        assert [kind for kind, _ in server.calls].count("seal") == 1


async def test_round_is_acknowledged_and_a_refused_one_teaches_the_version() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        b.follow(pod)
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        b.sidecars.send_round(UID, pod.uid, round_message(0, 1), 0)
        await b.until(lambda: b.view(pod).acked is not None)
        acked = b.view(pod).acked
        assert acked is not None
        assert (acked.round, acked.version, acked.sidecar_restarts) == (0, 1, 0)
        server.version = 7
        b.sidecars.send_round(UID, pod.uid, round_message(0, 2), 0)
        await b.until(lambda: (i := b.view(pod).inventory) is not None and i.version == 7)
        assert b.view(pod).reachable is Reachable.YES


async def test_stale_seal_tells_the_higher_round() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        server.round = RestartRound(9)
        b.follow(pod)
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        b.sidecars.seal(UID, pod.uid, RestartRound(3))
        await b.until(lambda: b.view(pod).sealed_round == 9)


async def test_long_poll_follows_the_coordinator_and_says_what_was_acted_on() -> None:
    async with bench() as b:
        pod, other = pod_view(0), pod_view(1)
        server, second = await b.serve(pod), await b.serve(other)
        b.follow(pod, other, coordinator=0)
        server.publish(CoordinatorState(3, RestartRound(0)))
        await b.until(lambda: b.sidecars.coordinator_state(UID) is not None)
        b.sidecars.acted_on(UID, 3)
        await b.until(lambda: server.since == 3)
        server.publish(CoordinatorState(4, RestartRound(0), finished=True))
        await b.until(lambda: (s := b.sidecars.coordinator_state(UID)) is not None and s.finished)
        # The operator names another one: its versions begin anew.
        second.publish(CoordinatorState(1, RestartRound(0), running=True))
        b.follow(pod, other, coordinator=1)
        await b.until(lambda: (s := b.sidecars.coordinator_state(UID)) is not None and s.running)
        assert second.since == 0
        b.follow(pod, other, round_=1)
        assert b.sidecars.coordinator_state(UID) is None


async def test_save_is_asked_until_somebody_takes_it_and_prune_lands_later() -> None:
    async with bench() as b:
        pod = pod_view(0)
        b.follow(pod)
        b.sidecars.ask(UID, pod.name, "/v1/save-now", Ask(RestartRound(0), "t"))
        await asyncio.sleep(0.1)
        server = await b.serve(pod)
        await b.until(lambda: "save-now" in [kind for kind, _ in server.calls])
        point = RestorePoint(Step(10), RestartRound(0), Digest("b3:aa"))
        message = Prune(RestartRound(0), (point,))
        replies = []

        def pruned() -> bool:
            replies.append(b.sidecars.prune(UID, pod.name, "gpt-s10-r0", message))
            return bool(replies[-1].deleted)

        await b.until(pruned)
        assert replies[-1].deleted == (point,)
        assert [kind for kind, _ in server.calls].count("prune") == 1


async def test_leaf_is_renewed_at_two_thirds_of_its_life() -> None:
    async with bench() as b:
        pod = pod_view(0, created_at=NOW - timedelta(hours=17))
        young = pod_view(1, created_at=NOW - timedelta(hours=15))
        server, other = await b.serve(pod), await b.serve(young)
        b.follow(pod, young)
        await b.until(lambda: "certificate" in [kind for kind, _ in server.calls])
        await asyncio.sleep(0.05)
        b.follow(pod, young)
        await b.until(lambda: b.view(young).reachable is Reachable.YES)
        assert [kind for kind, _ in server.calls].count("certificate") == 1
        assert "certificate" not in [kind for kind, _ in other.calls]


@pytest.mark.parametrize("age", [timedelta(days=40), timedelta(hours=-7)], ids=["old", "early"])
async def test_a_leaf_outside_of_its_period_is_renewed_before_the_call(age: timedelta) -> None:
    """The operator was away, or the clock of its node has changed: no call fails for that."""
    async with bench() as b:
        pod = pod_view(0, created_at=NOW)
        server = await b.serve(pod, leaf_of(pod, age))
        b.follow(pod, coordinator=0)
        server.publish(CoordinatorState(3, RestartRound(0), running=True))
        await b.until(lambda: b.view(pod).reachable is not Reachable.UNKNOWN)
        assert b.view(pod).reachable is Reachable.YES
        await b.until(lambda: b.sidecars.coordinator_state(UID) is not None)
        b.sidecars.seal(UID, pod.uid, RestartRound(1))
        await b.until(lambda: b.view(pod).sealed_round == 1)
        assert [kind for kind, _ in server.calls].count("certificate") == 1


async def test_a_sidecar_that_keeps_its_expired_leaf_is_silent_and_not_renewed_each_time() -> None:
    """Each renewal is a new key, three handshakes and a line of the log."""
    async with bench() as b:
        pod = pod_view(0, created_at=NOW)
        server = await b.serve(pod, leaf_of(pod, timedelta(days=40)))
        server.keeps_leaf = True

        def called_again() -> bool:
            b.follow(pod, suspects=frozenset({"node-a"}))
            b.sidecars.seal(UID, pod.uid, RestartRound(1))
            known = b.sidecars._jobs[UID].pods[pod.uid]
            return known.failures >= 5 or len(server.calls) > 1

        await b.until(called_again)
        assert [kind for kind, _ in server.calls] == ["certificate"]
        assert b.view(pod).reachable is Reachable.NO


@pytest.mark.parametrize("case", ["another pod's name", "another job's authority"])
async def test_an_expired_leaf_of_a_stranger_gets_nothing(case: str) -> None:
    async with bench() as b:
        pod = pod_view(0)
        asked = pod if case == "another job's authority" else replace(pod, name="gpt-5-r0")
        authority = AUTHORITY if case == "another pod's name" else new_authority("other")
        name = peer_dns_name(asked.name, UID)
        server = await b.serve(pod, new_leaf(authority, name, NOW - timedelta(days=3)))

        def unreachable() -> bool:
            b.follow(pod)
            b.sidecars.seal(UID, pod.uid, RestartRound(1))
            return b.view(pod).reachable is Reachable.NO

        await b.until(unreachable)
        assert server.calls == []


async def test_suspect_node_is_called_directly() -> None:
    async with bench() as b:
        pod = pod_view(0)
        server = await b.serve(pod)
        b.follow(pod)
        await b.until(lambda: b.view(pod).reachable is Reachable.YES)
        await server.close()

        def silent() -> bool:
            b.follow(pod, suspects=frozenset({"node-a"}))
            return b.view(pod).reachable is Reachable.NO

        await b.until(silent)


async def test_pod_on_its_way_out_is_asked_where_its_node_is_silent() -> None:
    """The operator restarted meanwhile: only the answer that fails lets the corpse be removed."""
    async with bench() as b:
        pod = replace(pod_view(0), terminating=True)

        def silent() -> bool:
            b.follow(pod, suspects=frozenset({"node-a"}))
            return b.view(pod).reachable is Reachable.NO

        await b.until(silent)


async def test_stranger_on_the_address_is_no_answer() -> None:
    async with bench() as b:
        pod = pod_view(0)
        stranger = replace(pod, name="gpt-5-r0")
        await b.serve(stranger)

        def unreachable() -> bool:
            b.follow(pod)
            b.sidecars.seal(UID, pod.uid, RestartRound(1))
            return b.view(pod).reachable is Reachable.NO

        await b.until(unreachable)
        assert b.servers[0].calls == []
