"""A scripted operator that sends the real operator's HTTPS requests and makes no decisions."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from tests.support.sidecar.waiting import DEADLINE_SECONDS

from holdfast_core.clock import SystemClock
from holdfast_core.errors import HoldfastError
from holdfast_core.format.manifest import Manifest, manifest_digest, parse_manifest
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Step, Worker
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import (
    CoordinatorState,
    Inventory,
    Member,
    Policy,
    Refused,
    RestorePoint,
    Round,
    Seal,
)
from holdfast_core.net import peer_dns_name

T = TypeVar("T")


@dataclass(slots=True)
class FakeOperator:
    """Client of the sidecars' control ports that sends the operator's messages."""

    job_uid: JobUid
    context: ssl.SSLContext
    members: dict[int, Member] = field(default_factory=dict)

    async def call(self, worker: int, path: str, message: Any, reply: type[T]) -> T:
        """POST `message`, or GET if it is None, and return the reply. `bytes` is a document as it is.

        Raises the error of a refusal.
        """
        member = self.members[worker]
        host, control, _ = member.address.split(":")
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.context)) as session,
            session.request(
                "GET" if message is None else "POST",
                f"https://{host}:{control}{path}",
                data=None if message is None else dumps(message),
                server_hostname=peer_dns_name(member.pod, self.job_uid),
                timeout=aiohttp.ClientTimeout(total=DEADLINE_SECONDS + 30),
            ) as response,
        ):
            data = await response.read()
            if response.status != 200:
                raise_refused(loads(Refused, data))
            return data if isinstance(data, reply) else loads(reply, data)

    async def seal(self, worker: int, round_: int) -> Inventory:
        return await self.call(worker, "/v1/seal", Seal(RestartRound(round_)), Inventory)

    async def round(self, worker: int, message: Round) -> Inventory:
        return await self.call(worker, "/v1/round", message, Inventory)

    async def round_all(self, message: Round) -> list[Inventory]:
        return list(await asyncio.gather(*(self.round(m.worker, message) for m in message.members)))

    async def inventory(self, worker: int) -> Inventory:
        return await self.call(worker, "/v1/inventory", None, Inventory)

    async def manifest(self, worker: int, listed: Digest, of: CheckpointId) -> Manifest:
        """Return a manifest that the worker's inventory lists. Its document has the listed digest."""
        path = f"/v1/manifest?step={of.step}&round={of.round}"
        document = await self.call(worker, path, None, bytes)
        assert manifest_digest(document) == listed
        return parse_manifest(document)

    async def state(self, coordinator: int, since: int = 0, timeout: int = 0) -> CoordinatorState:
        return await self.call(
            coordinator, f"/v1/state?since={since}&timeout={timeout}", None, CoordinatorState
        )

    async def state_until(
        self,
        coordinator: int,
        condition: Callable[[CoordinatorState], bool],
        what: str,
        *,
        acknowledge: bool = True,
    ) -> CoordinatorState:
        """Poll the coordinator until its state meets `condition`, and return that state.

        With `acknowledge`, each request carries the version of the last state, as the operator's does.
        Raises AssertionError that names `what` after DEADLINE_SECONDS.
        """
        clock = SystemClock()
        deadline = clock.monotonic() + DEADLINE_SECONDS
        since = 0
        while True:
            try:
                state = await self.state(coordinator, since, 2)
            except (HoldfastError, aiohttp.ClientError):
                await clock.sleep(0.1)
                state = None
            if state is not None and condition(state):
                return state
            if clock.monotonic() > deadline:
                raise AssertionError(f"not within {DEADLINE_SECONDS} s: {what}; {state}")
            since = state.version if state is not None and acknowledge else 0

    def message(
        self,
        round_: int,
        *,
        version: int = 1,
        restore: RestorePoint | None = None,
        copies: tuple[tuple[int, int], ...] = (),
        policy: Policy | None = None,
        coordinator: int = 0,
        store_host: int = 0,
        last_persisted: RestorePoint | None = None,
        pinned: tuple[int, ...] = (),
        fan_in: int = 64,
        rolled_back_from: int | None = None,
    ) -> Round:
        """Return a ROUND message with all members."""
        return Round(
            round=RestartRound(round_),
            version=version,
            restore_point=restore or RestorePoint(),
            coordinator=Worker(coordinator),
            store_host=Worker(store_host),
            workers=len(self.members),
            members=tuple(self.members[w] for w in sorted(self.members)),
            copies={
                Worker(source): tuple(Worker(b) for a, b in copies if a == source)
                for source, _ in copies
            },
            policy=policy or Policy(interval_steps=1, peer_copies=1 if copies else 0),
            last_persisted=last_persisted,
            pinned=tuple(Step(step) for step in pinned),
            fan_in=fan_in,
            rolled_back_from=None if rolled_back_from is None else Step(rolled_back_from),
        )
