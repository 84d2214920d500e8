"""The object store in a container of Azure or a bucket of Google, over obstore (Rust's object_store).

Both clouds store an object under a free key by one conditional request, whose body is in memory. A longer
object is therefore sent in parts to a temporary key beside its own, and the server copies it if the key is
free. A copy within an account or bucket is one step of the server. Parts that were sent and not yet put
together are invisible. Azure removes them after a week, Google only by a rule of the bucket.

obstore shows no CRC32C of the server. The writer puts one into the metadata of an object
(`holdfastcrc32c`); the bytes on their way are protected by TLS alone.

All retries but those of single parts are made here (`s3.errors.Retrier`): what is stored is looked at before
a write is repeated, because the reply to a write that succeeded may be lost.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any

import obstore

from holdfast_core.clock import Clock
from holdfast_core.contract import StoreConfig
from holdfast_core.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CorruptionError,
    CutError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format.canonical import append_crc, crc32c
from holdfast_core.node.files import TEMP_PREFIX, read_errors
from holdfast_core.store.cloud.client import PART_BYTES, Clients, CloudClient
from holdfast_core.store.cloud.keys import CloudCredentials
from holdfast_core.store.s3.errors import Retrier
from holdfast_core.store.s3.http import Timeouts
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

_AZURE_PARTS = 49_000
"""Azure takes 50,000 parts. Those of an object of more than 383 GiB are longer."""
_GOOGLE_PARTS = 9_900
"""Google takes 10,000 parts. Those of an object of more than 77 GiB are longer."""
_PROGRESS_BYTES = 1 << 20
"""A transfer that breaks after at least this many bytes is resumed with a new retry budget."""
_PAGE_KEYS = 5000
"""Azure's limit of a page, and so one request. It is five requests to Google."""
_MAX_DELETED = 256
"""Azure's limit of objects that one request deletes. obstore sends Google one request for each, ten at a
time."""
_MAX_UNFINISHED = 1000
_CRC = "holdfastcrc32c"
"""Name in the metadata of an object. Azure takes names of C# only, without hyphens."""


@dataclass(slots=True)
class _Writing:
    """One call of `write`."""

    key: str
    source: ObjectSource
    replace: bool
    part_bytes: int
    expected: ObjectInfo | None = None
    """What the object is. None: its parts were not made yet."""
    temporary: list[str] = field(default_factory=list)
    """Keys from which the object was copied."""


class CloudObjectStore:
    """Implementation of tiers.objects.ObjectStore. Safe for use by many threads, not after a fork.

    `close` ends all waits between attempts immediately. A request in progress ends at its time-out at
    the latest.
    """

    def __init__(
        self,
        config: StoreConfig,
        credentials: CloudCredentials,
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
            config: Account and container, or bucket, and endpoint.
            credentials: Source of the keys.
            ca_file: CA certificates of the endpoint; None uses those of the system.
            retrier: Retry policy of all operations; `close` sets its `stop` event.
            timeouts: Time-outs of all waits.
            throttle: Receives the size of each part in bytes before the part is sent; it may block.
            sent: Receives the size of each part that was handed to obstore.
            clock: Clock of the ages of objects between two looks at the server's clock.
        """
        self.config = config
        self._client = CloudClient(
            config, credentials, ca_file=ca_file, timeouts=timeouts, clock=clock
        )
        self._retrier = retrier or Retrier()
        self._throttle = throttle or _ignore
        self._sent = sent or _ignore
        self._at_once = max(1, config.max_concurrency)
        self._workers = ThreadPoolExecutor(self._at_once, thread_name_prefix="object-store")

    @property
    def name(self) -> str:
        return self._client.name

    def close(self) -> None:
        """End all waits between attempts, wait for requests in progress, and close the connections."""
        self._retrier.stop.set()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    # ------------------------------------------------------------------ writes

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        """See ObjectStore.write."""
        most = _GOOGLE_PARTS if self.config.google else _AZURE_PARTS
        part_bytes = max(PART_BYTES, -(-source.size_limit // most))
        writing = _Writing(key, source, replace, part_bytes)
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
                self._send_parts(writing)
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
        self._client.run(
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

    def _send_parts(self, writing: _Writing) -> None:
        """Write the object to a temporary key, and copy it within the server."""
        folder = writing.key.rpartition("/")[0]
        temp = f"{folder}/{TEMP_PREFIX}{secrets.token_hex(8)}".lstrip("/")
        what = f"parts of {writing.key!r}"
        writing.expected = self._client.run(
            what, lambda clients: self._parts(clients, writing, temp)
        )
        writing.temporary.append(temp)
        try:
            self._client.run(
                f"copy to {writing.key!r}",
                lambda clients: obstore.copy(
                    clients.once, temp, writing.key, overwrite=writing.replace
                ),
            )
        except NotFoundError as error:
            raise UnavailableError(f"{error}; they were removed meanwhile") from error
        self._retrier.call(f"copy to {writing.key}", lambda: self._confirm(writing))

    def _parts(self, clients: Clients, writing: _Writing, temp: str) -> ObjectInfo:
        """Send all parts and put them together. If this fails, no object appears."""
        expected = writing.expected
        writer = obstore.open_writer(
            clients.parts,
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
            del part, data  # before the next part is made
        # Without this call, as after an error, the parts are never put together.
        writer.close()
        return info

    def _read(self, writing: _Writing) -> Iterator[tuple[Part, bytes]]:
        """Return each part with its bytes, compared with its CRC32C."""

        def read(part: Part) -> tuple[Part, bytes]:
            with read_errors(f"reading for the upload of {writing.key}"):
                data = b"".join(part.data())
            if crc32c(data) != part.crc32c:
                writing.source.verify()
                raise UnavailableError(f"{writing.key}: the source changed while it was read")
            return part, data

        # A generator would refer to the last part, and keep its bytes while the next one is made.
        return map(read, writing.source.parts(writing.part_bytes))

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
                lambda: self._client.run(
                    what, lambda clients: obstore.delete(clients.once, list(keys))
                ),
            )
        except NotFoundError:
            # obstore shows the first failure of a request only, which may hide others.
            for key in keys if len(keys) > 1 else ():
                self._delete([key])

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        """See ObjectStore.unfinished. Parts that were not put together are not shown."""
        return [
            self._client.listed(item) for item in islice(self._temporary(prefix), _MAX_UNFINISHED)
        ]

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        """See ObjectStore.abort_stale."""
        found = {
            item["path"]
            for prefix in prefixes
            for item in self._temporary(prefix)
            if self._client.listed(item).age >= older_than
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

        def read(clients: Clients) -> bytes:
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
                return self._client.run(f"GET {key!r}", read)
            return self._client.run(f"GET {key!r}", read)

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

        def read(clients: Clients) -> None:
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
            self._client.run(f"GET {key!r}", read)
        except UnavailableError:
            if filled < _PROGRESS_BYTES:
                raise
        return filled

    def size(self, key: str, *, sure: bool = False) -> int | None:
        """See ObjectStore.size. Both clouds show an object as soon as it was written, so one look is sure."""
        found = self._retrier.call(f"look for {key}", lambda: self._head(key))
        return None if found is None else found.size_bytes

    def _head(self, key: str) -> ObjectInfo | None:
        """Return size and the writer's CRC32C of an object, or None if it does not exist.

        A missing container also gives None, because the reply to a HEAD has no body with an error code.
        """

        def look(clients: Clients) -> ObjectInfo:
            found = obstore.get(clients.once, key, options={"head": True})
            return ObjectInfo(found.meta["size"], _crc_of(found.attributes))

        try:
            return self._client.run(f"HEAD {key!r}", look)
        except NotFoundError:
            return None
        except AccessDeniedError:
            # The reply to a GET has the reason, that to a HEAD has no body.
            with suppress(NotFoundError, CutError):
                self._client.run(
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
            objects = tuple(
                self._client.listed(item) for item in found if not _is_temporary(item["path"])
            )
            page = found[-1]["path"] if len(found) == _PAGE_KEYS else ""
            if objects or not page:
                return Page(objects, page)

    def _chunk(self, prefix: str, after: str) -> Sequence[Any]:
        """Return the next objects whose key begins with `prefix` and is behind `after`, in order."""
        begin = "" if prefix.endswith("/") else prefix

        def read(clients: Clients) -> Sequence[Any]:
            # obstore lists whole folders only, so the last name of the prefix is compared here. A server
            # that does not know `startFrom` (Azurite) sends the pages before `after` as well.
            listing = obstore.list(
                clients.once, _folder(prefix), offset=after or begin or None, chunk_size=_PAGE_KEYS
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
            f"list of {prefix}", lambda: self._client.run(f"list of {prefix!r}", read)
        )

    def _folders(self, prefix: str) -> Page:
        found = self._retrier.call(
            f"list of {prefix}",
            lambda: self._client.run(
                f"list of {prefix!r}",
                lambda clients: obstore.list_with_delimiter(clients.once, _folder(prefix)),
            ),
        )
        objects = sorted(found["objects"], key=lambda item: item["path"])
        return Page(
            tuple(self._client.listed(item) for item in objects if not _is_temporary(item["path"])),
            folders=tuple(sorted(f"{path}/" for path in found["common_prefixes"])),
        )


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
