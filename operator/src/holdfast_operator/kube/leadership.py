"""The lease that decides which operator process writes (ADR 0004), and its renewal in a thread.

1. A process reads the lease. It takes a lease that has no holder, or whose record has not changed for the
   duration that its holder set.
2. The leader renews the lease. It may write for WRITE_SHARE of its duration after the beginning of the last
   renewal that succeeded, which is less than the lease's duration, so it has stopped before another process
   can take the lease.
3. A process that ends in order gives the lease back.

Times are differences of this process's monotonic clock. The time stamps in the lease are for people only.

A pass that takes long holds the operator's event loop. If the renewal waited for it, other processes would
take the lease, and the recovery of every job would begin again in another process, so it has a thread of its
own. A process whose event loop stands still for good keeps the lease until the kubelet's liveness probe,
which that loop answers, fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast_core import logs
from holdfast_core.clock import Clock
from holdfast_core.errors import HoldfastError
from holdfast_operator.base.settings import DEFAULT_LEASE_SECONDS
from holdfast_operator.kube.api import ApiError, KubeApi
from holdfast_operator.kube.cluster import CONFLICT, NOT_FOUND

WRITE_SHARE = 0.7
RENEW_SHARE = 0.2
STANDBY_SHARE = 0.1
"""Pause between two reads of a standby."""
REQUEST_SHARE = 0.3
"""Time-out of a turn, which reads the lease and may write it."""
GAP_SHARE = 0.5
"""Longest time between two reads of a standby over which an unchanged lease counts as not renewed. After a
longer one, for example after an outage of the API server, the leader has the whole duration of the lease
again. All of these are shares of the lease's duration."""


class LeaseLostError(HoldfastError):
    """Another process has taken the lease. The memory of this process is behind the cluster."""


@dataclass(frozen=True, slots=True)
class LeaseName:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def collection(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"

    @property
    def path(self) -> str:
        return f"{self.collection}/{self.name}"


@dataclass(slots=True)
class _ForeignRecord:
    """One record of another holder, and the monotonic times between which it was read unchanged."""

    version: str
    first: float
    last: float


class Leadership:
    """Take and renew the lease for one process of the election.

    Args:
        api: Session of the lease alone. It may write at any time.
        identity: Name of this process. A process that has the name of the holder takes the lease at once,
            so a container that is restarted in its pod does not wait.
        seconds: The duration that this process sets when it leads. A standby waits for that of the leader.
    """

    def __init__(
        self,
        api: KubeApi,
        lease: LeaseName,
        identity: str,
        clock: Clock,
        seconds: int = DEFAULT_LEASE_SECONDS,
    ) -> None:
        self._seconds = seconds
        self._api = api
        self._lease = lease
        self._identity = identity
        self._clock = clock
        self._log_changes = logs.Changed()
        self._seen: _ForeignRecord | None = None
        self._write_until: float | None = None
        self.gained = asyncio.Event()
        """Set when this process has taken the lease. It stays set."""

    @property
    def leads(self) -> bool:
        """Whether this process may write now."""
        return self._write_until is not None and self._clock.monotonic() < self._write_until

    def check(self) -> None:
        """Raise ApiError if this process may not write now."""
        if not self.leads:
            raise ApiError(
                None,
                "NotLeading",
                f"the request is not sent: this process has not renewed the lease {self._lease} for "
                f"{WRITE_SHARE * self._seconds:.0f} s, so another operator may lead",
            )

    async def run(self) -> None:
        """Take the lease and renew it, until cancelled. Raises LeaseLostError if another process took it."""
        request_seconds = REQUEST_SHARE * self._seconds
        while True:
            try:
                async with asyncio.timeout(request_seconds):
                    await self._turn()
                if self._log_changes.forget("fault"):
                    logs.info(f"requests for the lease {self._lease} work again")
            except LeaseLostError:
                raise
            except (HoldfastError, TimeoutError) as error:
                text = str(error) or f"no answer within {request_seconds:.1f} s"
                self._log_changes.warning("fault", f"the lease {self._lease}: {text}")
            leads = self.gained.is_set()
            await self._clock.sleep((RENEW_SHARE if leads else STANDBY_SHARE) * self._seconds)

    async def release(self) -> None:
        """Stop writing and give the lease back, so that another process can take it at once.

        Errors are logged. The lease then ends by itself.
        """
        self._write_until = None
        if not self.gained.is_set():
            return
        try:
            async with asyncio.timeout(REQUEST_SHARE * self._seconds):
                while not await self._given_back():
                    pass
        except (HoldfastError, TimeoutError) as error:
            logs.warning(f"giving back the lease {self._lease} failed, it ends by itself: {error}")

    async def _given_back(self) -> bool:
        """Give the lease back. False if a renewal that was cancelled reached the API server in between."""
        raw = await self._read()
        if raw is None or _holder(raw) != self._identity:
            return True
        try:
            await self._patch(raw, {"holderIdentity": None})
        except ApiError as error:
            if error.status == CONFLICT:
                return False
            raise
        logs.info("the lease is given back", lease=str(self._lease))
        return True

    # ------------------------------------------------------------------ one turn

    async def _turn(self) -> None:
        raw = await self._read()
        begun = self._clock.monotonic()
        if raw is None:
            await self._create()
        elif _holder(raw) == self._identity:
            await self._patch(raw, self._record())
        elif self.gained.is_set():
            self._write_until = None
            raise LeaseLostError(
                f"this process had not renewed the lease {self._lease} in time, and "
                f"{_holder(raw) or 'another process'} has taken it; this process ends and its container "
                "starts again as a standby"
            )
        elif _holder(raw) is None or self._not_renewed(raw):
            transitions = int(_spec(raw).get("leaseTransitions") or 0) + 1
            taken = {"acquireTime": self._stamp(), "leaseTransitions": transitions}
            await self._patch(raw, self._record() | taken)
        else:
            self._log_changes.info("standby", f"this process is a standby, {_holder(raw)} leads")
            return
        self._write_until = begun + WRITE_SHARE * self._seconds
        if not self.gained.is_set():
            logs.info("this process leads", lease=str(self._lease), identity=self._identity)
            self.gained.set()

    def _not_renewed(self, raw: Mapping[str, Any]) -> bool:
        now, version = self._clock.monotonic(), str(raw["metadata"]["resourceVersion"])
        seen = self._seen
        if seen is None or seen.version != version or now - seen.last > GAP_SHARE * self._seconds:
            self._seen = _ForeignRecord(version, now, now)
            return False
        seen.last = now
        duration = _spec(raw).get("leaseDurationSeconds") or self._seconds
        return now - seen.first >= float(duration)

    # ------------------------------------------------------------------ requests

    async def _read(self) -> Any | None:
        try:
            return await self._api.get(self._lease.path)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    async def _create(self) -> None:
        await self._api.post(
            self._lease.collection,
            {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._lease.name, "namespace": self._lease.namespace},
                "spec": self._record() | {"acquireTime": self._stamp(), "leaseTransitions": 0},
            },
        )

    async def _patch(self, raw: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
        version = raw["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version}, "spec": spec}
        await self._api.patch(self._lease.path, body)

    def _record(self) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._seconds,
            "renewTime": self._stamp(),
        }

    def _stamp(self) -> str:
        return _micro_time(self._clock.utc_now())


def _holder(raw: Mapping[str, Any]) -> str | None:
    """Return the holder, or None if the lease was given back."""
    return _spec(raw).get("holderIdentity") or None


def _spec(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw.get("spec") or {}


def _micro_time(moment: datetime) -> str:
    """Format a time in UTC with microseconds, as Kubernetes does in leases."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaseThread:
    """A part in the election that runs in its own thread, with its own event loop.

    Args:
        leadership: The election. Only this thread calls `run` and `release` of it.
        api: The session of `leadership`. The thread opens and closes it.
    """

    def __init__(self, leadership: Leadership, api: KubeApi) -> None:
        self._leadership = leadership
        self._api = api
        self._stop = asyncio.Event()
        self._thread: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        """The thread's event loop, and the task that waits for its end."""
        self.gained = asyncio.Event()
        """Set in the caller's event loop when this process has taken the lease. It stays set."""

    @property
    def leads(self) -> bool:
        """Whether this process may write now. Every thread may ask."""
        return self._leadership.leads

    async def run(self) -> None:
        """Take the lease and renew it until the process ends. Raises LeaseLostError if another one took it.

        A cancelled call leaves the thread running: `release` ends it.
        """
        loop, work = asyncio.new_event_loop(), self._take_part(asyncio.get_running_loop())
        ended = asyncio.create_task(asyncio.to_thread(loop.run_until_complete, work))
        self._thread = loop, ended
        await asyncio.shield(ended)

    async def release(self) -> None:
        """Stop writing, give the lease back, and end the thread. Without a call of `run`, do nothing."""
        if self._thread is None:
            return
        loop, ended = self._thread
        loop.call_soon_threadsafe(self._stop.set)
        await asyncio.wait({ended})
        loop.close()

    async def _take_part(self, caller: asyncio.AbstractEventLoop) -> None:
        await self._api.start()
        election = asyncio.create_task(self._leadership.run())
        others = [
            asyncio.create_task(self._announce(caller)),
            asyncio.create_task(self._stop.wait()),
        ]
        try:
            await asyncio.wait((election, others[1]), return_when=asyncio.FIRST_COMPLETED)
            if election.done():
                await election
        finally:
            for task in (election, *others):
                task.cancel()
            await asyncio.gather(election, *others, return_exceptions=True)
            await self._leadership.release()
            await self._api.close()

    async def _announce(self, caller: asyncio.AbstractEventLoop) -> None:
        await self._leadership.gained.wait()
        caller.call_soon_threadsafe(self.gained.set)
