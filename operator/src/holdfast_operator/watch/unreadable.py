"""Records of objects that exist and cannot be parsed, and their index.

After a rollback an object may hold a value that only a newer release can parse. Such an object must
not count as deleted, because the operator would then delete what belongs to it (ADR 0002).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from pydantic import ValidationError

from holdfast_core.api import Checkpoint
from holdfast_operator.model import labels
from holdfast_operator.model.job import Unreadable
from holdfast_operator.model.ownership import controller_of
from holdfast_operator.watch.sorted_index import SortedIndex

MAX_VALUE_CHARACTERS = 80
MAX_PROBLEM_CHARACTERS = 500


class UnreadableCache:
    """Index of the unreadable objects of some kinds."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str, str], Unreadable] = {}
        """Objects by kind, namespace and name."""
        self._names: SortedIndex[tuple[str, str], str] = SortedIndex()
        """Their names by kind and namespace."""

    def get(self, kind: str, namespace: str, name: str) -> Unreadable | None:
        return self._objects.get((kind, namespace, name))

    def all(self) -> tuple[Unreadable, ...]:
        return tuple(self._objects.values())

    def checkpoints(self, namespace: str, prefix: str) -> tuple[Unreadable, ...]:
        """Return the Checkpoints whose names begin with the prefix."""
        kind = Checkpoint.KIND
        names = self._names.start_at((kind, namespace), prefix)
        found = takewhile(lambda name: name.startswith(prefix), names)
        return tuple(self._objects[kind, namespace, name] for name in found)

    def note(self, old: object, new: object) -> None:
        """Remove an object that can be parsed now or was deleted; add one that cannot be parsed."""
        if isinstance(old, Unreadable):
            key = (old.kind, old.namespace, old.name)
            if key in self._objects and self._objects[key].uid == old.uid:
                del self._objects[key]
                self._names.remove(key[:2], key[2])
        if isinstance(new, Unreadable):
            self._objects[new.kind, new.namespace, new.name] = new
            self._names.add((new.kind, new.namespace), new.name)


def unreadable(kind: str, raw: Mapping[str, Any], error: Exception) -> Unreadable:
    """Return the record of an object whose parser raised `error`."""
    meta = raw["metadata"]
    its_labels = meta.get("labels")
    job = its_labels.get(labels.JOB_NAME) if isinstance(its_labels, Mapping) else None
    return Unreadable(
        kind=kind,
        namespace=str(meta.get("namespace") or ""),
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        problem=problem_of(error),
        owner=controller_of(raw),
        job=None if job is None else str(job),
    )


def problem_of(error: Exception) -> str:
    """Describe the first field that could not be parsed: what was expected and what was found."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"[:MAX_PROBLEM_CHARACTERS]
    first, *others = error.errors(include_url=False)
    field = ".".join(str(part) for part in first["loc"]) or "the object"
    found = repr(first.get("input"))
    if len(found) > MAX_VALUE_CHARACTERS:
        found = f"{found[:MAX_VALUE_CHARACTERS]}..."
    text = f"{field}: {first['msg']}, found {found}"
    if others:
        text = f"{text} (and {len(others)} more fields)"
    return text[:MAX_PROBLEM_CHARACTERS]
