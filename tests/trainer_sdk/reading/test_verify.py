"""`holdfast verify` on a store in a directory and on a folder: exit codes and texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.support.shards.shard_files import flip_bit
from tests.support.tiers.stored_checkpoints import store_step, values

import holdfast
from holdfast.__main__ import main
from holdfast_core.store.directory import DirectoryObjectStore
from holdfast_core.store.tier import ObjectTier


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A store with the steps 1 and 2 of one job."""
    root = tmp_path / "store"
    root.mkdir()
    with closing(ObjectTier(DirectoryObjectStore(root))) as tier:
        first = store_step(tier, tmp_path, 1, values(1))
        second = store_step(
            tier, tmp_path, 2, {**values(2), "whole": values(1)["whole"]}, base=first
        )
    yield root
    first.close()
    second.close()


def pack_of(store: Path, step: int, rank: int) -> Path:
    (found,) = store.glob(f"*/*/shards/s{step:012d}-r000000/rank{rank:06d}-*.pack")
    return found


def test_the_newest_step_is_read(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(store)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"step 2 of {store}: read 1.3 MiB in ")
    assert out.endswith("Intact: every byte matches its digest\n")


def test_the_state_is_assembled(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{store}@1", "--restore", "--world-size", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 1 of ")
    assert "assembled for 3 ranks: equal\n" in out


def test_another_number_of_ranks_is_chosen_without_one(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(store), "--restore"]) == 0
    assert "assembled for 2 ranks: equal\n" in capsys.readouterr().out


def test_damage_is_listed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_bit(pack_of(store, 2, 1), 100)
    pack_of(store, 1, 0).unlink()
    assert main(["verify", str(store)]) == 3
    out = capsys.readouterr().out
    assert "Damaged: " in out
    assert "  shard of rank 1: WrongBytes: " in out
    assert "  shard of rank 0: " in out


@pytest.mark.parametrize(
    ("step", "words", "status", "text"),
    [
        ("@9", [], 5, "expected step 9, found the steps 1, 2"),
        ("", ["--world-size", "2"], 2, "--world-size is the number of ranks of --restore"),
        ("", ["--restore", "--world-size", "4097"], 2, "expected 1 to 4096 ranks"),
    ],
)
def test_a_wrong_request(
    store: Path,
    capsys: pytest.CaptureFixture[str],
    step: str,
    words: list[str],
    status: int,
    text: str,
) -> None:
    assert main(["verify", f"{store}{step}", *words]) == status
    assert text in capsys.readouterr().err


def test_a_folder_of_a_checkpointer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ckpt"
    state = {"model": {"weight": torch.arange(300_000), "bias": torch.ones(7)}, "epoch": 3}
    with holdfast.Checkpointer(dir=folder, interval_steps=0) as ckpt:
        ckpt.save(5, state).wait()
    assert main(["verify", str(folder), "--restore", "--world-size", "2"]) == 0
    assert "assembled for 2 ranks: equal\n" in capsys.readouterr().out
    (shard,) = folder.glob("tier/**/*.shard")
    flip_bit(shard, 100_000)
    assert main(["verify", str(folder)]) == 3
    assert "  shard of rank 0: WrongBytes: " in capsys.readouterr().out
    assert shard.exists(), "nothing is moved to the quarantine"
    shard.unlink()
    assert main(["verify", str(folder)]) == 3
    assert "  shard of rank 0: Missing: " in capsys.readouterr().out


def test_an_empty_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "expected a folder in which a Checkpointer has saved" in capsys.readouterr().err
