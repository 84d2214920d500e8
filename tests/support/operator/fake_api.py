"""In-memory Kubernetes API that checks each request against the objects it holds, as the real one does.

Names clash within a namespace even while an object is being deleted. Only the status subresource writes the
status. A stale resourceVersion or a different uid is a conflict. Finalizers and running pods delay a
deletion. Objects whose owners are gone are collected `COLLECT_TICKS` ticks later. `refuse` plays admission
and outages. There are no watches here: tests list, or watch a ServedApi (served_api.py), which serves the
same objects over HTTP. The module contains nothing specific to the operator.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp

from holdfast_operator.kube.api import ApiError, KubeApi

COLLECT_TICKS = 5
"""Ticks until the garbage collector deletes an object whose owners are gone."""
STAMP = "2026-01-01T00:00:00Z"

_DELETES = "$deleteFromPrimitiveList/"

Raw = dict[str, Any]
Key = tuple[str, str, str]
"""Plural, namespace (empty for cluster-scoped objects) and name."""
Refusal = ApiError | Callable[[Mapping[str, Any]], ApiError | None]
"""The error of a request, or a function that returns it for the body of the request."""


@dataclass(frozen=True, slots=True)
class _Path:
    plural: str
    namespace: str
    name: str
    status: bool


def _parse(path: str) -> _Path:
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    return _Path(rest[0], namespace, rest[1] if len(rest) > 1 else "", rest[2:] == ["status"])


@dataclass
class FakeApi(KubeApi):
    """Test double for `KubeApi`."""

    objects: dict[Key, Raw] = field(default_factory=dict)
    refuse: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    """The refusals of requests by method and plural. The method of a read of a collection is LIST."""
    closed: set[str] = field(default_factory=set)
    """Namespaces in which every request is forbidden."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every write, in order."""
    changes: Counter[str] = field(default_factory=Counter)
    """Number of changes of each plural."""
    on_event: Callable[[str, Raw], None] = lambda kind, raw: None
    """Called with the type and the object of each event that a watch of all objects delivers."""
    _version: int = 100
    _uids: int = 0
    _orphaned: dict[Key, int] = field(default_factory=dict)

    # ------------------------------------------------------------------ for tests

    def put(self, plural: str, raw: Mapping[str, Any]) -> Raw:
        """Store a copy of `raw`, with a uid and a resourceVersion where it has none.

        An object that is replaced keeps its uid unless `raw` has another one.

        Returns the stored object itself: changes to it change the server's state.
        """
        found: Raw = copied(dict(raw))
        meta = found.setdefault("metadata", {})
        key = plural, meta.get("namespace", ""), meta["name"]
        known = self.objects.get(key)
        if "uid" not in meta:
            meta["uid"] = self._new_uid() if known is None else known["metadata"]["uid"]
        meta.setdefault("creationTimestamp", STAMP)
        meta.setdefault("resourceVersion", self._next_version())
        self._changed("ADDED" if known is None else "MODIFIED", plural, found)
        self.objects[key] = found
        return found

    @property
    def version(self) -> str:
        """The newest resourceVersion."""
        return str(self._version)

    def all(self, plural: str, namespace: str | None = None) -> list[Raw]:
        return [
            raw
            for (kind, where, _), raw in self.objects.items()
            if kind == plural and namespace in (None, where)
        ]

    def names(self, plural: str, namespace: str | None = None) -> set[str]:
        return {raw["metadata"]["name"] for raw in self.all(plural, namespace)}

    def touch(self, raw: Raw) -> None:
        """Give `raw` a new resourceVersion and count a change of its plural."""
        raw["metadata"]["resourceVersion"] = self._next_version()
        for plural in [key[0] for key, value in self.objects.items() if value is raw]:
            self._changed("MODIFIED", plural, raw)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Remove the object immediately, whatever finalizers it has."""
        gone = self.objects.pop((plural, namespace, name), None)
        if gone is not None:
            gone["metadata"]["resourceVersion"] = self._next_version()
            self._changed("DELETED", plural, gone)

    def tick(self) -> None:
        """Run the garbage collector once."""
        uids = {raw["metadata"]["uid"] for raw in self.objects.values()}
        for key, raw in list(self.objects.items()):
            owners = raw["metadata"].get("ownerReferences") or []
            if not owners or any(o["uid"] in uids for o in owners):
                self._orphaned.pop(key, None)
                continue
            self._orphaned[key] = self._orphaned.get(key, 0) + 1
            if self._orphaned[key] >= COLLECT_TICKS:
                self._delete(key, {})

    # ------------------------------------------------------------------ KubeApi

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        params: Mapping[str, str],
        *,
        total_seconds: float,
        read_seconds: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        raise _error(422, "Invalid", f"{path}: this server has no watches and no streamed lists")
        yield

    async def get_page(self, path: str, params: Mapping[str, str], *, seconds: float) -> Any:
        return await self.get(path, params)

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        where = _parse(path)
        self._check("GET" if where.name else "LIST", where)
        if where.name:
            return copied(self._find(where))
        selector = (params or {}).get("labelSelector", "")
        name = (params or {}).get("fieldSelector", "").removeprefix("metadata.name=")
        items = [
            raw
            for raw in self.all(where.plural, where.namespace or None)
            if _selected(raw["metadata"].get("labels") or {}, selector)
            and name in ("", raw["metadata"]["name"])
        ]
        return {
            "metadata": {"resourceVersion": self.version},
            "items": items,  # not copied: callers only parse the items
        }

    async def post(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        where = _parse(path)
        self.requests.append(("POST", path))
        self._check("POST", where, body)
        raw = json.loads(json.dumps(body))
        meta = raw["metadata"]
        if "name" not in meta:
            meta["name"] = f"{meta['generateName']}{self._uids}"
        key = (where.plural, where.namespace, meta["name"])
        if key in self.objects:
            raise _error(409, "AlreadyExists", f"{where.plural} {meta['name']!r} already exists")
        if (params or {}).get("dryRun"):
            return raw
        meta.update(
            namespace=where.namespace,
            uid=self._new_uid(),
            creationTimestamp=STAMP,
            generation=1,
            resourceVersion=self._next_version(),
        )
        raw.pop("status", None)
        self.objects[key] = raw
        self._changed("ADDED", where.plural, raw)
        return copied(raw)

    async def patch(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        where = _parse(path)
        self.requests.append(("PATCH", path))
        self._check("PATCH", where, body)
        raw = self._find(where)
        patch = json.loads(json.dumps(body))
        meta = patch.get("metadata") or {}
        version = meta.pop("resourceVersion", raw["metadata"]["resourceVersion"])
        if version != raw["metadata"]["resourceVersion"]:
            raise _error(409, "Conflict", f"{where.name}: the object has been modified")
        before = dict(raw)  # `merge` changes nothing in place
        if (params or {}).get("dryRun"):
            return copied(raw)
        if where.status:
            raw["status"] = merge(raw.get("status") or {}, patch.get("status") or {})
        else:
            raw["metadata"] = merge(raw["metadata"], meta)
            raw["spec"] = merge(raw.get("spec") or {}, patch.get("spec") or {})
        if raw != before:
            self.touch(raw)
        self._collect_finalized(where, raw)
        return copied(raw)

    async def patch_strategic(
        self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None
    ) -> Any:
        """Apply a strategic merge patch of metadata. Of its directives, one removes items from a list."""
        where = _parse(path)
        self.requests.append(("PATCH", path))
        self._check("PATCH", where, body)
        raw = self._find(where)
        patch = json.loads(json.dumps(body["metadata"]))
        if patch.pop("uid", raw["metadata"]["uid"]) != raw["metadata"]["uid"]:
            raise _error(409, "Conflict", f"{where.name}: the uid is another one")
        before = dict(raw)
        raw["metadata"] = dict(raw["metadata"])
        for key in [k for k in patch if k.startswith(_DELETES)]:
            name, gone = key.removeprefix(_DELETES), patch.pop(key)
            raw["metadata"][name] = [x for x in raw["metadata"].get(name, []) if x not in gone]
        raw["metadata"] = merge(raw["metadata"], patch)
        if raw != before:
            self.touch(raw)
        self._collect_finalized(where, raw)
        return copied(raw)

    async def delete(self, path: str, options: Mapping[str, Any] | None = None) -> Any:
        where = _parse(path)
        self.requests.append(("DELETE", path))
        self._check("DELETE", where)
        raw = self._find(where)
        wanted = ((options or {}).get("preconditions") or {}).get("uid")
        if wanted not in (None, raw["metadata"]["uid"]):
            raise _error(409, "Conflict", f"{where.name}: the uid is another one")
        self._delete((where.plural, where.namespace, where.name), options or {})
        return {}

    # ------------------------------------------------------------------ parts

    def _delete(self, key: Key, options: Mapping[str, Any]) -> None:
        raw = self.objects[key]
        at_once = key[0] != "pods" or options.get("gracePeriodSeconds") == 0
        if at_once and not raw["metadata"].get("finalizers"):
            self.remove(*key)
        elif "deletionTimestamp" not in raw["metadata"]:
            raw["metadata"]["deletionTimestamp"] = STAMP
            self.touch(raw)

    def _collect_finalized(self, where: _Path, raw: Raw) -> None:
        meta = raw["metadata"]
        if meta.get("deletionTimestamp") and not meta.get("finalizers") and where.plural != "pods":
            self.remove(where.plural, where.namespace, where.name)

    def _find(self, where: _Path) -> Raw:
        try:
            return self.objects[where.plural, where.namespace, where.name]
        except KeyError:
            raise _error(404, "NotFound", f"{where.plural} {where.name!r} not found") from None

    def _check(
        self, method: str, where: _Path, body: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        if where.namespace in self.closed:
            raise _error(403, "Forbidden", f"{where.plural} of namespace {where.namespace}")
        refusal = self.refuse.get((method, where.plural))
        if callable(refusal):
            refusal = refusal(body)
        if refusal is not None:
            raise refusal

    def _changed(self, kind: str, plural: str, raw: Raw) -> None:
        self.changes[plural] += 1
        self.on_event(kind, raw)

    def _new_uid(self) -> str:
        self._uids += 1
        return f"uid-{self._uids}"

    def _next_version(self) -> str:
        self._version += 1
        return str(self._version)


def _selected(labels: Mapping[str, str], selector: str) -> bool:
    """Return whether the labels match a selector of the forms `a=b`, `a!=b` and `a`, joined by commas."""
    for term in filter(None, selector.split(",")):
        key, operator, value = term.partition("=")
        if not operator:
            matches = key in labels
        elif key.endswith("!"):
            matches = labels.get(key[:-1]) != value
        else:
            matches = labels.get(key) == value
        if not matches:
            return False
    return True


def _error(status: int, reason: str, message: str) -> ApiError:
    return ApiError(status, reason, message)


def copied(raw: Any) -> Any:
    """Return a copy of a JSON value. `copy.deepcopy` takes four times as long."""
    if isinstance(raw, dict):
        return {key: copied(value) for key, value in raw.items()}
    if isinstance(raw, list):
        return [copied(value) for value in raw]
    return raw


def merge(old: Any, patch: Any) -> Any:
    """Return `old` with a JSON merge patch applied (RFC 7396)."""
    if not isinstance(patch, Mapping):
        return patch
    result = dict(old) if isinstance(old, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result
