"""Messages that the coordinator still has to send to each member: what it lacks of the plan, and manifests.

Each member has its own task, which sends one message at a time, so a member that hangs delays no other. The
next message follows from what the member has not acknowledged yet. A message that failed is therefore sent
again if it is still needed. The plan is sent before manifests, because a rank may need a slot that it frees,
and a member may take long to store a manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError, NotFoundError, StaleRoundError
from holdfast_core.ids import Digest, Step, Worker
from holdfast_core.messages.schema import (
    GangRequest,
    ManifestPut,
    Ok,
    Plan,
    Round,
)
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base import logs
from holdfast_sidecar.base.pod import Backoff
from holdfast_sidecar.base.rounds import relay_of
from holdfast_sidecar.base.settings import Settings
from holdfast_sidecar.coordinator.ledger import Ledger, StepEntry
from holdfast_sidecar.coordinator.plan import missing, plan
from holdfast_sidecar.wire.client import Peers

_PUTS_KEPT = 4


@dataclass(slots=True)
class _Acknowledged:
    """Record of what one member has acknowledged."""

    plan: Plan
    """The whole plan, of which the member has been sent what it lacked."""
    requests: int = 0
    """Number of acknowledged entries of `Outbox._requests`."""

    def request_acknowledged(self) -> None:
        self.requests += 1

    def plan_acknowledged(self, plan: Plan) -> None:
        self.plan = plan


class Outbox:
    """Sender of the coordinator's messages to all members of the round."""

    def __init__(
        self,
        settings: Settings,
        peers: Peers,
        ledger: Ledger,
        clock: Clock,
        on_manifest: Callable[[Step, Worker], None],
        on_lost: Callable[[Step], None],
    ) -> None:
        """Create the sender; `start` begins to send.

        Args:
            on_manifest: Called when a member has stored the manifest of a step.
            on_lost: Called when a member answers that it lacks its shard of a step.
        """
        self._settings = settings
        self._peers = peers
        self._ledger = ledger
        self._clock = clock
        self._on_manifest = on_manifest
        self._on_lost = on_lost
        self._tasks = Tasks()
        self._requests: list[tuple[str, GangRequest]] = []
        self._nothing = Plan(ledger.round)
        """What a process that has just started has acknowledged."""
        self._wakes = {worker: asyncio.Event() for worker in ledger.workers}
        self._acknowledged = {worker: _Acknowledged(self._nothing) for worker in ledger.workers}
        self._plans: dict[bool, Plan] = {}
        """The present plan for members that are released, and for others. Empty until it is asked for."""
        self._missing: dict[tuple[int, bool], tuple[Plan, Plan | None]] = {}
        """By the id of an acknowledged plan, that plan and what it lacks of the present one. Nearly all
        members have acknowledged the same plan."""
        self._puts: dict[Digest | None, ManifestPut] = {}
        """The newest messages with manifests. All members share them: one has megabytes in a large gang."""
        self._released = False
        self._released_at: float | None = None
        self._message: Round | None = None
        self._own: Worker | None = None

    def start(self, message: Round) -> None:
        self._message = message
        self._own = message.coordinator
        sending = ((self._serve(w), f"sending to worker {w}") for w in self._ledger.workers)
        self._tasks.spawn(self._tasks.spawn_all(sending), "sending to all workers")

    def update(self, message: Round) -> None:
        """Take over a higher version of the ROUND. A member whose pod was replaced gets everything again."""
        before = self._message
        self._message = message
        pods = {} if before is None else {m.worker: m.pod for m in before.members}
        for member in message.members:
            if pods.get(member.worker) != member.pod and member.worker in self._acknowledged:
                self._acknowledged[member.worker] = _Acknowledged(self._nothing)
        self.wake()

    async def close(self) -> None:
        await self._tasks.cancel()

    def wake(self) -> None:
        """Plan again and look for messages to all members. Call this when the ledger has changed."""
        self._plans, self._missing = {}, {}
        for event in self._wakes.values():
            event.set()

    # ------------------------------------------------------------------ what is to be sent

    def request(self, path: str, message: GangRequest) -> bool:
        """Queue a request for worker 0. Return False if the same one was queued before in this round."""
        if (path, message) in self._requests:
            return False
        self._requests.append((path, message))
        self._wakes[Worker(0)].set()
        return True

    def prune(self, steps: tuple[Step, ...]) -> None:
        """Forget these steps and have members delete them, except for those on their way to the store."""
        self._ledger.forget(steps)
        self.wake()

    def release(self) -> None:
        """Notify all members that their pods may end, the own pod last."""
        if not self._released:
            self._released = True
            self._released_at = self._clock.monotonic()
            self.wake()

    def repeat(self, worker: Worker) -> None:
        """Send everything again to a member whose sidecar has nothing, because it has just started.

        This has no effect on a member that was sent nothing yet.
        """
        if self._acknowledged[worker] != _Acknowledged(self._nothing):
            self._acknowledged[worker] = _Acknowledged(self._nothing)
            self._wakes[worker].set()

    # ------------------------------------------------------------------ one member

    async def _serve(self, worker: Worker) -> None:
        settings = self._settings
        backoff = Backoff(settings.backoff_first_seconds, settings.backoff_last_seconds)
        changed = logs.Changed()
        while True:
            self._wakes[worker].clear()
            chosen = self._next(worker)
            if chosen is None:
                await self._wait(worker)
                continue
            message, path, acknowledged = chosen
            try:
                await self._peers.call(worker, message, Ok, path=path)
            except StaleRoundError:
                return
            except HoldfastError as error:
                if isinstance(error, NotFoundError) and isinstance(message, ManifestPut):
                    self._on_lost(message.step)
                    continue
                changed.log(f"worker {worker}", f"{type(message).__name__}: {error}")
                await self._clock.sleep(backoff.next_seconds())
            else:
                backoff.reset()
                changed.healthy(f"worker {worker}")
                acknowledged()

    async def _wait(self, worker: Worker) -> None:
        """Wait until there may be something to send. The release of some pods also depends on time."""
        if not (self._released and self._released_before(worker)):
            await self._wakes[worker].wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._wakes[worker].wait()

    def _next(self, worker: Worker) -> tuple[Any, str | None, Callable[[], None]] | None:
        """Return the next message for this member, or None if nothing is missing.

        Returns:
            The message, its path if it is not the default for its type, and a function to call when the
            message is acknowledged.
        """
        record = self._acknowledged[worker]
        if worker == 0 and record.requests < len(self._requests):
            path, message = self._requests[record.requests]
            return message, path, record.request_acknowledged
        if (lacks := self._lacks(worker)) is not None:
            acknowledged = functools.partial(record.plan_acknowledged, self._plan(worker))
            return lacks, None, acknowledged
        for step in sorted(self._ledger.steps):
            put = self._manifest_for(worker, self._ledger.steps[step])
            if put is not None:
                return put, None, functools.partial(self._on_manifest, step, worker)
        return None

    def _plan(self, worker: Worker) -> Plan:
        """Return the whole plan for this member."""
        released = self._may_release(worker)
        if released not in self._plans:
            self._plans[released] = plan(self._ledger, released=released)
        return self._plans[released]

    def _lacks(self, worker: Worker) -> Plan | None:
        """Return what this member lacks of the plan."""
        record, wanted = self._acknowledged[worker], self._plan(worker)
        key = id(record.plan), wanted.released
        if key not in self._missing:
            self._missing[key] = record.plan, missing(wanted, record.plan)
        return self._missing[key][1]

    def _manifest_for(self, worker: Worker, entry: StepEntry) -> ManifestPut | None:
        """Return the manifest of a step if this member is to receive it now.

        The own node tier stores it first, so that a manifest that any member has also exists here.
        """
        if entry.manifest is None or worker in entry.acknowledged:
            return None
        if worker != self._own and self._own not in entry.acknowledged:
            return None
        key = entry.manifest_digest
        if key not in self._puts:
            if len(self._puts) >= _PUTS_KEPT:
                self._puts.pop(next(iter(self._puts)))
            self._puts[key] = ManifestPut(self._ledger.round, entry.step, entry.manifest.decode())
        return self._puts[key]

    def _may_release(self, worker: Worker) -> bool:
        """Return whether this member may be released now.

        A relay is released after the workers that it passes the release on to, and the own pod is last: these
        have acknowledged their release, or `release_seconds` have passed.
        """
        if not self._released or self._released_at is None:
            return False
        waited = self._clock.monotonic() - self._released_at
        return waited > self._settings.release_seconds or all(
            self._acknowledged[other].plan.released for other in self._released_before(worker)
        )

    def _released_before(self, worker: Worker) -> list[Worker]:
        """Return the workers that are released before this one."""
        message = self._message
        if worker == self._own:
            return [other for other in self._acknowledged if other != worker]
        if message is None or relay_of(message, worker) != worker:
            return []
        group = range(worker + 1, min(worker + message.fan_in, message.workers))
        return [Worker(other) for other in group]
