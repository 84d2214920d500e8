"""An object store in memory for tests: the contract at its simplest, independent of the real stores."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from datetime import timedelta

from holdfast_core.errors import AlreadyExistsError, CorruptionError, NotFoundError
from holdfast_core.format.canonical import crc32c
from holdfast_core.tiers.objects import Listed, ObjectSource, Page


class MemoryObjectStore:
    """ObjectStore over a dict. Its clock is `now`; a page has `page_keys` keys."""

    name = "memory"

    def __init__(self, page_keys: int = 1000) -> None:
        self.objects: dict[str, tuple[bytes, timedelta]] = {}
        self.now = timedelta(0)
        self._page_keys = page_keys
        self._lock = threading.Lock()

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        if source.made_while_sent and key in self.objects and not replace:
            raise AlreadyExistsError(f"{key}: expected nothing in {self.name}")
        data = b""
        for part in source.parts(100_000):
            found = b"".join(part.data())
            if crc32c(found) != part.crc32c:
                source.verify()
                raise CorruptionError(f"{key}: the source has changed")
            data += found
        with self._lock:
            held, _ = self.objects.get(key, (data, None))
            if held != data and not replace:
                raise AlreadyExistsError(f"{key}: {self.name} holds {len(held)} other bytes")
            if held != data or key not in self.objects:
                self.objects[key] = (data, self.now)

    def get(self, key: str) -> bytes:
        with self._lock:
            if key not in self.objects:
                raise NotFoundError(f"{key}: not in {self.name}")
            return self.objects[key][0]

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        data = self.get(key)[start : start + len(buffer)]
        if len(data) != len(buffer):
            raise CorruptionError(f"{key}: ends at byte {start + len(data)}")
        buffer[:] = data

    def size(self, key: str, *, sure: bool = False) -> int | None:
        with self._lock:
            return len(self.objects[key][0]) if key in self.objects else None

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        def name(key: str) -> str:
            inside, slash, _ = key.removeprefix(prefix).partition("/")
            return prefix + inside + slash if folders else key

        with self._lock:
            names = {name(key) for key in self.objects if key.startswith(prefix)}
            left = sorted(found for found in names if found > page)
            shown = left[: self._page_keys]
            listed = tuple(
                Listed(key, self.now - found[1], len(found[0]))
                for key in shown
                if (found := self.objects.get(key)) is not None
            )
        below = tuple(found for found in shown if found not in self.objects)
        return Page(listed, shown[-1] if len(left) > len(shown) else "", below)

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self.objects.pop(key, None)

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        return ()

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        return 0

    def close(self) -> None:
        """Do nothing."""
