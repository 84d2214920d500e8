"""A run that starts waits for the persisters of trainers that have ended, and for no other process."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import resource
import threading
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import until

from holdfast.directory.processes import (
    Claim,
    Process,
    claim,
    holder,
    is_held,
    remove_if_free,
    wait_for_writers,
)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path / "processes", "rank000000-1")


def test_an_unused_directory_has_no_writers_to_wait_for(tmp_path: Path) -> None:
    wait_for_writers(tmp_path / "processes")


def test_a_writer_without_its_trainer_is_waited_for(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, writer = Claim(process.trainer), Claim(process.writer)
    trainer.release()
    waiting = threading.Thread(target=wait_for_writers, args=(process.directory,))
    waiting.start()
    until(lambda: "waiting for process" in caplog.text, "it says so")
    assert waiting.is_alive()
    writer.release()
    waiting.join(HANG_SECONDS)
    assert not waiting.is_alive()
    assert caplog.text.count("waiting for process") == 1
    assert not process.directory.exists()


def test_a_live_trainer_is_not_waited_for(process: Process) -> None:
    with_trainer = [Claim(process.trainer), Claim(process.writer)]
    wait_for_writers(process.directory)
    assert process.trainer.exists() and process.writer.exists()
    for held in with_trainer:
        held.release()


def test_the_wait_for_a_writer_that_never_ends_has_a_limit(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Claim(process.writer)
    wait_for_writers(process.directory, longest_seconds=0.0)
    assert "starting from the newest committed checkpoint" in caplog.text
    assert process.writer.exists()
    writer.release()


def test_leftovers_of_a_killed_process_are_removed(process: Process) -> None:
    process.directory.mkdir()
    process.trainer.write_text("process 1 on here")
    process.writer.write_text("process 2 on here")
    wait_for_writers(process.directory)
    assert not process.directory.exists()


def test_a_lock_file_that_is_removed_while_locked_is_created_again(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(process.writer)
            process.writer.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    held = Claim(process.writer)
    assert removed and process.writer.exists()
    held.release()


def test_a_file_system_without_locks_causes_no_wait(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert claim(process.writer) is None
    assert list(process.directory.iterdir()) == []
    process.writer.touch()
    wait_for_writers(process.directory)


@pytest.mark.fault(
    "A network file system refuses a lock that another process holds, by another error"
)
def test_the_lock_file_of_another_process_is_not_removed(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third process would create it again, and both would write."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    held = Claim(process.writer)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        assert claim(process.writer) is None
        assert not remove_if_free(process.writer)
    assert is_held(process.writer)
    held.release()


@pytest.mark.fault("A folder is a symbolic link whose target is away")
@pytest.mark.parametrize("name", ["training.lock", "processes/rank000000"])
def test_a_lock_below_a_link_without_a_target_is_an_error(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "ckpt"
    folder.symlink_to(tmp_path / "unmounted")
    with pytest.raises(FileExistsError, match="ckpt"):
        Claim(folder / name)


def test_a_forked_child_does_not_keep_its_parents_lock(process: Process) -> None:
    """The child is a data loader's worker that survives when its trainer is killed."""
    held = Claim(process.trainer)
    begun, end = multiprocessing.Event(), multiprocessing.Event()

    def work() -> None:
        begun.set()
        end.wait(HANG_SECONDS)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    assert begun.wait(HANG_SECONDS)
    held.forget()  # the end of this process has the same effect
    try:
        assert not is_held(process.trainer)
    finally:
        end.set()
        child.join()


def test_an_unreferenced_claim_releases_its_lock(process: Process) -> None:
    held = Claim(process.trainer)
    assert is_held(process.trainer)
    del held
    assert not is_held(process.trainer)


@pytest.mark.fault("The disk of a folder is full when a process locks a file in it")
def test_a_lock_on_a_full_disk_is_held(process: Process) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        held = Claim(process.writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert holder(process.writer) == "another process"
    held.release()
    assert not is_held(process.writer)
