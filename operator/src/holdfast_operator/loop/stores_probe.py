"""What to do about one CheckpointStore: when to probe it, with which pod, and what its end means.

Pure: no clock, no I/O. The controller in stores.py gathers, asks here, and acts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from holdfast_core.api import API_VERSION, CheckpointStore, StoreCondition
from holdfast_core.clock import stamp
from holdfast_core.contract import STORE_DIR, StoreConfig
from holdfast_operator.model import labels
from holdfast_operator.model.ownership import PROBE_PREFIX
from holdfast_operator.render.pod import HOLDFAST_GROUP, SidecarSettings
from holdfast_operator.watch.records import ProbePod, StoreRecord

STUCK_SECONDS = 20.0
"""A pod whose Secret is missing waits in ContainerCreating and says so only in Events."""
LIMIT_SECONDS = 120
"""activeDeadlineSeconds of the pod: image pull and probe."""
AGAIN_SOONEST = timedelta(seconds=2)
AGAIN_LATEST = timedelta(minutes=2)
"""Between two probes of an unavailable store. In between they wait as long as it has been unavailable
until now, so that each wait is about twice the last: a Secret or the namespace's service account often
comes a moment after the store, and a store that is down for a night is not worth a pod a second."""

SECRET_NOT_FOUND = "SecretNotFound"
PROBE_FAILED = "ProbeFailed"
PROBE_REFUSED = "ProbeRefused"
_STUCK_WORDS = frozenset({"CreateContainerConfigError", "FailedMount", "ContainerCreating"})


@dataclass(frozen=True, slots=True)
class ProbeResult:
    available: bool
    reason: str
    message: str
    features: dict[str, bool] | None


def probe_due(store: StoreRecord, newest_job_start: datetime | None, now: datetime) -> bool:
    """At creation, on a change, while unavailable now and then, and when a job starts using it.

    `newest_job_start`: creation of the newest job that uses the store and has not begun.
    """
    status = store.store.status
    if store.last_probe is None or status.observed_generation != store.generation:
        return True
    if newest_job_start is not None and newest_job_start > store.last_probe:
        return True
    return store.available is not True and now - store.last_probe >= _again(store)


def next_look_seconds(store: StoreRecord, now: datetime) -> float | None:
    """When an unavailable store is due; None: an event will say."""
    if store.last_probe is None or store.available is True:
        return None
    return max(1.0, (store.last_probe + _again(store) - now).total_seconds())


def _again(store: StoreRecord) -> timedelta:
    if store.last_probe is None or store.since is None:
        return AGAIN_SOONEST
    return min(max(store.last_probe - store.since, AGAIN_SOONEST), AGAIN_LATEST)


def probe_name(store: StoreRecord) -> str:
    """The same until a probe has ended: two operators meet at one pod."""
    seed = f"{store.uid} {store.generation} {store.store.status.last_probe}"
    digest = hashlib.blake2b(seed.encode(), digest_size=5).hexdigest()
    return f"{PROBE_PREFIX}{store.name[:40].rstrip('-.')}-{digest}"


def render_probe(
    store: StoreRecord, config: StoreConfig, sidecar: SidecarSettings
) -> dict[str, Any]:
    """A pod of the sidecar image that holds the keys for one run; fits the restricted profile."""
    s3 = store.store.spec.s3
    sources: list[dict[str, Any]] = [{"secret": {"name": s3.credentials_secret_ref.name}}]
    if s3.ca_secret_ref is not None:
        items = [{"key": "ca.crt", "path": "ca.crt"}]
        sources.append({"secret": {"name": s3.ca_secret_ref.name, "items": items}})
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
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": CheckpointStore.KIND,
                    "name": store.name,
                    "uid": store.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
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
            "volumes": [{"name": "store", "projected": {"defaultMode": 0o440, "sources": sources}}],
        },
    }


def result_of(store: StoreRecord, pod: ProbePod, age_seconds: float) -> ProbeResult | None:
    """What the pod's state means; None: it is still under way."""
    if pod.phase in ("Succeeded", "Failed"):
        return parse_message(pod.message or "")
    if age_seconds > LIMIT_SECONDS + 30:
        words = f"the probe's pod has not ended after {age_seconds:.0f} s: is its node lost?"
        return ProbeResult(False, PROBE_FAILED, words, None)
    if pod.unscheduled is not None:
        if age_seconds < STUCK_SECONDS:
            return None
        words = f"the probe's pod finds no node: {pod.unscheduled}"
        return ProbeResult(False, PROBE_FAILED, words, None)
    waiting = pod.waiting_reason
    if waiting is None or age_seconds < STUCK_SECONDS:
        return None
    if waiting in _STUCK_WORDS:
        return ProbeResult(False, SECRET_NOT_FOUND, _missing_secret(store, pod), None)
    if waiting == "PodInitializing":
        return None
    words = f"the probe's pod cannot start: {waiting}: {pod.waiting_message}".rstrip(": ")
    return ProbeResult(False, PROBE_FAILED, words, None)


def parse_message(text: str) -> ProbeResult:
    """The JSON that the probe left as its last words; bounded by Kubernetes to 4 KiB."""
    try:
        data = json.loads(text)
        available = data["available"]
        if not isinstance(available, bool):
            raise TypeError("available is neither true nor false")
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
        words = text.strip()[-1000:] or "it left no message"
        return ProbeResult(False, PROBE_FAILED, f"the probe's pod failed: {words}", None)


def store_status(store: StoreRecord, result: ProbeResult, now: datetime) -> dict[str, Any]:
    """Merge patch of `.status`."""
    changed = store.available is not result.available
    old = next(
        (c for c in store.store.status.conditions if c.type == StoreCondition.AVAILABLE), None
    )
    since = stamp(now) if changed or old is None else old.last_transition_time
    status: dict[str, Any] = {
        "conditions": [
            {
                "type": StoreCondition.AVAILABLE.value,
                "status": "True" if result.available else "False",
                "reason": result.reason,
                "message": result.message,
                "lastTransitionTime": since,
                "observedGeneration": store.generation,
            }
        ],
        "lastProbe": stamp(now),
        "observedGeneration": store.generation,
    }
    if result.features is not None:
        status["features"] = result.features
    return status


def _missing_secret(store: StoreRecord, pod: ProbePod) -> str:
    s3 = store.store.spec.s3
    wanted = [f"{s3.credentials_secret_ref.name} with keys accessKey and secretKey"]
    if s3.ca_secret_ref is not None:
        wanted.append(f"{s3.ca_secret_ref.name} with key ca.crt")
    words = (
        f"the probe's pod does not start for {STUCK_SECONDS:.0f} s: expected in namespace "
        f"{store.namespace}: Secret {', Secret '.join(wanted)}; create what is missing (the operator "
        "may not read Secrets)"
    )
    return f"{words}: {pod.waiting_message}" if pod.waiting_message else words
