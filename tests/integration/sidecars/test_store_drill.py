"""The command of a drill pod against a real store: exit code, report, and what is no damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.ports import closed_port
from tests.support.sidecar.commands import run_command, write_keys
from tests.support.tiers.stored_checkpoints import NAMESPACE, StoredStep, store_step, values
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import DrillContract, StoreConfig
from holdfast_core.ids import JobUid
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration


@dataclass(frozen=True, slots=True)
class Bed:
    server: MinioServer
    config: StoreConfig
    tier: ObjectTier
    step: StoredStep
    folder: Path

    def run(
        self, config: StoreConfig | None = None, text: str | None = None, **changed: Any
    ) -> tuple[int, dict[str, Any]]:
        """Run the command and return its exit code and report."""
        request = self.step.request
        wanted = DrillContract(
            NAMESPACE,
            **{"job_uid": request.job_uid, "manifest": request.manifest, **changed},
        )
        variables = {
            "HOLDFAST_STORE": (config or self.config).to_json(),
            "HOLDFAST_DRILL": wanted.to_json() if text is None else text,
        }
        return run_command("drill", self.folder, variables)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("drill")
    with MinioServer() as server:
        write_keys(folder, server.credentials.keys)
        config = server.config("drill")
        with closing(s3_tier(config, server.credentials)) as tier:
            step = store_step(tier, folder, 1, values(1))
            yield Bed(server, config, tier, step, folder)
            step.close()


def test_an_intact_checkpoint(bed: Bed) -> None:
    status, report = bed.run(world_size=3)
    assert status == 0, report
    assert (report["step"], report["round"], report["shards"], report["tensors"]) == (1, 0, 4, 4)
    assert report["badCount"] == 0
    assert report["readBytes"] > 1_000_000


def test_a_checkpoint_that_is_not_there(bed: Bed) -> None:
    status, report = bed.run(step=7)
    assert (status, report["error"]) == (1, "NotFoundError")
    assert "expected step 7, found the steps 1" in report["message"]
    status, report = bed.run(job_uid=JobUid("0" * 8))
    assert (status, report["error"]) == (1, "NotFoundError")


@pytest.mark.fault("The store lacks the manifest of a checkpoint that was committed")
def test_a_missing_manifest_of_a_committed_checkpoint_is_damage(bed: Bed) -> None:
    status, report = bed.run(step=7, round=0)
    assert status == 3
    assert [(b["part"], b["damage"]) for b in report["bad"]] == [("manifest", "Missing")]
    status, report = bed.run(step=7, round=0, job_uid=JobUid("0" * 8))
    assert (status, report["error"]) == (1, "NotFoundError"), "bucket or prefix may be wrong"


@pytest.mark.fault("The store is down while a drill pod runs")
def test_a_store_that_is_down_is_no_damage(bed: Bed) -> None:
    with closed_port() as port:
        down = StoreConfig(f"127.0.0.1:{port}", False, "bucket", "drill", "us-east-1")
        status, report = bed.run(down)
    assert (status, report["error"]) == (1, "UnavailableError")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "HOLDFAST_DRILL is not valid"),
        ('{"namespace": "a", "job_uid": 7}', "Expected `str`, got `int` - at `$.job_uid`"),
        ('{"namespace": "a", "job_uid": "b", "other": 1}', "HOLDFAST_DRILL is not valid"),
    ],
)
def test_a_wrong_request_is_named(bed: Bed, text: str, message: str) -> None:
    status, report = bed.run(text=text)
    assert (status, report["error"]) == (1, "ConfigError")
    assert message in report["message"]


def test_a_world_size_out_of_bounds(bed: Bed) -> None:
    status, report = bed.run(world_size=0)
    assert (status, report["error"]) == (1, "ConfigError")
    assert "expected 1 to 4096 ranks" in report["message"]


def test_damage_is_named(bed: Bed, tmp_path: Path) -> None:
    """This test comes last, because it damages the checkpoint."""
    admin, bucket = bed.server.admin(), bed.server.bucket
    key = next(
        str(item.object_name)
        for item in admin.list_objects(bucket, prefix=f"drill/{NAMESPACE}", recursive=True)
        if "rank000002" in str(item.object_name) and not str(item.object_name).endswith(".layout")
    )
    admin.fget_object(bucket, key, str(tmp_path / "copy"))
    admin.remove_object(bucket, key)
    status, report = bed.run()
    assert status == 3
    assert ("shard of rank 2", "Missing") in {(b["part"], b["damage"]) for b in report["bad"]}
    admin.fput_object(bucket, key, str(tmp_path / "copy"))
    assert bed.run()[0] == 0
