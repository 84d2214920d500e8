"""An index whose items are sorted below each key, so that a look-up reads none that it does not return."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Any)


class SortedIndex(Generic[K, T]):
    """Items of each key in ascending order. Items of one key differ."""

    def __init__(self) -> None:
        self._items: dict[K, list[T]] = {}

    def add(self, key: K, item: T) -> None:
        """Add an item. An item that is there stays there once."""
        items = self._items.setdefault(key, [])
        place = bisect_left(items, item)
        if items[place : place + 1] != [item]:
            insort(items, item)

    def remove(self, key: K, item: T) -> None:
        """Remove an item if it is there."""
        items = self._items.get(key, [])
        place = bisect_left(items, item)
        if items[place : place + 1] == [item]:
            del items[place]
            if not items:
                del self._items[key]

    def last(self, key: K) -> T | None:
        """Return the largest item of the key, or None."""
        items = self._items.get(key)
        return items[-1] if items else None

    def start_at(self, key: K, item: T) -> Iterator[T]:
        """Yield the items of the key that are not smaller than `item`."""
        items = self._items.get(key, [])
        for place in range(bisect_left(items, item), len(items)):
            yield items[place]
