"""A coordinator builds manifests."""

from __future__ import annotations

import pytest
from tests.support.sidecar import rank_document
from tests.support.sidecar.contracts import CONTRACT

from holdfast_core.errors import CorruptionError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import manifest_digest, parse_manifest, parse_manifest_of
from holdfast_core.format.rank_layout import layout_digests
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, Step
from holdfast_core.messages.schema import (
    ShardInfo,
)
from holdfast_sidecar.coordinator.ledger import StepEntry
from holdfast_sidecar.coordinator.plan import Built, build_manifest

PARENT = Digest("b3:" + "e" * 64)


def entry(order: tuple[int, ...] = (0, 1)) -> StepEntry:
    made = StepEntry(Step(9), RestartRound(3), 2)
    for rank in order:
        data = bytes([rank]) * 10
        made.shards[Rank(rank)] = ShardInfo(Rank(rank), 10, digest_of(data), digest_of(b"t" + data))
        made.layouts[Rank(rank)] = layout_digests(rank_document(rank, 10))
    return made


def build(order: tuple[int, ...] = (0, 1)) -> Built:
    return build_manifest(CONTRACT, PARENT, entry(order))


def test_any_coordinator_writes_the_same_bytes() -> None:
    first = build((0, 1))
    assert first == build((1, 0))
    manifest = parse_manifest(first.manifest)
    assert manifest.parent == PARENT
    assert [shard.layout for shard in manifest.shards] == [
        digest_of(rank_document(rank, 10)) for rank in range(2)
    ]
    assert (manifest.step, manifest.restart_round, manifest.world_size) == (9, 3, 2)
    assert manifest_digest(first.manifest) == first.digest


@pytest.mark.parametrize(
    ("job_uid", "step", "round_"),
    [(JobUid("another"), 9, 3), (CONTRACT.job_uid, 8, 3), (CONTRACT.job_uid, 9, 2)],
    ids=["job", "step", "round"],
)
def test_a_manifest_with_the_name_of_another_is_refused(
    job_uid: JobUid, step: int, round_: int
) -> None:
    built = build()
    with pytest.raises(CorruptionError, match="renamed or copied"):
        parse_manifest_of(built.manifest, job_uid, CheckpointId(Step(step), RestartRound(round_)))
