"""The local commit and the candidates of a restore, over a node tier."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.support.shards.builders import (
    JOB,
    JOB_UID,
    BytesSource,
    build_manifest,
    rank_layout,
    rank_payload,
    shard_header,
)
from tests.support.tiers.candidates import candidates
from tests.support.tiers.scratch import ScratchTier

from holdfast_core.errors import AlreadyExistsError, NotFoundError
from holdfast_core.format.canonical import digest_of
from holdfast_core.format.manifest import parse_manifest
from holdfast_core.format.rank_layout import LayoutDigests, layout_digests
from holdfast_core.ids import CheckpointId, Digest, JobUid, Rank, RestartRound, Step
from holdfast_core.shards.file import ShardRecord
from holdfast_core.tiers.base import NodeTier

WORLD = 2
LAYOUTS = [rank_layout(rank=rank, world_size=WORLD) for rank in range(WORLD)]


@pytest.fixture
def tier() -> ScratchTier:
    return ScratchTier()


def write(tier: NodeTier, rank: int, *, step: int = 10, round: int = 0) -> ShardRecord:
    data = rank_payload(rank=rank, world_size=WORLD, step=step)
    header = shard_header(
        len(data),
        rank=rank,
        step=step,
        round=round,
        world_size=WORLD,
        layout=digest_of(rank_layout(rank=rank, world_size=WORLD)),
    )
    return tier.write_shard(header, BytesSource(data))


def commit(tier: NodeTier, step: int, round: int = 0) -> tuple[Digest, list[ShardRecord]]:
    records = [write(tier, rank, step=step, round=round) for rank in range(WORLD)]
    for layout in LAYOUTS:
        tier.put_layout(layout)
    manifest = build_manifest(JOB, described(records), parent=None)
    return tier.put_manifest(JOB_UID, records[0].checkpoint, manifest), records


def described(records: Iterable[ShardRecord]) -> list[tuple[ShardRecord, LayoutDigests]]:
    return [(record, layout_digests(LAYOUTS[record.header.rank])) for record in records]


def steps(tier: NodeTier, ranks: list[Rank] | None = None) -> list[tuple[int, int]]:
    return [(c.manifest.step, c.manifest.restart_round) for c in candidates(tier, JOB_UID, ranks)]


def test_the_manifest_does_not_depend_on_the_order_of_shards(tier: NodeTier) -> None:
    records = [write(tier, rank) for rank in range(WORLD)]
    one = build_manifest(JOB, described(records), parent=None)
    assert build_manifest(JOB, described(reversed(records)), parent=None) == one
    assert parse_manifest(one).ref(Rank(1)) == records[1].ref


def test_a_commit_is_idempotent_and_the_newest_comes_first(tier: NodeTier) -> None:
    first, _ = commit(tier, 10)
    assert commit(tier, 10)[0] == first
    commit(tier, 20)
    commit(tier, 20, round=1)
    assert steps(tier) == [(20, 1), (20, 0), (10, 0)]
    (*_, oldest) = candidates(tier, JOB_UID)
    assert oldest.digest == first
    assert list(candidates(tier, JobUid("another"))) == []


def test_another_manifest_of_the_same_step_is_an_alarm(tier: NodeTier) -> None:
    _, records = commit(tier, 10)
    other = build_manifest(JOB, described(records), parent=digest_of(b"parent"))
    with pytest.raises(AlreadyExistsError):
        tier.put_manifest(JOB_UID, records[0].checkpoint, other)


def test_a_step_without_a_manifest_does_not_exist(tier: NodeTier) -> None:
    commit(tier, 10)
    for rank in range(WORLD):
        write(tier, rank, step=20)
    assert steps(tier) == [(10, 0)]


def test_a_step_without_a_shard_is_passed_over(tier: NodeTier) -> None:
    commit(tier, 10)
    _, records = commit(tier, 20)
    tier.delete_shard(records[1].ref)
    left_out: list[tuple[CheckpointId, str]] = []
    found = list(candidates(tier, JOB_UID, skipped=lambda c, why: left_out.append((c, why))))
    assert [c.manifest.step for c in found] == [10]
    assert [c for c, _ in left_out] == [CheckpointId(Step(20), RestartRound(0))]
    assert steps(tier, [Rank(0)]) == [(20, 0), (10, 0)]


def test_bad_bytes_are_quarantined_and_the_older_step_wins(tier: ScratchTier) -> None:
    commit(tier, 10)
    _, records = commit(tier, 20)
    tier.damage(records[0].ref, 4096 + 20)
    assert steps(tier) == [(10, 0)]
    assert tier.volume.why_quarantined(tier.shard_path(records[0].ref)) is not None
    with pytest.raises(NotFoundError):
        tier.open_shard(records[0].ref)


def test_a_manifest_under_another_name_is_passed_over(tier: ScratchTier) -> None:
    _, records = commit(tier, 10)
    document = build_manifest(JOB, described(records), parent=None)
    tier.put_manifest(JOB_UID, CheckpointId(Step(99), RestartRound(0)), document)
    tier.put_manifest(JOB_UID, CheckpointId(Step(98), RestartRound(0)), b"not a manifest")
    left_out: list[str] = []
    assert [
        c.manifest.step for c in candidates(tier, JOB_UID, skipped=lambda _, w: left_out.append(w))
    ] == [10]
    assert "names s10-r0" in left_out[0]
