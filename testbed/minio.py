"""MinIO in the cluster, at http://minio.minio.svc:9000 with bucket `checkpoints`."""

from __future__ import annotations

from pathlib import Path

from testbed import cluster
from testbed.config import HANG_SECONDS, PACKAGE, Bed

NAMESPACE = "minio"
BUCKET = "checkpoints"
NODE_PORT = 30900


def deploy(bed: Bed, log: Path | None = None) -> str:
    """Apply the manifest and wait until the server is ready. Its pod creates the bucket."""
    cluster.kubectl(bed, "apply", "-f", str(PACKAGE / "manifests/minio.yaml"))
    rollout = ("-n", NAMESPACE, "rollout", "status", "deploy/minio", f"--timeout={HANG_SECONDS}s")
    cluster.kubectl(bed, *rollout, timeout_seconds=HANG_SECONDS + 60)
    return f"bucket {BUCKET}"
