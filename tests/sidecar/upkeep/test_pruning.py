"""What a sidecar deletes from its node, on a real node tier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.shards.builders import JOB_UID, BytesSource, shard_header
from tests.support.sidecar.rounds import round_message

from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.messages.schema import RestorePoint, Round
from holdfast_core.node.tier import DiskNodeTier
from holdfast_sidecar.upkeep.prune import (
    delete_off_lineage,
    delete_orphans,
    delete_steps,
    protected_steps,
)


@pytest.fixture
def node(tmp_path: Path) -> DiskNodeTier:
    tier = DiskNodeTier(tmp_path / "node", capacity_bytes=1 << 30)
    tier.open()
    return tier


def put(node: DiskNodeTier, step: int, round_: int, *, manifest: bool = True) -> None:
    node.write_shard(shard_header(100, step=step, round=round_), BytesSource(bytes(100)))
    if manifest:
        node.put_manifest(JOB_UID, CheckpointId(Step(step), RestartRound(round_)), b"{}")


def left(node: DiskNodeTier) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return the (step, round) of the manifests and of the shards."""
    return (
        {(c.step, c.round) for _, c in node.list_manifests()},
        {(r.header.step, r.header.round) for r in node.list_shards()},
    )


def message(base: int | None, *, pinned: tuple[int, ...] = ()) -> Round:
    """Return the ROUND of round 2, which begins at step `base` of round 0 or from the beginning."""
    point = RestorePoint() if base is None else RestorePoint(Step(base), RestartRound(0))
    return round_message(2, restore_point=point, pinned=tuple(Step(s) for s in pinned))


def test_named_steps_are_deleted_in_every_round_that_saved_them(node: DiskNodeTier) -> None:
    for step, round_ in ((1, 0), (2, 0), (2, 1), (3, 1)):
        put(node, step, round_)
    assert delete_steps(node, JOB_UID, frozenset({Step(2)})) == 2
    assert left(node) == ({(1, 0), (3, 1)}, {(1, 0), (3, 1)})
    assert delete_steps(node, JOB_UID, frozenset({Step(2)})) == 0, "again"


def test_steps_of_older_rounds_above_the_restore_point_are_deleted(node: DiskNodeTier) -> None:
    for step, round_ in ((5, 0), (6, 0), (7, 1), (7, 2)):
        put(node, step, round_)
    put(node, 8, 1, manifest=False)
    delete_off_lineage(node, JOB_UID, message(5))
    assert left(node) == ({(5, 0), (7, 2)}, {(5, 0), (7, 2)})


@pytest.mark.fault("A node with old shards comes back after the gang has started over")
def test_steps_from_before_a_start_over_are_deleted_whatever_their_numbers(
    node: DiskNodeTier,
) -> None:
    """They would count as kept checkpoints, and a prune of step 4 of round 0 takes that of round 1 along."""
    for step, round_ in ((4, 0), (4, 1), (5, 1)):
        put(node, step, round_)
    held = replace(
        message(None),
        restore_point=RestorePoint(Step(5), RestartRound(1)),
        lineage_from=RestartRound(1),
    )
    assert delete_off_lineage(node, JOB_UID, held) == 1
    assert left(node) == ({(4, 1), (5, 1)}, {(4, 1), (5, 1)})


@pytest.mark.fault("A node begins a round with a quarantined checkpoint off the lineage")
def test_a_quarantined_checkpoint_off_the_lineage_stays(node: DiskNodeTier) -> None:
    for step, round_ in ((5, 0), (6, 0), (7, 1)):
        put(node, step, round_)
    held = replace(message(5), quarantined=(RestorePoint(Step(6), RestartRound(0)),))
    assert delete_off_lineage(node, JOB_UID, held) == 1
    assert left(node) == ({(5, 0), (6, 0)}, {(5, 0), (6, 0)})
    assert protected_steps(held) == {5, 6}


@pytest.mark.parametrize(
    "round_message",
    [
        pytest.param(message(None), id="from the beginning"),
        pytest.param(
            replace(
                message(5),
                restore_point=RestorePoint(Step(5), RestartRound(0), job_uid=JOB_UID + "x"),  # type: ignore[arg-type]
            ),
            id="another job's checkpoint",
        ),
    ],
)
def test_nothing_is_deleted_without_an_own_restore_point(
    node: DiskNodeTier, round_message: Round
) -> None:
    put(node, 9, 0)
    assert delete_off_lineage(node, JOB_UID, round_message) == 0
    assert left(node) == ({(9, 0)}, {(9, 0)})


def test_orphans_of_older_rounds_are_deleted_and_those_of_this_round_kept(
    node: DiskNodeTier,
) -> None:
    put(node, 3, 1)
    for step, round_ in ((4, 1), (5, 1), (6, 2), (9, 1)):
        put(node, step, round_, manifest=False)
    deleted = delete_orphans(
        node,
        JOB_UID,
        before=RestartRound(2),
        below=Step(8),
        protected=frozenset({Step(5)}),
    )
    assert deleted == 1
    assert left(node) == ({(3, 1)}, {(3, 1), (5, 1), (6, 2), (9, 1)})


def test_the_restore_point_and_pinned_steps_are_protected() -> None:
    assert protected_steps(message(5, pinned=(2, 9))) == {2, 5, 9}
    assert protected_steps(message(None)) == frozenset()
