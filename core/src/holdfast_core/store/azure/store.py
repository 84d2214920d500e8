"""The object store in a container of Azure Blob Storage, over obstore (Rust's object_store).

Azure stores an object under a free key by one conditional request, whose body is in memory. A longer object
is therefore sent in blocks to a temporary key beside its own, and the server copies it if the key is free.
A copy within an account is one step of the server. Blocks that were sent and not yet put together are
invisible, and Azure removes them after a week.

Azure keeps no CRC32C. The writer puts one into the metadata of an object (`holdfastcrc32c`); the bytes on
their way are protected by TLS alone.

obstore's own retries repeat single blocks only. All others are made here (`s3.errors.Retrier`): what is
stored is looked at before a write is repeated, because the reply to a write that succeeded may be lost.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.store import AzureStore

from holdfast_core.clock import Clock, SystemClock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    CorruptionError,
    CutError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import append_crc, crc32c
from holdfast_core.node.files import TEMP_PREFIX, read_errors
from holdfast_core.store.azure.credentials import AzureCredentials, AzureKeys, account_url
from holdfast_core.store.azure.errors import ObstoreError, translated
from holdfast_core.store.s3.errors import Retrier
from holdfast_core.store.s3.http import HttpPool, Timeouts
from holdfast_core.tiers.objects import (
    MAX_DOCUMENT_BYTES,
    Listed,
    ObjectInfo,
    ObjectSource,
    Page,
    Part,
    info_of,
)
from holdfast_core.tiers.sources import run_all

PART_BYTES = 8 << 20
"""Length of a block, and the longest object that one request writes. An upload has at most as many blocks in
memory as requests at a time, and two more: 48 MiB by default, as in an upload to S3."""
_MAX_BLOCKS = 49_000
"""Azure takes 50,000 blocks. Those of an object of more than 383 GiB are longer."""
_PROGRESS_BYTES = 1 << 20
"""A transfer that breaks after at least this many bytes is resumed with a new retry budget."""
_PAGE_KEYS = 5000
"""Azure's limit of a page, and so one request."""
_MAX_DELETED = 256
"""Azure's limit of objects that one request deletes."""
_MAX_UNFINISHED = 1000
_CLOCK_SECONDS = 600.0
"""Time after which the server's clock is compared again."""
_CLOCK_AGAIN_SECONDS = 60.0
"""Time after which it is asked again if it could not be asked. A listing would otherwise wait for the
connection once for each object."""
_CRC = "holdfastcrc32c"
"""Name in the metadata of an object. Azure takes names of C# only, without hyphens."""
_BLOCK_RETRIES = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10)},
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Clients:
    """Two clients of the container with the same keys."""

    once: AzureStore
    """Sends each request once."""
    blocks: AzureStore
    """Repeats a block that could not be sent: otherwise one lost connection would cost a whole upload."""


@dataclass(slots=True)
class _Writing:
    """One call of `write`."""

    key: str
    source: ObjectSource
    replace: bool
    expected: ObjectInfo | None
    """What the object is. None: its parts were not made yet."""
    temporary: list[str] = field(default_factory=list)
    """Keys from which the object was copied."""

    @property
    def part_bytes(self) -> int:
        return max(PART_BYTES, -(-self.source.size_limit // _MAX_BLOCKS))


class AzureObjectStore:
    """Implementation of tiers.objects.ObjectStore. Safe for use by many threads, not after a fork.

    `close` ends all waits between attempts immediately. A request in progress ends at its time-out at
    the latest.
    """

    def __init__(
        self,
        config: StoreConfig,
        credentials: AzureCredentials,
        *,
        ca_file: str | None = None,
        retrier: Retrier | None = None,
        timeouts: Timeouts | None = None,
        throttle: Callable[[int], object] | None = None,
        sent: Callable[[int], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create the store. It opens connections when they are first needed.

        Args:
            config: Account, container and endpoint.
            credentials: Source of the keys.
            ca_file: CA certificates of the endpoint; None uses those of the system.
            retrier: Retry policy of all operations; `close` sets its `stop` event.
            timeouts: Time-outs of all waits.
            throttle: Receives the size of each part in bytes before the part is sent; it may block.
            sent: Receives the size of each part that was handed to obstore.
            clock: Clock of the ages of objects between two looks at the server's clock.
        """
        self.config = config
        self._credentials = credentials
        self._ca_file = ca_file
        self._retrier = retrier or Retrier()
        self._timeouts = timeouts or Timeouts()
        self._throttle = throttle or _ignore
        self._sent = sent or _ignore
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._opened: tuple[AzureKeys, _Clients] | None = None
        self._time_lock = threading.Lock()
        """Is not `_lock`, because all requests would wait for a server that does not tell its time."""
        self._server_time: tuple[float, datetime | None] | None = None
        self._http = HttpPool(
            config.endpoint, secure=config.secure, ca_file=ca_file, timeouts=timeouts
        )
        self._at_once = max(1, config.max_concurrency)
        self._workers = ThreadPoolExecutor(self._at_once, thread_name_prefix="object-store")

    @property
    def name(self) -> str:
        config = self.config
        return f"container {config.bucket!r} of account {config.account!r} at {config.endpoint}"

    def close(self) -> None:
        """End all waits between attempts, wait for requests in progress, and close the connections."""
        self._retrier.stop.set()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._http.close()
        with self._lock:
            self._opened = None

    # ------------------------------------------------------------------ writes

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        """See ObjectStore.write."""
        writing = _Writing(key, source, replace, None)
        if not source.made_while_sent:
            writing.expected = info_of(source.parts(writing.part_bytes))
        is_copied = True
        try:
            self._retrier.call(f"upload of {key}", lambda: self._attempt(writing))
        except UnavailableError:
            is_copied = (
                False  # the server may still copy, and `abort_stale` removes what it copies from
            )
            raise
        finally:
            if is_copied and writing.temporary:
                with suppress(HoldfastError):
                    self._delete(writing.temporary)

    def _attempt(self, writing: _Writing) -> None:
        if not writing.replace and self._is_stored(writing.key, writing.expected):
            return
        try:
            if writing.source.size_limit <= writing.part_bytes:
                self._put(writing)
            else:
                self._send_blocks(writing)
        except AlreadyExistsError as error:
            if not self._is_stored(writing.key, writing.expected):
                raise UnavailableError(f"{error}; but no such object exists") from error

    def _put(self, writing: _Writing) -> None:
        """Write the object by one request."""
        parts = list[bytes]()
        info = ObjectInfo(0, 0)
        for part, data in self._read(writing):
            parts.append(data)
            info = _appended(info, part)
        data, writing.expected = b"".join(parts), info
        self._throttle(len(data))
        self._run(
            f"PUT {writing.key!r}",
            lambda clients: obstore.put(
                clients.once,
                writing.key,
                data,
                mode="overwrite" if writing.replace else "create",
                use_multipart=False,
                attributes=_attributes(info),
            ),
        )
        self._sent(len(data))

    def _send_blocks(self, writing: _Writing) -> None:
        """Write the object to a temporary key, and copy it within the server."""
        folder = writing.key.rpartition("/")[0]
        temp = f"{folder}/{TEMP_PREFIX}{secrets.token_hex(8)}".lstrip("/")
        what = f"blocks of {writing.key!r}"
        writing.expected = self._run(what, lambda clients: self._blocks(clients, writing, temp))
        writing.temporary.append(temp)
        try:
            self._run(
                f"copy to {writing.key!r}",
                lambda clients: obstore.copy(
                    clients.once, temp, writing.key, overwrite=writing.replace
                ),
            )
        except NotFoundError as error:
            raise UnavailableError(f"{error}; its blocks were removed meanwhile") from error
        self._retrier.call(f"copy to {writing.key}", lambda: self._confirm(writing))

    def _blocks(self, clients: _Clients, writing: _Writing, temp: str) -> ObjectInfo:
        """Send all blocks and put them together. If this fails, no object appears."""
        expected = writing.expected
        writer = obstore.open_writer(
            clients.blocks,
            temp,
            buffer_size=writing.part_bytes,
            max_concurrency=self._at_once,
            attributes=None if expected is None else _attributes(expected),
        )
        info = ObjectInfo(0, 0)
        for part, data in self._read(writing):
            self._throttle(len(data))
            writer.write(data)
            self._sent(len(data))
            info = _appended(info, part)
        # Without this call, as after an error, the blocks are never put together.
        writer.close()
        return info

    def _read(self, writing: _Writing) -> Iterator[tuple[Part, bytes]]:
        """Yield each part with its bytes, compared with its CRC32C."""
        for part in writing.source.parts(writing.part_bytes):
            with read_errors(f"reading for the upload of {writing.key}"):
                data = b"".join(part.data())
            if crc32c(data) != part.crc32c:
                writing.source.verify()
                raise UnavailableError(f"{writing.key}: the source changed while it was read")
            yield part, data

    def _confirm(self, writing: _Writing) -> None:
        """Raise UnavailableError while the server copies: the object is empty until then."""
        if not self._is_stored(writing.key, writing.expected):
            raise UnavailableError(f"{writing.key!r} in {self.name}: no such object after its copy")

    def _is_stored(self, key: str, expected: ObjectInfo | None) -> bool:
        """Return True if the key holds exactly these bytes, by size and CRC32C, and False if it is free.

        Raises:
            AlreadyExistsError: It holds anything else, or anything at all if `expected` is None.
            UnavailableError: The object is empty, because a writer's copy is under way.
        """
        found = self._head(key)
        if found is None:
            return False
        if expected is not None:
            if found.size_bytes == 0 < expected.size_bytes:
                raise UnavailableError(f"{key!r} in {self.name}: it is empty, maybe still copied")
            if found.size_bytes == expected.size_bytes and found.crc32c is None:
                found = self._whole(key, found.size_bytes)
            if found == expected:
                return True
        checksum = "no CRC32C" if found.crc32c is None else f"CRC32C {found.crc32c:08x}"
        wanted = "nothing"
        if expected is not None:
            wanted = f"{expected.size_bytes} bytes with CRC32C {expected.crc32c:08x}"
        raise AlreadyExistsError(
            f"{key!r} in {self.name}: expected {wanted}, found {found.size_bytes} bytes with {checksum}"
        )

    def _whole(self, key: str, size_bytes: int) -> ObjectInfo:
        """Read an object in parts, and return its length and checksum.

        One request for a long object would exceed the time-out of a request, and begin again each time.
        """
        crc, buffer = 0, memoryview(bytearray(min(PART_BYTES, size_bytes)))
        for start in range(0, size_bytes, PART_BYTES):
            part = buffer[: size_bytes - start]
            self.read_into(key, start, part)
            crc = crc32c(part, crc)
        return ObjectInfo(size_bytes, crc)

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore.delete."""
        some = [keys[at : at + _MAX_DELETED] for at in range(0, len(keys), _MAX_DELETED)]
        run_all(self._workers, self._delete, some)

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete objects by one request. If one does not exist, by one request for each."""
        what = f"delete of {len(keys)} objects, from {keys[0]} on"
        try:
            self._retrier.call(
                what,
                lambda: self._run(what, lambda clients: obstore.delete(clients.once, list(keys))),
            )
        except NotFoundError:
            # obstore shows the first failure of a request only, which may hide others.
            for key in keys if len(keys) > 1 else ():
                self._delete([key])

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        """See ObjectStore.unfinished. Blocks that were not put together are not shown."""
        return [self._listed(item) for item in islice(self._temporary(prefix), _MAX_UNFINISHED)]

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        """See ObjectStore.abort_stale."""
        found = {
            item["path"]
            for prefix in prefixes
            for item in self._temporary(prefix)
            if self._listed(item).age >= older_than
        }
        self.delete(sorted(found))
        return len(found)

    def _temporary(self, prefix: str) -> Iterator[Any]:
        page = ""
        while True:
            found = self._chunk(prefix, page)
            yield from (item for item in found if _is_temporary(item["path"]))
            if len(found) < _PAGE_KEYS:
                return
            page = found[-1]["path"]

    # ------------------------------------------------------------------ reads

    def get(self, key: str) -> bytes:
        """See ObjectStore.get. Raises CorruptionError if two reads do not match the writer's checksum."""

        def read(clients: _Clients) -> bytes:
            found = obstore.get(clients.once, key)
            if found.meta["size"] > MAX_DOCUMENT_BYTES:
                raise CorruptionError(
                    f"{key!r} in {self.name}: more than {MAX_DOCUMENT_BYTES} bytes"
                )
            expected, data = _crc_of(found.attributes), bytes(found.bytes())
            if expected not in (None, crc32c(data)):
                raise CorruptionError(
                    f"{key!r} in {self.name}: expected CRC32C {expected:08x}, found {crc32c(data):08x} "
                    f"over {len(data)} bytes"
                )
            return data

        def attempt() -> bytes:
            with suppress(CorruptionError):  # a byte may have been wrong on its way
                return self._run(f"GET {key!r}", read)
            return self._run(f"GET {key!r}", read)

        return self._retrier.call(f"get of {key}", attempt)

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        """See ObjectStore.read_into. A broken transfer resumes after its last received byte."""
        filled = 0
        while filled < len(buffer):
            at, rest = start + filled, buffer[filled:]
            filled += self._retrier.call(
                f"download of {key}",
                lambda at=at, rest=rest: self._pull(key, at, rest, stopped),  # type: ignore[misc]
            )

    def _pull(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None
    ) -> int:
        """Send one GET and return the number of received bytes.

        This is less than the buffer's length if the transfer broke after _PROGRESS_BYTES or more.
        """
        if stopped is not None and stopped.is_set():
            raise UnavailableError(f"download of {key}: its bytes are not needed any more")
        filled = 0

        def read(clients: _Clients) -> None:
            nonlocal filled
            filled = 0
            stop = start + len(buffer)
            found = obstore.get(clients.once, key, options={"range": (start, stop)})
            if found.range != (start, stop):
                raise CutError(
                    f"{key!r} in {self.name}: ends at byte {found.meta['size']}, expected {stop}"
                )
            for data in found.stream(_PROGRESS_BYTES):
                buffer[filled : filled + len(data)] = data
                filled += len(data)

        try:
            self._run(f"GET {key!r}", read)
        except UnavailableError:
            if filled < _PROGRESS_BYTES:
                raise
        return filled

    def size(self, key: str, *, sure: bool = False) -> int | None:
        """See ObjectStore.size. Azure shows an object as soon as it was written, so one look is sure."""
        found = self._retrier.call(f"look for {key}", lambda: self._head(key))
        return None if found is None else found.size_bytes

    def _head(self, key: str) -> ObjectInfo | None:
        """Return size and the writer's CRC32C of an object, or None if it does not exist.

        A missing container also gives None, because the reply to a HEAD has no body with an error code.
        """

        def look(clients: _Clients) -> ObjectInfo:
            found = obstore.get(clients.once, key, options={"head": True})
            return ObjectInfo(found.meta["size"], _crc_of(found.attributes))

        try:
            return self._run(f"HEAD {key!r}", look)
        except NotFoundError:
            return None
        except AccessDeniedError:
            # The reply to a GET has the reason, that to a HEAD has no body.
            with suppress(NotFoundError, CutError):
                self._run(
                    f"GET {key!r}",
                    lambda clients: obstore.get(clients.once, key, options={"range": (0, 1)}),
                )
            raise

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        """See ObjectStore.list. A listing by folder has one page."""
        if folders:
            return self._folders(prefix)
        while True:
            found = self._chunk(prefix, page)
            objects = tuple(self._listed(item) for item in found if not _is_temporary(item["path"]))
            page = found[-1]["path"] if len(found) == _PAGE_KEYS else ""
            if objects or not page:
                return Page(objects, page)

    def _chunk(self, prefix: str, after: str) -> Sequence[Any]:
        """Return the next objects whose key begins with `prefix` and is behind `after`, in order."""

        def read(clients: _Clients) -> Sequence[Any]:
            # obstore lists whole folders only, so the last name of the prefix is compared here. A server
            # that does not know `startFrom` (Azurite) sends the pages before `after` as well.
            listing = obstore.list(
                clients.once, _folder(prefix), offset=after or None, chunk_size=_PAGE_KEYS
            )
            found = list[Any]()
            for chunk in listing:
                found += (
                    item
                    for item in chunk
                    if item["path"].startswith(prefix) and item["path"] > after
                )
                is_behind = bool(chunk) and chunk[-1]["path"][: len(prefix)] > prefix
                if len(found) >= _PAGE_KEYS or is_behind:
                    break
            return found[:_PAGE_KEYS]

        return self._retrier.call(
            f"list of {prefix}", lambda: self._run(f"list of {prefix!r}", read)
        )

    def _folders(self, prefix: str) -> Page:
        found = self._retrier.call(
            f"list of {prefix}",
            lambda: self._run(
                f"list of {prefix!r}",
                lambda clients: obstore.list_with_delimiter(clients.once, _folder(prefix)),
            ),
        )
        objects = sorted(found["objects"], key=lambda item: item["path"])
        return Page(
            tuple(self._listed(item) for item in objects if not _is_temporary(item["path"])),
            folders=tuple(sorted(f"{path}/" for path in found["common_prefixes"])),
        )

    def _listed(self, item: Any) -> Listed:
        age = max(timedelta(0), self._server_now(item["last_modified"]) - item["last_modified"])
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

    # ------------------------------------------------------------------ requests

    def _run(self, request: str, call: Callable[[_Clients], T]) -> T:
        """Make the call, and make it again if the keys are refused and there are other ones by now."""
        keys = self._credentials.retrieve()
        try:
            return self._run_once(request, call, keys)
        except AccessDeniedError:
            fresh = self._credentials.refresh()
            if fresh == keys:
                raise
            return self._run_once(request, call, fresh)

    def _run_once(self, request: str, call: Callable[[_Clients], T], keys: AzureKeys) -> T:
        try:
            return call(self._clients(keys))
        except ObstoreError as error:
            # The text of the cause has the whole request, which may contain a shared access signature.
            raise translated(error, f"{request} in {self.name}", keys.secrets()) from None

    def _clients(self, keys: AzureKeys) -> _Clients:
        with self._lock:
            if self._opened is None or self._opened[0] != keys:
                once = self._open(keys, {"max_retries": 0})
                self._opened = (keys, _Clients(once, self._open(keys, _BLOCK_RETRIES)))
            return self._opened[1]

    def _open(self, keys: AzureKeys, retries: Any) -> AzureStore:
        limit = self._timeouts.grace_seconds + PART_BYTES / (64 << 10)
        http = not self.config.secure or (
            keys.identity is not None and keys.identity.authority.startswith("http://")
        )
        options: Any = {
            "allow_http": http,
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
        return AzureStore(
            self.config.bucket,
            config=_settings(self.config, keys),
            client_options=options,
            retry_config=retries,
        )


def _settings(config: StoreConfig, keys: AzureKeys) -> Any:
    """Return obstore's settings. It reads the environment for all that are not given."""
    settings: dict[str, Any] = {
        "account_name": config.account,
        "endpoint": account_url(config),
        "use_emulator": False,
        "use_fabric_endpoint": False,
        "skip_signature": False,
    }
    if keys.identity is not None:
        return settings | {
            "credential_type": "workload_identity",
            "federated_token_file": keys.identity.token_file,
            "client_id": keys.identity.client_id,
            "tenant_id": keys.identity.tenant_id,
            "authority_host": keys.identity.authority,
        }
    if keys.sas_token:
        return settings | {"credential_type": "sas_token", "sas_key": keys.sas_token}
    return settings | {"credential_type": "access_key", "account_key": keys.account_key}


def _ignore(_length: int) -> None:
    """Do nothing: the default of `throttle` and `sent`."""


def _appended(info: ObjectInfo, part: Part) -> ObjectInfo:
    crc = append_crc(info.crc32c or 0, part.crc32c, part.length_bytes)
    return ObjectInfo(info.size_bytes + part.length_bytes, crc)


def _attributes(info: ObjectInfo) -> Any:
    return {"Content-Type": "application/octet-stream", _CRC: f"{info.crc32c:08x}"}


def _crc_of(attributes: Any) -> int | None:
    """Return the writer's checksum. None: the object has none, or another program changed it."""
    try:
        return int(attributes.get(_CRC, ""), 16)
    except ValueError:
        return None


def _folder(prefix: str) -> str | None:
    return prefix.rpartition("/")[0] or None


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(TEMP_PREFIX)
