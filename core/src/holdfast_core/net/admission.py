"""Decide which connections a port keeps when more arrive than it can hold. Opens and closes nothing.

Until a caller has proven who it is, it may be anybody, and it can come from any number of addresses.
Such a caller gets a place among few, and never for long: a new one is always let in, and takes the
place of the oldest one of the address that holds most. An attacker therefore displaces its own
connections first, and with many addresses must fill all places again within the milliseconds of an
honest handshake. Callers that are known, and addresses at which a known caller was or is expected,
have places of their own, which strangers cannot take.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

_ADDRESSES_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Places:
    """How many connections of each kind a port holds at most."""

    strangers: int = 64
    """Whose caller is not known yet."""
    strangers_per_address: int = 16
    expected: int = 128
    """The same, from addresses of known callers. One address may hold all of them: many pods share
    one where a node translates addresses."""
    known: int = 4096
    known_per_name: int = 32


@dataclass(slots=True)
class _Entry:
    address: str
    is_expected: bool
    name: str | None = None
    working: int = 0


class Admission(Generic[C]):
    """Thread-safe. `close` is called without a lock held, for each connection that loses its place;
    it may be called twice for one that ends at the same time."""

    def __init__(
        self,
        places: Places,
        close: Callable[[C], None],
        *,
        expected: Callable[[], Container[str]] = frozenset,
    ) -> None:
        """`expected`: addresses of callers that may come at any time."""
        self._places = places
        self._close = close
        self._expected = expected
        self._lock = threading.Lock()
        self._open: dict[C, _Entry] = {}
        """In the order in which they came."""
        self._names: Counter[str] = Counter()
        self._seen: OrderedDict[str, None] = OrderedDict()
        """Addresses of which a caller was known."""
        self.displaced = 0
        """Connections that lost their place to others."""

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: C, address: str) -> None:
        """Let a new connection in; another one may lose its place."""
        is_expected = address in self._expected()
        with self._lock:
            is_expected = is_expected or address in self._seen
            loser = self._loser(address, is_expected)
            self._open[connection] = _Entry(address, is_expected)
            self._forget(loser)
        self._end(loser)

    def is_known(self, connection: C, name: str) -> bool:
        """The caller has proven its name. False: there is no place for it, and it must be closed."""
        with self._lock:
            entry = self._open.get(connection)
            if entry is None:
                return False
            loser: C | None = None
            if self._names[name] >= self._places.known_per_name:
                loser = self._oldest_idle(name)
            elif self._names.total() >= self._places.known:
                loser = self._oldest_idle(None)
            else:
                self._remember(entry.address)
                self._names[name] += 1
                entry.name = name
                return True
            if loser is not None:
                self._forget(loser)
                self._names[name] += 1
                entry.name = name
        self._end(loser)
        return loser is not None

    def leave(self, connection: C) -> None:
        """It is closed. Does nothing for one that has lost its place."""
        with self._lock:
            self._forget(connection)

    @contextmanager
    def working(self, connection: C) -> Iterator[None]:
        """A request of it is in work: it does not lose its place meanwhile."""
        with self._lock:
            entry = self._open.get(connection)
            if entry is not None:
                entry.working += 1
        try:
            yield
        finally:
            if entry is not None:
                with self._lock:
                    entry.working -= 1

    # ------------------------------------------------------------------ inside, under the lock

    def _loser(self, address: str, is_expected: bool) -> C | None:
        places = self._places
        waiting = [
            (connection, entry.address)
            for connection, entry in self._open.items()
            if entry.name is None and entry.is_expected == is_expected
        ]
        held = Counter(found for _, found in waiting)
        if not is_expected and held[address] >= places.strangers_per_address:
            crowded = address
        elif len(waiting) >= (places.expected if is_expected else places.strangers):
            crowded = held.most_common(1)[0][0]
        else:
            return None
        return next(connection for connection, found in waiting if found == crowded)

    def _oldest_idle(self, name: str | None) -> C | None:
        for connection, entry in self._open.items():
            if entry.name is None or entry.working:
                continue
            if name is None or entry.name == name:
                return connection
        return None

    def _forget(self, connection: C | None) -> None:
        entry = None if connection is None else self._open.pop(connection, None)
        if entry is not None and entry.name is not None:
            self._names[entry.name] -= 1
            if not self._names[entry.name]:
                del self._names[entry.name]

    def _remember(self, address: str) -> None:
        self._seen[address] = None
        self._seen.move_to_end(address)
        while len(self._seen) > _ADDRESSES_KEPT:
            self._seen.popitem(last=False)

    def _end(self, loser: C | None) -> None:
        if loser is not None:
            self.displaced += 1
            self._close(loser)
