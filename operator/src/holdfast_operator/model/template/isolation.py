"""Keep the containers of a job's template out of the sidecar's volumes, Secrets and processes. Pure.

The sidecar's certificates and store keys are volumes of the same pod. A template that names one of these
volumes, mounts over its path, or shares the process namespace could read them. The chart's admission policy
refuses the same templates when they are written. These rules also apply if the policy is switched off, and
before every later creation of a pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast_core.contract import SIDECAR_CONTAINER

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
