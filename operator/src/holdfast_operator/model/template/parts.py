"""The parts of a job's spec that a pod gets when it is created, and digests of them. Pure.

Each pod has the digests in an annotation. A later edit of the spec shows as a difference, after any number of
restarts of the operator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from blake3 import blake3
from pydantic import BaseModel

from holdfast_core.api import Gang

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
