"""The test server itself: a missing binary fails a test with the remedy, and a kill keeps data."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_core.testing.builders import JOB_UID
from holdfast_core.testing.minio_server import MinioServer, ServerUnavailableError
from holdfast_core.tiers.object import S3ObjectTier
from holdfast_core.tiers.object_probe import ProbeReason, probe

pytestmark = pytest.mark.integration


def test_without_a_binary_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_TESTBED_DIR", str(tmp_path))
    with pytest.raises(ServerUnavailableError, match="`make cluster-up` builds it"):
        MinioServer().start()


def test_a_killed_server_keeps_what_was_acknowledged() -> None:
    with MinioServer() as server:
        tier = S3ObjectTier(server.config("p"), server.credentials)
        digest = tier.put_layout("team-a", JOB_UID, b"{}")
        server.kill()
        server.revive()
        assert tier.get_layout("team-a", JOB_UID, digest) == b"{}"
        tier.close()
        assert probe(server.config("p"), server.credentials).reason is ProbeReason.AVAILABLE
