"""Notifications between components of which one is created before the other.

The component that notifies is created with the signal. The ones that are created later subscribe to it. So
every component is complete after its constructor, although the notifications form circles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Signal(Generic[P]):
    """One kind of event. To call the signal is to notify its subscribers, in the order of subscription."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[P, object]] = []

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        self._subscribers.append(subscriber)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for subscriber in self._subscribers:
            subscriber(*args, **kwargs)
