"""Requests to the other sidecars of the job: HTTPS with mutual TLS and explicit time-outs.

The server's certificate must name the pod that ROUND lists (`<pod>.<job-uid>.holdfast`), so that a request
fails if the address belongs to another pod by now. A message to the own worker is dispatched without a
connection, but goes through the same refusals. In a large gang, reports to the coordinator, and requests for
its plan and for manifests, go through a relay (ADR 0016).

`Member.address` is a pod IP, and the ports are those of the contract. The form `ip:control_port:bulk_port`
also names the ports, so that several sidecars on one machine (tests, the local demo) can be members of one
job.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp

from holdfast_core.contract import SidecarContract
from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of, hex_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Worker
from holdfast_core.messages.codec import MAX_CONTROL_BYTES, dumps, loads
from holdfast_core.messages.common import raise_refused
from holdfast_core.messages.schema import (
    Member,
    Plan,
    Refused,
    WorkerReports,
)
from holdfast_core.net import peer_dns_name
from holdfast_sidecar.base.rounds import Caller, RoundState, next_hop
from holdfast_sidecar.wire.bodies import in_pieces
from holdfast_sidecar.wire.verbs import PATHS, ROUND_HEADER


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and ports of one sidecar."""

    host: str
    control_port: int
    bulk_port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.control_port}"


def parse_address(address: str, *, control_port: int, bulk_port: int) -> Endpoint | None:
    """Parse `Member.address`.

    Args:
        control_port: The port if the address does not name one.
        bulk_port: The port if the address does not name one.

    Returns:
        The endpoint, or None if the address is unknown ("").

    Raises:
        ConfigError: The text is not an address.
    """
    if not address:
        return None
    if _is_ip(address):
        return Endpoint(address, control_port, bulk_port)
    host, _, ports = address.partition(":")
    if address.startswith("["):
        host, _, ports = address[1:].partition("]:")
    control, _, bulk = ports.partition(":")
    if not _is_ip(host) or not (control.isdecimal() and bulk.isdecimal()):
        raise ConfigError(
            f"member address {address!r}: expected a pod IP, or ip:control_port:bulk_port"
        )
    return Endpoint(host, int(control), int(bulk))


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a member has answered, as HTTP status and body."""

    status: int
    body: bytes


_KEEP_SECONDS = 300.0
"""Time for which a connection without a request is kept. It exceeds the time between two commits of most
jobs, and is less than the time that the server keeps it. A relay has some hundred neighbours at most."""
_MAX_CONNECTIONS = 512
"""Connections at the same time. The neighbours of a relay must not wait for one another."""
_CONNECT_SECONDS = 5.0

Dispatch = Callable[[Caller, str, Any], Awaitable[Any]]
"""Handler of a message from (caller, path, message), which returns the reply or raises a HoldfastError."""


class NotConnectedError(UnavailableError):
    """Error: a member cannot be connected to, or its connection has ended."""


class Peers:
    """Client of the members of the current ROUND, by worker number."""

    def __init__(
        self,
        contract: SidecarContract,
        context: ssl.SSLContext,
        current: Callable[[], RoundState],
        *,
        call_seconds: float,
    ) -> None:
        self._contract = contract
        self._context = context
        self._current = current
        self._call_seconds = call_seconds
        self._session: aiohttp.ClientSession | None = None
        self._dispatch: Dispatch | None = None

    async def start(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=self._context,
                limit=_MAX_CONNECTIONS,
                limit_per_host=16,
                keepalive_timeout=_KEEP_SECONDS,
            ),
            auto_decompress=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def endpoint(self, member: Member) -> Endpoint:
        """Return the endpoint of a member.

        Raises:
            UnavailableError: Its address is not known yet.
            ConfigError: Its address is not valid.
        """
        endpoint = parse_address(
            member.address,
            control_port=self._contract.control_port,
            bulk_port=self._contract.bulk_port,
        )
        if endpoint is None:
            raise UnavailableError(f"worker {member.worker} ({member.pod}) has no address yet")
        return endpoint

    def server_name(self, member: Member) -> str:
        return peer_dns_name(member.pod, self._contract.job_uid)

    async def call(
        self, worker: Worker, message: Any, reply: type[T], *, path: str | None = None
    ) -> T:
        """Send a message to a member by POST and return its reply.

        A message to the own worker is dispatched without a request and raises what its handler raises.

        Args:
            path: The path if it is not the one of the message's type.

        Raises:
            StaleRoundError, RefusedError, NotFoundError: The member refuses the message.
            UnavailableError: There is no reply, or the worker is not a member.
            FormatError: The reply is not valid.
        """
        target = path or PATHS[type(message)]
        if worker == self._current().worker and self._dispatch is not None:
            answer = await self._dispatch(Caller(self._contract.pod_name), target, message)
            if not isinstance(answer, reply):
                raise FormatError(f"{target}: answered {type(answer).__name__}")
            return answer
        round_ = getattr(message, "round", None)
        # What members send one another must not stop at a relay, which would take it for its own.
        send = self._relayed if isinstance(message, WorkerReports) else self.exchange
        what = f"POST {target} to worker {worker}"
        return loads(reply, body_of(await send(worker, target, round_, dumps(message)), what))

    async def _relayed(
        self, worker: Worker, path: str, round_: RestartRound | None, *body: bytes, **options: Any
    ) -> Answer:
        """Make a request to the coordinator, or to the relay on the way to it."""
        hop = self._next_hop(worker)
        try:
            return await self.exchange(hop, path, round_, *body, **options)
        except NotConnectedError:
            if hop == worker:
                raise
            # The relay has failed. What its group reports must not wait until the operator has noticed. A
            # relay that is only slow is not passed over: the coordinator is busy, and thousands of new
            # connections would not help it.
            return await self.exchange(worker, path, round_, *body, **options)

    def _next_hop(self, coordinator: Worker) -> Worker:
        accepted = self._current().accepted
        return coordinator if accepted is None else next_hop(accepted, self._current().worker)

    async def plan(
        self, coordinator: Worker, round_: RestartRound, known: Plan, timeout_seconds: float
    ) -> Plan:
        """Request the plan from the coordinator or the own relay, when it is newer than `known`.

        Raises what `call` raises.
        """
        query = {
            "round": str(round_),
            "coordinator": known.coordinator,
            "since": str(known.version),
            "timeout": str(int(timeout_seconds)),
        }
        path = f"/v1/plan?{urlencode(query)}"
        answer = await self._relayed(coordinator, path, None, seconds=timeout_seconds + 5)
        return loads(Plan, body_of(answer, f"GET /v1/plan to worker {coordinator}"))

    async def get(
        self,
        worker: Worker,
        path: str,
        reply: type[T],
        *,
        query: dict[str, str] | None = None,
        seconds: float | None = None,
    ) -> T:
        """Send a GET request to a member and return its reply. Raises what `call` raises.

        Args:
            seconds: Total time-out; None for that of `call`.
        """
        target = f"{path}?{urlencode(query)}" if query else path
        answer = await self.exchange(worker, target, None, seconds=seconds)
        return loads(reply, body_of(answer, f"GET {path} to worker {worker}"))

    async def manifest(
        self,
        worker: Worker,
        checkpoint: CheckpointId,
        job_uid: JobUid | None = None,
        *,
        seconds: float | None = None,
    ) -> bytes:
        """Request the document of a manifest from a member. Raises what `call` raises.

        Args:
            worker: The member.
            checkpoint: The checkpoint.
            job_uid: The job that owns it. None means this job.
            seconds: Total time-out; None for that of `call`.
        """
        path = _manifest_path(checkpoint, job_uid)
        answer = await self.exchange(worker, path, None, seconds=seconds)
        return body_of(answer, f"GET /v1/manifest to worker {worker}")

    async def planned_manifest(self, checkpoint: CheckpointId) -> bytes:
        """Request a manifest that the plan names from the own relay, or from the coordinator.

        Raises what `call` raises.
        """
        accepted = self._current().accepted
        if accepted is None:
            raise UnavailableError("the sidecar waits for its ROUND")
        answer = await self._relayed(accepted.coordinator, _manifest_path(checkpoint), None)
        return body_of(answer, "GET /v1/manifest to the coordinator")

    async def layout(self, worker: Worker, digest: Digest) -> bytes:
        """Request a layout from a member. Raises what `call` raises, and CorruptionError."""
        answer = await self.exchange(worker, f"/v1/layout?digest={hex_of(digest)}", None)
        data = body_of(answer, f"GET /v1/layout to worker {worker}")
        # The digest of a layout of the greatest size takes 20 ms.
        if (found := await asyncio.to_thread(digest_of, data)) != digest:
            raise CorruptionError(f"layout from worker {worker}: digest {found}, expected {digest}")
        return data

    async def exchange(
        self,
        worker: Worker,
        path: str,
        round_: RestartRound | None,
        *body: bytes,
        seconds: float | None = None,
    ) -> Answer:
        """Make one request to a member itself: POST of the pieces of a body, or GET without any.

        Raises:
            NotConnectedError: There is no connection to the member, or it ended.
            UnavailableError: There is no reply, or the worker is not a member.
            FormatError: The reply is too large.
        """
        body_bytes = sum(map(len, body))
        method = "POST" if body_bytes else "GET"
        member = self._current().member(worker)
        if member is None:
            raise UnavailableError(f"worker {worker} is not a member of the current round")
        endpoint = self.endpoint(member)
        if self._session is None:
            raise UnavailableError("the client has not been started")
        what = f"{method} {path} to worker {worker} ({member.pod} at {endpoint.url})"
        headers = {"Content-Length": str(body_bytes)} if body_bytes else {}
        if round_ is not None:
            headers[ROUND_HEADER] = str(round_)
        try:
            async with (
                asyncio.timeout(seconds or self._call_seconds),
                self._session.request(
                    method,
                    endpoint.url + path,
                    data=_written(body) if body_bytes else None,
                    headers=headers,
                    server_hostname=self.server_name(member),
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                    allow_redirects=False,
                ) as response,
            ):
                data = bytearray(await response.content.read(MAX_CONTROL_BYTES + 1))
                while not response.content.at_eof() and len(data) <= MAX_CONTROL_BYTES:
                    data += await response.content.read(MAX_CONTROL_BYTES + 1 - len(data))
                status = response.status
        except aiohttp.ClientConnectionError as error:
            raise NotConnectedError(f"{what}: {error or type(error).__name__}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{what}: {error or type(error).__name__}") from error
        if len(data) > MAX_CONTROL_BYTES:
            raise FormatError(f"{what}: more than {MAX_CONTROL_BYTES} bytes")
        return Answer(status, bytes(data))


async def _written(body: tuple[bytes, ...]) -> AsyncIterator[memoryview]:
    """Yield a body in pieces, each of which is written when the receiver has read enough of the others."""
    for piece in body:
        for part in in_pieces(piece):
            yield part


def _manifest_path(checkpoint: CheckpointId, job_uid: JobUid | None = None) -> str:
    query = {"step": str(checkpoint.step), "round": str(checkpoint.round)}
    if job_uid is not None:
        query["jobUid"] = str(job_uid)
    return f"/v1/manifest?{urlencode(query)}"


def body_of(answer: Answer, what: str) -> bytes:
    """Return the body of a reply. Raises the error of a refusal, or UnavailableError."""
    if answer.status == 200:
        return answer.body
    if answer.status in (400, 409):
        raise_refused(_refused(answer.body, what))
    raise UnavailableError(f"{what}: status {answer.status}: {answer.body[:200]!r}")


def _refused(data: bytes, what: str) -> Refused:
    try:
        return loads(Refused, data)
    except FormatError as error:
        raise UnavailableError(f"{what}: expected a refusal as the body: {error}") from error
