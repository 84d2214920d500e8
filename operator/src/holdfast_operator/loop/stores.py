"""Keeps each CheckpointStore's condition up to date: creates probe pods, reads their results, deletes them.

The operator holds no store keys: the pod mounts the Secret in the store's own namespace.
"""

from __future__ import annotations

from holdfast_core.api import API_VERSION, CheckpointStore, merge_patch
from holdfast_core.clock import Clock
from holdfast_operator.base import logs
from holdfast_operator.kube.api import NameTakenError
from holdfast_operator.kube.cluster import Cluster
from holdfast_operator.kube.events import Events, Subject
from holdfast_operator.loop.stores_probe import (
    PROBE_REFUSED,
    ProbeResult,
    next_look_seconds,
    probe_due,
    probe_name,
    render_probe,
    result_of,
    store_status,
)
from holdfast_operator.model import kinds
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.store_view import store_config
from holdfast_operator.watch.cache import ClusterCache
from holdfast_operator.watch.records import ProbePod

LOOK_AGAIN_SECONDS = 2.0


class Stores:
    """Reconciler of CheckpointStores."""

    def __init__(
        self,
        cluster: Cluster,
        cache: ClusterCache,
        events: Events,
        sidecar: SidecarSettings,
        clock: Clock,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._events = events
        self._sidecar = sidecar
        self._clock = clock
        self._first_seen: dict[str, float] = {}
        """Monotonic seconds at which this process first saw a probe pod, by uid."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Run one pass over the store.

        Returns:
            Seconds after which the next pass is due without an event, or None if no pass is due.

        Raises:
            ApiError: A request failed.
            ConflictError: The store changed since it was read.
        """
        store = self._cache.stores.get((namespace, name))
        if store is None:
            # A deleted store's probe pods are garbage-collected; those of an unreadable store stay.
            return None
        pods = self._cache.pods.probes(store.namespace, store.uid)
        if self._cache.pods.unreadable(namespace, store.uid):
            return LOOK_AGAIN_SECONDS
        if store.deleting:
            for pod in pods:
                await self._remove(pod)
            return None
        current = next((p for p in pods if p.name == probe_name(store)), None)
        for pod in pods:
            if pod is not current and not pod.terminating:
                await self._remove(pod)
        if current is not None:
            return await self._look_at(store, current)
        now = self._clock.utc_now()
        if not probe_due(store, self._cache.jobs.newest_start(namespace, name), now):
            return next_look_seconds(store, now)
        body = render_probe(store, store_config(store), self._sidecar)
        refusal = await self._cluster.refusal_of_pod(namespace, body)
        if refusal is not None:
            text = f"the probe's pod cannot be created in the namespace: {refusal}"
            await self._write(store, ProbeResult(False, PROBE_REFUSED, text, None))
            return LOOK_AGAIN_SECONDS
        try:
            await self._cluster.create_owned(body)
        except NameTakenError as error:
            await self._write(store, ProbeResult(False, PROBE_REFUSED, str(error), None))
        return LOOK_AGAIN_SECONDS

    async def _look_at(self, store: CheckpointStore, pod: ProbePod) -> float:
        now = self._clock.monotonic()
        age = now - self._first_seen.setdefault(pod.uid, now)
        result = result_of(store, pod, age)
        if result is not None:
            await self._write(store, result)
            await self._remove(pod)
        return LOOK_AGAIN_SECONDS

    async def _remove(self, pod: ProbePod) -> None:
        self._first_seen.pop(pod.uid, None)
        if not pod.terminating:
            await self._cluster.delete(kinds.POD, pod.namespace, pod.name, pod.uid)

    async def _write(self, store: CheckpointStore, result: ProbeResult) -> None:
        status = store_status(store, result, self._clock.utc_now())
        await self._cluster.patch_status(
            CheckpointStore.KIND,
            store.namespace,
            store.name,
            store.resource_version,
            merge_patch(status),
        )
        if store.available is result.available:
            return
        logs.info(
            f"store {result.reason}: {result.message}", namespace=store.namespace, store=store.name
        )
        subject = Subject(API_VERSION, CheckpointStore.KIND, store.namespace, store.name, store.uid)
        kind = "Normal" if result.available else "Warning"
        await self._events.emit(subject, kind, result.reason, result.message)
