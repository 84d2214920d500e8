"""The suite of the store contract is public: it runs outside of this repository (docs/extending.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STORE = (ROOT / "examples" / "object_store" / "sqlite_store.py").read_text()
SUITE = """\
import pytest
from sqlite_store import SqliteObjectStore

from holdfast.testing import ObjectStoreContract


@pytest.fixture
def objects(tmp_path):
    return SqliteObjectStore(tmp_path / "objects.sqlite")


class TestObjectStore(ObjectStoreContract):
    pass
"""
OVERWRITES = STORE.replace("INSERT OR IGNORE", "INSERT OR REPLACE")
READS_ZEROS = STORE.replace(
    "data = self.get(key)[start : start + len(buffer)]", "data = bytes(len(buffer))"
)


@pytest.mark.fault("A store that others wrote overwrites objects, or reads wrong bytes")
@pytest.mark.parametrize(
    ("store", "failing"),
    [
        (STORE, ()),
        (OVERWRITES, ("an_object_is_written_once", "of_different_objects_one_is_stored")),
        (
            READS_ZEROS,
            ("an_object_reads_back_as_it_was_written", "a_range_beyond_the_end_is_refused"),
        ),
    ],
    ids=["a good store", "a store that overwrites", "a store that reads zeros"],
)
def test_the_suite_runs_in_another_project(
    tmp_path: Path, store: str, failing: tuple[str, ...]
) -> None:
    (tmp_path / "sqlite_store.py").write_text(store)
    (tmp_path / "test_store.py").write_text(SUITE)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["CI"] = "true"  # there pytest writes whole diffs, which must not be of megabytes
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider", "test_store.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == (1 if failing else 0), ran.stdout + ran.stderr
    assert all(f"test_{name}" in ran.stdout for name in failing), ran.stdout


def test_the_doubles_of_training_code_need_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; from holdfast.testing import FakeSidecar"
    subprocess.run([sys.executable, "-c", code], check=True)
