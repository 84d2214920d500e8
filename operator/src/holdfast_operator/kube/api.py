"""The HTTP session for all reads and writes of the Kubernetes API (ADR 0004).

This module handles requests, time-outs and errors, independently of kinds. It retries nothing; its callers
do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from holdfast_core.errors import HoldfastError
from holdfast_core.net.tls import use_large_read_buffer
from holdfast_operator.kube.access import KubeAccess

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 30.0
USER_AGENT = "holdfast-operator"

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


class ConflictError(HoldfastError):
    """The object changed or disappeared after it was read. The caller must observe and decide again."""


class NameTakenError(HoldfastError):
    """An object that does not belong to the job has the name that the job's object would get.

    The operator leaves that object alone.
    """


class ApiError(HoldfastError):
    """Error of a request that the API server refused or that got no usable answer (status None)."""

    def __init__(self, status: int | None, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        """The server's reason, such as Conflict, AlreadyExists or Expired; Timeout after a time-out without
        an answer; "" otherwise."""


def _always() -> None:
    """Permit each write."""


class KubeApi:
    """Session to the API, usable between `start` and `close`.

    Requests raise ApiError, or ConfigError if the token file cannot be read.

    Args:
        check_write: Called immediately before each request that writes. What it raises is raised instead of
            sending the request.
    """

    def __init__(self, access: KubeAccess, check_write: Callable[[], None] = _always) -> None:
        self._access = access
        self._check_write = check_write
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        connector = aiohttp.TCPConnector(
            ssl=self._access.ssl_context(), limit=0, ttl_dns_cache=10, keepalive_timeout=30
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Accept": "application/json", "User-Agent": USER_AGENT},
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        params: Mapping[str, str],
        *,
        total_seconds: float,
        read_seconds: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a GET whose body the caller reads. Errors while the body is read are ApiErrors, too.

        Its connection reads in large pieces: the events of a thousand jobs must not wait for the turns of the
        event loop (ADR 0005).

        Args:
            total_seconds: Limit for the whole response.
            read_seconds: Longest silence of the server, or None for no limit.
        """
        async with self._open(
            "GET", path, params, None, None, total_seconds, read_seconds
        ) as response:
            use_large_read_buffer(getattr(response.connection, "transport", None))
            yield response

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        return await self._call("GET", path, params)

    async def get_page(self, path: str, params: Mapping[str, str], *, seconds: float) -> Any:
        """Read a page of a LIST. Its connection reads in large pieces, as that of `stream`.

        Args:
            seconds: Limit for the whole response.
        """
        async with self.stream(path, params, total_seconds=seconds) as response:
            return _decoded("GET", path, await response.read())

    async def post(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        return await self._call("POST", path, params, body)

    async def patch(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        """Send a JSON merge patch."""
        return await self._call("PATCH", path, params, body, MERGE_PATCH)

    async def patch_strategic(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        """Send a strategic merge patch, which can remove an item from a list.

        Only Kubernetes' own kinds accept it.
        """
        return await self._call("PATCH", path, params, body, STRATEGIC_MERGE_PATCH)

    async def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Any:
        return await self._call("DELETE", path, None, options)

    async def _call(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        async with self._open(
            method, path, params, body, content_type, REQUEST_SECONDS, None
        ) as response:
            return _decoded(method, path, await response.read())

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        content_type: str | None,
        total_seconds: float,
        read_seconds: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise ApiError(None, "", f"{method} {path}: the session is not open")
        headers: dict[str, str] = {}
        token = self._access.current_token()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            headers["Content-Type"] = content_type or "application/json"
            data = json.dumps(body, separators=(",", ":")).encode()
        timeout = aiohttp.ClientTimeout(
            total=total_seconds, sock_connect=CONNECT_SECONDS, sock_read=read_seconds
        )
        if method != "GET":
            self._check_write()
        try:
            async with self._session.request(
                method,
                self._access.server + path,
                params=params,
                data=data,
                headers=headers,
                timeout=timeout,
            ) as response:
                if response.status >= 300:
                    raise _refused(method, path, response.status, await response.read())
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            kind = "Timeout" if isinstance(error, TimeoutError) else ""
            raise ApiError(None, kind, f"{method} {path} failed: {text}") from error


def _decoded(method: str, path: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ApiError(None, "", f"{method} {path}: the response is not JSON: {error}") from error


def _refused(method: str, path: str, status: int, data: bytes) -> ApiError:
    reason, message = "", data[:300].decode(errors="replace")
    try:
        answer = json.loads(data)
        reason = str(answer.get("reason") or "")
        message = str(answer.get("message") or message)
    except (ValueError, AttributeError):
        pass  # the page of a proxy, whose first bytes are the message
    return ApiError(status, reason, f"{method} {path}: {status} {reason}: {message}")
