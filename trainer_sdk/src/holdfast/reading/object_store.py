"""The checkpoints of a training without a cluster in an object store.

This module imports packages that only the extra `holdfast-sdk[s3]` installs.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.directory.choice import JOB_UID, NAMESPACE
from holdfast_core.closing import Closing
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, ShardRef, age_of
from holdfast_core.store.open import open_tier
from holdfast_core.store_url import StoreUrl
from holdfast_core.tiers.base import ShardSource


class StoreSource(Closing):
    """CheckpointSource of an object store. It writes nothing to the store.

    Raises ConfigError for an invalid endpoint or profile. The first request is sent by a method.
    """

    def __init__(self, url: StoreUrl, env: Mapping[str, str]) -> None:
        self._url = url
        self._tier = open_tier(url, env)

    @property
    def name(self) -> str:
        return str(self._url)

    def checkpoints(self) -> list[CheckpointId]:
        found = self._tier.list_manifests(NAMESPACE, JOB_UID)
        return sorted(found, key=age_of, reverse=True)

    def claim(self, checkpoint: CheckpointId) -> object:
        """Return None: a run that uploads to the store cannot see its readers."""
        return None

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        document = self._tier.get_manifest(NAMESPACE, JOB_UID, checkpoint)
        return parse_manifest_of(document, JOB_UID, checkpoint)

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        return self._tier.get_layout(NAMESPACE, ref, digest)

    def open_shard(self, ref: ShardRef) -> ShardSource:
        return self._tier.open_shard(NAMESPACE, ref)

    def close(self) -> None:
        self._tier.close()
