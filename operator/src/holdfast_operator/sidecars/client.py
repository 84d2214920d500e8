"""Client for single calls to a sidecar, and the limits on such calls.

Calls have mutual TLS, explicit time-outs and strictly parsed replies. The client connects to the pod's IP and
verifies the pod's name in the certificate. It keeps the connections of polls for the next poll, and those of
SEAL for the ROUND that follows: a handshake takes both sides more processor time than the call.

The limits are a rate with a burst, and slots for concurrent calls. The slots are limited in total, for each
job, and for pods that do not answer:

1. Pods that answered the last call, pods of unknown state, and pods that did not answer several calls have
   separate slots. Thousands of silent pods cannot take the slots of a healthy job, nor those of a pod that
   failed once because the operator itself was slow.
2. Within each of these kinds, calls of a recovery (SEAL, ROUND, the first poll of a coordinator) go first,
   and jobs take turns, each with a limited number of concurrent calls. One large or hostile job delays
   another by one call at most.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeVar

import aiohttp

from holdfast_core.contract import CONTROL_PORT
from holdfast_core.errors import FormatError, UnavailableError
from holdfast_core.ids import CheckpointId, JobUid
from holdfast_core.messages.codec import dumps, loads, reply_limit_bytes
from holdfast_core.messages.schema import (
    CoordinatorState,
    GangRequest,
    Inventory,
    Ok,
    Prune,
    Refusal,
    Refused,
)
from holdfast_core.net import peer_dns_name
from holdfast_operator.model.actions import CallPath

R = TypeVar("R")

CONNECT_SECONDS = 2.0
HANDSHAKE_SECONDS = 3.0
"""Limit for TCP and TLS together. A pod that accepts the connection and sends nothing must not hold its
call slot for longer."""
CALL_SECONDS = 5.0
SEAL_SECONDS = 8.0
"""Time-out of a seal, which waits for the ranks to end (5 s at most) and for full slots to reach the disk."""
PRUNE_SECONDS = 60.0
"""Time-out of a prune, which lists and deletes objects in the object store."""
POLL_SECONDS = 25
"""Time after which a sidecar answers a long poll without a change."""
KEEP_SECONDS = 15.0
"""Time for which the connection of a poll is kept for the next one, and that of a SEAL for the ROUND."""
INLINE_BYTES = 32 << 10
"""Larger replies are parsed in a thread, because the event loop serves all jobs."""


class SidecarRefused(Exception):
    """Error of a call that the sidecar answered with a refusal."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(f"{refused.code}: {refused.message}")
        self.refused = refused

    @property
    def code(self) -> Refusal:
        return self.refused.code


@dataclass(frozen=True, slots=True)
class Target:
    """Address and identity of the sidecar to call."""

    job_uid: str
    pod: str
    address: str
    """Pod IP."""
    ranks: int
    """Number of ranks of the job, which bounds the size of its sidecars' replies."""


@dataclass(slots=True)
class _Connection:
    """How a request reaches the sidecar."""

    kept: bool = False
    """Whether it uses the connection of an earlier request."""


class SidecarClient:
    """Client for the control ports of sidecars. It is usable between `start` and `close`.

    Raises:
        UnavailableError: The sidecar did not answer, or its error reply is malformed.
        FormatError: A reply with status 200 is malformed, or any reply is too large.
        SidecarRefused: The sidecar refused the request.
    """

    def __init__(self, port: int = CONTROL_PORT) -> None:
        self._port = port
        self._session: aiohttp.ClientSession | None = None
        self._kept: aiohttp.ClientSession | None = None
        # Large replies are parsed one at a time, which bounds memory and processor time.
        self._large = asyncio.Lock()

    async def start(self) -> None:
        # Inventories are read once in minutes, and ten thousand connections would need a gigabyte.
        self._session = _session(aiohttp.TCPConnector(limit=0, force_close=True))
        # The pool keeps connections apart by address, TLS context and name of the pod.
        self._kept = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS))

    async def close(self) -> None:
        for session in (self._session, self._kept):
            if session is not None:
                await session.close()

    async def change(
        self, context: ssl.SSLContext, target: Target, path: CallPath, message: Any
    ) -> Inventory:
        """Send SEAL, FinishCommit or ROUND, to which the sidecar answers with its new inventory."""
        seconds = SEAL_SECONDS if path is CallPath.SEAL else CALL_SECONDS
        close = path is CallPath.ROUND
        return await self._call(
            context, target, path, Inventory, message, seconds, keep=True, close=close
        )

    async def request(
        self, context: ssl.SSLContext, target: Target, path: str, message: GangRequest
    ) -> Ok:
        return await self._call(context, target, path, Ok, message)

    async def prune(self, context: ssl.SSLContext, target: Target, message: Prune) -> Ok:
        return await self._call(context, target, CallPath.PRUNE, Ok, message, PRUNE_SECONDS)

    async def inventory(self, context: ssl.SSLContext, target: Target) -> Inventory:
        return await self._call(context, target, "/v1/inventory", Inventory)

    async def manifest(
        self, context: ssl.SSLContext, target: Target, checkpoint: CheckpointId
    ) -> bytes | None:
        """Return the document of a manifest, or None if the sidecar does not have it any longer."""
        path = f"/v1/manifest?step={checkpoint.step}&round={checkpoint.round}"
        try:
            return await self._call(context, target, path, bytes)
        except SidecarRefused as refusal:
            if refusal.code is Refusal.NOT_FOUND:
                return None
            raise

    async def state(
        self, context: ssl.SSLContext, target: Target, since: int, quiet_seconds: float
    ) -> CoordinatorState:
        """Return the coordinator's state when its version is above `since`, or after POLL_SECONDS.

        Every version is above 0, so that a sidecar answers a poll with `since` 0 within CALL_SECONDS. The
        connection is kept for the next poll. A coordinator that is lost during a poll costs the poll's
        whole time-out in any case.

        Args:
            quiet_seconds: Time for which the coordinator keeps back changes that are not urgent.
        """
        wait = POLL_SECONDS if since else 0
        path = f"/v1/state?since={since}&timeout={wait}&quiet={round(quiet_seconds)}"
        return await self._call(
            context, target, path, CoordinatorState, seconds=wait + CALL_SECONDS, keep=True
        )

    async def _call(
        self,
        context: ssl.SSLContext,
        target: Target,
        path: str,
        reply: type[R],
        message: Any | None = None,
        seconds: float = CALL_SECONDS,
        *,
        keep: bool = False,
        close: bool = False,
    ) -> R:
        """Send a request and parse its reply.

        Args:
            reply: Type of the reply. `bytes`: it is a document, which is returned as it is.
            message: What is sent by POST: a message, or its encoding. None sends a GET.
            keep: Use a kept connection if there is one, and keep it.
            close: Close the connection afterwards.
        """
        method = "GET" if message is None else "POST"
        session, connection = self._kept if keep else self._session, _Connection()
        if session is None:
            raise UnavailableError(f"{method} {path} to {target.pod}: the session is not open")
        host = f"[{target.address}]" if ":" in target.address else target.address
        try:
            async with session.request(
                method,
                f"https://{host}:{self._port}{path}",
                data=message if message is None or isinstance(message, bytes) else dumps(message),
                headers={
                    "Content-Type": "application/json",
                    **({"Connection": "close"} if close else {}),
                },
                ssl=context,
                server_hostname=peer_dns_name(target.pod, target.job_uid),
                timeout=aiohttp.ClientTimeout(
                    total=seconds, connect=HANDSHAKE_SECONDS, sock_connect=CONNECT_SECONDS
                ),
                allow_redirects=False,
                trace_request_ctx=connection,
            ) as response:
                kind = reply if response.status == 200 else Refused
                data = await _bounded(response, reply_limit_bytes(kind, target.ranks))
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if connection.kept and method == "POST" and not isinstance(error, TimeoutError):
                # The sidecar has closed the kept connection meanwhile. SEAL and ROUND may arrive twice, but
                # aiohttp itself repeats only a GET.
                return await self._call(
                    context, target, path, reply, message, seconds, keep=keep, close=close
                )
            # aiohttp's message for a failed connect contains the TLS context's address in memory.
            cause = getattr(error, "os_error", None) or error
            text = str(cause) or type(cause).__name__
            raise UnavailableError(
                f"{method} {path.partition('?')[0]} to the sidecar of pod {target.pod} at "
                f"{target.address} failed: {text}"
            ) from error
        if status == 200:
            return await self._parsed(reply, data, target)
        try:
            refused = loads(Refused, data)
        except FormatError as error:
            raise UnavailableError(
                f"{method} {path.partition('?')[0]} to the sidecar of pod {target.pod}: status "
                f"{status}, and the response is not a message of the protocol"
            ) from error
        raise SidecarRefused(refused)

    async def _parsed(self, reply: type[R], data: bytes, target: Target) -> R:
        if isinstance(data, reply):
            return data
        limit_bytes = reply_limit_bytes(reply, target.ranks)
        if len(data) <= INLINE_BYTES:
            return loads(reply, data, limit_bytes=limit_bytes)
        async with self._large:
            return await asyncio.to_thread(loads, reply, data, limit_bytes=limit_bytes)


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_reused)
    # Sidecars do not compress. Without decompression a small body cannot grow in memory.
    return aiohttp.ClientSession(
        connector=connector,
        trust_env=False,
        auto_decompress=False,
        trace_configs=[trace],
    )


async def _reused(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    """Record that the request uses a kept connection."""
    context.trace_request_ctx.kept = True


async def _bounded(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_chunked(1 << 16):
        size += len(chunk)
        if size > limit_bytes:
            raise FormatError(
                f"the reply of a sidecar is larger than {limit_bytes} bytes, more than a job of "
                "its size can require"
            )
        parts.append(chunk)
    return b"".join(parts)


# --------------------------------------------------------------------------- limits


@dataclass(slots=True)
class Allowance:
    """Rate limit: `burst` uses without a wait, and one more every `seconds_each` seconds."""

    burst: int
    seconds_each: float
    used_until: float = 0.0
    """Monotonic time at which the whole burst is available again."""

    def try_use(self, now: float) -> bool:
        """Take one use if it is available without a wait. Return whether it was."""
        used_until = max(self.used_until, now) + self.seconds_each
        if used_until - now > (self.burst + 0.5) * self.seconds_each:  # 0.5: sums are rounded
            return False
        self.used_until = used_until
        return True

    def wait_seconds(self, now: float) -> float:
        """Take one use and return the seconds that the caller must wait before it."""
        self.used_until = max(self.used_until, now) + self.seconds_each
        return max(0.0, self.used_until - now - self.burst * self.seconds_each)


class Standing(Enum):
    """Whether the pod to call has answered lately."""

    ANSWERS = "answers"
    UNKNOWN = "unknown"
    SILENT = "silent"


SLOTS: Mapping[Standing, int] = MappingProxyType(
    {Standing.ANSWERS: 128, Standing.UNKNOWN: 256, Standing.SILENT: 64}
)
"""Concurrent calls of each kind. Each is one connection, and a silent pod occupies it for seconds."""
JOB_SHARE = 8
"""Divisor: one job holds at most a JOB_SHARE-th of the slots of a kind, and at least one."""


class CallSlots:
    """Owner of all call slots. Wrap each call in `async with slots.hold(...)`."""

    def __init__(self, slots: Mapping[Standing, int] = SLOTS) -> None:
        self._kinds = {standing: _Kind(count) for standing, count in slots.items()}

    @asynccontextmanager
    async def hold(self, job: JobUid, standing: Standing, *, urgent: bool) -> AsyncIterator[None]:
        """Wait for a slot and hold it. Urgent calls go before all others of the same standing."""
        kind = self._kinds[standing]
        await kind.acquire(job, urgent)
        try:
            yield
        finally:
            kind.release(job)


class _Kind:
    """The slots of one standing."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._per_job = max(1, count // JOB_SHARE)
        self._held: dict[JobUid, int] = {}
        self._waiting: tuple[_Turns, _Turns] = ({}, {})
        """Waiting calls: the urgent ones, then the others."""

    async def acquire(self, job: JobUid, urgent: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting[0 if urgent else 1]
        waiting.setdefault(job, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(job)  # the slot was assigned just before the cancellation arrived
            raise

    def release(self, job: JobUid) -> None:
        self._free += 1
        self._held[job] -= 1
        if not self._held[job]:
            del self._held[job]
        self._serve()

    def _serve(self) -> None:
        while self._free > 0:
            turn = self._next(self._waiting[0]) or self._next(self._waiting[1])
            if turn is None:
                return
            job, future = turn
            self._free -= 1
            self._held[job] = self._held.get(job, 0) + 1
            future.set_result(None)

    def _next(self, turns: _Turns) -> tuple[JobUid, asyncio.Future[None]] | None:
        """Remove and return the next call of the first job in turn that is below its limit.

        The job then moves to the end of the turns.
        """
        while True:
            job = next((j for j in turns if self._held.get(j, 0) < self._per_job), None)
            if job is None:
                return None
            queue = turns.pop(job)
            while queue:
                future = queue.popleft()
                if not future.done():
                    if queue:
                        turns[job] = queue
                    return job, future


_Turns = dict[JobUid, deque[asyncio.Future[None]]]
"""Waiting calls by job, in the order of the jobs' turns."""
