"""Which checkpoints a run keeps beyond the newest ones: its restore point, and what waits for its upload."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import payload, rank_layout_and_plan

from holdfast.directory.choice import JOB_UID
from holdfast.directory.open_folder import ServiceOptions
from holdfast.directory.persister import DirectoryService, MakeUploads
from holdfast.directory.saves import Push
from holdfast.directory.uploads import FolderUploads
from holdfast.slots.staging import SlotRing
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import CheckpointId, Level, Rank, Step
from holdfast_core.messages.schema import Policy, Stage, StepOutcome
from holdfast_core.node.tier import checkpoints_in
from holdfast_core.shm.shared_files import LayoutFiles

LAYOUT, PLAN = rank_layout_and_plan(rank=0, world_size=1, rows_per_rank=10)
SIZE = PLAN.total_bytes


class NeverUploaded(FolderUploads):
    """Uploads to a store that does not answer: every checkpoint of one step waits."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._waiting = frozenset[CheckpointId]()

    @property
    def wanted(self) -> frozenset[CheckpointId]:
        return self._waiting

    def committed(self, checkpoint: CheckpointId) -> None:
        if checkpoint.step == self._step:
            self._waiting |= {checkpoint}

    def listen(self, push: Push) -> None: ...

    def take(self) -> None: ...

    def finish(self, longest_seconds: float) -> bool:
        return False

    def abort(self) -> None: ...


def train(root: Path, *steps: int, uploads: MakeUploads | None = None) -> int | None:
    """Run one training that keeps two checkpoints, and return the step that it restored."""
    options = ServiceOptions(
        root=root / "ckpt",
        slots_dir=root / "slots",
        layouts_dir=root / "layouts",
        world_size=1,
        own_ranks=range(1),
        policy=Policy(interval_steps=1, keep_last=2),
    )
    service = DirectoryService.start(options, make_uploads=uploads)
    LayoutFiles(root / "layouts").ensure(LAYOUT, digest_of(LAYOUT))
    ring = SlotRing(root / "slots", Rank(0), 2)
    ring.ensure(SIZE, service.round)
    for step in steps:
        save(service, ring, step)
    ring.close()
    service.finish(HANG_SECONDS)
    return service.restore_point.step


def save(service: DirectoryService, ring: SlotRing, step: int) -> None:
    slot = ring.acquire()
    slot.begin(service.round, Step(step), SIZE)
    slot.payload[:SIZE] = list(payload(SIZE, seed=step))
    slot.complete()
    pushed: queue.SimpleQueue[object] = queue.SimpleQueue()
    stage = Stage(service.round, Step(step), Rank(0), slot.name, SIZE, digest_of(LAYOUT))
    service.handle(stage, pushed.put)
    _next(pushed, lambda m: isinstance(m, StepOutcome) and not m.failed and m.level is Level.LOCAL)


def _next(pushed: queue.SimpleQueue[object], wanted: Callable[[object], bool]) -> None:
    while not wanted(pushed.get(timeout=HANG_SECONDS)):
        pass


def kept(root: Path) -> list[int]:
    return sorted(checkpoint.step for checkpoint in checkpoints_in(root / "ckpt/tier", JOB_UID))


def test_the_restore_point_stays_while_the_run_saves_newer_steps(tmp_path: Path) -> None:
    """A restart of the run, or another process of it, may have to restore from there again."""
    assert train(tmp_path, 1) is None
    assert train(tmp_path, 2, 3, 4, 5) == 1
    assert kept(tmp_path) == [1, 4, 5]
    assert train(tmp_path, 6) == 5
    assert kept(tmp_path) == [5, 6], "it was the restore point of an ended run"


def test_a_checkpoint_that_waits_for_its_upload_stays(tmp_path: Path) -> None:
    train(tmp_path, 1, 2, 3, 4, 5, uploads=lambda folder, background: NeverUploaded(2))
    assert kept(tmp_path) == [2, 4, 5]
