"""An uploading process that is killed while the proxy holds one of its requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.hang import HANG_SECONDS
from tests.support.servers.hostile_s3 import HostileProxy

from holdfast_core.contract import StoreConfig
from holdfast_core.node.shard_file import DiskShardReader

UPLOADER = Path(__file__).with_name("uploader.py")


def kill_in_upload(
    proxy: HostileProxy, config: StoreConfig, reader: DiskShardReader, *what: str
) -> None:
    """Upload the shard in a process, and kill it with SIGKILL when the proxy holds a request.

    The caller adds the rule that makes the proxy hold a request. `what` are the arguments of uploader.py
    after those that identify the shard.
    """
    ref = reader.record.ref
    identity = json.dumps([ref.job_uid, ref.step, ref.round, ref.rank, ref.blake3])
    path = os.readlink(f"/proc/self/fd/{reader.fd}")
    command = [sys.executable, str(UPLOADER), config.to_json(), path, identity, *what]
    with subprocess.Popen(command) as child:
        try:
            assert proxy.holding.wait(HANG_SECONDS)
        finally:
            child.send_signal(signal.SIGKILL)
        assert child.wait(HANG_SECONDS) == -signal.SIGKILL
