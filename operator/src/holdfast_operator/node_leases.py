"""Which nodes are silent, by our own monotonic clock: the lease did not change although we watched.

1. A lease is stale when its renewTime has not changed for the threshold.
2. That counts only if the copy is known to be newer than the moment when it became stale: the watch
   delivered something since, or a direct GET found the same renewTime.
3. Whether the node is lost is decided with the sidecars' silence; this module knows leases only.
Other machines' clocks are compared for equality, never for order.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Seen:
    renewed: str
    changed_at: float
    confirmed_at: float


class NodeLeases:
    """Times are monotonic seconds. After a restart of the operator every timer starts again."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def observe(self, node: str, renewed: str, at: float) -> None:
        """The reflector, or a direct GET, saw this renewTime."""
        known = self._seen.get(node)
        if known is None or known.renewed != renewed:
            self._seen[node] = _Seen(renewed, at, at)
        else:
            known.confirmed_at = at

    def forget(self, node: str) -> None:
        self._seen.pop(node, None)

    def changed_at(self, node: str) -> float | None:
        """When the lease was last seen to change; None for a node without a lease."""
        known = self._seen.get(node)
        return None if known is None else known.changed_at

    def stale_seconds(self, node: str, now: float) -> float | None:
        """Since when nothing changed; None for a node without a lease."""
        known = self._seen.get(node)
        return None if known is None else now - known.changed_at

    def is_silent(
        self, node: str, threshold_seconds: float, now: float, contact: float | None
    ) -> bool:
        """`contact`: when the watch of leases last delivered anything."""
        known = self._seen.get(node)
        if known is None or now - known.changed_at < threshold_seconds:
            return False
        return self._confirmed(known, contact) >= known.changed_at + threshold_seconds

    def needs_confirmation(
        self, node: str, threshold_seconds: float, now: float, contact: float | None
    ) -> bool:
        """Stale for long enough, but nothing proves that it is not our own watch that is silent."""
        known = self._seen.get(node)
        if known is None or now - known.changed_at < threshold_seconds:
            return False
        return self._confirmed(known, contact) < known.changed_at + threshold_seconds

    @staticmethod
    def _confirmed(known: _Seen, contact: float | None) -> float:
        return known.confirmed_at if contact is None else max(known.confirmed_at, contact)
