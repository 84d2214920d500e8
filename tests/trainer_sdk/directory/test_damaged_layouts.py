"""All steps of a training share one layout: damage to it is found and repaired by the next save."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast_core.format.canonical import digest_of

Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def misdirected(path: Path) -> None:
    document = b"{}"
    path.write_bytes(document + f"\n{digest_of(document)}\n".encode())


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def layout_of(root: Path) -> Path:
    (path,) = (root / "tier/layouts").glob("*.json")
    return path


@pytest.mark.fault("The layout that all steps share is damaged")
@pytest.mark.parametrize("damage", [flip, cut, misdirected, link, directory, Path.unlink])
def test_the_next_save_repairs_a_damaged_layout(tmp_path: Path, damage: Damage) -> None:
    root = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=root, interval_steps=0) as ckpt:
        ckpt.restore({"w": np.zeros(8), "n": 0})
        for step in range(1, 4):
            if step == 2:
                damage(layout_of(root))
            ckpt.save(step, {"w": np.full(8, float(step)), "n": step}).wait("local")
    with holdfast.open(root) as saved:
        assert saved.steps() == (1, 2, 3)
        for step in saved.steps():
            with saved.at(step) as one:
                assert (np.asarray(one.tensors()["w"]) == float(step)).all()


def test_a_layout_that_is_damaged_between_two_runs_is_repaired(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    for step in (1, 2):
        with holdfast.Checkpointer(dir=root, interval_steps=0) as ckpt:
            assert ckpt.restore({"w": np.zeros(8)}) == (step - 1 or None)
            ckpt.save(step, {"w": np.full(8, float(step))}).wait("local")
        misdirected(layout_of(root)) if step == 1 else None
    with holdfast.open(root) as saved, saved.at(1) as one:
        assert (np.asarray(one.tensors()["w"]) == 1.0).all()
