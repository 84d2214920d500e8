"""Uploads of a folder: what waits while the store is away, and a run that was overtaken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import write_checkpoint
from tests.support.shards.placements import Tensor
from tests.support.trainer.launched import until

import holdfast
from holdfast.directory.choice import JOB_UID, NAMESPACE
from holdfast.directory.folder_store import FolderStore
from holdfast.directory.open_folder import OpenFolder, ServiceOptions
from holdfast.directory.plan import FolderPlan, PlanFile
from holdfast.directory.uploads import FolderUploads
from holdfast_core.errors import SaveFailedError, UnavailableError
from holdfast_core.format.canonical import sealed, unsealed
from holdfast_core.format.manifest import parse_manifest_of
from holdfast_core.ids import CheckpointId, Level, Rank, RestartRound, Step
from holdfast_core.messages.schema import Policy
from holdfast_core.pacing import BackgroundLimit
from holdfast_core.store.tier import ObjectTier
from holdfast_core.store_url import parse_store_url

ROUND = RestartRound(1)


class AwayStore(FolderStore):
    """A store that does not answer while `is_away`."""

    is_away = False
    then: Callable[[], None] | None = None
    """What happens after the next look for another run, once."""

    def take(self, round_: RestartRound, *, has_checkpoints: bool) -> None:
        if self.is_away:
            raise UnavailableError("away")
        super().take(round_, has_checkpoints=has_checkpoints)

    def open_for_uploads(
        self, throttle: Callable[[int], object], *, conditional_put: bool
    ) -> ObjectTier:
        if self.is_away:
            raise UnavailableError("away")
        return super().open_for_uploads(throttle, conditional_put=conditional_put)

    def expect_newest(self, round_: RestartRound) -> None:
        super().expect_newest(round_)
        then, self.then = self.then, None
        if then is not None:
            then()


class Run:
    """The uploads of one run of a folder, by the persister of one of its ranks."""

    def __init__(
        self, root: Path, store: Path, run_id: str, round_: RestartRound, rank: int, ranks: int
    ) -> None:
        for name in ("slots", "layouts"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self.root = root
        self.store = AwayStore(
            parse_store_url(f"file://{store}"), {}, root / "store", run_id, lambda seconds: True
        )
        self.folder = OpenFolder.open(
            ServiceOptions(
                root,
                root / "slots",
                root / "layouts",
                ranks,
                range(rank, rank + 1),
                Policy(0, 2, 2, peer_copies=0),
                round=round_,
                choose_restore=False,
                run_id=run_id,
            ),
            self.store,
        )
        self.ranks = ranks
        self.pushed: list[Any] = []
        self.uploads = FolderUploads(self.folder, self.store, BackgroundLimit(root / "slots"), 2)
        self.uploads.listen(self.pushed.append)

        self._is_started = False

    def start(self) -> None:
        self._is_started = True
        self.uploads.start()

    def end(self) -> None:
        if self._is_started:
            self.uploads.abort()

    def failed(self, step: int) -> bool | None:
        """Return whether the upload of this step has failed. None: it has not ended."""
        return next((one.failed for one in self.pushed if one.step == step), None)

    def saved(self, step: int, round_: int = ROUND) -> CheckpointId:
        tensor = Tensor("F32", (4, 4))
        data = np.full((4, 4), step, np.float32)
        mesh = (self.ranks,)
        return write_checkpoint(self.root, {"t": (tensor, data)}, mesh, step=step, round=round_)


Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def run(
            name: str = "run", round_: RestartRound = ROUND, rank: int = 0, ranks: int = 1
        ) -> Run:
            made = Run(tmp_path / name, tmp_path / "objects", name, round_, rank, ranks)
            stack.callback(made.store.close)
            stack.callback(made.end)
            return made

        yield run


def at(step: int) -> CheckpointId:
    return CheckpointId(Step(step), ROUND)


@pytest.mark.fault("The store is away for many saves")
def test_while_the_store_is_away_the_folder_keeps_three_checkpoints_for_it(make: Make) -> None:
    run = make()
    run.store.is_away = True
    run.start()
    run.uploads.take()
    for step in range(1, 101):
        run.uploads.committed(at(step))
    assert run.uploads.wanted == {at(1), at(99), at(100)}


@pytest.mark.fault("The store is away for more saves than outcomes are kept")
def test_each_of_very_many_checkpoints_that_waited_gets_an_outcome(make: Make) -> None:
    run = make()
    first, last = run.saved(1), run.saved(200)
    run.store.is_away = True
    run.uploads.take()
    run.uploads.committed(first)
    for step in range(2, 200):
        run.uploads.committed(at(step))
    run.uploads.committed(last)
    run.store.is_away = False
    run.start()
    until(lambda: len(run.pushed) == 200, "each checkpoint has an outcome")
    assert run.uploads.wanted == frozenset()
    assert {one.step for one in run.pushed if not one.failed} == {1, 200}


@pytest.mark.fault("Another run takes the store and the first one goes on saving")
def test_what_is_saved_after_another_run_took_the_store_fails_and_may_be_pruned(
    make: Make,
) -> None:
    run, other = make(), make("other")
    run.uploads.take()
    other.store.take(RestartRound(2), has_checkpoints=False)
    run.start()
    run.uploads.committed(run.saved(1))
    until(lambda: run.failed(1), "the upload has failed")
    run.uploads.committed(run.saved(2))
    assert run.failed(2)
    assert run.pushed[-1].level == Level.PERSISTED
    assert run.uploads.wanted == frozenset()


@pytest.mark.fault("An overtaken run is idle while the later one uploads")
def test_an_idle_run_that_was_overtaken_deletes_nothing(make: Make, tmp_path: Path) -> None:
    """The later run may be uploading again what looks like the rest of an old upload."""
    run, other = make(), make("other")
    run.uploads.take()
    other.store.take(RestartRound(2), has_checkpoints=False)
    being_uploaded = other.saved(7, round_=0)
    tier, node = other.store.tier, other.folder.tier
    manifest = parse_manifest_of(
        node.get_manifest(JOB_UID, being_uploaded), JOB_UID, being_uploaded
    )
    assert node.look_up(manifest.ref(Rank(0))) is not None
    with node.open_shard(manifest.ref(Rank(0))) as reader:
        tier.upload_shard(NAMESPACE, reader)
    objects = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    for path in objects:
        os.utime(path, (1, 1))
    run.start()
    file = PlanFile(run.folder.committer.files(ROUND).path / "plan.json")
    until(lambda: (plan := file.read()) is not None and bool(plan.over), "it is overtaken")
    assert tier.shards_stored(NAMESPACE, JOB_UID, being_uploaded)


@pytest.mark.fault("Another run takes the store after a run has committed, before it deletes")
def test_a_run_that_was_overtaken_after_a_commit_deletes_nothing(make: Make) -> None:
    """Its process stood still in between. The later run may need what the first one would not keep."""
    run, other = make(), make("other")
    run.uploads.take()
    run.start()
    for step in (1, 2):
        run.uploads.committed(run.saved(step))
        until(lambda s=step: run.failed(s) is False, "it is in the store")
    run.store.then = lambda: other.store.take(RestartRound(2), has_checkpoints=False)
    run.uploads.committed(run.saved(3))
    until(lambda: run.failed(3) is False, "step 3 is in the store")
    run.uploads.finish(HANG_SECONDS)
    assert other.store.checkpoints() == {at(1), at(2), at(3)}


@pytest.mark.fault("The store is away for one rank of a folder while others upload")
def test_a_rank_learns_of_an_upload_while_its_next_one_fails(make: Make) -> None:
    run = make(rank=1, ranks=2)
    run.store.is_away = True
    plan, _ = FolderPlan().with_committed([run.saved(2)])
    queue, _ = plan.queue.requested(None, ())
    file = PlanFile(run.folder.committer.files(ROUND).path / "plan.json")
    file.write(replace(plan, queue=queue).persisted(at(1)))
    run.start()
    until(lambda: run.failed(1) is False, "the outcome of step 1")


@pytest.mark.fault("A persister is killed with checkpoints in its queue")
def test_a_persister_queues_what_the_one_before_had_not_queued(make: Make) -> None:
    """It was killed while it uploaded step 1, and the ranks may wait for each of the others."""
    before = make()
    before.uploads.take()
    for step in (1, 2, 3):
        before.saved(step)
    run = make()
    run.start()
    until(lambda: len(run.pushed) == 3, "each checkpoint has an outcome")
    assert [run.failed(step) for step in (1, 2, 3)] == [False] * 3


def test_a_checkpoint_that_is_older_than_those_of_the_store_is_not_uploaded(make: Make) -> None:
    """Retention would delete it at once."""
    other = make("other")
    other.uploads.take()
    other.start()
    for step in (2, 3, 4):
        other.uploads.committed(other.saved(step))
    until(lambda: other.failed(4) is False, "step 4 is in the store")
    run = make(round_=RestartRound(2))
    (run.root / "store").mkdir()
    (run.root / "store" / "training").write_text((other.root / "store" / "training").read_text())
    run.saved(1, round_=0)
    run.uploads.take()
    run.start()
    run.uploads.committed(run.saved(5, round_=2))
    until(lambda: run.failed(5) is False, "step 5 is in the store")
    assert run.failed(1) is None


def test_saves_that_are_not_uploaded_because_another_run_took_the_store_count_as_failed(
    tmp_path: Path,
) -> None:
    folder, objects = tmp_path / "folder", tmp_path / "objects"
    objects.mkdir()
    state = {"w": np.zeros(64)}
    with holdfast.Checkpointer(
        holdfast.Folder(folder, store=f"file://{objects}"), interval_steps=0, on_save_error="warn"
    ) as ckpt:
        assert ckpt.restore(state) is None
        ckpt.save(1, state).wait("persisted", timeout=HANG_SECONDS)
        assert ckpt.saves_failed == 0
        (marker,) = (objects / "standalone/standalone/runs").glob("r*.json")
        later = json.loads(unsealed(marker.read_bytes(), str(marker)))
        document = json.dumps({**later, "run": "another"}).encode()
        marker.with_name("r000009.json").write_bytes(sealed(document))
        lost = ckpt.save(2, state)
        with pytest.raises(SaveFailedError, match="taken the store"):
            lost.wait("persisted", timeout=HANG_SECONDS)
        assert lost.durable
        assert lost.failure is not None
        ckpt.save(3, state)
        assert ckpt.saves_failed >= 1
