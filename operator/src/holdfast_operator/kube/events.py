"""Kubernetes Events for users, at most one a minute for each object and reason.

Nothing depends on an Event: one that cannot be written is logged and dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast_core.clock import Clock, stamp
from holdfast_core.errors import HoldfastError
from holdfast_operator.base import logs
from holdfast_operator.kube.cluster import EVENT, Cluster
from holdfast_operator.model import labels

INTERVAL_SECONDS = 60.0
MAX_MESSAGE_CHARACTERS = 1000
_MAX_REMEMBERED = 20_000


@dataclass(frozen=True, slots=True)
class Subject:
    """The object that an Event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(slots=True)
class _Emitted:
    at: float
    suppressed: int = 0


class Events:
    """Writer of Events, with a limit for each object and reason."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._emitted: dict[tuple[str, str], _Emitted] = {}

    async def emit(self, subject: Subject, kind: str, reason: str, message: str) -> None:
        """Write an Event, unless one for this object and reason was written less than a minute ago.

        Errors are logged; HoldfastError is never raised.

        Args:
            kind: Normal or Warning.
        """
        count = self._count(subject.uid, reason)
        if count is None:
            return
        now = stamp(self._clock.utc_now())
        body = {
            "apiVersion": "v1",
            "kind": EVENT,
            "metadata": {"generateName": f"{subject.name}-", "namespace": subject.namespace},
            "involvedObject": {
                "apiVersion": subject.api_version,
                "kind": subject.kind,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message[:MAX_MESSAGE_CHARACTERS],
            "source": {"component": labels.FIELD_MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": count,
        }
        try:
            await self._cluster.create(body)
        except HoldfastError as error:
            logs.warning(
                f"event {reason} not written: {error}",
                namespace=subject.namespace,
                object=subject.name,
            )

    def _count(self, uid: str, reason: str) -> int | None:
        """Return the count for the Event, including those suppressed before it; None to suppress it."""
        now = self._clock.monotonic()
        known = self._emitted.get((uid, reason))
        if known is not None and now - known.at < INTERVAL_SECONDS:
            known.suppressed += 1
            return None
        if len(self._emitted) >= _MAX_REMEMBERED:
            self._emitted.clear()
        self._emitted[uid, reason] = _Emitted(now)
        return 1 if known is None else 1 + known.suppressed
