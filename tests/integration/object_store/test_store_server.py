"""The test server itself: a missing binary fails a test with the remedy, and data survives a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.servers.store_server import ServerUnavailableError, StoreServer
from tests.support.shards.builders import shard_file, shard_header
from tests.support.tiers.stores import s3_tier

from holdfast_core.format.canonical import digest_of
from holdfast_core.store.probe import ProbeReason, probe

pytestmark = pytest.mark.integration


def test_without_a_binary_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: StoreServer
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_TESTBED_DIR", str(tmp_path))
    with pytest.raises(ServerUnavailableError, match="`make tools` builds it"):
        type(server)().start()


def test_a_killed_server_keeps_what_was_acknowledged(server: StoreServer) -> None:
    with type(server)() as own:
        tier = s3_tier(own.config("p"), own.credentials)
        ref = shard_file(shard_header(1), b"x")[1].ref
        tier.put_layout("team-a", ref, b"{}")
        own.kill()
        own.revive()
        assert tier.get_layout("team-a", ref, digest_of(b"{}")) == b"{}"
        tier.close()
        assert probe(own.config("p"), own.credentials).reason is ProbeReason.AVAILABLE
