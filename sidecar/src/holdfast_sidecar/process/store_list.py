"""The command that lists the checkpoints of a store in a pod of its own, for `kubectl holdfast import`.

A termination message has room for some twenty checkpoints. So the list goes to stdout, one line of JSON for
each checkpoint, and the person's command reads the pod's log. The last line counts the others: a kubelet
keeps only the end of a log that is too long.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from holdfast_core.clock import SystemClock
from holdfast_core.contract import ListContract, StoreConfig
from holdfast_core.errors import CorruptionError, FormatError, NotFoundError
from holdfast_core.format import keys
from holdfast_core.format.manifest import manifest_digest, parse_manifest_of
from holdfast_core.ids import CheckpointId, JobUid
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.process.store_command import open_tier, report_on

_ERROR_CHARACTERS = 2000


def list_store(store: str, store_dir: str, request: str, report_path: Path) -> int:
    """Write a line for each checkpoint to stdout, then the count to stdout and to the kubelet's file.

    Args:
        store: `StoreConfig` as JSON.
        store_dir: Directory with the credentials.
        request: `ListContract` as JSON.
        report_path: The termination log of the container.

    Returns:
        The exit code: 1 if the store could not be listed.
    """

    def work() -> tuple[str, int]:
        count = 0
        config, wanted = StoreConfig.from_json(store), ListContract.from_json(request)
        with closing(open_tier(store, store_dir)) as tier:
            for item in listed(tier, wanted, SystemClock().utc_now(), config.max_concurrency):
                sys.stdout.write(json.dumps(item) + "\n")
                count += 1
        return json.dumps({"lines": count}), 0

    return report_on(work, report_path)


def listed(
    tier: ObjectTier, wanted: ListContract, now: datetime, readers: int
) -> Iterator[dict[str, Any]]:
    """Yield a document for each checkpoint, job after job, in order of step and round.

    A manifest that cannot be used has an `error`, because a restore would fail as well.

    Raises:
        HoldfastError: The store cannot be listed or read.
    """
    with ThreadPoolExecutor(max(1, readers)) as pool:
        for namespace, uid in tier.jobs(wanted.namespace):
            ages = {
                key.checkpoint: age
                for key, age in tier.job(namespace, uid).parsed(f"{keys.MANIFESTS}/")
                if isinstance(key, keys.ManifestKey)
            }
            there = sorted(ages)
            if wanted.job not in (None, uid):
                # One manifest of a job says its name.
                first = _document(tier, namespace, uid, ages, now, there[-1]) if there else {}
                if first.get("job") != wanted.job:
                    continue
            yield from pool.map(partial(_document, tier, namespace, uid, ages, now), there)


def _document(
    tier: ObjectTier,
    namespace: str,
    uid: JobUid,
    ages: dict[CheckpointId, timedelta],
    now: datetime,
    checkpoint: CheckpointId,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "namespace": namespace,
        "jobUid": uid,
        "step": checkpoint.step,
        "round": checkpoint.round,
    }
    try:
        document = tier.get_manifest(namespace, uid, checkpoint)
        manifest = parse_manifest_of(document, uid, checkpoint, namespace=namespace)
    except (CorruptionError, FormatError, NotFoundError) as error:
        return {**found, "error": str(error)[:_ERROR_CHARACTERS]}
    return {
        **found,
        "job": manifest.job.name,
        "manifest": manifest_digest(document),
        "bytes": manifest.payload_bytes,
        "worldSize": manifest.world_size,
        "committedAt": f"{now - ages[checkpoint]:%Y-%m-%dT%H:%M:%SZ}",
    }
