"""A script lists, inspects and deletes the checkpoints of a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.support import zygote
from tests.support.crash.failpoints import PANIC_EXIT_CODE
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import write_checkpoint
from tests.support.shards.placements import Tensor
from tests.support.trainer.watched_sidecar import WatchedSidecar

import holdfast
from holdfast.base.settings import current_environment
from holdfast_core.errors import ConfigError, NotFoundError

WEIGHT = torch.arange(12, dtype=torch.float32)
ROOT = Path(__file__).resolve().parents[2]


def save(folder: Path, *steps: int) -> holdfast.Checkpointer:
    """Save some steps and return the open Checkpointer."""
    ckpt = holdfast.Checkpointer(holdfast.Folder(folder, keep_last=9), when_busy="wait")
    for step in steps:
        ckpt.save(step, {"weight": WEIGHT + step}).wait(timeout=HANG_SECONDS)
    return ckpt


def shards_of(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.rglob("*.shard"))


def test_a_listing_has_every_committed_step_in_the_order_of_restores(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(12)}
    with holdfast.Checkpointer(holdfast.Folder(tmp_path, keep_last=9)) as ckpt:
        ckpt.restore(state)
        for step in (1, 2, 3):
            ckpt.save(step, state).wait(timeout=HANG_SECONDS)
        ckpt.restore(state, step=1)
        ckpt.save(2, state).wait(timeout=HANG_SECONDS)
        assert ckpt.list() == ((1, 0), (2, 0), (3, 0), (2, 1))
        assert ckpt.inspect().round == 1
        assert ckpt.inspect(3).round == 0
        assert torch.equal(ckpt.inspect(3).tensors()["weight"].read(), torch.zeros(12))
        with pytest.raises(NotFoundError, match="expected step 7, found steps 1, 2, 3"):
            ckpt.inspect(7)


def test_a_folder_without_checkpoints_has_an_empty_list(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        assert ckpt.list() == ()
        assert ckpt.delete(1) is False


def test_a_deleted_step_and_its_shards_are_gone(tmp_path: Path) -> None:
    with save(tmp_path, 1, 2, 3) as ckpt:
        assert ckpt.delete(2) is True
        assert ckpt.delete(2) is False
        assert [one.step for one in ckpt.list()] == [1, 3]
        assert shards_of(tmp_path / "tier/standalone") == [
            "s000000000001-r000000",
            "s000000000003-r000000",
        ]
        # The run goes on, and saves the step again.
        ckpt.save(4, {"weight": WEIGHT}).wait(timeout=HANG_SECONDS)
        assert [one.step for one in ckpt.list()] == [1, 3, 4]


def test_the_newest_checkpoint_is_deleted_only_on_request(tmp_path: Path) -> None:
    save(tmp_path, 1, 2).close()
    ckpt = holdfast.Checkpointer(tmp_path)
    with pytest.raises(ConfigError, match=r"step 2 .* is the newest.*even_last=True"):
        ckpt.delete(2)
    assert ckpt.delete(2, even_last=True)
    assert ckpt.delete(1, even_last=True)
    assert ckpt.list() == ()


def test_the_newest_checkpoint_of_a_running_training_is_never_deleted(tmp_path: Path) -> None:
    with save(tmp_path, 1, 2) as training:
        for ckpt in (training, holdfast.Checkpointer(tmp_path)):
            with pytest.raises(
                ConfigError, match=r"step 2 .* newest checkpoint of a running training"
            ):
                ckpt.delete(2, even_last=True)
            assert [one.step for one in ckpt.list()] == [1, 2]


def test_the_checkpoint_that_a_run_was_restored_from_is_not_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1, 2).close()
    with holdfast.Checkpointer(holdfast.Folder(tmp_path, keep_last=9)) as training:
        assert training.restore({"weight": torch.zeros(12)}) == 2
        training.save(3, {"weight": WEIGHT}).wait(timeout=HANG_SECONDS)
        other = holdfast.Checkpointer(tmp_path)
        for ckpt in (training, other):
            with pytest.raises(
                ConfigError, match=r"step 2 in .* is in use: a training was restored"
            ):
                ckpt.delete(2, even_last=True)
        assert other.delete(1)
    assert other.delete(2)
    assert [one.step for one in other.list()] == [3]


def test_a_checkpoint_that_a_process_reads_is_not_deleted(tmp_path: Path) -> None:
    with save(tmp_path, 1, 2) as ckpt:
        with holdfast.open(tmp_path) as folder, folder.at(1) as saved:
            with pytest.raises(ConfigError, match="in use"):
                ckpt.delete(1)
            assert torch.equal(saved.tensors()["weight"].read(), WEIGHT + 1)
        assert ckpt.delete(1)


def test_all_histories_of_a_step_are_deleted(tmp_path: Path) -> None:
    whole = {"w": (Tensor("F32", (12,), [0]), WEIGHT.numpy())}
    for step, round_ in ((4, 0), (5, 0), (5, 1), (6, 1)):
        write_checkpoint(tmp_path, whole, [2], step=step, round=round_)
    assert holdfast.Checkpointer(tmp_path).delete(5)
    with holdfast.open(tmp_path) as folder:
        assert folder.list() == ((4, 0), (6, 1))


@pytest.mark.fault("A process dies within `Checkpointer.delete`")
@pytest.mark.parametrize(
    ("where", "steps"),
    [
        ("node.before_tombstone", [1, 2, 3]),
        ("node.after_tombstone", [1, 3]),
        ("node.before_delete", [1, 3]),
    ],
)
def test_a_kill_leaves_the_checkpoint_whole_or_absent_and_the_next_save_clears_the_rest(
    tmp_path: Path, where: str, steps: list[int]
) -> None:
    folder = tmp_path / "ckpt"
    save(folder, 1, 2, 3).close()
    program = (
        "import holdfast\n"
        "from tests.support.crash.failpoints import failpoints\n"
        f"with failpoints('{where}=panic'):\n"
        f"    holdfast.Checkpointer({str(folder)!r}).delete(2)\n"
    )
    ended = zygote.run([sys.executable, "-c", program], cwd=ROOT, env=current_environment())
    assert ended.returncode == PANIC_EXIT_CODE
    with holdfast.open(folder) as opened:
        assert list(opened.steps()) == steps
        for step in steps:
            assert torch.equal(opened.at(step).tensors()["weight"].read(), WEIGHT + step)
    with holdfast.Checkpointer(holdfast.Folder(folder, keep_last=9)) as ckpt:
        assert ckpt.restore({"weight": torch.zeros(12)}) == 3
        ckpt.save(4, {"weight": WEIGHT}).wait(timeout=HANG_SECONDS)
    assert len(shards_of(folder / "tier/standalone")) == len(steps) + 1


def test_in_a_pod_the_operator_manages_checkpoints(sidecar: WatchedSidecar) -> None:
    with holdfast.Checkpointer() as ckpt:
        for call in (ckpt.list, ckpt.inspect, lambda: ckpt.delete(1)):
            with pytest.raises(ConfigError, match=r"in a worker pod.*kubectl get checkpoints"):
                call()


@pytest.mark.parametrize("step", [-1, "2", None, 1.5])
def test_a_value_that_is_not_a_step_deletes_nothing(tmp_path: Path, step: object) -> None:
    with save(tmp_path, 1, 2) as ckpt:
        with pytest.raises(ConfigError, match=r"delete\(step\): expected"):
            ckpt.delete(step)  # type: ignore[arg-type]
        assert [one.step for one in ckpt.list()] == [1, 2]
