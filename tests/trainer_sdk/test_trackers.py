"""What an experiment tracker needs: an identity that survives restarts, and the step that was restored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.crash.failpoints import failpoints
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.counted import Training, lap
from tests.support.trainer.launched import run_two_ranks
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast_core.errors import ConfigError


def test_a_folder_keeps_its_identity(tmp_path: Path) -> None:
    found = []
    for steps in (2, 4):
        training = Training()
        with holdfast.Checkpointer(dir=tmp_path / "ckpt", when_busy="wait") as ckpt:
            found.append(ckpt.run_id)
            assert ckpt.restored_step is None
            list(lap(ckpt, training, steps))
            assert ckpt.restored_step == (None if steps == 2 else 2)
    with holdfast.Checkpointer(dir=tmp_path / "other") as ckpt:
        found.append(ckpt.run_id)
    assert found[0] == found[1] != found[2]


def test_the_restored_step_is_that_of_the_last_restore(tmp_path: Path) -> None:
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(tmp_path, keep_last=9)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, training.state).wait(timeout=HANG_SECONDS)
        assert ckpt.restored_step is None
        ckpt.restore(training.state, step=2)
        assert ckpt.restored_step == 2
    assert ckpt.restored_step == 2


def test_a_job_has_the_identity_of_its_object(sidecar: WatchedSidecar) -> None:
    with holdfast.Checkpointer() as ckpt:
        assert ckpt.run_id == "fake-job"


def test_a_training_that_uses_no_tracker_does_not_need_an_identity(tmp_path: Path) -> None:
    training = Training()
    (tmp_path / "run-id").write_text("damaged")
    with holdfast.Checkpointer(dir=tmp_path, when_busy="wait") as ckpt:
        assert list(lap(ckpt, training, 2)) == [0, 1]
        with pytest.raises(ConfigError, match="run-id: expected 16"):
            _ = ckpt.run_id
    with (
        failpoints("node.before_temp=err"),
        holdfast.Checkpointer(dir=tmp_path / "new") as ckpt,
        pytest.raises(ConfigError, match="run-id"),
    ):
        _ = ckpt.run_id


def test_a_copied_folder_keeps_its_identity(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "one") as ckpt:
        expected = ckpt.run_id
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    with holdfast.Checkpointer(dir=tmp_path / "other") as ckpt:
        assert ckpt.run_id == expected


def test_all_ranks_have_the_same_identity(tmp_path: Path) -> None:
    program = (
        "import sys, holdfast\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "with holdfast.Checkpointer(dir=sys.argv[1]) as ckpt:\n"
        "    found = [None, None]\n"
        "    dist.all_gather_object(found, (ckpt.run_id, ckpt.restore({'n': 0}), ckpt.restored_step))\n"
        "    assert found[0] == found[1], found\n"
        "    print('found', *found[0])\n"
    )
    output = run_two_ranks(program, tmp_path)
    kept = (tmp_path / "ckpt" / "run-id").read_text().strip()
    assert f"found {kept} None None" in output
