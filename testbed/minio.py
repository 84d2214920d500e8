"""MinIO in the cluster, at http://minio.minio.svc:9000 with bucket `checkpoints`."""

from __future__ import annotations

import time
from pathlib import Path

from testbed import cluster
from testbed.config import PACKAGE, Bed
from testbed.shell import BedError

NAMESPACE = "minio"
BUCKET = "checkpoints"


def deploy(bed: Bed, log: Path | None = None) -> str:
    """Apply the manifest and wait until the server is ready and the bucket exists."""
    cluster.kubectl(bed, "apply", "-f", str(PACKAGE / "manifests/minio.yaml"))
    rollout = ("-n", NAMESPACE, "rollout", "status", "deploy/minio", "--timeout=120s")
    cluster.kubectl(bed, *rollout, timeout_seconds=130)
    make = ("-n", NAMESPACE, "exec", "deploy/minio", "--", "mc", "mb", "--ignore-existing")
    deadline = time.monotonic() + 60
    while True:
        try:
            cluster.kubectl(bed, *make, f"local/{BUCKET}")
            return f"bucket {BUCKET}"
        except BedError:  # the pod of an earlier revision may have received the command
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
