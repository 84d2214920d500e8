"""Builders of API objects as users write them.

Each object is valid unless the caller's changes make it invalid.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from holdfast_core.api.base import API_VERSION


class Absent:
    """Type of `ABSENT`, which marks a field that `merged` removes."""


ABSENT = Absent()


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with `changes` merged into it at every depth.

    A field whose change is `ABSENT` is removed.
    """
    result = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if isinstance(value, Absent):
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = merged({}, value) if isinstance(value, Mapping) else copy.deepcopy(value)
    return result


def job_object(
    name: str = "gpt-small", namespace: str = "team-a", **spec_changes: Any
) -> dict[str, Any]:
    """Return a TrainingJob of 4 workers that saves every 50 steps to the node and peer tiers."""
    spec = {
        "workers": 4,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "trainer",
                        "image": "example/trainer:1",
                        "command": ["holdfast", "run", "--", "python", "train.py"],
                        "resources": {"limits": {"memory": "4Gi"}},
                    }
                ]
            }
        },
        "checkpoint": {"interval": {"steps": 50}},
    }
    return _object("TrainingJob", name, namespace, merged(spec, spec_changes))


def checkpoint_object(
    name: str = "gpt-small-s100-r0", namespace: str = "team-a", **spec_changes: Any
) -> dict[str, Any]:
    """Return a Checkpoint with only `jobRef`, which requests a save."""
    spec = {"jobRef": {"name": "gpt-small"}}
    return _object("Checkpoint", name, namespace, merged(spec, spec_changes))


def store_object(
    name: str = "main", namespace: str = "team-a", **s3_changes: Any
) -> dict[str, Any]:
    """Return a CheckpointStore with the required fields only."""
    s3 = {
        "endpoint": "http://minio.storage.svc:9000",
        "bucket": "checkpoints",
        "credentialsSecretRef": {"name": "store-keys"},
    }
    return _object("CheckpointStore", name, namespace, {"s3": merged(s3, s3_changes)})


def azure_store_object(
    name: str = "main", namespace: str = "team-a", **azure_changes: Any
) -> dict[str, Any]:
    """Return a CheckpointStore of Azure with the required fields only."""
    azure = {
        "account": "teamastore",
        "container": "checkpoints",
        "credentialsSecretRef": {"name": "store-keys"},
    }
    return _object("CheckpointStore", name, namespace, {"azure": merged(azure, azure_changes)})


def google_store_object(
    name: str = "main", namespace: str = "team-a", **google_changes: Any
) -> dict[str, Any]:
    """Return a CheckpointStore of Google with the required fields only."""
    google = {"bucket": "checkpoints"}
    return _object("CheckpointStore", name, namespace, {"google": merged(google, google_changes)})


def _object(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec,
    }
