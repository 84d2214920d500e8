"""Layouts in the store are deleted when no manifest names them any more, and never before."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from tests.support.shards.builders import (
    JOB,
    layout,
    manifest,
    payload,
    shard_file,
    shard_header,
)
from tests.support.sidecar.contracts import CONTRACT
from tests.support.tiers.memory import MemoryTier

from holdfast_core.errors import CorruptionError, FormatError, NotFoundError
from holdfast_core.ids import CheckpointId, Digest, JobUid, RestartRound, Step
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier
from holdfast_sidecar.upkeep.store_layouts import StoreLayouts

NAME = (JOB.namespace, JOB.uid)
SIZE = 1000
LAYOUTS = [layout(world_size=n) for n in (1, 2, 3)]


class World:
    """A store with checkpoints, each of which names one of LAYOUTS."""

    def __init__(self, folder: Path) -> None:
        self.store = Interrupted(DirectoryObjectStore(folder / "store"))
        self.node = MemoryTier()
        self.uploading: set[CheckpointId] = set()
        self.layouts = self.life()

    def life(self, quiet: timedelta = timedelta(0)) -> StoreLayouts:
        return StoreLayouts(CONTRACT, self.node, self.store, quiet, lambda: self.uploading)

    def persist(self, step: int, number: int) -> CheckpointId:
        """Put layout, manifest, and the layout again, as a coordinator does."""
        _, record = shard_file(shard_header(SIZE, step=step, world_size=1), payload(SIZE))
        found = manifest([record], layout_document=LAYOUTS[number])
        self.store.put_layout(*NAME, LAYOUTS[number])
        self.store.put_manifest(*NAME, found.checkpoint, found.to_bytes())
        self.store.put_layout(*NAME, LAYOUTS[number])
        return found.checkpoint

    def has(self, number: int) -> bool:
        try:
            return self.store.get_layout(*NAME, digest(number)) == LAYOUTS[number]
        except NotFoundError:
            return False


class Interrupted(ObjectTier):
    """A tier that calls `before_delete` between the check and the delete of a layout."""

    before_delete: Callable[[], object] = staticmethod(lambda: None)

    def delete_layout(self, namespace: str, job_uid: JobUid, digest: Digest) -> None:
        self.before_delete()
        super().delete_layout(namespace, job_uid, digest)


def digest(number: int) -> Digest:
    return MemoryTier().put_layout(LAYOUTS[number])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_layout_goes_at_the_second_look_after_its_last_manifest(world: World) -> None:
    older = world.persist(1, 0)
    world.persist(2, 1)
    assert world.layouts.look() == frozenset()
    world.store.delete_checkpoint(*NAME, older)
    assert world.layouts.look() == frozenset()
    assert world.has(0)
    assert world.layouts.look() == {digest(0)}
    assert (world.has(0), world.has(1)) == (False, True)


def test_a_layout_that_is_used_again_in_between_is_kept(world: World) -> None:
    older = world.persist(1, 0)
    world.store.delete_checkpoint(*NAME, older)
    world.layouts.look()
    newer = world.persist(2, 0)
    assert world.layouts.look() == frozenset()
    world.store.delete_checkpoint(*NAME, newer)
    assert world.layouts.look() == frozenset(), "the count starts again"


def test_no_layout_is_deleted_while_a_save_is_being_uploaded(world: World) -> None:
    older = world.persist(1, 0)
    world.store.delete_checkpoint(*NAME, older)
    world.layouts.look()
    world.uploading = {CheckpointId(Step(2), RestartRound(0))}
    world.layouts.look()
    world.uploading = set()
    assert world.layouts.look() == frozenset(), "the count starts again for what the save found"
    assert world.layouts.look() == {digest(0)}


def test_a_save_of_another_coordinator_in_the_moment_of_the_delete_is_whole(world: World) -> None:
    """The other coordinator found the layout, and put its manifest after the layout had been checked."""
    older = world.persist(1, 0)
    world.store.delete_checkpoint(*NAME, older)
    world.layouts.look()
    _, record = shard_file(shard_header(SIZE, step=2, world_size=1), payload(SIZE))
    found = manifest([record], layout_document=LAYOUTS[0])
    world.store.put_layout(*NAME, LAYOUTS[0])
    world.store.before_delete = lambda: world.store.put_manifest(
        *NAME, found.checkpoint, found.to_bytes()
    )
    assert world.layouts.look() == {digest(0)}
    assert not world.has(0), "this is where that coordinator puts the layout once more"
    world.node.put_layout(LAYOUTS[0])
    world.layouts.look()
    assert world.has(0), "or, had it died there, the next look does, from the node"


def test_a_young_layout_may_be_of_a_save_under_way(world: World) -> None:
    world.store.put_layout(*NAME, LAYOUTS[0])
    layouts = world.life(quiet=timedelta(hours=1))
    for _ in range(3):
        assert layouts.look() == frozenset()
    assert world.has(0)


@pytest.mark.parametrize(
    ("document", "error"),
    [(b'{"formatVersion":9}', FormatError), (None, CorruptionError)],
    ids=["of a newer release", "of another step"],
)
def test_a_manifest_that_cannot_be_read_keeps_every_layout(
    world: World, tmp_path: Path, document: bytes | None, error: type[Exception]
) -> None:
    older = world.persist(1, 0)
    world.persist(2, 1)
    (first,) = (tmp_path / "store").rglob("manifests/s000000000001/*.json")
    (second,) = (tmp_path / "store").rglob("manifests/s000000000002/*.json")
    second.write_bytes(first.read_bytes() if document is None else document)
    world.store.delete_checkpoint(*NAME, older)
    for _ in range(3):
        with pytest.raises(error):
            world.layouts.look()
    assert world.has(0)
    assert world.has(1)
