"""Which nodes are silent, by our own monotonic clock: the lease did not change although we watched.

1. A lease is stale when its renewTime has not changed for the threshold.
2. That counts only if the copy is known to be newer than the moment when it became stale: the watch
   delivered something since, or a direct GET found the same renewTime.
3. A Node object that is not there, although a pod is bound to it, is stale from the moment at which we
   miss it; what proves it is the watch of nodes. The lease goes with the object, so that nothing would
   ever turn stale otherwise.
4. Whether the node is lost is decided with the sidecars' silence; this module knows leases only.
Other machines' clocks are compared for equality, never for order.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_MISSING = 4096
"""Names of nodes that are remembered as missing: more than pods are ever bound to at a time."""


@dataclass(slots=True)
class _Seen:
    renewed: str
    changed_at: float
    confirmed_at: float
    first_value: bool
    """It has not changed since this process saw it first, which says nothing about the node."""


class NodeLeases:
    """Times are monotonic seconds. After a restart of the operator every timer starts again."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._missing: dict[str, float] = {}

    def miss(self, node: str, at: float) -> None:
        """A pod is bound to this node, and there is no Node object of that name."""
        if len(self._missing) >= MAX_MISSING:
            self._missing.clear()
        self._missing.setdefault(node, at)

    def found(self, node: str) -> None:
        """The Node object is there."""
        self._missing.pop(node, None)

    def is_missing(self, node: str) -> bool:
        return node in self._missing

    def observe(self, node: str, renewed: str, at: float) -> None:
        """The reflector, or a direct GET, saw this renewTime."""
        known = self._seen.get(node)
        if known is None or known.renewed != renewed:
            self._seen[node] = _Seen(renewed, at, at, known is None)
        else:
            known.confirmed_at = at

    def forget(self, node: str) -> None:
        self._seen.pop(node, None)

    def changed_at(self, node: str) -> float | None:
        """When the lease was last seen to change; None for a node without a lease."""
        known = self._seen.get(node)
        return None if known is None else known.changed_at

    def stale_seconds(self, node: str, now: float) -> float | None:
        """For how long nothing changed; None for a node without a lease."""
        if node in self._missing:
            return now - self._missing[node]
        known = self._seen.get(node)
        return None if known is None else now - known.changed_at

    def is_undated(self, node: str) -> bool:
        """Whether there is a lease that this process has not seen change: it may be of any age."""
        known = self._seen.get(node)
        return known is not None and known.first_value

    def silent(self, threshold_seconds: float, now: float, contact: float | None) -> set[str]:
        """Names of all nodes whose leases are silent, by the watch of leases."""
        late = (n for n, s in self._seen.items() if now - s.changed_at >= threshold_seconds)
        return {n for n in late if self.is_silent(n, threshold_seconds, now, contact)}

    def is_silent(
        self, node: str, threshold_seconds: float, now: float, contact: float | None
    ) -> bool:
        """`contact`: when the watch of leases last delivered anything, or the watch of nodes if the node
        is missing."""
        if node in self._missing:
            due = self._missing[node] + threshold_seconds
            return now >= due and contact is not None and contact >= due
        known = self._seen.get(node)
        if known is None or now - known.changed_at < threshold_seconds:
            return False
        return self._confirmed(known, contact) >= known.changed_at + threshold_seconds

    def needs_confirmation(
        self, node: str, threshold_seconds: float, now: float, contact: float | None
    ) -> bool:
        """Stale for long enough, but nothing proves that it is not our own watch that is silent."""
        if node in self._missing:
            return False  # the next bookmark of the watch of nodes proves it
        known = self._seen.get(node)
        if known is None or now - known.changed_at < threshold_seconds:
            return False
        return self._confirmed(known, contact) < known.changed_at + threshold_seconds

    @staticmethod
    def _confirmed(known: _Seen, contact: float | None) -> float:
        return known.confirmed_at if contact is None else max(known.confirmed_at, contact)
