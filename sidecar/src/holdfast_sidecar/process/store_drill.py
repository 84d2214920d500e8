"""The command that reads a whole stored checkpoint in a pod of its own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from holdfast_core.contract import DrillContract, DrillExit
from holdfast_core.drill import DrillRequest, drill, newest_of
from holdfast_core.ids import CheckpointId, Digest, RestartRound, Step
from holdfast_core.store.drilled import StoredJob
from holdfast_sidecar.process.store_command import open_tier, report_on


def drill_store(store: str, store_dir: str, request: str, report_path: Path) -> int:
    """Read a checkpoint and write the report to the file that the kubelet reads, and to stdout.

    Args:
        store: `StoreConfig` as JSON.
        store_dir: Directory with the credentials.
        request: `DrillContract` as JSON.
        report_path: The termination log of the container.

    Returns:
        A DrillExit.
    """
    return report_on(lambda: _drilled(store, store_dir, request), report_path)


def _drilled(store: str, store_dir: str, request: str) -> tuple[str, DrillExit]:
    """Return the report of a drill and the exit code. Raises HoldfastError."""
    wanted = DrillContract.from_json(request)
    with closing(open_tier(store, store_dir)) as tier:
        job = StoredJob(tier, wanted.namespace, wanted.job_uid)
        if wanted.manifest is not None and wanted.step is not None and wanted.round is not None:
            # It was committed: a manifest that is missing is damage.
            checkpoint = CheckpointId(Step(wanted.step), RestartRound(wanted.round))
        else:
            checkpoint = newest_of(job, wanted.step, wanted.round)
        digest = None if wanted.manifest is None else Digest(wanted.manifest)
        report = drill(job, DrillRequest(wanted.job_uid, checkpoint, digest, wanted.world_size))
    return report.to_json(), report.exit_code
