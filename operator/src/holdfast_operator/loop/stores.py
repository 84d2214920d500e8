"""Keep each CheckpointStore's condition up to date: create probe pods, read their results, delete them.

The operator holds no store keys: the pod mounts the Secret in the store's own namespace. The rules are pure
functions: when a probe is due, its pod, and the meaning of its result. `Stores` gathers their inputs and
carries their results out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from holdfast_core import logs
from holdfast_core.api import (
    CheckpointStore,
    CheckpointStoreStatus,
    StoreCondition,
    StoreFeatures,
    changed,
    merge_patch,
)
from holdfast_core.clock import Clock
from holdfast_core.contract import STORE_DIR, StoreConfig
from holdfast_operator.kube.api import NameTakenError
from holdfast_operator.kube.cluster import Cluster, Events
from holdfast_operator.model import labels
from holdfast_operator.model.installation import SidecarSettings
from holdfast_operator.model.job import store_config, store_view
from holdfast_operator.model.ownership import PROBE_PREFIX
from holdfast_operator.model.render import HOLDFAST_GROUP, owner_reference, store_sources
from holdfast_operator.watch.cache import ClusterCache
from holdfast_operator.watch.records import ProbePod

STUCK_SECONDS = 20.0
"""Age from which a probe pod that has not started counts as failed. A pod whose Secret is missing stays in
ContainerCreating, and only its Events name the reason."""
LIMIT_SECONDS = 120
"""activeDeadlineSeconds of the pod, for image pull and probe together."""
AGAIN_SOONEST = timedelta(seconds=2)
AGAIN_LATEST = timedelta(minutes=2)
"""Shortest and longest time between two probes of an unavailable store. Between these limits the wait
equals the time for which the store had been unavailable at the last probe, so each wait is about twice the
one before. The first probes come soon because a Secret or the namespace's service account is often created
just after the store; later ones are rare so that a long outage costs few pods."""

SECRET_NOT_FOUND = "SecretNotFound"
PROBE_FAILED = "ProbeFailed"
PROBE_REFUSED = "ProbeRefused"
_STUCK_REASONS = frozenset({"CreateContainerConfigError", "FailedMount", "ContainerCreating"})


@dataclass(frozen=True, slots=True)
class ProbeResult:
    available: bool
    reason: str
    message: str
    features: dict[str, bool] | None


def probe_due(store: CheckpointStore, newest_job_start: datetime | None, now: datetime) -> bool:
    """Return whether the store must be probed now.

    A probe is due after creation or a change of the spec, when a new job uses the store, and from time to
    time (AGAIN_SOONEST, AGAIN_LATEST) while the store is not available.

    Args:
        newest_job_start: Creation of the newest job that uses the store and has no round yet.
    """
    last_probe = store.status.last_probe
    if last_probe is None or store.status.observed_generation != store.generation:
        return True
    if newest_job_start is not None and newest_job_start > last_probe:
        return True
    return store.available is not True and now - last_probe >= _again(store)


def next_look_seconds(store: CheckpointStore, now: datetime) -> float | None:
    """Return the seconds until the next probe is due, or None if only an event can make one due."""
    last_probe = store.status.last_probe
    if last_probe is None or store.available is True:
        return None
    return max(1.0, (last_probe + _again(store) - now).total_seconds())


def _again(store: CheckpointStore) -> timedelta:
    known, last_probe = store.status.condition(StoreCondition.AVAILABLE), store.status.last_probe
    if last_probe is None or known is None:
        return AGAIN_SOONEST
    return min(max(last_probe - known.last_transition_time, AGAIN_SOONEST), AGAIN_LATEST)


def probe_name(store: CheckpointStore) -> str:
    """Return the name of the probe's pod.

    The name changes only when a probe has ended, so that two operators create the same pod.
    """
    seed = f"{store.uid} {store.generation} {store.status.last_probe}"
    digest = hashlib.blake2b(seed.encode(), digest_size=5).hexdigest()
    return f"{PROBE_PREFIX}{store.name[:40].rstrip('-.')}-{digest}"


def render_probe(
    store: CheckpointStore, config: StoreConfig, sidecar: SidecarSettings
) -> dict[str, Any]:
    """Return the probe's pod, which runs the sidecar image once with the store's keys mounted.

    The pod complies with the Pod Security profile `restricted`.
    """
    sources = store_sources(store_view(store))
    user = {"runAsNonRoot": True, "runAsUser": HOLDFAST_GROUP, "runAsGroup": HOLDFAST_GROUP}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": probe_name(store),
            "namespace": store.namespace,
            "labels": {
                labels.MANAGED_BY: labels.MANAGED_BY_VALUE,
                labels.COMPONENT: labels.COMPONENT_STORE_PROBE,
                labels.STORE_NAME: store.name,
            },
            "ownerReferences": [owner_reference(store)],
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIMIT_SECONDS,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {
                **user,
                "fsGroup": HOLDFAST_GROUP,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "probe",
                    "image": sidecar.image,
                    "imagePullPolicy": sidecar.pull_policy,
                    "command": ["holdfast-sidecar", "probe-store"],
                    "env": [
                        {"name": "HOLDFAST_STORE", "value": config.to_json()},
                        {"name": "HOLDFAST_STORE_DIR", "value": STORE_DIR},
                    ],
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "64Mi"},
                        "limits": {"memory": "256Mi"},
                    },
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": [{"name": "store", "mountPath": STORE_DIR, "readOnly": True}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
            "volumes": [
                {
                    "name": "store",
                    "projected": {
                        "defaultMode": 0o440,
                        "sources": sources,
                    },
                }
            ],
        },
    }


def result_of(store: CheckpointStore, pod: ProbePod, age_seconds: float) -> ProbeResult | None:
    """Return the result that the pod's state means, or None while the probe is under way.

    Args:
        age_seconds: Time since this operator process first saw the pod.
    """
    if pod.phase in ("Succeeded", "Failed"):
        return parse_message(pod.message or "")
    if age_seconds > LIMIT_SECONDS + 30:
        message = (
            f"the probe's pod has not ended after {age_seconds:.0f} s: check whether its node "
            "is lost"
        )
        return ProbeResult(False, PROBE_FAILED, message, None)
    if pod.unscheduled is not None:
        if age_seconds < STUCK_SECONDS:
            return None
        message = f"the probe's pod cannot be scheduled: {pod.unscheduled}"
        return ProbeResult(False, PROBE_FAILED, message, None)
    waiting = pod.waiting_reason
    if waiting is None or age_seconds < STUCK_SECONDS:
        return None
    if waiting in _STUCK_REASONS:
        return ProbeResult(False, SECRET_NOT_FOUND, _missing_secret(store, pod), None)
    if waiting == "PodInitializing":
        return None
    message = f"the probe's pod cannot start: {waiting}: {pod.waiting_message}".rstrip(": ")
    return ProbeResult(False, PROBE_FAILED, message, None)


def parse_message(text: str) -> ProbeResult:
    """Parse the probe's termination message, which is JSON. Kubernetes limits it to 4 KiB.

    Any other text is the message of a failed probe.
    """
    try:
        data = json.loads(text)
        available = data["available"]
        if not isinstance(available, bool):
            raise TypeError("`available` is neither true nor false")
        features = data.get("features")
        known = ("conditionalPut", "checksum", "multipart", "rangeGet")
        return ProbeResult(
            available=available,
            reason=str(data.get("reason") or ("Probed" if available else PROBE_FAILED))[:128],
            message=str(data.get("message") or "")[:2000],
            features=None
            if not isinstance(features, dict)
            else {k: v for k in known if isinstance(v := features.get(k), bool)},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = text.strip()[-1000:] or "it wrote no termination message"
        return ProbeResult(False, PROBE_FAILED, f"the probe's pod failed: {message}", None)


def store_status(
    store: CheckpointStore, result: ProbeResult, now: datetime
) -> CheckpointStoreStatus:
    """Return the status for this result. Features on which the probe did not report stay as they are."""
    known = store.status.features or StoreFeatures()
    status = store.status.with_condition(
        StoreCondition.AVAILABLE,
        result.available,
        result.reason,
        result.message,
        now,
        store.generation,
    )
    return changed(
        status,
        features=StoreFeatures.from_dict({**known.to_dict(), **(result.features or {})}),
        last_probe=now,
        observed_generation=store.generation,
    )


def _missing_secret(store: CheckpointStore, pod: ProbePod) -> str:
    s3 = store.spec.s3
    wanted = [f"{s3.credentials_secret_ref.name} with keys accessKey and secretKey"]
    if s3.ca_secret_ref is not None:
        wanted.append(f"{s3.ca_secret_ref.name} with key ca.crt")
    message = (
        f"the probe's pod has not started for {STUCK_SECONDS:.0f} s: expected in namespace "
        f"{store.namespace}: Secret {', Secret '.join(wanted)}; create what is missing (the "
        "operator may not read Secrets)"
    )
    return f"{message}: {pod.waiting_message}" if pod.waiting_message else message


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
        store = self._cache.stores.get(namespace, name)
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
            await self._cluster.delete(labels.POD, pod.namespace, pod.name, pod.uid)

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
        kind = "Normal" if result.available else "Warning"
        await self._events.emit(store, kind, result.reason, result.message)
