"""The command that lists a store in a pod of its own, and deletes what no checkpoint needs."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from holdfast_core.contract import StoreConfig, UsageContract
from holdfast_core.errors import HoldfastError
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.credentials import FileCredentials
from holdfast_core.store.s3.store import S3ObjectStore
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store.usage import StoreUsage, sweep, usage_of
from holdfast_sidecar.process.termination import write_report

_MESSAGE_CHARACTERS = 2000


def store_usage(store: str, store_dir: str, request: str, report_path: Path) -> int:
    """List a store and write the report to the file that the kubelet reads, and to stdout.

    Args:
        store: `StoreConfig` as JSON.
        store_dir: Directory with the credentials.
        request: `UsageContract` as JSON.
        report_path: The termination log of the container.

    Returns:
        0 if the store was listed and the report written, else 1.
    """
    try:
        text, status = _listed(store, store_dir, UsageContract.from_json(request)).to_json(), 0
    except HoldfastError as error:
        message = str(error).encode("ascii", "replace").decode()[:_MESSAGE_CHARACTERS]
        text, status = json.dumps({"error": type(error).__name__, "message": message}), 1
    return status if write_report(text, report_path) else 1


def _listed(store: str, store_dir: str, wanted: UsageContract) -> StoreUsage:
    config = StoreConfig.from_json(store)
    credentials = FileCredentials(store_dir)
    client = S3Client(config, credentials, ca_file=credentials.ca_file)
    with closing(ObjectTier(S3ObjectStore(client), config.prefix)) as tier:
        usage = usage_of(tier)
        if wanted.sweep_after_seconds is None:
            return usage
        grace = timedelta(seconds=wanted.sweep_after_seconds)
        return sweep(tier, usage, grace, running=wanted.running, ended=wanted.ended)
