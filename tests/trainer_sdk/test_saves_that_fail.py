"""A save that fails is counted, logged and reported. Later saves succeed, and `close` ends."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import zygote
from tests.support.crash.failpoints import failpoints, in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.shards.builders import payload, rank_layout_and_plan
from tests.support.trainer.launched import committed_step, persisters_of, until
from tests.support.trainer.slot_files import all_taken, states_below
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast.directory.open_folder import ServiceOptions
from holdfast.directory.persister import DirectoryService
from holdfast.slots.staging import SlotRing
from holdfast_core.errors import NotFoundError, SaveFailedError
from holdfast_core.format.canonical import digest_of
from holdfast_core.ids import Level, Rank, Step
from holdfast_core.messages.schema import Policy, Refusal, Stage
from holdfast_core.node.files import TEMP_PREFIX
from holdfast_core.shm.shared_files import LayoutFiles
from holdfast_core.shm.slot_file import SlotState

LAYOUT, PLAN = rank_layout_and_plan(rank=0, world_size=1, rows_per_rank=100)
SIZE = PLAN.total_bytes


class Writer:
    """A DirectoryService with one rank, in this process."""

    def __init__(self, directory: Path) -> None:
        self.ended: list[BaseException] = []
        self.folder_losses = 0
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        slots = directory / "slots"
        policy = Policy(interval_steps=1, keep_last=3)
        self.service = DirectoryService.start(
            ServiceOptions(directory / "ckpt", slots, directory / "layouts", 1, range(1), policy),
            self.ended.append,
            self._folder_lost,
        )
        LayoutFiles(directory / "layouts").ensure(LAYOUT, digest_of(LAYOUT))
        self.ring = SlotRing(slots, Rank(0), 2)
        self.ring.ensure(SIZE, self.service.round)

    def _folder_lost(self) -> None:
        self.folder_losses += 1

    def stage(self, step: int, push: Callable[[Any], None] | None = None) -> None:
        slot = self.ring.acquire(HANG_SECONDS)
        assert slot is not None, "no slot is free any more"
        round_ = self.service.round
        slot.begin(round_, Step(step), SIZE)
        slot.payload[:SIZE] = list(payload(SIZE, seed=step))
        slot.complete()
        message = Stage(round_, Step(step), Rank(0), slot.name, SIZE, digest_of(LAYOUT))
        self.service.handle(message, push or self.said.put)

    def outcome(self, step: int) -> str:
        """Return "committed", or the reason why the step was not committed."""
        while True:
            message = self.said.get(timeout=HANG_SECONDS)
            if not message.failed and message.level is Level.LOCAL:
                assert message.step == step
                return "committed"
            if message.failed and message.level is Level.LOCAL:
                assert message.step == step
                return f"{message.reason}: {message.message}"


@pytest.mark.fault("The folder's writer thread raises an exception that no code expects")
@pytest.mark.parametrize("kind", ["MemoryError", "ValueError", "OSError", "SystemExit"])
@pytest.mark.parametrize(
    "where",
    [
        "node.before_fsync",
        "node.after_rename",
        "directory.slot_freed",
        "directory.before_commit",
        "node.before_tombstone",
    ],
)
def test_an_exception_of_the_writer_is_a_failed_save(
    tmp_path: Path, where: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(tmp_path)
    for step in (1, 2, 3):
        writer.stage(step)
        assert writer.outcome(step) == "committed"
    with failpoints(f"{where}=raise:{kind}"):
        writer.stage(4)
        # A failure of the pruning after a commit does not change the commit.
        pruning = where == "node.before_tombstone"
        assert ("committed" if pruning else f"failpoint {where}") in writer.outcome(4)
        writer.service.write_out()
    for step in (5, 6, 7):  # more saves than slots
        writer.stage(step)
        assert writer.outcome(step) == "committed"
    writer.service.finish(HANG_SECONDS)
    assert not writer.ended
    assert where in caplog.text


@pytest.mark.fault("A callback to the trainer raises in the folder's writer thread")
def test_a_callback_that_raises_does_not_end_the_writer(tmp_path: Path) -> None:
    def broken(message: Any) -> None:
        raise SystemExit("the trainer has no connection")

    writer = Writer(tmp_path)
    for step in (1, 2, 3):
        writer.stage(step, broken)
    writer.stage(4)
    assert writer.outcome(4) == "committed"
    assert writer.service.finish(HANG_SECONDS)


@pytest.mark.fault("A cleaner removes the layouts and not the slots")
def test_a_layout_that_was_removed_fails_its_save_alone(tmp_path: Path) -> None:
    """A program that cleans shared memory by age removes layouts, which are written once, but not slots.
    If the failure counted as a lost folder, it would end each new writer process."""
    writer = Writer(tmp_path)
    for path in (tmp_path / "layouts").iterdir():
        path.unlink()
    with pytest.raises(NotFoundError, match="layout"):
        writer.stage(1)
    assert writer.folder_losses == 0
    LayoutFiles(tmp_path / "layouts").ensure(LAYOUT, digest_of(LAYOUT))
    writer.stage(2)
    assert writer.outcome(2) == "committed"


def test_the_exit_status_of_the_persister_shows_a_failed_save(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    with failpoints("directory.write_shard=raise:MemoryError"):
        writer.stage(1)
        assert "MemoryError" in writer.outcome(1)
    assert not writer.service.finish(HANG_SECONDS)


@pytest.fixture
def go(tmp_path: Path) -> Path:
    return tmp_path / "go"


def in_writers(monkeypatch: pytest.MonkeyPatch, directory: Path, rules: str) -> None:
    """Set the rules for the writer processes that this test starts."""
    for name, value in in_every_python(directory, rules).items():
        monkeypatch.setenv(name, value)


def writer_of(folder: Path) -> int:
    (pid,) = persisters_of(os.getpid(), folder)
    return pid


@pytest.mark.fault("The folder's writer is killed at any point of a save")
@pytest.mark.parametrize(
    "where",
    ["node.before_fsync", "node.after_rename", "directory.slot_freed", "directory.before_commit"],
)
def test_a_killed_persister_loses_no_save(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, go: Path, where: str
) -> None:
    """The writer waits at `where` when it is killed. The next writer completes its save."""
    folder = tmp_path / "ckpt"
    in_writers(monkeypatch, tmp_path, f"{where}=wait:{go}")
    go.touch()
    with holdfast.Checkpointer(dir=folder, on_save_error="raise") as ckpt:
        ckpt.save(1, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)
        go.unlink()
        handle = ckpt.save(2, {"t": torch.full((4,), 2.0)})
        until(lambda: all_taken(memory), "the writer has it")
        if where in ("directory.slot_freed", "directory.before_commit"):
            until(lambda: states_below(memory) == [SlotState.FREE] * 2, "freed")
        os.kill(writer_of(folder), signal.SIGKILL)
        go.touch()
        handle.wait(timeout=HANG_SECONDS)
    assert ckpt.saves_failed == 0
    assert ckpt.last_committed_step == committed_step(folder) == 2


@pytest.mark.fault("The folder's writer cannot be started again before the end")
def test_a_writer_that_cannot_come_back_does_not_hang_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go: Path
) -> None:
    """Without the count of lost connections, `close` would wait until this test has failed."""
    monkeypatch.setattr("holdfast.places.folder._SETTLE_SECONDS", 2 * HANG_SECONDS)
    folder = tmp_path / "ckpt"
    in_writers(monkeypatch, tmp_path, f"node.before_fsync=wait:{go}")
    go.touch()
    ckpt = holdfast.Checkpointer(dir=folder, on_save_error="raise")
    ckpt.save(1, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)
    go.unlink()
    ckpt.save(2, {"t": torch.ones(4)})
    until(
        lambda: bool(list(folder.rglob(f"{TEMP_PREFIX}*"))), "the file of step 2 is being written"
    )
    folder.rename(tmp_path / "away")
    folder.write_text("not a folder any more")
    os.kill(writer_of(folder), signal.SIGKILL)
    with pytest.raises(SaveFailedError, match="step 2: not durable yet"):
        ckpt.close()
    assert ckpt.saves_failed == 1
    assert ckpt.last_committed_step == 1


FULL = "directory.write_shard=err"


@pytest.mark.fault("The last save fails after `save` returned")
@pytest.mark.parametrize("how", ["warn", "raise"])
def test_the_last_save_is_counted_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: Any
) -> None:
    """The disk fails after `save` has returned, and no later save reports that."""
    in_writers(monkeypatch, tmp_path, FULL)
    ckpt = holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=2, on_save_error=how)

    def train() -> None:
        with ckpt:
            for _ in ckpt.steps(3, {"t": torch.ones(4)}):
                pass

    if how == "raise":
        with pytest.raises(SaveFailedError):
            train()
    else:
        train()
        assert "did not become durable, the newest is step 3" in caplog.text
    assert ckpt.saves_failed == (2 if how == "warn" else ckpt.saves_failed)
    assert ckpt.saves_failed >= 1
    assert ckpt.last_committed_step is None
    assert committed_step(tmp_path / "ckpt") == 0


@pytest.mark.fault('A script with on_save_error="raise" ends after a failed save')
def test_a_script_that_asked_for_errors_ends_with_one(tmp_path: Path) -> None:
    """The script runs as a program, because a batch system sees only the exit status."""
    program = (
        "import sys, numpy as np, holdfast\n"
        "with holdfast.Checkpointer(dir=sys.argv[1], on_save_error=sys.argv[2]) as ckpt:\n"
        "    ckpt.save(1, {'t': np.ones(4)})\n"
    )
    ended = {
        how: zygote.run(
            [sys.executable, "-c", program, str(tmp_path / how), how],
            env={**os.environ, **in_every_python(tmp_path, FULL)},
            capture_output=True,
            text=True,
            check=False,
        )
        for how in ("warn", "raise")
    }
    assert ended["warn"].returncode == 0
    assert "did not become durable" in ended["warn"].stderr
    assert ended["raise"].returncode == 1
    assert "SaveFailedError" in ended["raise"].stderr


@pytest.mark.fault("A step is saved twice before the first is durable")
def test_a_step_that_is_saved_twice_is_durable_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go: Path
) -> None:
    """Some scripts save at the interval and once more after the loop."""
    in_writers(monkeypatch, tmp_path, f"directory.write_shard=wait:{go}")
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", on_save_error="raise") as ckpt:
        handles = [ckpt.save(1, {"t": torch.ones(4)}) for _ in range(2)]
        go.touch()
        for handle in handles:
            handle.wait(timeout=HANG_SECONDS)
    assert ckpt.saves_failed == 0


@pytest.mark.fault("A step is saved again with other bytes, in a folder")
def test_a_step_that_is_saved_again_with_other_bytes_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go: Path
) -> None:
    """This holds during and after the first save, because a level names only the step."""
    in_writers(monkeypatch, tmp_path, f"directory.write_shard=wait:{go}")
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        first = ckpt.save(1, {"t": torch.ones(4)})
        others = [ckpt.save(1, {"t": torch.zeros(4)})]
        go.touch()
        first.wait(timeout=HANG_SECONDS)
        others.append(ckpt.save(1, {"t": torch.zeros(4)}))
        for other in others:
            with pytest.raises(SaveFailedError, match="has saved step 1 with other bytes before"):
                other.wait(timeout=HANG_SECONDS)
            assert not other.durable
        again = ckpt.save(1, {"t": torch.ones(4)})
        again.wait(timeout=HANG_SECONDS)
        for step in (2, 3):  # the slots are free again
            ckpt.save(step, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        state = {"t": torch.zeros(4)}
        assert ckpt.restore(state, step=1) == 1
        assert state["t"].tolist() == [1.0] * 4


@pytest.mark.fault("An exception ends a script while a save is written")
def test_a_save_that_is_still_written_when_an_exception_ends_the_script_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_writers(monkeypatch, tmp_path, f"directory.write_shard=wait:{go}")
    ckpt = holdfast.Checkpointer(dir=tmp_path / "ckpt")
    with pytest.raises(ZeroDivisionError), ckpt:
        ckpt.save(1, {"t": torch.ones(4)})
        1 / 0  # noqa: B018
    assert ckpt.saves_failed == 0
    assert "did not become durable" not in caplog.text
    go.touch()
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as again:
        assert again.restore({"t": torch.zeros(4)}) == 1


@pytest.mark.fault("A script raises an exception after a failed save")
def test_an_exception_of_the_script_is_not_hidden_by_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_writers(monkeypatch, tmp_path, FULL)
    ckpt = holdfast.Checkpointer(dir=tmp_path / "ckpt", on_save_error="raise")
    with pytest.raises(ZeroDivisionError), ckpt:
        handle = ckpt.save(1, {"t": torch.ones(4)})
        with pytest.raises(SaveFailedError):
            handle.wait(timeout=HANG_SECONDS)
        1 / 0  # noqa: B018
    assert ckpt.saves_failed == 1


@pytest.mark.fault("In a pod, the sidecar refuses the last save")
def test_in_a_pod_only_saves_that_the_sidecar_did_not_acknowledge_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WatchedSidecar(tmp_path / "shared", tmp_path / "node") as sidecar:
        for name, value in sidecar.environment(HOLDFAST_ROUND="0").items():
            monkeypatch.setenv(name, value)
        with holdfast.Checkpointer() as ckpt:
            ckpt.save(1, {"t": torch.ones(4)})
        assert ckpt.saves_failed == 0
        sidecar.faults.refuse["Stage"] = Refusal.SEALED
        with (
            pytest.raises(SaveFailedError, match="step 2: Sealed"),
            holdfast.Checkpointer(on_save_error="raise") as ckpt,
        ):
            ckpt.save(2, {"t": torch.ones(4)})
        assert ckpt.saves_failed == 1
