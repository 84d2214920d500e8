"""Decide which connections a port keeps when more arrive than it can hold. No I/O.

An unauthenticated caller may be an attacker with any number of addresses. Unauthenticated callers share a
small number of places. A new one always gets a place: if none is free, it replaces the oldest connection of
the address that holds the most places. An attacker therefore displaces its own connections first. With many
addresses it would have to fill all places again within the milliseconds that an honest handshake takes.
Authenticated callers have places of their own. So have unauthenticated callers at an address that an
authenticated caller has used or that a caller is expected from. Other callers cannot take those places.
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
    """Largest number of connections of each kind that a port holds."""

    unauthenticated: int = 64
    """Connections whose caller is not authenticated yet."""
    unauthenticated_per_address: int = 16
    expected: int = 128
    """Connections that are not authenticated yet, from addresses of known callers. One address may hold all
    of these places, because many pods share one address where a node translates addresses."""
    known: int = 4096
    """Connections whose caller is authenticated."""
    known_per_name: int = 32
    """Authenticated connections whose certificates have the same name."""


@dataclass(slots=True)
class _Entry:
    address: str
    is_expected: bool
    name: str | None = None
    working: int = 0


class Admission(Generic[C]):
    """Allocator of a port's places. Thread-safe."""

    def __init__(
        self,
        places: Places,
        close: Callable[[C], None],
        *,
        expected: Callable[[], Container[str]] = frozenset,
    ) -> None:
        """Create the places of one port.

        Args:
            places: How many places there are.
            close: Called for each connection that loses its place, without the lock held. It may be called
                for a connection that is ending at the same time.
            expected: Returns the addresses that callers are expected from.
        """
        self._places = places
        self._close = close
        self._expected = expected
        self._lock = threading.Lock()
        self._open: dict[C, _Entry] = {}
        """Connections that have a place, oldest first."""
        self._names: Counter[str] = Counter()
        """Number of authenticated connections for each name."""
        self._seen: OrderedDict[str, None] = OrderedDict()
        """Addresses that authenticated callers have used, least recently used first."""
        self.displaced = 0
        """Number of connections that lost their place to others."""

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: C, address: str) -> None:
        """Give a new connection a place. Another connection may lose its place."""
        is_expected = address in self._expected()
        with self._lock:
            is_expected = is_expected or address in self._seen
            loser = self._loser(address, is_expected)
            self._open[connection] = _Entry(address, is_expected)
            self._forget(loser)
        self._end(loser)

    def is_known(self, connection: C, name: str) -> bool:
        """Move an authenticated connection to a place for known callers.

        Where those places are taken, the oldest connection without a request in progress loses its place,
        if there is one: of the same name at that name's limit, otherwise of any name.

        Returns:
            False if there is no place, or the connection has lost its own meanwhile. Then the caller closes
            it.
        """
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
        """Free the place of a closed connection. Do nothing if it has lost its place already."""
        with self._lock:
            self._forget(connection)

    @contextmanager
    def working(self, connection: C) -> Iterator[None]:
        """Protect an authenticated connection from losing its place while a request is in progress."""
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
        per_address = Counter(found for _, found in waiting)
        if not is_expected and per_address[address] >= places.unauthenticated_per_address:
            crowded = address
        elif len(waiting) >= (places.expected if is_expected else places.unauthenticated):
            crowded = per_address.most_common(1)[0][0]
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
