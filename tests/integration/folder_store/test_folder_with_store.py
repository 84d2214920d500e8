"""Saves go to the folder and from there to the store. A restore reads from it what the folder lacks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.servers.minio_server import MinioServer
from tests.support.trainer.counted import Training

import holdfast
from holdfast_core.errors import SaveFailedError


def trained(folder: Path, url: str, *steps: int, keep_last: int = 3) -> None:
    """Restore, and train and save up to each of these steps. Each is in the store when this returns."""
    training = Training()
    with holdfast.Checkpointer(
        holdfast.Folder(folder, store=url, store_keep_last=keep_last)
    ) as ckpt:
        ckpt.restore(training.state)
        for step in steps:
            while training.done < step:
                training.step()
            ckpt.save(step, training.state).wait("persisted", timeout=HANG_SECONDS)


def restored(folder: Path, url: str | None) -> tuple[int | None, int]:
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as ckpt:
        return ckpt.restore(training.state), training.done


def manifests(minio: MinioServer, url: str) -> list[str]:
    """Return the steps and rounds that have a manifest in the store."""
    prefix = url.removeprefix(f"s3://{minio.bucket}/") + "/standalone/standalone/manifests/"
    listed = minio.admin().list_objects(minio.bucket, prefix=prefix, recursive=True)
    return [str(item.object_name).removeprefix(prefix) for item in listed]


@pytest.mark.fault("The folder is lost, or the training moves to another machine")
def test_a_lost_folder_is_restored_from_the_store(folder: Path, url: str) -> None:
    state = {"t": torch.rand(300_000), "n": 5}
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as ckpt:
        handle = ckpt.save(7, state)
        handle.wait("persisted", timeout=HANG_SECONDS)
        assert handle.level == "persisted"
    shutil.rmtree(folder)
    fresh = {"t": torch.zeros(300_000), "n": 0}
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as ckpt:
        assert ckpt.restore(fresh) == 7
    assert torch.equal(fresh["t"].view(torch.int32), state["t"].view(torch.int32))  # type: ignore[attr-defined]
    assert fresh["n"] == 5


def test_another_machine_continues_the_training(tmp_path: Path, folder: Path, url: str) -> None:
    trained(folder, url, 1, 2)
    trained(tmp_path / "other", url, 3)
    assert restored(tmp_path / "third", url) == (3, 3)
    # The first machine has an older step in its folder.
    assert restored(folder, url) == (3, 3)


def test_a_step_that_was_restored_from_the_store_counts_as_one_of_the_folder(
    tmp_path: Path, folder: Path, url: str
) -> None:
    trained(folder, url, 1)
    other = tmp_path / "other"
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(other, store=url)) as ckpt:
        ckpt.restore(training.state)
        training.step()
        ckpt.save(2, training.state).wait(timeout=HANG_SECONDS)
        assert ckpt.restore(training.state, step=1) == 1
        assert training.done == 1


def test_a_newer_step_of_the_folder_is_restored_and_then_uploaded(
    tmp_path: Path, folder: Path, url: str, minio: MinioServer
) -> None:
    trained(folder, url, 1)
    training = Training()
    with holdfast.Checkpointer(dir=folder) as ckpt:  # a run without the store
        ckpt.restore(training.state)
        training.step()
        ckpt.save(2, training.state).wait(timeout=HANG_SECONDS)
    training = Training()
    with holdfast.Checkpointer(holdfast.Folder(folder, store=url)) as ckpt:
        assert ckpt.restore(training.state) == 2
        ckpt.allocate(training.state)
    assert manifests(minio, url) == ["s000000000001/r000000.json", "s000000000002/r000001.json"]
    assert restored(tmp_path / "other", url) == (2, 2)


@pytest.mark.fault("A shard of the folder is damaged and the store has it")
def test_a_damaged_shard_of_the_folder_is_read_from_the_store(folder: Path, url: str) -> None:
    trained(folder, url, 1, 2)
    (shard,) = folder.rglob("s000000000002-*/*.shard")
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    assert restored(folder, url) == (2, 2)


@pytest.mark.fault("A manifest of the folder is damaged and the store has it")
def test_a_damaged_manifest_of_the_folder_is_replaced_before_the_first_save(
    tmp_path: Path, folder: Path
) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    trained(folder, url, 1)
    (manifest,) = (folder / "tier").rglob("manifests/*/*.json")
    manifest.write_bytes(b"{}")
    trained(folder, url, 2)
    assert restored(folder, None) == (2, 2)
    with holdfast.Checkpointer(dir=folder) as ckpt:
        assert [one.step for one in ckpt.list()] == [1, 2]
        ckpt.inspect(1).close()


def test_the_store_keeps_the_newest_checkpoints(folder: Path, url: str, minio: MinioServer) -> None:
    trained(folder, url, 1, 2, 3, 4, keep_last=2)
    assert manifests(minio, url) == ["s000000000003/r000000.json", "s000000000004/r000000.json"]
    trained(folder, url, 5, keep_last=2)
    # The restore point of the second run stays, so that it can return to it.
    assert manifests(minio, url) == ["s000000000004/r000000.json", "s000000000005/r000001.json"]


def test_looking_at_the_store_writes_nothing_to_it(
    tmp_path: Path, folder: Path, url: str, minio: MinioServer
) -> None:
    trained(folder, url, 1)

    def objects() -> list[tuple[str, object]]:
        prefix = url.removeprefix(f"s3://{minio.bucket}/")
        listed = minio.admin().list_objects(minio.bucket, prefix=prefix, recursive=True)
        return [(str(item.object_name), item.last_modified) for item in listed]

    before = objects()
    assert restored(tmp_path / "other", url) == (1, 1)
    assert objects() == before


def test_a_directory_serves_as_the_store(tmp_path: Path, folder: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    trained(folder, url, 1, 2)
    shutil.rmtree(folder)
    assert restored(folder, url) == (2, 2)


@pytest.mark.parametrize("has_store_first", [True, False])
def test_the_identity_of_a_training_comes_back_from_the_store(
    tmp_path: Path, folder: Path, has_store_first: bool
) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    with holdfast.Checkpointer(
        holdfast.Folder(folder, store=url if has_store_first else None)
    ) as ckpt:
        expected = ckpt.run_id
    trained(folder, url, 1)
    shutil.rmtree(folder)
    for machine in ("other", "third"):
        with holdfast.Checkpointer(holdfast.Folder(tmp_path / machine, store=url)) as ckpt:
            assert ckpt.run_id == expected


def test_without_a_store_no_save_is_persisted(folder: Path) -> None:
    with (
        holdfast.Checkpointer(dir=folder) as ckpt,
        pytest.raises(SaveFailedError, match=r"Folder\(store="),
    ):
        ckpt.save(1, {"t": torch.ones(3)}).wait("persisted", timeout=HANG_SECONDS)
