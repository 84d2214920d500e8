"""The command that reads a whole stored checkpoint in a pod of its own."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from holdfast_core.contract import DrillContract, StoreConfig
from holdfast_core.errors import HoldfastError
from holdfast_core.ids import Digest
from holdfast_core.store.drill import DrillRequest, drill, find_checkpoint
from holdfast_core.store.s3.client import S3Client
from holdfast_core.store.s3.credentials import FileCredentials
from holdfast_core.store.s3.store import S3ObjectStore
from holdfast_core.store.tier import ObjectTier

INTACT = 0
NOT_READ = 1
"""The report says why nothing is known: the store is down, or there is no such checkpoint."""
DAMAGED = 3
NOT_RESTORABLE = 4
_MESSAGE_CHARACTERS = 2000


def drill_store(store: str, store_dir: str, request: str, report_path: Path) -> int:
    """Read a checkpoint and write the report to the file that the kubelet reads, and to stdout.

    Args:
        store: `StoreConfig` as JSON.
        store_dir: Directory with the credentials.
        request: `DrillContract` as JSON.
        report_path: The termination log of the container.

    Returns:
        0 if the checkpoint is intact, 3 if it is damaged, 4 if it is intact but its state cannot be
        assembled for the requested number of ranks, 1 if it could not be read to its end.
    """
    try:
        text, status = _drilled(store, store_dir, DrillContract.from_json(request))
    except HoldfastError as error:
        message = str(error).encode("ascii", "replace").decode()[:_MESSAGE_CHARACTERS]
        text, status = json.dumps({"error": type(error).__name__, "message": message}), NOT_READ
    sys.stdout.write(text + "\n")
    try:
        report_path.write_text(text)
    except OSError as error:
        sys.stderr.write(f"writing the report to {report_path}: {error}\n")
        return NOT_READ
    return status


def _drilled(store: str, store_dir: str, wanted: DrillContract) -> tuple[str, int]:
    """Return the report of a drill and the exit code. Raises HoldfastError."""
    config = StoreConfig.from_json(store)
    credentials = FileCredentials(store_dir)
    client = S3Client(config, credentials, ca_file=credentials.ca_file)
    tier = ObjectTier(S3ObjectStore(client), config.prefix, readers=config.max_concurrency)
    with closing(tier):
        checkpoint = find_checkpoint(
            tier, wanted.namespace, wanted.job_uid, wanted.step, wanted.round
        )
        digest = None if wanted.manifest is None else Digest(wanted.manifest)
        report = drill(
            tier,
            DrillRequest(wanted.namespace, wanted.job_uid, checkpoint, digest, wanted.world_size),
        )
    text = report.to_json()
    if not report.is_intact:
        return text, DAMAGED
    return text, NOT_RESTORABLE if report.not_restorable else INTACT
