"""The checkpoints of one training in an object store: of a folder that uploads there, or of a TrainingJob.

This module imports packages that only the extra `holdfast-sdk[s3]` installs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from holdfast.directory.choice import JOB_UID, NAMESPACE
from holdfast_core.drill import DrillPlace
from holdfast_core.errors import ConfigError, FormatError, NotFoundError
from holdfast_core.format.manifest import Manifest, parse_manifest_of
from holdfast_core.ids import CheckpointId, Digest, JobUid, ShardRef, TierName, age_of
from holdfast_core.store.drilled import StoredJob
from holdfast_core.store.open import open_tier
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store_url import StoreUrl
from holdfast_core.tasks import Closing
from holdfast_core.tiers.base import ShardSource

_SHOWN_JOBS = 10


class StoreSource(Closing):
    """CheckpointSource of a training in an object store. It writes nothing to the store."""

    tier = TierName.OBJECT

    def __init__(
        self, url: StoreUrl, tier: ObjectTier, namespace: str = NAMESPACE, uid: JobUid = JOB_UID
    ) -> None:
        self._tier = tier
        self._namespace = namespace
        self.job_uid = uid
        is_of_folder = (namespace, uid) == (NAMESPACE, JOB_UID)
        self.name = str(url) if is_of_folder else f"{url}/{namespace}/{uid}"

    @classmethod
    def open(cls, url: StoreUrl, env: Mapping[str, str]) -> Self:
        """Open the only training of a prefix, or the one that the URL names: prefix/namespace/uid.

        A prefix without any checkpoint is taken for one that a folder will upload to.

        Raises:
            ConfigError: The endpoint or profile is not valid, or the prefix holds several trainings.
            AccessDeniedError: The keys do not suffice.
            UnavailableError: The store does not answer.
        """
        parent, namespace, uid = _parts(url)
        tier = open_tier(parent, env)
        try:
            if uid and tier.list_manifests(namespace, JobUid(uid)):
                return cls(parent, tier, namespace, JobUid(uid))
        except FormatError:
            pass  # the last names of the prefix are none of a job
        except BaseException:
            tier.close()
            raise
        tier.close()
        tier = open_tier(url, env)
        try:
            found = tuple(itertools.islice(tier.jobs(), _SHOWN_JOBS + 1))
            if len(found) > 1:
                raise ConfigError(_choose_one(url, tier, found))
            return cls(url, tier, *(found[0] if found else ()))
        except BaseException:
            tier.close()
            raise

    def checkpoints(self) -> list[CheckpointId]:
        found = self._tier.list_manifests(self._namespace, self.job_uid)
        return sorted(found, key=age_of, reverse=True)

    def claim(self, checkpoint: CheckpointId) -> object:
        """Return None: a run that uploads to the store cannot see its readers."""
        return None

    def manifest(self, checkpoint: CheckpointId) -> Manifest:
        document = self._tier.get_manifest(self._namespace, self.job_uid, checkpoint)
        return parse_manifest_of(document, self.job_uid, checkpoint)

    def layout(self, ref: ShardRef, digest: Digest) -> bytes:
        return self._tier.get_layout(self._namespace, ref, digest)

    def open_shard(self, ref: ShardRef) -> ShardSource:
        return self._tier.open_shard(self._namespace, ref)

    def drilled(self) -> DrillPlace:
        return StoredJob(self._tier, self._namespace, self.job_uid)

    def close(self) -> None:
        self._tier.close()


def _parts(url: StoreUrl) -> tuple[StoreUrl, str, str]:
    """Split a URL into the store, and the namespace and uid that its last two names may be."""
    if url.directory:
        path = Path(url.directory)
        if not (path / "manifests").is_dir():
            return url, "", ""
        return replace(url, directory=str(path.parent.parent)), path.parent.name, path.name
    prefix, _, uid = url.prefix.rpartition("/")
    parent, _, namespace = prefix.rpartition("/")
    return replace(url, prefix=parent), namespace, uid


def _choose_one(url: StoreUrl, tier: ObjectTier, jobs: Sequence[tuple[str, JobUid]]) -> str:
    lines = [f"{url} holds the checkpoints of several trainings. Open one of them:"]
    for namespace, uid in jobs[:_SHOWN_JOBS]:
        name = "a job"
        newest = max(tier.list_manifests(namespace, uid), key=age_of, default=None)
        if newest is None:
            continue  # deleted meanwhile
        if (namespace, uid) == (NAMESPACE, JOB_UID):
            name = "uploaded by a folder"
        else:
            with suppress(FormatError, NotFoundError):  # damaged, or deleted meanwhile
                document = tier.get_manifest(namespace, uid, newest)
                name = f"job {parse_manifest_of(document, uid, newest).job.name}"
        lines.append(f"  {url}/{namespace}/{uid}  {name}, newest step {newest.step}")
    if len(jobs) > _SHOWN_JOBS:
        lines.append(f"  and more: {url}/NAMESPACE/UID names each of them")
    return "\n".join(lines)
