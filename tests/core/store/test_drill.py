"""A drill finds all damage of a stored checkpoint, and reports no damage that there is not."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.tiers.faulty import Fault, Faults, Faulty
from tests.support.tiers.objects import MemoryObjectStore
from tests.support.tiers.stored_checkpoints import (
    NAMESPACE,
    StoredStep,
    store_step,
    values,
)

from holdfast_core.drill import BadPart, Damage, DrillReport, DrillRequest, drill
from holdfast_core.errors import (
    AccessDeniedError,
    ConfigError,
    HoldfastError,
    NotFoundError,
    UnavailableError,
)
from holdfast_core.format import keys
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.store.drilled import StoredJob
from holdfast_core.store.tier import ObjectTier


def drill_of(tier: ObjectTier, request: DrillRequest) -> DrillReport:
    return drill(StoredJob(tier, NAMESPACE, request.job_uid), request)


KINDS = ("whole", "packed", "compressed")


@dataclass
class Bed:
    """Two steps in a store. Packs of the second one refer to objects of the first one."""

    store: MemoryObjectStore
    tier: ObjectTier
    first: StoredStep
    second: StoredStep

    @property
    def keys(self) -> list[str]:
        return sorted(self.store.objects)

    def data(self, key: str) -> bytes:
        return self.store.objects[key][0]

    def put(self, key: str, data: bytes) -> None:
        self.store.objects[key] = (data, self.store.now)

    def drill(self, step: StoredStep | None = None, world_size: int | None = None) -> DrillReport:
        request = replace((step or self.second).request, world_size=world_size)
        return drill_of(self.tier, request)

    def key_of(self, step: StoredStep, rank: int) -> str:
        """Return the key of the object of a rank's shard."""
        ref = step.readers[rank].record.ref
        job = self.tier.job(NAMESPACE, ref.job_uid)
        found = (job.key(keys.shard_key(ref)), job.key(keys.pack_key(ref)))
        return next(key for key in found if key in self.store.objects)


def bed_of(kind: str, directory: Path) -> Bed:
    store = MemoryObjectStore()
    tier = ObjectTier(store)
    before = values(1)
    first = store_step(
        tier, directory, 1, before, packed=kind != "whole", compressed=kind == "compressed"
    )
    after = {**values(2), "whole": before["whole"]}
    second = store_step(
        tier,
        directory,
        2,
        after,
        base=first,
        packed=kind != "whole",
        compressed=kind == "compressed",
    )
    return Bed(store, tier, first, second)


@pytest.fixture(scope="module", params=KINDS)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bed]:
    bed = bed_of(request.param, tmp_path_factory.mktemp(request.param))
    yield bed
    bed.tier.close()
    bed.first.close()
    bed.second.close()


@pytest.fixture
def bed(shared: Bed) -> Iterator[Bed]:
    """The bed of the module, whose objects a test may damage."""
    before = dict(shared.store.objects)
    yield shared
    shared.store.objects = before


def test_a_healthy_checkpoint_is_intact(bed: Bed) -> None:
    for step in (bed.first, bed.second):
        report = bed.drill(step)
        assert (report.bad, report.bad_count, report.shards) == ((), 0, 4)
        assert report.not_restorable == ""


def test_each_stored_byte_is_read_once(tmp_path: Path) -> None:
    """Replicas have the common part once in the store, and a step has what did not change from before."""
    bed = bed_of("packed", tmp_path)
    whole = sum(reader.record.header.payload_bytes for reader in bed.second.readers)
    assert bed.drill().read_bytes < 0.6 * whole


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_state_is_assembled_for_any_number_of_ranks(bed: Bed, world_size: int) -> None:
    report = bed.drill(world_size=world_size)
    assert (report.tensors, report.not_restorable, report.bad) == (4, "", ())


def test_replicas_that_differ_are_no_damage(tmp_path: Path) -> None:
    store = MemoryObjectStore()
    tier = ObjectTier(store)
    step = store_step(tier, tmp_path, 1, [values(seed) for seed in range(4)])
    for world_size in range(1, 6):
        report = drill_of(tier, replace(step.request, world_size=world_size))
        assert (report.bad, report.tensors, report.not_restorable) == ((), 4, "")


# ------------------------------------------------------------------ damage

Strike = Callable[[Bed, random.Random], str]
"""Damages the store and returns the key of the damaged object."""


def _needed(bed: Bed) -> list[str]:
    """Return the objects of the second step, and those of the first one whose chunks it needs."""
    own = [key for key in bed.keys if "s000000000002-" in key and "/references/" not in key]
    report_keys = [bed.key_of(bed.first, rank) for rank in range(4)]
    return own + (report_keys if bed.key_of(bed.second, 0).endswith(".pack") else [])


def flip(bed: Bed, chance: random.Random) -> str:
    key = chance.choice([key for key in _needed(bed) if "s000000000002-" in key])
    data = bytearray(bed.data(key))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    bed.put(key, bytes(data))
    return key


def cut(bed: Bed, chance: random.Random) -> str:
    key = chance.choice(_needed(bed))
    bed.put(key, bed.data(key)[: chance.randrange(len(bed.data(key)))])
    return key


def swap(bed: Bed, chance: random.Random) -> str:
    """Put another object of the same kind under the key."""
    key = chance.choice([key for key in _needed(bed) if "s000000000002-" in key])
    ending = key[-6:]
    others = [k for k in bed.keys if k[-6:] == ending and bed.data(k) != bed.data(key)]
    bed.put(key, bed.data(chance.choice(others)))
    return key


def miss(bed: Bed, chance: random.Random) -> str:
    key = chance.choice(_needed(bed))
    del bed.store.objects[key]
    return key


@pytest.mark.fault("An object of a stored checkpoint is flipped, cut, swapped or missing")
@pytest.mark.parametrize("strike", [flip, cut, swap, miss])
def test_damage_is_found_in_100_of_100_drills(bed: Bed, strike: Strike) -> None:
    """34 drills for each of the three ways in which shards are stored."""
    before = dict(bed.store.objects)
    for seed in range(34):
        bed.store.objects = dict(before)
        key = strike(bed, random.Random(seed))
        report = bed.drill()
        assert report.bad_count, f"{strike.__name__} of {key} with seed {seed} was not found"


def _only(report: DrillReport) -> tuple[str, Damage]:
    (bad,) = report.bad
    return bad.part, bad.damage


def test_each_kind_of_damage_is_named(bed: Bed) -> None:
    before = dict(bed.store.objects)
    own, other = (bed.key_of(bed.second, rank) for rank in (1, 0))
    data = bed.data(own)
    flipped = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
    for changed, damage in (
        (flipped, Damage.WRONG_BYTES),
        (data[:-100], Damage.CUT),
        (bed.data(other), Damage.SWAPPED),
    ):
        bed.store.objects = dict(before)
        bed.put(own, changed)
        found = {(bad.part, bad.damage) for bad in bed.drill().bad}
        assert ("shard of rank 1", damage) in found
    bed.store.objects = dict(before)
    del bed.store.objects[own]
    assert ("shard of rank 1", Damage.MISSING) in {
        (bad.part, bad.damage) for bad in bed.drill().bad
    }


def test_a_damaged_manifest_is_named(bed: Bed) -> None:
    (key,) = [key for key in bed.keys if "/manifests/s000000000002" in key]
    (first,) = [key for key in bed.keys if "/manifests/s000000000001" in key]
    data = bed.data(key)
    bed.put(key, data.replace(b"gpt-small", b"gpt-smalk"))
    assert _only(bed.drill()) == ("manifest", Damage.WRONG_BYTES)
    bed.put(key, bed.data(first))
    assert _only(bed.drill()) == ("manifest", Damage.SWAPPED)
    del bed.store.objects[key]
    assert _only(bed.drill()) == ("manifest", Damage.MISSING)


def test_a_reference_that_nothing_keeps_is_named(tmp_path: Path) -> None:
    bed = bed_of("packed", tmp_path)
    for key in [key for key in bed.keys if "/references/" in key]:
        del bed.store.objects[key]
    assert _only(bed.drill()) == ("reference to step 1", Damage.MISSING)


def test_a_layout_of_another_rank_is_damage(bed: Bed) -> None:
    own, other = sorted(k for k in bed.keys if "s000000000002" in k and k.endswith(".layout"))[1:3]
    bed.put(own, bed.data(other))
    assert _only(bed.drill()) == ("layout of rank 1", Damage.WRONG_BYTES)


# ------------------------------------------------------------------ what is no damage


@pytest.mark.fault("The store fails while a drill reads a checkpoint")
@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    operation=st.sampled_from(["get", "size", "read_into", "list"]),
    first=st.integers(1, 40),
    times=st.none() | st.integers(1, 3),
    denied=st.booleans(),
    world_size=st.none() | st.integers(1, 5),
)
def test_a_store_that_fails_is_never_damage(
    shared: Bed,
    operation: str,
    first: int,
    times: int | None,
    denied: bool,
    world_size: int | None,
) -> None:
    error: HoldfastError = AccessDeniedError("denied") if denied else UnavailableError("down")
    faults = Faults([Fault(operation, error, first, times)])
    tier = ObjectTier(Faulty(shared.store, faults))
    try:
        report = drill_of(tier, replace(shared.second.request, world_size=world_size))
    except (UnavailableError, AccessDeniedError):
        return
    finally:
        tier.close()
    assert report.is_intact
    assert report.not_restorable == ""


class OnceWrong(MemoryObjectStore):
    """Returns one wrong byte at the first read of each object."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()
        self._lock_of_seen = threading.Lock()

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        super().read_into(key, start, buffer, stopped)
        with self._lock_of_seen:
            if key not in self._seen:
                self._seen.add(key)
                buffer[len(buffer) // 2] ^= 1


def test_a_byte_that_is_wrong_in_transit_is_no_damage(bed: Bed) -> None:
    store = OnceWrong()
    store.objects = bed.store.objects
    tier = ObjectTier(store)
    assert drill_of(tier, bed.second.request).bad == ()
    tier.close()


class Deleting(MemoryObjectStore):
    """Deletes a checkpoint at its n-th read."""

    def __init__(self, tier: ObjectTier, request: DrillRequest, read: int) -> None:
        super().__init__()
        self._inner = tier
        self._request = request
        self._left = read

    def read_into(
        self, key: str, start: int, buffer: memoryview, stopped: threading.Event | None = None
    ) -> None:
        self._left -= 1
        if self._left == 0:
            request = self._request
            self._inner.delete_checkpoint(NAMESPACE, request.job_uid, request.checkpoint)
        super().read_into(key, start, buffer, stopped)


@pytest.mark.fault("A checkpoint is deleted while a drill reads it")
@pytest.mark.parametrize("read", range(1, 12, 2))
def test_a_checkpoint_that_is_deleted_meanwhile_is_not_damaged(bed: Bed, read: int) -> None:
    store = Deleting(bed.tier, bed.second.request, read)
    store.objects = bed.store.objects
    tier = ObjectTier(store)
    with pytest.raises(NotFoundError, match="deleted while it was read"):
        drill_of(tier, bed.second.request)
    tier.close()


def test_a_store_without_the_job_is_not_damage(bed: Bed) -> None:
    bed.store.objects = {}
    with pytest.raises(NotFoundError, match="check the bucket and the prefix"):
        bed.drill()


@pytest.mark.parametrize("world_size", [-1, 0, 4097])
def test_a_world_size_out_of_bounds_is_refused(bed: Bed, world_size: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 4096 ranks"):
        bed.drill(world_size=world_size)


def test_elements_that_no_shard_holds_are_not_damage(tmp_path: Path) -> None:
    """The same ranks can restore such a checkpoint, so it must not be quarantined."""
    tier = ObjectTier(MemoryObjectStore())
    half = store_step(tier, tmp_path, 1, values(1), packed=False, mesh=(1, 8))
    report = drill_of(tier, replace(half.request, world_size=3))
    assert report.bad == ()
    assert "elements are in no readable shard" in report.not_restorable


def test_a_report_fits_into_a_termination_message() -> None:
    bad = tuple(
        BadPart(f"shard of rank {rank}", Damage.CUT, "é" * 1000 + '"') for rank in range(100)
    )
    checkpoint = CheckpointId(Step(10), RestartRound(2))
    text = DrillReport(checkpoint, 1 << 40, 12.3456, 1000, bad, 1000).to_json()
    assert len(text) <= 4096
    assert text.isascii()
    found = json.loads(text)
    assert (found["step"], found["round"]) == (10, 2)
    assert found["badCount"] == 1000
    assert found["bad"][0]["part"] == "shard of rank 0"
    assert np.isclose(found["seconds"], 12.346)
