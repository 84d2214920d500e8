"""Which training `holdfast.open` finds in a folder, and in a directory that serves as a store of jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.hang import HANG_SECONDS

import holdfast
from holdfast_core.errors import ConfigError


def stored(store: Path, job: str, step: int) -> Path:
    """Let the store list a checkpoint of a job. Nothing reads its manifest."""
    folder = store / job / f"manifests/s{step:012d}"
    folder.mkdir(parents=True)
    (folder / "r000000.json").write_text("{}")
    return store / job


def steps(place: Path) -> tuple[int, ...]:
    with holdfast.open(place) as found:
        return found.steps()


@pytest.mark.fault("A folder of checkpoints lies in a project with directories named manifests")
@pytest.mark.parametrize("other", ["manifests", "deploy/k8s/manifests"])
def test_a_folder_is_a_folder_whatever_lies_beside_its_tier(tmp_path: Path, other: str) -> None:
    (tmp_path / other).mkdir(parents=True)
    (tmp_path / other / "web.yaml").write_text("kind: Service")
    with holdfast.Checkpointer(tmp_path) as ckpt:
        ckpt.save(5, {"x": np.ones(4)}).wait(timeout=HANG_SECONDS)
    assert steps(tmp_path) == (5,)


@pytest.mark.fault("A store of jobs has objects and directories of others")
def test_a_stray_object_hides_no_job(tmp_path: Path) -> None:
    job = stored(tmp_path, "team-a/uid-1", 7)
    (tmp_path / "team-a/README").write_text("ours")
    (job / "notes.txt").write_text("of the job")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/part-0").write_bytes(bytes(10))
    assert steps(tmp_path) == (7,)


def test_a_directory_that_cannot_be_read_is_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root of a volume has `lost+found`. The tests run as root, who may read it."""
    stored(tmp_path, "team-a/uid-1", 7)
    (tmp_path / "lost+found").mkdir(mode=0)
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("lost+found"):
            raise PermissionError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert steps(tmp_path) == (7,)


def test_of_many_jobs_ten_are_listed_and_the_error_says_that_there_are_more(tmp_path: Path) -> None:
    for number in range(12):
        stored(tmp_path, f"team-a/uid-{number:02}", number)
    with pytest.raises(ConfigError, match="several trainings") as raised:
        holdfast.open(tmp_path)
    text = str(raised.value)
    assert text.count("newest step") == 10
    assert f"and more: file://{tmp_path}/NAMESPACE/UID" in text
    assert steps(tmp_path / "team-a/uid-11") == (11,)


def test_reading_changes_no_directory_above_the_store(tmp_path: Path) -> None:
    store = tmp_path / "team/run7"
    stored(store, "standalone/standalone", 3)
    before = tmp_path.stat().st_mtime_ns, store.parent.stat().st_mtime_ns
    assert steps(store) == (3,)
    assert (tmp_path.stat().st_mtime_ns, store.parent.stat().st_mtime_ns) == before
