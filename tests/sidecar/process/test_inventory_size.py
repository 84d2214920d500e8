"""An inventory that the operator would refuse leaves out its oldest steps."""

from __future__ import annotations

import pytest

from holdfast_core.format.digest import digest_of
from holdfast_core.format.keys import MAX_RANK, MAX_ROUND, MAX_STEP
from holdfast_core.ids import Rank, RestartRound, Step, TierName, Worker
from holdfast_core.messages.bounds import MAX_INT, reply_limit_bytes
from holdfast_core.messages.codec import dumps, loads
from holdfast_core.messages.schema import HeldShard, Inventory, ManifestInfo, ShardInfo
from holdfast_sidecar.process.inventory import MOST_ENTRY_BYTES, fit

ROUND = RestartRound(3)
DIGEST = digest_of(b"x")


def manifest(step: int, world_size: int) -> ManifestInfo:
    shards = tuple(ShardInfo(Rank(r), 1 << 40, DIGEST, DIGEST) for r in range(world_size))
    return ManifestInfo(Step(step), ROUND, DIGEST, world_size, shards)


def inventory(world_size: int, *steps: int) -> Inventory:
    held = tuple(
        HeldShard(Step(s), ROUND, Rank(0), 1 << 40, DIGEST, TierName.NODE) for s in (*steps, 99)
    )
    found = tuple(manifest(step, world_size) for step in steps)
    return Inventory(Worker(0), "gpt-0-r0", ROUND, 1, found, held)


@pytest.mark.parametrize(
    ("world_size", "steps", "listed"),
    [
        pytest.param(2, [1, 2, 3], [1, 2, 3], id="it fits"),
        pytest.param(4096 * 8, [1, 2, 3], [2, 3], id="4,096 workers with 8 ranks"),
        pytest.param(100_000, [1, 2], [2], id="the newest one is too large alone"),
        pytest.param(1, [], [], id="no step"),
    ],
)
def test_the_oldest_steps_are_left_out(
    world_size: int, steps: list[int], listed: list[int]
) -> None:
    fitting = fit(inventory(world_size, *steps))
    assert [m.step for m in fitting.manifests] == listed
    assert [s.step for s in fitting.shards] == [*listed, 99], "a step in progress stays"


@pytest.mark.parametrize("world_size", [1, 8, 100])
def test_the_reply_is_as_large_as_the_operator_accepts(world_size: int) -> None:
    limit_bytes = reply_limit_bytes(Inventory, world_size)
    each = len(dumps(manifest(100000, world_size)))
    many = range(100000, 100000 + 2 * limit_bytes // each)
    fitting = fit(inventory(world_size, *many))
    data = dumps(fitting)
    assert limit_bytes - 2 * each <= len(data) <= limit_bytes
    assert loads(Inventory, data, limit_bytes=limit_bytes) == fitting


def test_the_bound_of_an_entry_holds_for_the_largest_values() -> None:
    """A small inventory is not measured, so no entry may be larger than the bound."""
    shard = ShardInfo(Rank(MAX_RANK), MAX_INT, DIGEST, DIGEST)
    held = HeldShard(
        Step(MAX_STEP), RestartRound(MAX_ROUND), Rank(MAX_RANK), MAX_INT, DIGEST, TierName.MEMORY
    )
    empty = ManifestInfo(Step(MAX_STEP), RestartRound(MAX_ROUND), DIGEST, MAX_INT, ())
    assert max(len(dumps(entry)) + 1 for entry in (shard, held, empty)) <= MOST_ENTRY_BYTES
