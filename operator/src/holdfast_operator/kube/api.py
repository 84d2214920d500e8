"""The HTTP session for all reads and writes of the Kubernetes API (ADR 0004), and the access that it uses.

Address and credentials come from the pod's service account or from a kubeconfig file. The session handles
requests, time-outs and errors, independently of kinds. It retries nothing; its callers do.
"""

from __future__ import annotations

import base64
import binascii
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from holdfast_core.errors import ConfigError, HoldfastError
from holdfast_core.net import load_leaf, use_large_read_buffer
from holdfast_operator.base.settings import SERVICE_ACCOUNT_DIR, Settings


@dataclass(frozen=True, slots=True)
class KubeAccess:
    """Address and credentials of the API. PEM text is kept in memory and never written to a disk."""

    server: str
    """https://host:port, without a slash at the end."""
    ca_pem: str | None = None
    """Certificate authorities of the server; None for those of the system."""
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    """File of the token, read again for each request because projected tokens rotate."""
    certificate_pem: str | None = None
    key_pem: str | None = field(default=None, repr=False)

    def current_token(self) -> str | None:
        """Return the bearer token, or None. Raises ConfigError if the token file cannot be read."""
        if self.token_file is None:
            return self.token
        try:
            return self.token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"token file {self.token_file} cannot be read: {error}") from error

    def ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.ca_pem)
        if self.certificate_pem is not None and self.key_pem is not None:
            load_leaf(context, self.certificate_pem, self.key_pem)
        return context


def load_access(settings: Settings) -> KubeAccess:
    """Return the access that the settings name. Raises ConfigError with the file and what it lacks."""
    if settings.kubeconfig is not None:
        return from_kubeconfig(Path(settings.kubeconfig))
    if settings.api_server is None:
        raise ConfigError(
            "cannot find the Kubernetes API: neither KUBECONFIG nor KUBERNETES_SERVICE_HOST is "
            "set; run in a pod with a service account, or set KUBECONFIG to a file"
        )
    return from_service_account(settings.api_server, SERVICE_ACCOUNT_DIR)


def from_service_account(server: str, directory: Path) -> KubeAccess:
    return KubeAccess(
        server=server, ca_pem=_read(directory / "ca.crt"), token_file=directory / "token"
    )


def from_kubeconfig(path: Path) -> KubeAccess:
    try:
        config = yaml.safe_load(_read(path)) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"kubeconfig {path} is not YAML: {error}") from error
    wanted = config.get("current-context")
    context = _named(path, config, "contexts", wanted, "context")
    cluster = _named(path, config, "clusters", context.get("cluster"), "cluster")
    user = _named(path, config, "users", context.get("user"), "user")
    if cluster.get("insecure-skip-tls-verify"):
        raise ConfigError(
            f"kubeconfig {path}: insecure-skip-tls-verify is not supported: set "
            "certificate-authority instead"
        )
    if "exec" in user or "auth-provider" in user:
        raise ConfigError(
            f"kubeconfig {path}: user {context.get('user')!r} logs in by a plug-in, which is not "
            "supported: use a token, a tokenFile or a client certificate"
        )
    token_file = user.get("tokenFile")
    return KubeAccess(
        server=str(cluster.get("server", "")).rstrip("/"),
        ca_pem=_pem(path, cluster, "certificate-authority"),
        token=user.get("token"),
        token_file=None if token_file is None else path.parent / str(token_file),
        certificate_pem=_pem(path, user, "client-certificate"),
        key_pem=_pem(path, user, "client-key"),
    )


def _named(
    path: Path, config: Mapping[str, Any], group: str, name: Any, inner: str
) -> Mapping[str, Any]:
    for entry in config.get(group) or []:
        if entry.get("name") == name:
            found = entry.get(inner)
            return found if isinstance(found, Mapping) else {}
    raise ConfigError(f"kubeconfig {path}: {group} has no entry named {name!r}")


def _pem(path: Path, section: Mapping[str, Any], key: str) -> str | None:
    data = section.get(f"{key}-data")
    if data is not None:
        try:
            return base64.b64decode(str(data), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"kubeconfig {path}: {key}-data is not base64: {error}") from error
    name = section.get(key)
    return None if name is None else _read(path.parent / str(name))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


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
