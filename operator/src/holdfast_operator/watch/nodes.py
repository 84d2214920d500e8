"""Nodes by name, those that cannot be parsed included."""

from __future__ import annotations

from collections.abc import Iterable

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
