"""An object store in one SQLite file: each object is a row. A complete example of the contract."""

import sqlite3
import threading
from collections.abc import Collection, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

from holdfast_core.errors import AlreadyExistsError, NotFoundError, TierError, UnavailableError
from holdfast_core.format.canonical import crc32c
from holdfast_core.tiers.objects import Listed, ObjectSource, Page

NOW = "(julianday('now') * 86400.0)"
TABLE = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB, written REAL)"


class SqliteObjectStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = f"SQLite file {path}"

    def write(self, key: str, source: ObjectSource, *, replace: bool = False) -> None:
        if source.made_while_sent and not replace and self.size(key) is not None:
            raise AlreadyExistsError(f"{self.name}: {key!r} exists")
        data = bytearray()
        for part in source.parts(8 << 20):
            data += (found := b"".join(part.data()))
            if crc32c(found) != part.crc32c:
                source.verify()
                raise UnavailableError(f"{key!r}: the source changed while it was read")
        insert = "INSERT OR REPLACE" if replace else "INSERT OR IGNORE"
        self._run(f"{insert} INTO objects VALUES (?, ?, {NOW})", key, data)
        if self.get(key) != data:
            raise AlreadyExistsError(f"{self.name}: {key!r} holds other bytes")

    def get(self, key: str) -> bytes:
        found = self._run("SELECT data FROM objects WHERE key = ?", key)
        if not found:
            raise NotFoundError(f"{self.name}: no object {key!r}")
        return bytes(found[0][0])

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        data = self.get(key)[start : start + len(buffer)]
        if len(data) != len(buffer):
            raise TierError(f"{self.name}: {key!r} ends at byte {start + len(data)}")
        buffer[:] = data

    def size(self, key: str, *, sure: bool = False) -> int | None:
        found = self._run("SELECT length(data) FROM objects WHERE key = ?", key)
        return int(found[0][0]) if found else None

    def list(self, prefix: str, page: str = "", *, folders: bool = False) -> Page:
        sql = f"SELECT key, {NOW} - written, length(data) FROM objects WHERE substr(key, 1, ?) = ?"
        rows = self._run(f"{sql} ORDER BY key", len(prefix), prefix)
        found = [Listed(k, timedelta(seconds=max(0.0, age)), size) for k, age, size in rows]
        inside = [o.key[: o.key.find("/", len(prefix)) + 1] if folders else "" for o in found]
        here = tuple(o for o, folder in zip(found, inside, strict=True) if not folder)
        return Page(here, folders=tuple(sorted({*inside} - {""})))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._run("DELETE FROM objects WHERE key = ?", key)

    def unfinished(self, prefix: str) -> Sequence[Listed]:
        return ()  # a transaction that was interrupted leaves nothing

    def abort_stale(self, prefixes: Collection[str], older_than: timedelta) -> int:
        return 0

    def close(self) -> None:
        """Do nothing: every call opens and closes the file."""

    def _run(self, statement: str, *values: Any) -> Sequence[Any]:
        try:  # `with rows` is one transaction, which is durable when it ends
            with closing(sqlite3.connect(self._path, timeout=60)) as rows, rows:
                rows.execute(TABLE)
                return rows.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise UnavailableError(f"{self.name}: {error}") from error
