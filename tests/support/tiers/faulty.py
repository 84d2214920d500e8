"""A wrapper of a tier, a store or a source whose calls fail as a test sets. For tests only."""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from holdfast_core.errors import HoldfastError, UnavailableError
from holdfast_core.tasks import Closing

_OPENING = frozenset({"begin_copy", "open_shard"})
"""Methods that return an object whose calls may fail too."""


@dataclass(frozen=True, slots=True)
class Fault:
    operation: str
    """Method that fails. One that yields pieces fails at a piece, after the pieces before it."""
    error: HoldfastError | None = None
    """Error that it raises; None for an UnavailableError."""
    first: int = 1
    """Number of the first call that the fault hits, counted per operation from 1."""
    times: int | None = None
    """Number of calls that the fault hits; None for all from `first` on."""


class Faults:
    """Set of faults that counts calls and raises the errors that are due. It is thread-safe."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self._faults = tuple(faults)
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def clear(self) -> None:
        with self._lock:
            self._faults = ()

    def calls(self, operation: str) -> int:
        with self._lock:
            return self._calls[operation]

    def strike(self, operation: str) -> None:
        """Count a call, and raise the error of a fault that is due."""
        with self._lock:
            self._calls[operation] += 1
            call, faults = self._calls[operation], self._faults
        for fault in faults:
            last = call if fault.times is None else fault.first + fault.times - 1
            if fault.operation == operation and fault.first <= call <= last:
                raise fault.error or UnavailableError(f"fault: {operation} call {call}")


class Faulty(Closing):
    """An object with the methods of `inner`, which fail by the rules of `faults`."""

    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def close(self) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if inspect.isgeneratorfunction(found):
            return functools.partial(self._pieces, name, found)
        return functools.partial(self._call, name, found) if inspect.ismethod(found) else found

    def _call(self, name: str, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        self._faults.strike(name)
        found = method(*given, **options)
        return Faulty(found, self._faults) if name in _OPENING else found

    def _pieces(self, name: str, method: Callable[..., Any], *given: Any) -> Generator[Any]:
        for piece in method(*given):
            self._faults.strike(name)
            yield piece
