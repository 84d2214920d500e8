"""The template of a job: isolation, types of the fields that the operator reads, digests, grace period. Pure.

Isolation: the sidecar's certificates and store keys are volumes of the same pod. A template that names one of
these volumes, mounts over its path, or shares the process namespace could read them. The chart's admission
policy refuses the same templates when they are written. These rules also apply if the policy is switched off,
and before every later creation of a pod.

Types: the CRD keeps the template as it is, so a user may write `env` as a map or `memory: 4GB`. The API
server checks a whole pod (loop/observe.py), but it may be away, and the template can be edited at any
time. Code that renders or reads a template relies on this check: it raises for no template that passes.

Digests: each pod has digests of the parts of the spec that it got when it was created in an annotation. A
later edit of the spec shows as a difference, after any number of restarts of the operator.

Grace period: a long grace period delays nothing: a pod leaves as soon as its sidecar has flushed, and its
launcher kills ranks that do not stop in their part. So the bounds are wide.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from pydantic import BaseModel

from holdfast_core.api import Gang, parse_quantity_bytes
from holdfast_core.contract import SIDECAR_CONTAINER
from holdfast_core.errors import ConfigError

# --------------------------------------------------------------------------- isolation


RESERVED_PREFIX = "holdfast-"
"""Prefix of the names of all containers and volumes that the operator adds."""
RESERVED_PATH = "/holdfast"
"""Directory below which the operator mounts all of its volumes."""
_CERTIFICATES = re.compile(r"(-certs-[0-9]+-r[0-9]+|-holdfast-certs-[0-9]+)$")
"""End of the names of Secrets that hold a gang's certificates (holdfast_core.names, model.pod_source)."""
_NODE_CLAIM = re.compile(r"-holdfast-node$")
"""End of the names of claims of node volumes. Kubernetes names them after the pod and its volume."""
_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")


@dataclass(frozen=True, slots=True)
class Breach:
    """A field of the template that could give access to the sidecar's volumes, Secrets or processes."""

    path: str
    """Path of the field, such as spec.template.spec.containers[0].volumeMounts[1].mountPath."""
    problem: str
    """The value that was found, why it is refused, and what to write instead."""

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def find_breach(template: Mapping[str, Any]) -> Breach | None:
    """Return the first field that the rules refuse, or None."""
    spec = template.get("spec")
    if not isinstance(spec, Mapping):
        return None
    return next(_breaches(spec), None)


def _breaches(spec: Mapping[str, Any]) -> Iterator[Breach]:
    root = "spec.template.spec"
    for name in ("shareProcessNamespace", "hostPID"):
        if spec.get(name):
            yield Breach(
                f"{root}.{name}",
                (
                    "must not be true: processes of the trainer could read the sidecar's memory, "
                    "environment and files, including its certificate and the store's keys"
                ),
            )
    for kind in _CONTAINER_LISTS:
        for path, container in items_of(spec, kind, root):
            yield from _of_container(path, container)
    for path, volume in items_of(spec, "volumes", root):
        yield from _of_volume(path, volume)


def _of_container(path: str, container: Mapping[str, Any]) -> Iterator[Breach]:
    if str(container.get("name", "")).startswith(RESERVED_PREFIX):
        yield Breach(
            f"{path}.name",
            f"is {container['name']!r}, but names that start with {RESERVED_PREFIX} belong to the "
            f"operator, as {SIDECAR_CONTAINER} does: choose another name",
        )
    for at, mount in items_of(container, "volumeMounts", path):
        yield from _reserved_volume(at, mount)
        yield from _mount_path(f"{at}.mountPath", str(mount.get("mountPath", "")))
    for at, device in items_of(container, "volumeDevices", path):
        yield from _reserved_volume(at, device)
    for at, variable in items_of(container, "env", path):
        source = variable.get("valueFrom")
        if isinstance(source, Mapping):
            yield from _secret(f"{at}.valueFrom.secretKeyRef", source.get("secretKeyRef"), "name")
            yield from _reserved_volume(
                f"{at}.valueFrom.fileKeyRef", source.get("fileKeyRef"), "volumeName"
            )
    for at, source in items_of(container, "envFrom", path):
        yield from _secret(f"{at}.secretRef", source.get("secretRef"), "name")


def _of_volume(path: str, volume: Mapping[str, Any]) -> Iterator[Breach]:
    yield from _reserved_volume(path, volume)
    for kind, source in volume.items():
        if isinstance(source, Mapping):
            yield from _secret(f"{path}.{kind}", source, "secretName")
            for reference in ("secretRef", "nodePublishSecretRef"):
                yield from _secret(f"{path}.{kind}.{reference}", source.get(reference), "name")
    yield from _claim(
        f"{path}.persistentVolumeClaim", volume.get("persistentVolumeClaim"), "claimName"
    )
    claim: Any = volume
    for key in ("ephemeral", "volumeClaimTemplate", "spec"):
        claim = claim.get(key) if isinstance(claim, Mapping) else None
    if isinstance(claim, Mapping):
        for key in ("dataSource", "dataSourceRef"):
            at = f"{path}.ephemeral.volumeClaimTemplate.spec.{key}"
            yield from _claim(at, claim.get(key), "name")
    for at, source in items_of(volume.get("projected"), "sources", f"{path}.projected"):
        yield from _secret(f"{at}.secret", source.get("secret"), "name")


def _reserved_volume(path: str, item: Any, key: str = "name") -> Iterator[Breach]:
    if isinstance(item, Mapping) and str(item.get(key, "")).startswith(RESERVED_PREFIX):
        yield Breach(
            f"{path}.{key}",
            f"is {item[key]!r}, but volumes whose names start with {RESERVED_PREFIX} belong to "
            "the operator, which mounts what the trainer needs: use a volume of another name",
        )


def _mount_path(path: str, value: str) -> Iterator[Breach]:
    parts = value.split("/")
    plain = parts[0] == "" and not {"", ".", ".."} & set(parts[1:] if parts[-1] else parts[1:-1])
    if not plain or value == "/":
        yield Breach(
            path,
            f"is {value!r}, expected an absolute path without empty, '.' and '..' parts: such a "
            f"path can hide a directory below {RESERVED_PATH}",
        )
    elif f"{value}/".startswith(f"{RESERVED_PATH}/"):
        yield Breach(
            path,
            f"is {value!r}, but the operator mounts its volumes below {RESERVED_PATH}: choose "
            "another path",
        )


def _secret(path: str, source: Any, key: str) -> Iterator[Breach]:
    what = "a Secret with certificates of a gang, which only sidecars may read: use a Secret of another name"
    yield from _reserved_name(path, source, key, _CERTIFICATES, what)


def _claim(path: str, source: Any, key: str) -> Iterator[Breach]:
    what = (
        "a claim with the checkpoints and the private key of a sidecar, which only that sidecar may read: "
        "use a claim of another name"
    )
    yield from _reserved_name(path, source, key, _NODE_CLAIM, what)


def _reserved_name(
    path: str, source: Any, key: str, reserved: re.Pattern[str], what: str
) -> Iterator[Breach]:
    if isinstance(source, Mapping) and reserved.search(str(source.get(key, ""))):
        yield Breach(f"{path}.{key}", f"is {source[key]!r}, the name of {what}")


def items_of(parent: Any, key: str, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects of the list `parent[key]`, each with its path. Skip values of any other type."""
    values = parent.get(key) if isinstance(parent, Mapping) else None
    if isinstance(values, Sequence) and not isinstance(values, str):
        for index, value in enumerate(values):
            if isinstance(value, Mapping):
                yield f"{path}.{key}[{index}]", value


# --------------------------------------------------------------------------- types


_Shape = Callable[[str, Any], Iterator[Breach]]
"""Yields the faults of the value at a path."""
_MAX_SHOWN = 80


def find_misfit(template: Mapping[str, Any]) -> Breach | None:
    """Return the first field that the operator reads and whose value has another type than in a pod."""
    return next(_TEMPLATE("spec.template", template), None)


def pod_spec(job: Gang) -> Mapping[str, Any]:
    """Return the PodSpec of the job's template.

    It is empty if another controller creates the pods, or if the template does not pass `find_misfit`.
    """
    template = job.spec.template
    if template is None or find_misfit(template) is not None:
        return {}
    spec: Mapping[str, Any] = template.get("spec") or {}
    return spec


def _fault(path: str, value: Any, expected: str) -> Breach:
    return Breach(path, f"is {_kind(value)}, expected {expected}, as in the template of any pod")


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case Mapping():
            return "an object"
        case _:
            return "a list"


def _text(path: str, value: Any) -> Iterator[Breach]:
    if not isinstance(value, str):
        yield _fault(path, value, "a string")


def _integer(path: str, value: Any) -> Iterator[Breach]:
    if not isinstance(value, int) or isinstance(value, bool):
        yield _fault(path, value, "an integer")


def _quantity(path: str, value: Any) -> Iterator[Breach]:
    try:
        parse_quantity_bytes("" if isinstance(value, bool) else str(value))
    except ConfigError:
        shown = repr(value)[:_MAX_SHOWN]
        yield Breach(
            path,
            f"is {shown}, expected a number of bytes with an optional suffix (Ki, Mi, Gi, Ti, k, M, G, T), "
            "for example 4Gi",
        )


def _texts(path: str, value: Any) -> Iterator[Breach]:
    if not isinstance(value, Mapping):
        yield _fault(path, value, "an object")
        return
    for key, text in value.items():
        yield from _text(f"{path}.{key}", text)


def _object(**fields: _Shape) -> _Shape:
    """Return the shape of an object with these fields. A field that is null counts as absent."""

    def check(path: str, value: Any) -> Iterator[Breach]:
        if not isinstance(value, Mapping):
            yield _fault(path, value, "an object")
            return
        for name, shape in fields.items():
            if value.get(name) is not None:
                yield from shape(f"{path}.{name}", value[name])

    return check


def _list(item: _Shape) -> _Shape:
    def check(path: str, value: Any) -> Iterator[Breach]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            yield _fault(path, value, "a list")
            return
        for index, found in enumerate(value):
            yield from item(f"{path}[{index}]", found)

    return check


_ANY = _object()
_TERM = _object(matchFields=_list(_ANY), matchExpressions=_list(_ANY))
_CONTAINER = _object(
    name=_text,
    command=_list(_text),
    args=_list(_text),
    env=_list(_object(name=_text)),
    envFrom=_list(_ANY),
    volumeMounts=_list(_object(name=_text, mountPath=_text)),
    volumeDevices=_list(_object(name=_text)),
    securityContext=_ANY,
    resources=_object(limits=_object(memory=_quantity)),
)
_AFFINITY = _object(
    nodeAffinity=_object(
        requiredDuringSchedulingIgnoredDuringExecution=_object(nodeSelectorTerms=_list(_TERM))
    ),
    podAntiAffinity=_object(preferredDuringSchedulingIgnoredDuringExecution=_list(_ANY)),
)
_TEMPLATE = _object(
    metadata=_object(labels=_texts, annotations=_texts),
    spec=_object(
        containers=_list(_CONTAINER),
        initContainers=_list(_CONTAINER),
        volumes=_list(_object(name=_text)),
        securityContext=_ANY,
        affinity=_AFFINITY,
        tolerations=_list(_ANY),
        terminationGracePeriodSeconds=_integer,
        nodeName=_text,
    ),
)


# --------------------------------------------------------------------------- digests


TEMPLATE = "spec.template"
RESTORE_FROM = "spec.restoreFrom"
_DIGEST_BYTES = 6


def part_digests(job: Gang) -> dict[str, str]:
    """Return the digest of each part, by its path in the object."""
    checkpoint, source = job.spec.checkpoint, job.spec.restore_from
    parts = {
        TEMPLATE: job.spec.template,
        "spec.checkpoint.memory": _given(checkpoint.memory),
        "spec.checkpoint.node": _given(checkpoint.node),
        RESTORE_FROM: None if source is None else _given(source),
    }
    return {path: _digest(value) for path, value in parts.items()}


def to_annotation(digests: Mapping[str, str]) -> str:
    return ",".join(f"{path}={digest}" for path, digest in sorted(digests.items()))


def from_annotation(text: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of path and digest. What is no such pair is left out."""
    pairs = (item.partition("=") for item in text.split(","))
    return tuple((path, digest) for path, found, digest in pairs if found)


def _given(part: BaseModel) -> dict[str, object]:
    """Return the fields that differ from their defaults.

    A field that a later release adds must not look like an edit of every job. The API server writes its
    default into the objects, so whether a field is set says nothing about who set it.
    """
    return part.model_dump(mode="json", exclude_defaults=True)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode()).hexdigest(_DIGEST_BYTES)


# --------------------------------------------------------------------------- the grace period


STOP_SECONDS = 30
"""Shortest time for the ranks to reach the step at which they stop, save it and exit."""
STOP_STEPS = 4
"""Steps of mean length in this time: the ranks stop at a step two ahead of the request (ADR 0017)."""
FLUSH_SECONDS = 30
"""Shortest time for the flush."""
UNMEASURED_FLUSH_SECONDS = 120
"""Time for the flush before one was measured."""
MAX_GRACE_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Grace:
    """Times of a pod that leaves, in seconds since its SIGTERM."""

    stop_seconds: int
    """The launcher kills the ranks that still run after this time."""
    total_seconds: int
    """terminationGracePeriodSeconds of the pod."""


def grace_of(job: Gang) -> Grace:
    """Return the times of new pods: the template's grace period if it has one, else an upper bound.

    Half of a grace period that the user has chosen is for the ranks. Adopted pods have the grace period of
    their controller's template, which the admission policy divides in the same way.
    """
    chosen = pod_spec(job).get("terminationGracePeriodSeconds")
    if isinstance(chosen, int):
        return Grace(chosen // 2, chosen)
    status = job.status
    stop, flush = STOP_SECONDS, UNMEASURED_FLUSH_SECONDS
    if status.step and status.goodput is not None:
        mean = status.goodput.training_seconds / status.step
        stop = max(stop, math.ceil(STOP_STEPS * mean))
    if status.flush_seconds is not None:
        flush = max(FLUSH_SECONDS, 2 * status.flush_seconds)
    stop = min(stop, MAX_GRACE_SECONDS // 2)
    return Grace(stop, min(stop + flush, MAX_GRACE_SECONDS))
