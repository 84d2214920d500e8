"""The contract of worker 0 of a job, as far as a test does not say otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast_core.contract import SidecarContract
from holdfast_core.ids import JobUid, RestartRound, Worker

_CONTRACT = SidecarContract(
    job_uid=JobUid("job-1"),
    job="gpt",
    namespace="team-a",
    worker=Worker(0),
    birth_round=RestartRound(0),
    procs_per_worker=1,
    shared_dir="",
    pod_name="gpt-0-r0",
    pod_ip="127.0.0.1",
    node_dir="",
    node_capacity_bytes=0,
    certs_dir="",
    store_dir="",
    store="",
)


def contract_with(**fields: Any) -> SidecarContract:
    return replace(_CONTRACT, **fields)
