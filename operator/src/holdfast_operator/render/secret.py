"""The Secret with certificates of a job's pods, without its data, which only the edge has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_core.api import Gang
from holdfast_operator.model import kinds
from holdfast_operator.render.metadata import job_labels, owner_reference


def render_certificates(job: Gang, name: str) -> dict[str, Any]:
    metadata = {"labels": job_labels(job), "ownerReferences": [owner_reference(job)]}
    return render_secret(job.namespace, name, metadata)


def render_secret(namespace: str, name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": kinds.SECRET,
        "type": "Opaque",
        "immutable": True,
        "metadata": {**metadata, "name": name, "namespace": namespace},
    }
