"""Requests to the other sidecars of the job: HTTPS with mutual TLS and explicit time-outs.

The server's certificate must name the pod that ROUND lists (`<pod>.<job-uid>.holdfast`), so that a request
fails if the address belongs to another pod by now. A message to the own worker is dispatched without a
connection, but goes through the same refusals.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp

from holdfast_core.contract import SidecarContract, peer_dns_name
from holdfast_core.errors import (
    FormatError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
)
from holdfast_core.ids import Worker
from holdfast_core.messages.codec import MAX_CONTROL_BYTES, dumps, loads
from holdfast_core.messages.schema import Member, Refusal, Refused
from holdfast_sidecar.base.rounds import Caller, RoundState
from holdfast_sidecar.wire.addresses import Endpoint, parse_address
from holdfast_sidecar.wire.verbs import PATHS, ROUND_HEADER

T = TypeVar("T")

Dispatch = Callable[[Caller, str, Any], Awaitable[Any]]
"""Handler of a message from (caller, path, message), which returns the reply or raises a HoldfastError."""


def raise_refused(refused: Refused) -> None:
    """Raise the error that the code of a refusal stands for.

    Raises:
        StaleRoundError: For STALE_ROUND.
        NotFoundError: For NOT_FOUND.
        RefusedError: For all other codes.
    """
    if refused.code is Refusal.STALE_ROUND:
        raise StaleRoundError(refused.message, own_round=refused.round, own_version=refused.version)
    if refused.code is Refusal.NOT_FOUND:
        raise NotFoundError(refused.message)
    raise RefusedError(refused.code, refused.message)


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
            connector=aiohttp.TCPConnector(ssl=self._context, limit_per_host=16),
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
        if worker == self._contract.worker and self._dispatch is not None:
            answer = await self._dispatch(Caller(self._contract.pod_name), target, message)
            if not isinstance(answer, reply):
                raise FormatError(f"{target}: answered {type(answer).__name__}")
            return answer
        round_ = getattr(message, "round", None)
        data = await self._request(
            "POST",
            worker,
            target,
            body=dumps(message),
            headers=None if round_ is None else {ROUND_HEADER: str(round_)},
            seconds=self._call_seconds,
        )
        return loads(reply, data)

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
        data = await self._request(
            "GET", worker, path, query=query, seconds=seconds or self._call_seconds
        )
        return loads(reply, data)

    async def _request(
        self,
        method: str,
        worker: Worker,
        path: str,
        *,
        seconds: float,
        query: dict[str, str] | None = None,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytes:
        member = self._current().member(worker)
        if member is None:
            raise UnavailableError(f"worker {worker} is not a member of the current round")
        endpoint = self.endpoint(member)
        if self._session is None:
            raise UnavailableError("the client has not been started")
        what = f"{method} {path} to worker {worker} ({member.pod} at {endpoint.url})"
        try:
            async with self._session.request(
                method,
                endpoint.url + path,
                params=query,
                data=body,
                headers=headers,
                server_hostname=self.server_name(member),
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=5),
                allow_redirects=False,
            ) as response:
                data = await response.content.read(MAX_CONTROL_BYTES + 1)
                while not response.content.at_eof() and len(data) <= MAX_CONTROL_BYTES:
                    data += await response.content.read(MAX_CONTROL_BYTES + 1 - len(data))
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{what}: {error or type(error).__name__}") from error
        if len(data) > MAX_CONTROL_BYTES:
            raise FormatError(f"{what}: more than {MAX_CONTROL_BYTES} bytes")
        if status == 200:
            return data
        if status in (400, 409):
            raise_refused(_refused(data, what))
        raise UnavailableError(f"{what}: status {status}")


def _refused(data: bytes, what: str) -> Refused:
    try:
        return loads(Refused, data)
    except FormatError as error:
        raise UnavailableError(f"{what}: expected a refusal as the body: {error}") from error
