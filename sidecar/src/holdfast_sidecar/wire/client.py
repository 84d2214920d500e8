"""Requests to the other sidecars of the job: HTTPS with mutual TLS and explicit time-outs.

The server's certificate must name the pod that ROUND lists (`<pod>.<job-uid>.holdfast`), so that a request
fails if the address belongs to another pod by now. A message to the own worker is dispatched without a
connection, but goes through the same refusals. In a large gang, messages between the coordinator and other
groups of workers go through a relay (ADR 0016).
They are letters (`Mail`) that wait for the next request to the same worker.

`Member.address` is a pod IP, and the ports are those of the contract. The form `ip:control_port:bulk_port`
also names the ports, so that several sidecars on one machine (tests, the local demo) can be members of one
job.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import urlencode

import aiohttp

from holdfast_core.contract import SidecarContract
from holdfast_core.errors import (
    ConfigError,
    CorruptionError,
    FormatError,
    HoldfastError,
    NotFoundError,
    RefusedError,
    StaleRoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import digest_of, hex_of
from holdfast_core.ids import Digest, RestartRound, Worker
from holdfast_core.messages.codec import MAX_CONTROL_BYTES, loads
from holdfast_core.messages.report import (
    Answer,
    Letter,
    Relay,
    RelayReply,
    decode,
    encode,
    pieces,
)
from holdfast_core.messages.schema import (
    ManifestPut,
    Member,
    Plan,
    Refusal,
    Refused,
)
from holdfast_core.net.tls import peer_dns_name
from holdfast_core.tasks import Tasks
from holdfast_sidecar.base.rounds import Caller, RoundState, is_of_coordinator, next_hop
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


_MAX_LETTERS = 256
_MAX_BYTES = 16 << 20
"""Bytes of a request from which on it takes no further letter."""


@dataclass(slots=True)
class _Waiting:
    path: str
    worker: Worker
    body: bytes
    answer: asyncio.Future[Answer]


class Mail:
    """Sender of letters to one worker. Those that come during a request go together into the next one."""

    def __init__(self, send: Callable[[tuple[Letter, ...]], Awaitable[Sequence[Answer]]]) -> None:
        """Create the sender. `send` makes one request and returns an answer for each worker in order."""
        self._send = send
        self._waiting: deque[_Waiting] = deque()
        self._tasks = Tasks()
        self._sending = False

    async def deliver(self, path: str, worker: Worker, body: bytes) -> Answer:
        """Send a letter and return its answer. Raises what `send` raises."""
        waiting = _Waiting(path, worker, body, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if not self._sending:
            self._sending = True
            self._tasks.spawn(self._run(), "mail")
        return await waiting.answer

    async def close(self) -> None:
        await self._tasks.cancel()
        for waiting in self._waiting:
            waiting.answer.cancel()

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._send_some()
        finally:
            self._sending = False

    async def _send_some(self) -> None:
        letters, sent = self._next_letters()
        if not sent:
            return
        try:
            answers = await self._send(letters)
            if len(answers) != len(sent):
                raise FormatError(f"{len(answers)} answers to letters for {len(sent)} workers")
        except HoldfastError as error:
            for waiting in chain(*sent):
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
        except asyncio.CancelledError:
            for waiting in chain(*sent):
                waiting.answer.cancel()
            raise
        else:
            for same, answer in zip(sent, answers, strict=True):
                for waiting in same:
                    if not waiting.answer.done():
                        waiting.answer.set_result(answer)

    def _next_letters(self) -> tuple[tuple[Letter, ...], list[list[_Waiting]]]:
        """Return the letters of the next request, and who waits for each of its answers.

        Several wait for one answer if a sender has repeated its message before the first was sent.
        """
        groups: dict[tuple[str, bytes], dict[Worker, list[_Waiting]]] = {}
        size_bytes = 0
        while self._waiting and len(groups) < _MAX_LETTERS and size_bytes < _MAX_BYTES:
            waiting = self._waiting.popleft()
            if waiting.answer.done():
                continue  # Its sender has given up.
            group = groups.setdefault((waiting.path, waiting.body), {})
            size_bytes += 0 if group else len(waiting.body)
            group.setdefault(waiting.worker, []).append(waiting)
        letters = tuple(Letter(path, tuple(group), body) for (path, body), group in groups.items())
        return letters, [same for group in groups.values() for same in group.values()]


T = TypeVar("T")

_KEEP_SECONDS = 300.0
"""Time for which a connection without a request is kept. It exceeds the time between two commits of most
jobs, and is less than the time that the server keeps it. A relay has some hundred neighbours at most."""
_MAX_CONNECTIONS = 512
"""Connections at the same time. The neighbours of a relay must not wait for one another."""
_CONNECT_SECONDS = 5.0

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
        self._mail: dict[tuple[RestartRound, str], Mail] = {}
        """Letters to each pod in the current round."""

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
        for mail in self._mail.values():
            await mail.close()
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
        shared = isinstance(message, ManifestPut | Plan)
        body = _encode_shared(message) if shared else encode(message)
        round_ = getattr(message, "round", None)
        # What members send one another must not stop at a relay, which would take it for its own.
        send = self._relayed if is_of_coordinator(type(message)) else self.exchange
        what = f"POST {target} to worker {worker}"
        return decode(reply, body_of(await send(worker, target, round_, body), what))

    async def _relayed(
        self, worker: Worker, path: str, round_: RestartRound | None, body: bytes
    ) -> Answer:
        """Send a message of or to the coordinator on its way, and return the member's answer."""
        hop = self._next_hop(worker)
        if hop == worker:
            return await self.exchange(worker, path, round_, body)
        if self._current().is_coordinator:
            return await self.mail(hop).deliver(path, worker, body)
        try:
            return await self.exchange(hop, path, round_, body)
        except NotConnectedError:
            # The relay has failed. What its group reports must not wait until the operator has noticed. A
            # relay that is only slow is not passed over: the coordinator is busy, and thousands of new
            # connections would not help it.
            return await self.exchange(worker, path, round_, body)

    def _next_hop(self, worker: Worker) -> Worker:
        accepted = self._current().accepted
        if accepted is None:
            return worker
        return next_hop(accepted, self._current().worker, worker)

    def mail(self, worker: Worker) -> Mail:
        """Return the sender of letters to this worker, which is a relay or the coordinator.

        Raises:
            UnavailableError: The worker is not a member of the current round.
        """
        round_, member = self._current().round, self._current().member(worker)
        if member is None:
            raise UnavailableError(f"worker {worker} is not a member of the current round")
        key = round_, member.pod
        if key not in self._mail:
            # A request to a lost pod that is still under way must not hold up the letters of the next round.
            self._mail = {k: mail for k, mail in self._mail.items() if k[0] == round_}

            async def send(letters: tuple[Letter, ...]) -> tuple[Answer, ...]:
                message = Relay(self._current().round, letters)
                answer = await self.exchange(worker, PATHS[Relay], message.round, *pieces(message))
                found = body_of(answer, f"POST {PATHS[Relay]} to worker {worker}")
                return decode(RelayReply, found).answers

            self._mail[key] = Mail(send)
        return self._mail[key]

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
            seconds: Total time-out; None for that of `call`. A request that has its own goes to the member
                itself, because it would hold up other letters.
        """
        target = f"{path}?{urlencode(query)}" if query else path
        hop = self._next_hop(worker)
        if seconds is None and hop != worker and self._current().is_coordinator:
            answer = await self.mail(hop).deliver(target, worker, b"")
        else:
            answer = await self.exchange(worker, target, None, seconds=seconds)
        return decode(reply, body_of(answer, f"GET {path} to worker {worker}"))

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


@lru_cache(maxsize=8)
def _encode_shared(message: Any) -> bytes:
    """Return the body of a message that goes to many members. That of a manifest has megabytes."""
    return encode(message)


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
