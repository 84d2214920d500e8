"""The contract of a sidecar with defaults, so that a test names only the fields that it checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.shards.builders import JOB_UID

from holdfast_core.contract import SidecarContract
from holdfast_core.ids import RestartRound, Worker

CONTRACT = SidecarContract(
    job_uid=JOB_UID,
    job="gpt",
    namespace="team-a",
    worker=Worker(0),
    birth_round=RestartRound(0),
    procs_per_worker=1,
    shared_dir="",
    pod_name="gpt-0-r0",
    pod_ip="127.0.0.1",
    node_dir="",
    node_capacity_bytes=1 << 30,
    certs_dir="",
    store_dir="",
    store="",
)
"""Worker 0 of a job with one rank in each pod and without an object store."""


def contract_with(**fields: Any) -> SidecarContract:
    """Return CONTRACT with these fields replaced."""
    return replace(CONTRACT, **fields)
