"""A folder keeps one identity for all runs that train in it, whatever happens while it is created."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.crash.failpoints import PANIC_EXIT_CODE, failpoints, in_every_python
from tests.support.hang import HANG_SECONDS

from holdfast.base.kept_run import kept_run_id
from holdfast_core.errors import CorruptionError, HoldfastError

PROGRAM = (
    "import sys, pathlib\n"
    "from holdfast.base.kept_run import kept_run_id\n"
    "print(kept_run_id(pathlib.Path(sys.argv[1]), read_only=False), flush=True)\n"
)


def test_the_first_call_creates_it_and_later_ones_return_it(tmp_path: Path) -> None:
    assert kept_run_id(tmp_path, read_only=True) is None
    assert list(tmp_path.iterdir()) == []
    created = kept_run_id(tmp_path, read_only=False)
    assert created is not None
    assert re.fullmatch("[0-9a-f]{32}", created)
    assert kept_run_id(tmp_path, read_only=False) == created
    assert kept_run_id(tmp_path, read_only=True) == created
    assert [path.name for path in tmp_path.iterdir()] == ["run-id"]


@pytest.mark.fault("A process is killed at a write of the identity of a training")
@pytest.mark.parametrize(
    "point",
    [
        "node.before_temp",
        "node.after_create",
        "node.before_fsync",
        "node.after_fsync",
        "node.after_rename",
        "node.after_dirsync",
    ],
)
def test_a_kill_while_it_is_created_leaves_none_or_a_whole_one(tmp_path: Path, point: str) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    killed = zygote.run(
        [sys.executable, "-c", PROGRAM, str(folder)],
        env={**os.environ, **in_every_python(tmp_path, f"{point}=panic")},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert killed.returncode == PANIC_EXIT_CODE, killed.stderr
    left = kept_run_id(folder, read_only=True)
    found = kept_run_id(folder, read_only=False)
    assert found is not None
    assert left in (None, found)
    assert kept_run_id(folder, read_only=False) == found


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-1-0").write_text("")
    kept_run_id(tmp_path, read_only=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run-id"]


@pytest.mark.fault("Two runs create the identity of a folder at the same moment")
def test_runs_that_start_together_use_the_same_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: kept_run_id(tmp_path, read_only=False), range(16)))
    assert len(found) == 1


@pytest.mark.fault("The identity of a training is damaged")
@pytest.mark.parametrize("data", [b"", b"0" * 15 + b"\n", b"\xff" * 33, b"0" * 500])
def test_a_damaged_one_is_not_replaced(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run-id").write_bytes(data)
    with pytest.raises(CorruptionError, match=r"run-id: expected 16"):
        kept_run_id(tmp_path, read_only=False)
    assert (tmp_path / "run-id").read_bytes() == data


def test_a_disk_error_is_an_error(tmp_path: Path) -> None:
    with failpoints("node.fsync=err"), pytest.raises(HoldfastError, match="fsync"):
        kept_run_id(tmp_path, read_only=False)
    assert list(tmp_path.iterdir()) == []
