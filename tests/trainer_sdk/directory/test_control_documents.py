"""Damage to a small document that decides about checkpoints refuses none of them, and accuses nobody."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast_core.errors import ConfigError

Damage = Callable[[Path], None]


def empty(path: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def one_digit(path: Path) -> None:
    """Change a digit of the first identity in the document: it stays a valid document."""
    data = path.read_bytes()
    place = next(
        i for i in range(len(data)) if all(c in b"0123456789abcdef" for c in data[i : i + 16])
    )
    path.write_bytes(
        data[:place] + (b"1" if data[place : place + 1] != b"1" else b"2") + data[place + 1 :]
    )


def not_utf8(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" + path.read_bytes()[2:])


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [empty, cut, one_digit, not_utf8, directory, Path.unlink]


class Training:
    """A training whose folder has a store. Each run saves one step."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.store = tmp_path / "folder", tmp_path / "store"
        self.store.mkdir(exist_ok=True)

    def run(self, step: int, meanwhile: Callable[[], object] = lambda: None) -> int | None:
        """Restore, save `step` and wait until it is in the store. Return what was restored."""
        own = {"w": np.zeros(64), "n": 0}
        with holdfast.Checkpointer(
            holdfast.Folder(self.folder, store=f"file://{self.store}"), interval_steps=0
        ) as ckpt:
            restored = ckpt.restore(own)
            ckpt.save(step, {"w": np.full(64, float(step)), "n": step}).wait("persisted")
            meanwhile()
            after = ckpt.save(step + 1, {"w": np.full(64, step + 1.0), "n": step + 1})
            after.wait("persisted")
        assert own["n"] == (restored or 0)
        return restored

    @property
    def marker(self) -> Path:
        return max((self.store / "standalone/standalone/runs").glob("r*.json"))

    @property
    def record(self) -> Path:
        return self.folder / "store" / "training"


@pytest.mark.fault(
    "The marker of a run in the store, or the record of its training in the folder, is damaged or "
    "missing"
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_marker_of_an_ended_run_refuses_no_start(
    tmp_path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    training.run(1)
    damage(training.marker)
    assert training.run(3) == 2
    assert training.run(5) == 4
    assert holdfast.open(f"file://{training.store}").steps()[-1] == 6


@pytest.mark.fault(
    "The marker of a run in the store, or the record of its training in the folder, is damaged or "
    "missing"
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_the_own_marker_stops_no_uploads(tmp_path: Path, damage: Damage) -> None:
    training = Training(tmp_path)
    training.run(1, meanwhile=lambda: damage(training.marker))
    assert holdfast.open(f"file://{training.store}").steps() == (1, 2)


@pytest.mark.fault(
    "The marker of a run in the store, or the record of its training in the folder, is damaged or "
    "missing"
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_of_the_training_accuses_nobody(tmp_path: Path, damage: Damage) -> None:
    training = Training(tmp_path)
    training.run(1)
    damage(training.record)
    assert training.run(3) == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_empty_folder_continues_a_store_with_a_damaged_marker(
    tmp_path: Path, damage: Damage
) -> None:
    training = Training(tmp_path)
    training.run(1)
    damage(training.marker)
    training.folder.rename(tmp_path / "lost")
    assert training.run(3) == 2


def test_another_training_is_still_refused(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.run(1)
    other = Training(tmp_path)
    other.folder = tmp_path / "other"
    with holdfast.Checkpointer(dir=other.folder, interval_steps=0) as ckpt:
        ckpt.restore({"w": np.zeros(64), "n": 0})
        ckpt.save(9, {"w": np.zeros(64), "n": 9}).wait("local")
    with pytest.raises(ConfigError, match="training"):
        other.run(10)


@pytest.mark.parametrize("damage", [empty, cut, one_digit, not_utf8])
def test_a_damaged_identity_is_named(
    tmp_path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    training = Training(tmp_path)
    training.run(1)
    damage(training.folder / "run-id")
    assert training.run(3) == 2
