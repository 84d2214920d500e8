"""Pods of the local demo: what a deletion leaves."""

from __future__ import annotations

from pathlib import Path

from demo.local_pods import LocalPod, PodSpec

from holdfast_core.ids import RestartRound, Worker


def test_a_pod_that_was_deleted_before_its_start_starts_nothing(tmp_path: Path) -> None:
    """Another thread starts the pod, and the end of the demo does not wait for it."""
    spec = PodSpec(
        name="gpt-0",
        uid="uid",
        job_uid="job-uid",
        job="gpt",
        namespace="demo",
        worker=Worker(0),
        birth_round=RestartRound(0),
        store="",
        node_capacity_bytes=1 << 30,
        command=("false",),
        memory_root=tmp_path / "memory",
        disk_root=tmp_path / "disk",
        certs=tmp_path / "certs",
        keys=tmp_path / "keys",
        log_folder=tmp_path / "logs",
        workdir=tmp_path,
    )
    pod = LocalPod(spec)
    pod.delete()
    pod.start()
    assert pod.sidecar is None
    assert pod.trainer is None
    assert list(tmp_path.iterdir()) == []
