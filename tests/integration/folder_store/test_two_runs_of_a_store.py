"""Two runs with one prefix: the later one takes the store, and bytes of two trainings are never mixed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.counted import Training

import holdfast
from holdfast_core.errors import ConfigError, SaveFailedError


@pytest.mark.fault("A second run takes the store")
def test_a_run_that_was_overtaken_uploads_nothing_more(
    tmp_path: Path, folder: Path, url: str
) -> None:
    first, second = Training(), Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as early:
        early.restore(first.state)
        first.step()
        early.save(1, first.state).wait("persisted", timeout=HANG_SECONDS)
        with holdfast.Checkpointer(holdfast.Folder(tmp_path / "other", store=url)) as late:
            assert late.restore(second.state) == 1
            second.step()
            late.save(2, second.state).wait("persisted", timeout=HANG_SECONDS)
        first.step()
        handle = early.save(2, first.state)
        handle.wait("local", timeout=HANG_SECONDS)
        with pytest.raises(SaveFailedError, match="has taken the store since this run began"):
            handle.wait("persisted", timeout=HANG_SECONDS)
    third = Training()
    with holdfast.Checkpointer(holdfast.Folder(tmp_path / "third", store=url)) as ckpt:
        assert ckpt.restore(third.state) == 2


def test_of_two_runs_that_start_together_the_one_that_saves_first_uploads(
    tmp_path: Path, folder: Path, url: str
) -> None:
    first, second = Training(), Training()
    with (
        holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as one,
        holdfast.Checkpointer(holdfast.Folder(tmp_path / "other", store=url)) as other,
    ):
        assert one.restore(first.state) is None
        assert other.restore(second.state) is None
        one.save(1, first.state).wait("persisted", timeout=HANG_SECONDS)
        with pytest.raises(ConfigError, match="has taken the store since this run began"):
            other.allocate(second.state)


def test_a_folder_of_another_training_is_refused_before_the_first_step(
    tmp_path: Path, folder: Path, url: str
) -> None:
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as ckpt:
        ckpt.save(1, training.state).wait("persisted", timeout=HANG_SECONDS)
    foreign = tmp_path / "foreign"
    with holdfast.Checkpointer(dir=foreign) as ckpt:
        ckpt.save(5, training.state).wait(timeout=HANG_SECONDS)
    with pytest.raises(ConfigError, match="choose another prefix"):
        holdfast.Checkpointer(holdfast.Folder(foreign, store=url)).open()


def test_a_run_of_the_same_folder_takes_over_after_a_rollback(folder: Path, url: str) -> None:
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as ckpt:
        for step in (1, 2):
            training.step()
            ckpt.save(step, training.state).wait("persisted", timeout=HANG_SECONDS)
        assert ckpt.restore(training.state, step=1) == 1
        training.step()
        ckpt.save(2, training.state).wait("persisted", timeout=HANG_SECONDS)
    fresh = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder.with_name("other"), store=url)) as ckpt:
        assert ckpt.restore(fresh.state) == 2
