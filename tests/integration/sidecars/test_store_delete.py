"""The command of a pod that deletes checkpoints, against a real store, killed at each kind of request."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.servers.hostile_s3 import Hang, HostileProxy
from tests.support.servers.minio_server import MinioServer
from tests.support.servers.ports import closed_port
from tests.support.sidecar.commands import run_command, start_command, write_keys
from tests.support.tiers.stored_checkpoints import NAMESPACE, StoredStep, store_step, values
from tests.support.tiers.stores import s3_tier

from holdfast_core.contract import DeleteContract, StoreConfig
from holdfast_core.drill import drill
from holdfast_core.store.drilled import StoredJob
from holdfast_core.store.tier import ObjectTier

pytestmark = pytest.mark.integration


@dataclass(frozen=True, slots=True)
class Bed:
    """Two steps in a store. The packs of the second one refer to objects of the first one."""

    server: MinioServer
    config: StoreConfig
    tier: ObjectTier
    steps: tuple[StoredStep, ...]
    folder: Path

    def contract(self, *doomed: int, keep: tuple[int, ...] | None = None) -> DeleteContract:
        ids = [step.checkpoint for step in self.steps]
        kept = None if keep is None else tuple(ids[i] for i in keep)
        uid = self.steps[0].request.job_uid
        return DeleteContract(NAMESPACE, uid, tuple(ids[i] for i in doomed), kept, ended=True)

    def run(
        self, wanted: DeleteContract | str, config: StoreConfig | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Run the command and return its exit code and report."""
        return run_command("delete", self.folder, variables_of(wanted, config or self.config))

    def stored(self) -> set[str]:
        found = self.server.admin().list_objects(self.server.bucket, recursive=True)
        return {str(item.object_name) for item in found}

    def intact(self, index: int) -> bool:
        request = self.steps[index].request
        report = drill(StoredJob(self.tier, NAMESPACE, request.job_uid), request)
        return not report.bad_count


def variables_of(wanted: DeleteContract | str, config: StoreConfig) -> dict[str, str]:
    text = wanted if isinstance(wanted, str) else wanted.to_json()
    return {"HOLDFAST_STORE": config.to_json(), "HOLDFAST_DELETE": text}


@pytest.fixture(scope="module")
def server() -> Iterator[MinioServer]:
    with MinioServer() as running:
        yield running


@pytest.fixture
def bed(server: MinioServer, tmp_path: Path) -> Iterator[Bed]:
    write_keys(tmp_path, server.credentials.keys)
    config = server.config("delete")
    with closing(s3_tier(config, server.credentials)) as tier:
        first = store_step(tier, tmp_path, 1, values(1))
        changed = {**values(1), **dict(list(values(2).items())[:1])}
        second = store_step(tier, tmp_path, 2, changed, base=first)
        found = Bed(server, config, tier, (first, second), tmp_path)
        yield found
        tier.job(NAMESPACE, first.request.job_uid).delete_below("")
        first.close()
        second.close()


def test_a_checkpoint_goes_and_what_another_one_needs_stays(bed: Bed) -> None:
    assert bed.run(bed.contract(0)) == (0, {"deleted": 1})
    assert bed.intact(1)
    assert any("shards/s000000000001" in key for key in bed.stored())
    assert bed.run(bed.contract(1)) == (0, {"deleted": 1})
    assert bed.stored() == set()


def test_the_newest_is_kept(bed: Bed) -> None:
    assert bed.run(bed.contract(keep=(1,))) == (0, {"deleted": 1})
    assert bed.intact(1)
    assert bed.run(bed.contract(keep=())) == (0, {"deleted": 1})
    assert bed.stored() == set()


def test_nothing_is_left_of_what_is_not_there(bed: Bed) -> None:
    assert bed.run(bed.contract(keep=()))[0] == 0
    assert bed.run(bed.contract(keep=())) == (0, {"deleted": 0})
    assert bed.run(bed.contract(0, 1)) == (0, {"deleted": 2})


@pytest.mark.fault("The store is down while a pod deletes checkpoints in it")
def test_a_store_that_is_down_is_reported(bed: Bed) -> None:
    before = bed.stored()
    with closed_port() as port:
        down = replace(bed.config, endpoint=f"127.0.0.1:{port}")
        status, report = bed.run(bed.contract(0), down)
    assert (status, report["error"]) == (1, "UnavailableError")
    assert bed.stored() == before


def test_a_wrong_request_is_named(bed: Bed) -> None:
    status, report = bed.run("{}")
    assert (status, report["error"]) == (1, "ConfigError")
    assert "HOLDFAST_DELETE is not valid" in report["message"]


@pytest.mark.fault("A pod that deletes checkpoints in the store is killed")
@pytest.mark.parametrize("at", range(1, 12, 2))
def test_it_may_be_killed_at_any_request(bed: Bed, at: int) -> None:
    """The store has carried out the request at which the process is killed."""
    wanted = bed.contract(keep=(1,))
    with HostileProxy(bed.server.endpoint) as proxy:
        proxy.add(lambda _: len(proxy.requests) >= at, Hang())
        through = replace(bed.config, endpoint=proxy.endpoint)
        with start_command("delete", bed.folder, variables_of(wanted, through)) as child:
            held = proxy.holding.wait(HANG_SECONDS)
            child.send_signal(signal.SIGKILL)
            assert child.wait(HANG_SECONDS) in (-signal.SIGKILL, 0)
        assert held, f"the command sent fewer than {at} requests"
    assert bed.intact(1)
    assert bed.run(wanted)[0] == 0
    assert bed.intact(1)
    bed.run(bed.contract(keep=()))
    assert bed.stored() == set()
