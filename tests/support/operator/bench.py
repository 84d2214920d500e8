"""A bench for calls to sidecars: the operator's `Sidecars` in front of TLS servers that play the sidecars."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.hang import HANG_SECONDS
from tests.support.operator.served_sidecar import ServedSidecar
from tests.support.servers.ports import free_port

from holdfast_core.clock import SystemClock
from holdfast_core.ids import JobUid, RestartRound, Worker, is_spare
from holdfast_core.messages.schema import Round, Seal
from holdfast_core.net import operator_dns_name, peer_dns_name
from holdfast_operator.model.actions import Call, CallPath, OutgoingRound
from holdfast_operator.model.job import PodPhase, PodView, Reachable, SidecarView
from holdfast_operator.model.ownership import Key, job_key
from holdfast_operator.sidecars.calls import Sidecars
from holdfast_operator.sidecars.certificates import (
    KeyPair,
    client_context,
    new_authority,
    new_leaf,
)
from holdfast_operator.sidecars.client import SidecarClient

UID = JobUid("0c0ffee0-0000-4000-8000-000000000000")
KEY = job_key("team", "gpt")
AUTHORITY = new_authority(UID)


CONTEXT = client_context(AUTHORITY, new_leaf(AUTHORITY, operator_dns_name(UID)))


async def identity(job_uid: JobUid) -> ssl.SSLContext:
    return CONTEXT


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


SPEED = 20
"""How many times faster the clock of a bench runs, so that tests do not wait for back-offs."""


class RecordingClock(SystemClock):
    """A fast clock that records its sleeps, and that a test may stop by setting `stopped`."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.stopped: float | None = None

    def monotonic(self) -> float:
        return SPEED * super().monotonic() if self.stopped is None else self.stopped

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await super().sleep(seconds / SPEED)


@dataclass
class Bench:
    sidecars: Sidecars
    port: int
    enqueued: list[Key] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    clock: RecordingClock = field(default_factory=RecordingClock)
    defects: list[Exception] = field(default_factory=list)
    """Each is raised once when the bench is notified of a change, as a defect of the operator would be."""
    servers: dict[int, ServedSidecar] = field(default_factory=dict)

    async def serve(self, pod: PodView, leaf: KeyPair | None = None) -> ServedSidecar:
        server = ServedSidecar(pod.worker, pod.name, pod.birth_round)
        leaf = leaf or new_leaf(AUTHORITY, peer_dns_name(pod.name, UID))
        await server.start(pod.ip or "", self.port, AUTHORITY.certificate, leaf)
        self.servers[pod.worker] = server
        return server

    async def answering(self, pod: PodView) -> ServedSidecar:
        """Serve this pod, follow it, and return its sidecar when it has answered."""
        server = await self.serve(pod)
        self.follow(pod)
        await self.until(lambda: self.view(pod).reachable is Reachable.YES)
        return server

    def follow(
        self,
        *pods: PodView,
        round_: int = 0,
        coordinator: int | None = None,
        suspects: frozenset[str] = frozenset(),
        trains: bool = False,
    ) -> None:
        self.sidecars.follow(
            KEY,
            UID,
            RestartRound(round_),
            pods,
            None if coordinator is None else Worker(coordinator),
            suspects,
            ranks=8,
            gang=frozenset(p.uid for p in pods if trains and not is_spare(p.worker)),
        )

    def call(self, pod: PodView, path: CallPath, message: Any) -> bool:
        """Request a call as a decision does."""
        return self.sidecars.call(UID, Call(path, pod.worker, pod.name, pod.uid, message))

    def seal(self, pod: PodView, round_: int) -> None:
        self.call(pod, CallPath.SEAL, Seal(RestartRound(round_)))

    def send_round(self, pod: PodView, message: Round) -> None:
        self.call(pod, CallPath.ROUND, OutgoingRound.of(message))

    def view(self, pod: PodView) -> SidecarView:
        return next(v for v in self.sidecars.views(UID) if v.pod_uid == pod.uid)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
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
    sidecars = Sidecars(client, identity, clock, enqueue, errors.append)
    found = Bench(sidecars, port, keys, errors, clock, defects)
    try:
        yield found
    finally:
        await found.sidecars.close()
        await client.close()
        for server in found.servers.values():
            await server.close()
