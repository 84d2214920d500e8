"""An inventory that is too large for the operator omits its oldest steps."""

from __future__ import annotations

import pytest

from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import (
    MAX_RANK,
    MAX_ROUND,
    MAX_STEP,
    CheckpointId,
    Digest,
    JobUid,
    Rank,
    RestartRound,
    ShardRef,
    Step,
    Worker,
)
from holdfast_core.messages.codec import MAX_LISTED, dumps, loads, reply_limit_bytes
from holdfast_core.messages.schema import Inventory
from holdfast_sidecar.process.inventory import MOST_ENTRY_BYTES, fit

ROUND = RestartRound(3)
UID = JobUid("11111111-2222-3333-4444-555555555555")
DIGEST = digest_of(b"x")


def listed(*steps: int) -> dict[Digest, CheckpointId]:
    return {digest_of(b"%d" % step): CheckpointId(Step(step), ROUND) for step in steps}


def held(step: int, rank: int = 0) -> ShardRef:
    return ShardRef(UID, Step(step), ROUND, Rank(rank), DIGEST)


def inventory(*steps: int, shards: int = 1) -> Inventory:
    """Return an inventory with these steps, which slots hold as well, and one shard of a later step."""
    stored = [held(step, rank) for step in steps for rank in range(shards)]
    slots = tuple(held(step) for step in steps)
    return Inventory(
        Worker(0), "gpt-0-r0", ROUND, 1, listed(*steps), (*stored, held(99999)), in_memory=slots
    )


@pytest.mark.fault("An inventory is above the limit of a reply")
@pytest.mark.parametrize(
    ("world_size", "steps", "shards", "kept"),
    [
        pytest.param(2, 3, 1, 3, id="it fits"),
        pytest.param(4096 * 8, 2000, 1, MAX_LISTED, id="more manifests than may be listed"),
        pytest.param(1, 2, 2000, 1, id="the newest one is too large alone"),
        pytest.param(1, 0, 1, 0, id="no step"),
    ],
)
def test_the_oldest_steps_are_left_out(world_size: int, steps: int, shards: int, kept: int) -> None:
    fitting = fit(inventory(*range(1, steps + 1), shards=shards), world_size)
    newest = list(range(steps - kept + 1, steps + 1))
    assert [m.step for m in fitting.manifests.values()] == newest
    assert {s.step for s in fitting.shards} == {*newest, 99999}, "a step in progress stays"
    assert [s.step for s in fitting.in_memory] == newest


@pytest.mark.parametrize("world_size", [1, 8])
def test_the_reply_is_as_large_as_the_operator_accepts(world_size: int) -> None:
    limit_bytes = reply_limit_bytes(Inventory, world_size)
    each = len(dumps(listed(100000))) - 2 + 9 * len(dumps(held(100000))) + 10
    many = range(100000, 100000 + 2 * limit_bytes // each)
    fitting = fit(inventory(*many, shards=8), world_size)
    data = dumps(fitting)
    assert limit_bytes - 2 * each <= len(data) <= limit_bytes
    assert loads(Inventory, data, limit_bytes=limit_bytes) == fitting


def test_the_bound_of_an_entry_holds_for_the_largest_values() -> None:
    """The size of a small inventory is not measured, so no entry may be larger than the bound."""
    uid = JobUid("x" * 64)
    shard = ShardRef(uid, Step(MAX_STEP), RestartRound(MAX_ROUND), Rank(MAX_RANK), DIGEST)
    manifest = {DIGEST: CheckpointId(Step(MAX_STEP), RestartRound(MAX_ROUND))}
    assert max(len(dumps(entry)) + 1 for entry in (shard, manifest)) <= MOST_ENTRY_BYTES
