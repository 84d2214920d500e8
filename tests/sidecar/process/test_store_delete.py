"""The deletion of checkpoints by a pod of its own: what goes, what stays, and that it may die anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiers.objects import MemoryObjectStore
from tests.support.tiers.stored_checkpoints import NAMESPACE, StoredStep, store_step, values

from holdfast_core.contract import DeleteContract
from holdfast_core.drill import drill
from holdfast_core.errors import ConfigError
from holdfast_core.ids import CheckpointId, JobUid
from holdfast_core.store.drilled import StoredJob
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.process.store_delete import delete

STRAY = "shards/s000000000099-r000000/rank000000-0123456789abcdef.shard"


class Killed(BaseException):
    """Stands for the end of the process."""


class MortalStore(MemoryObjectStore):
    """Store whose client dies before one of its deletes."""

    deletes_left: int | None = None

    def delete(self, keys: Any) -> None:
        if self.deletes_left is not None:
            if not self.deletes_left:
                raise Killed
            self.deletes_left -= 1
        super().delete(keys)


@dataclass
class Bed:
    """Three steps in a store. The packs of the others refer to objects of the first one."""

    store: MortalStore
    tier: ObjectTier
    steps: tuple[StoredStep, ...]

    @property
    def ids(self) -> tuple[CheckpointId, ...]:
        return tuple(step.checkpoint for step in self.steps)

    def contract(self, *doomed: int, keep: tuple[int, ...] | None = None) -> DeleteContract:
        """Return the request to delete the checkpoints of these indexes, of a job that has ended."""
        kept = None if keep is None else tuple(self.ids[i] for i in keep)
        uid = self.steps[0].request.job_uid
        return DeleteContract(NAMESPACE, uid, tuple(self.ids[i] for i in doomed), kept, ended=True)

    def intact(self, index: int) -> bool:
        request = self.steps[index].request
        report = drill(StoredJob(self.tier, NAMESPACE, request.job_uid), request)
        return not report.bad_count

    def folders(self) -> set[str]:
        """Return the kinds and checkpoints of which objects are stored."""
        return {"/".join(key.split("/")[2:4]) for key in self.store.objects}


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    store = MortalStore()
    with closing(ObjectTier(store)) as tier:
        steps: list[StoredStep] = []
        frozen = values(1)
        for step in (1, 2, 3):
            changing = {**frozen, **dict(list(values(step).items())[:1])}
            base = steps[0] if steps else None
            steps.append(store_step(tier, tmp_path, step, changing, base=base))
        yield Bed(store, tier, tuple(steps))
        for stored in steps:
            stored.close()


def test_the_bed_has_references(bed: Bed) -> None:
    uid = bed.steps[0].request.job_uid
    assert bed.tier.get_references(NAMESPACE, uid, bed.ids[2])


def test_chunks_that_another_checkpoint_needs_stay_until_it_goes(bed: Bed) -> None:
    assert delete(bed.tier, bed.contract(0, 1)) == 2
    assert bed.tier.list_manifests(NAMESPACE, bed.steps[0].request.job_uid) == (bed.ids[2],)
    assert bed.intact(2)
    delete(bed.tier, bed.contract(2))
    assert bed.store.objects == {}


@pytest.mark.parametrize("keep", [(2,), (0,), (0, 2), ()])
def test_all_but_some_goes_with_what_no_manifest_names(bed: Bed, keep: tuple[int, ...]) -> None:
    prefix = bed.tier.job(NAMESPACE, bed.steps[0].request.job_uid).prefix
    bed.store.objects[prefix + STRAY] = (b"half an upload", bed.store.now)
    delete(bed.tier, bed.contract(keep=keep))
    assert all(bed.intact(i) for i in keep)
    assert not any("s000000000099" in key for key in bed.store.objects)
    manifests = bed.tier.list_manifests(NAMESPACE, bed.steps[0].request.job_uid)
    assert manifests == tuple(bed.ids[i] for i in keep)
    if not keep:
        assert bed.store.objects == {}


def test_other_jobs_are_not_touched(bed: Bed) -> None:
    other = f"{NAMESPACE}/another-uid/manifests/s000000000001/r000000.json"
    bed.store.objects[other] = (b"{}", bed.store.now)
    delete(bed.tier, bed.contract(keep=()))
    assert set(bed.store.objects) == {other}


def test_a_job_that_may_still_write_keeps_what_no_manifest_names(bed: Bed) -> None:
    prefix = bed.tier.job(NAMESPACE, bed.steps[0].request.job_uid).prefix
    bed.store.objects[prefix + STRAY] = (b"an upload under way", bed.store.now)
    wanted = bed.contract(0)
    delete(bed.tier, DeleteContract(wanted.namespace, wanted.job_uid, wanted.checkpoints))
    assert prefix + STRAY in bed.store.objects


@pytest.mark.fault("A pod that deletes checkpoints in the store is killed")
@pytest.mark.parametrize("keep", [None, (2,), ()])
def test_it_may_be_killed_before_each_delete(bed: Bed, keep: tuple[int, ...] | None) -> None:
    wanted = bed.contract(0, 1) if keep is None else bed.contract(keep=keep)
    before, deaths = dict(bed.store.objects), 0
    delete(bed.tier, wanted)
    expected = dict(bed.store.objects)
    while True:
        bed.store.objects = dict(before)
        bed.store.deletes_left = deaths
        try:
            delete(bed.tier, wanted)
        except Killed:
            deaths += 1
        else:
            break
        finally:
            bed.store.deletes_left = None
        if keep is None or 2 in keep:
            assert bed.intact(2)
        delete(bed.tier, wanted)
        assert bed.store.objects == expected
    assert deaths > 3


def test_the_contract_is_read_back(bed: Bed) -> None:
    for wanted in (bed.contract(0, 1), bed.contract(keep=(2,)), bed.contract(keep=())):
        assert DeleteContract.from_json(wanted.to_json()) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": 7},
        {"job_uid": None},
        {"checkpoints": [{"step": 1}]},
        {"checkpoints": [{"step": "1", "round": 0}]},
        {"checkpoints": [{"step": True, "round": 0}]},
        {"keep": [1]},
        {"ended": "yes"},
        {"more": 1},
    ],
    ids=str,
)
def test_a_request_that_is_not_valid_deletes_nothing(change: dict[str, Any]) -> None:
    given = json.loads(DeleteContract(NAMESPACE, JobUid("uid")).to_json())
    with pytest.raises(ConfigError, match="HOLDFAST_DELETE is not valid"):
        DeleteContract.from_json(json.dumps({**given, **change}))
