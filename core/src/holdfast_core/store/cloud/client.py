"""Requests to a container or bucket over obstore: keys, time-outs and errors, and the server's clock.

obstore's own retries repeat single parts only. All others are made by the store (`s3.errors.Retrier`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import AccessDeniedError, ConfigError, HoldfastError
from holdfast_core.store.cloud.errors import ObstoreError, translated
from holdfast_core.store.cloud.keys import CloudCredentials, CloudKeys
from holdfast_core.store.s3.http import HttpPool, Timeouts
from holdfast_core.tiers.objects import Listed

PART_BYTES = 8 << 20
"""Length of a part, and the longest object that one request writes. An upload has at most as many parts in
memory as requests at a time, and two more: 48 MiB by default, as in an upload to S3."""
_CLOCK_SECONDS = 600.0
"""Time after which the server's clock is compared again."""
_CLOCK_AGAIN_SECONDS = 60.0
"""Time after which it is asked again if it could not be asked. A listing would otherwise wait for the
connection once for each object."""
_PART_RETRIES = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10)},
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clients:
    """Two clients of obstore with the same keys."""

    once: Any
    """Sends each request once."""
    parts: Any
    """Repeats a part that could not be sent: otherwise one lost connection would cost a whole upload."""


class CloudClient:
    """Sends the requests of one store. Many threads may use it, but not a process that was forked since."""

    def __init__(
        self,
        config: StoreConfig,
        credentials: CloudCredentials,
        *,
        ca_file: str | None = None,
        timeouts: Timeouts | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Open no connection yet. The arguments are those of CloudObjectStore."""
        self.config = config
        self._credentials = credentials
        self._ca_file = ca_file
        self._timeouts = timeouts or Timeouts()
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._opened: tuple[CloudKeys, Clients] | None = None
        self._time_lock = threading.Lock()
        """Is not `_lock`, because all requests would wait for a server that does not tell its time."""
        self._server_time: tuple[float, datetime | None] | None = None
        self._http = HttpPool(
            config.endpoint, secure=config.secure, ca_file=ca_file, timeouts=timeouts
        )

    @property
    def name(self) -> str:
        config = self.config
        if config.account:
            return f"container {config.bucket!r} of account {config.account!r} at {config.endpoint}"
        return f"bucket {config.bucket!r} at {config.endpoint}"

    def close(self) -> None:
        self._http.close()
        with self._lock:
            self._opened = None

    def run(self, request: str, call: Callable[[Clients], T]) -> T:
        """Make the call, and make it again if the keys are refused and there are other ones by now.

        Raises errors of holdfast_core.errors, whose texts begin with `request`.
        """
        keys = self._credentials.retrieve()
        try:
            return self._run_once(request, call, keys)
        except AccessDeniedError:
            fresh = self._credentials.refresh()
            if fresh == keys:
                raise
            return self._run_once(request, call, fresh)

    def _run_once(self, request: str, call: Callable[[Clients], T], keys: CloudKeys) -> T:
        try:
            return call(self._clients(keys))
        except ObstoreError as error:
            # The text of the cause has the whole request, which may contain keys.
            raise translated(error, f"{request} in {self.name}", keys) from None

    def _clients(self, keys: CloudKeys) -> Clients:
        with self._lock:
            if self._opened is None or self._opened[0] != keys:
                once = self._open(keys, {"max_retries": 0})
                self._opened = (keys, Clients(once, self._open(keys, _PART_RETRIES)))
            return self._opened[1]

    def _open(self, keys: CloudKeys, retries: Any) -> Any:
        limit = self._timeouts.grace_seconds + PART_BYTES / (64 << 10)
        options: dict[str, Any] = {
            "allow_http": not self.config.secure,
            "connect_timeout": timedelta(seconds=self._timeouts.connect_seconds),
            "read_timeout": timedelta(seconds=self._timeouts.idle_seconds),
            "timeout": timedelta(seconds=limit),
        }
        if self._ca_file is not None:
            try:
                options["root_certificate"] = Path(self._ca_file).read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"CA certificate {self._ca_file}: {error.strerror or error}"
                ) from error
        return keys.open(self.config, options, retries)

    def listed(self, item: Any) -> Listed:
        """Return an object of obstore's listing, with its age by the server's clock."""
        written = item["last_modified"]
        age = max(timedelta(0), self._server_now(written) - written)
        return Listed(item["path"], age, item["size"])

    def _server_now(self, at_least: datetime) -> datetime:
        """Return the time by the server's clock.

        obstore does not show the Date of a reply, so this asks for it, without keys. If the server cannot
        be asked, it is `at_least`: the ages are then too small, so that nothing is deleted too early.
        """
        with self._time_lock:
            since, date = self._server_time or (0.0, None)
            limit = _CLOCK_AGAIN_SECONDS if date is None else _CLOCK_SECONDS
            if self._server_time is None or self._clock.monotonic() - since > limit:
                date = self._asked_time()
                since = self._clock.monotonic()
                self._server_time = since, date
            if date is None:
                return at_least
            return date + timedelta(seconds=self._clock.monotonic() - since)

    def _asked_time(self) -> datetime | None:
        try:
            with self._http.request("HEAD", "/", {"Host": self.config.endpoint}) as reply:
                return parsedate_to_datetime(reply.headers["date"]).astimezone(UTC)
        except (HoldfastError, KeyError, ValueError):
            return None
