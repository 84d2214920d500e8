"""The command of the pod that lists a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.store_server import ACCESS_KEY, SECRET_KEY
from tests.support.shards.builders import JOB_UID
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import StoreConfig, UsageContract
from holdfast_core.ids import CheckpointId, RestartRound, Step

pytestmark = pytest.mark.integration


def listed(folder: Path, config: StoreConfig, request: str) -> tuple[int, dict[str, Any]]:
    (folder / "accessKey").write_text(ACCESS_KEY)
    (folder / "secretKey").write_text(SECRET_KEY)
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast_sidecar", "usage"],
        env={
            **os.environ,
            "HOLDFAST_STORE": config.to_json(),
            "HOLDFAST_STORE_DIR": str(folder),
            "HOLDFAST_USAGE": request,
            "HOLDFAST_TERMINATION_LOG": str(folder / "log"),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    report = json.loads((folder / "log").read_text())
    assert report == json.loads(ended.stdout), ended.stderr
    return ended.returncode, report


def test_the_command_leaves_the_usage_for_the_kubelet(tmp_path: Path) -> None:
    with MinioServer() as server:
        config = server.config("usage")
        tier = s3_tier(config, server.credentials)
        for step in (10, 20):
            checkpoint = CheckpointId(Step(step), RestartRound(0))
            tier.put_manifest("team-a", JOB_UID, checkpoint, b"{}" * step)
        tier.close()
        code, report = listed(tmp_path, config, UsageContract(3600, ended=(JOB_UID,)).to_json())
        refused = listed(tmp_path, config, '{"sweep_after_seconds": 1}')
    assert code == 0
    assert (report["bytes"], report["objects"], report["checkpoints"]) == (60, 2, 2)
    assert report["jobs"] == [["team-a", JOB_UID, 60, 2]]
    assert report["namespaces"] == [["team-a", 60, 2]]
    assert report["orphans"]["shards"] == {"objects": 0, "bytes": 0, "oldestSeconds": 0}
    assert refused[0] == 1
    assert refused[1]["error"] == "ConfigError"
