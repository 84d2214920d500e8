"""The commands of pods that work on a store, run with the real program and a folder as their Secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.hang import HANG_SECONDS

from holdfast_core.store.s3.credentials import Keys

DEADLINE_SECONDS = HANG_SECONDS


def write_keys(folder: Path, keys: Keys) -> None:
    """Write the keys of the store as the kubelet mounts the Secret."""
    (folder / "accessKey").write_text(keys.access_key)
    (folder / "secretKey").write_text(keys.secret_key)


def start_command(verb: str, folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `holdfast-sidecar VERB` with the variables of its container."""
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast_sidecar", verb],
        env={
            **os.environ,
            **variables,
            "HOLDFAST_STORE_DIR": str(folder),
            "HOLDFAST_TERMINATION_LOG": str(folder / "termination-log"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_command(
    verb: str, folder: Path, variables: Mapping[str, str]
) -> tuple[int, dict[str, Any]]:
    """Run the command, and return its exit code and the report that it leaves for the kubelet."""
    with start_command(verb, folder, variables) as child:
        printed, errors = child.communicate(timeout=DEADLINE_SECONDS)
    report: dict[str, Any] = json.loads((folder / "termination-log").read_text())
    assert json.loads(printed) == report, errors
    return child.returncode, report
