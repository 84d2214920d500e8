"""Nodes by name, and which of them are silent: their leases did not change while the operator watched them.

1. A lease is stale when its renewTime has not changed for the threshold, measured by this process's
   monotonic clock.
2. A stale lease makes its node silent only if the operator's copy is newer than the moment at which the
   lease became stale: the watch has delivered something since, or a direct GET found the same renewTime.
3. A node to which a pod is bound, but whose Node object does not exist, is stale from the moment at which
   that is first seen. The watch of nodes or a direct read confirms it. The lease is deleted together with
   the Node object, so the lease alone would never become stale.
4. While most leases are late at the same time, they are no evidence, because then the API server or the
   operator itself is slow (ADR 0007).
5. `decide` combines this with the silence of the sidecars to decide whether a node is lost.

Time stamps of other machines are compared for equality, never for order (R30).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from holdfast_operator.model.job import NodeView, Unreadable


class NodeCache:
    """Index of the Node objects."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeView] = {}
        self._hidden: set[str] = set()
        """Names of Node objects that cannot be parsed."""

    def get(self, name: str) -> NodeView | None:
        return self._nodes.get(name)

    def names(self) -> Iterable[str]:
        return self._nodes.keys()

    def with_conditions(self, conditions: frozenset[tuple[str, str]]) -> set[str]:
        """Return the names of the nodes that have one of these conditions."""
        if not conditions:
            return set()
        return {name for name, node in self._nodes.items() if node.conditions & conditions}

    def is_there(self, name: str) -> bool:
        """Return whether a Node object of this name exists, whether or not it can be parsed."""
        return name in self._nodes or name in self._hidden

    def change(
        self, old: NodeView | Unreadable | None, new: NodeView | Unreadable | None
    ) -> str | None:
        """Take a change. Return the name of the node if passes over jobs may see it, or None."""
        item = new or old
        if item is None:
            return None
        if isinstance(new, Unreadable):
            self._hidden.add(new.name)
            return None  # the node exists, so its last parsed record is kept
        self._hidden.discard(item.name)
        before = self._nodes.get(item.name)
        if new is None:
            self._nodes.pop(item.name, None)
        else:
            self._nodes[item.name] = new
        return item.name if before is None or new is None or _seen(before) != _seen(new) else None


def _seen(node: NodeView) -> object:
    return node.taints, node.other_taints, node.conditions, node.labels


WATCH_FRESH_SECONDS = 15.0
"""Time without any news after which the watch of leases is silent. Each node renews its lease every 10 s."""
DOUBT_SHARE = 0.55
"""Share of late leases from which on no lease is evidence. At the same share kube-controller-manager evicts
no pods any more (--unhealthy-zone-threshold)."""
DOUBT_SECONDS = 15.0
"""Age from which on a lease counts as late here. Each node renews its lease every 10 s, and a job counts a
node as lost after 20 s by default."""
DOUBT_NODES = 10
"""Number of late leases up to which they are evidence. In a small cluster, most nodes may be lost at once."""
OFF_SECONDS = 900.0
"""Age, watched without a pause, from which on a lease no longer counts in the comparison: its machine is off.
An API server that is slow after an outage is slow for minutes."""
MAX_MISSING = 4096
"""Limit of the record of missing nodes, more than pods are bound to at a time. A full record is cleared."""


@dataclass(slots=True)
class _Seen:
    renewed: str
    """renewTime, compared for equality only."""
    changed_at: float
    """When renewTime was last seen to change, or first seen."""
    confirmed_at: float
    """When renewTime was last read."""
    first_value: bool
    """Whether renewTime is the first one that this process saw, so that the lease may be of any age."""


@dataclass(slots=True)
class _Missing:
    since: float
    confirmed_at: float
    """When a direct read last found no Node object, or `since`."""


class NodeLeases:
    """Node leases and missing nodes, by name of the node.

    Times are monotonic seconds. After a restart of the operator every timer starts again.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._missing: dict[str, _Missing] = {}
        self.late_count: int | None = None
        """Number of late leases while they are in doubt, otherwise None."""

    @property
    def count(self) -> int:
        """Number of nodes that have a lease."""
        return len(self._seen)

    def compare(self, now: float, since: float = 0.0) -> None:
        """Find out whether so many leases are late at the same time that they are in doubt.

        The operator does this every second. The threshold is not that of a job, because a job with another
        one must not change what the others see. Machines that are off for good do not count: otherwise they
        would put the leases of all others in doubt for ever.

        Args:
            since: When the watch of leases first delivered something after its last silence.
        """
        ages = [
            now - s.changed_at
            for s in self._seen.values()
            if now - max(s.changed_at, since) < OFF_SECONDS
        ]
        late = sum(age >= DOUBT_SECONDS for age in ages)
        in_doubt = late > DOUBT_NODES and late >= DOUBT_SHARE * len(ages)
        self.late_count = late if in_doubt else None

    def miss(self, node: str, at: float) -> None:
        """Record that a pod is bound to this node and that its Node object does not exist."""
        if len(self._missing) >= MAX_MISSING:
            self._missing.clear()
        self._missing.setdefault(node, _Missing(at, at))

    def confirm_missing(self, node: str, at: float) -> None:
        """Record that a direct read found no Node object of a missing node."""
        if node in self._missing:
            self._missing[node].confirmed_at = at

    def found(self, node: str) -> None:
        """Record that the Node object exists."""
        self._missing.pop(node, None)

    def is_missing(self, node: str) -> bool:
        return node in self._missing

    def observe(self, node: str, renewed: str, at: float) -> None:
        """Record a renewTime that the reflector or a direct GET read."""
        known = self._seen.get(node)
        if known is None or known.renewed != renewed:
            self._seen[node] = _Seen(renewed, at, at, known is None)
        else:
            known.confirmed_at = at

    def forget(self, node: str) -> None:
        self._seen.pop(node, None)

    def changed_at(self, node: str) -> float | None:
        """Return when the lease was last seen to change, or None for a node without a lease."""
        known = self._seen.get(node)
        return None if known is None else known.changed_at

    def stale_seconds(
        self, node: str, now: float, contact: float | None, since: float = 0.0
    ) -> float | None:
        """Return for how long the lease did not change or the node was missing; None without a lease.

        While the API server is away, every lease grows old, and the kubelets need some time to renew them
        afterwards. If all nodes counted as late then, the operator would call every sidecar of the cluster
        again and again. So the time of a silent watch does not count, nor does the time before a silence. The
        result is 0 while the leases are in doubt.

        Args:
            contact: When the watch of leases last delivered anything.
            since: When it first delivered something after its last silence.
        """
        if node in self._missing:
            return now - self._missing[node].since
        known = self._seen.get(node)
        return None if known is None else self._stale(known, now, contact, since)

    def late(
        self, threshold_seconds: float, now: float, contact: float | None, since: float = 0.0
    ) -> set[str]:
        """Return the missing nodes, and those whose leases are stale (`stale_seconds`) for this time."""
        late = {
            n
            for n, s in self._seen.items()
            if self._stale(s, now, contact, since) >= threshold_seconds
        }
        return late | self._missing.keys()

    def _stale(self, known: _Seen, now: float, contact: float | None, since: float) -> float:
        if self.late_count is not None:
            return 0.0
        is_fresh = contact is None or now - contact <= WATCH_FRESH_SECONDS
        until = now if is_fresh else self._confirmed(known, contact)
        return until - max(known.changed_at, since)

    def is_undated(self, node: str) -> bool:
        """Return whether the node has a lease that this process has never seen change."""
        known = self._seen.get(node)
        return known is not None and known.first_value

    def silent(self, threshold_seconds: float, now: float, contact: float | None) -> set[str]:
        """Return the names of all nodes whose leases are silent.

        Args:
            contact: When the watch of leases last delivered anything.
        """
        late = (n for n, s in self._seen.items() if now - s.changed_at >= threshold_seconds)
        return {n for n in late if self.is_silent(n, threshold_seconds, now, contact)}

    def is_silent(
        self, node: str, threshold_seconds: float, now: float, contact: float | None
    ) -> bool:
        """Return whether the node is proven to be silent for the threshold.

        Args:
            contact: When the watch of leases last delivered anything; for a missing node, the watch of
                nodes.
        """
        due, confirmed = self._evidence(node, threshold_seconds, contact)
        return now >= due and confirmed >= due

    def needs_confirmation(
        self, node: str, threshold_seconds: float, now: float, contact: float | None
    ) -> bool:
        """Return whether the node is stale, but the silence may be that of the operator's own watch.

        Nodes change rarely, so their watch may deliver only a bookmark a minute. A direct read confirms
        earlier that a Node object does not exist.
        """
        due, confirmed = self._evidence(node, threshold_seconds, contact)
        return now >= due and confirmed < due

    def _evidence(
        self, node: str, threshold_seconds: float, contact: float | None
    ) -> tuple[float, float]:
        """Return from when on the node is stale, and up to when that is known.

        An unknown node never is stale, nor is one whose lease is in doubt.
        """
        known = self._missing.get(node)
        if known is not None:
            return known.since + threshold_seconds, self._confirmed(known, contact)
        seen = self._seen.get(node)
        if seen is None or self.late_count is not None:
            return inf, 0.0
        return seen.changed_at + threshold_seconds, self._confirmed(seen, contact)

    @staticmethod
    def _confirmed(known: _Seen | _Missing, contact: float | None) -> float:
        return known.confirmed_at if contact is None else max(known.confirmed_at, contact)
