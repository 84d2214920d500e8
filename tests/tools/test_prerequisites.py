"""What a person reads on a machine that lacks something: all of it at once, and what works without it.

A folder of stand-ins plays the machine: only its programs are on the PATH.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.hang import HANG_SECONDS

SCRIPT = Path(__file__).resolve().parents[2] / "tools/prerequisites.sh"
ALWAYS = ("sh", "df", "id", "python3", "bash", "apt-get")
PLAYED = {
    "python3": "echo 3.11",
    "apt-get": "exit 0",
    "id": "echo 0",
    "df": "echo head; echo 'fs 100000000 1 99000000 1% /'",
}


def machine(tmp_path: Path, *, lacks: tuple[str, ...] = (), **played: str) -> Path:
    """Return a folder with the programs of a machine. Keyword arguments replace what programs do."""
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {**PLAYED, **{name.replace("_", "-"): text for name, text in played.items()}}
    for name in ALWAYS:
        if name in lacks:
            continue
        if name in programs:
            (folder / name).write_text(f"#!/bin/sh\n{programs[name]}\n")
            (folder / name).chmod(0o755)
        else:
            (folder / name).symlink_to(shutil.which(name))
    return folder


def check(tmp_path: Path, programs: Path, what: str) -> tuple[int, list[str]]:
    env = {"PATH": str(programs), "HOME": str(tmp_path)}
    done = subprocess.run(
        ["/bin/sh", SCRIPT, what], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("what", ["base", "cluster"])
def test_a_machine_with_everything_passes_in_silence(tmp_path, what):
    assert check(tmp_path, machine(tmp_path), what) == (0, [])


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    programs = machine(
        tmp_path,
        lacks=("bash", "apt-get"),
        python3="echo 3.9; exit 1",
        id="echo 1000",
        df="echo head; echo 'fs 9000000 1 3145728 1% /'",
    )
    status, lines = check(tmp_path, programs, "cluster")
    assert status == 1
    assert [line.partition(". ")[0] for line in lines[:-1]] == [
        "missing: Python 3.11 or later as python3, found 3.9",
        "missing: bash, which the Makefile uses as its shell",
        f"missing: 8 GiB of free space in {tmp_path}, which has 3 GiB",
        "missing: apt-get, which unpacks a Docker engine of Debian",
        "missing: root, with which the test bed starts a Docker engine",
        f"missing: 25 GiB of free space in {tmp_path}, which has 3 GiB",
    ]
    assert "nothing but `make help` works" in lines[-1]


def test_a_machine_with_next_to_nothing_gets_the_whole_list(tmp_path):
    """There is no df, no HOME and no program but `id`: the script itself must not fail."""
    programs = machine(tmp_path, lacks=("sh", "df", "python3", "bash", "apt-get"), id="echo 1000")
    done = subprocess.run(
        ["/bin/sh", SCRIPT, "cluster"],
        env={"PATH": str(programs)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert [line.partition(",")[0] for line in done.stderr.splitlines()[:-1]] == [
        "missing: Python 3.11 or later as python3",
        "missing: bash",
        "missing: apt-get",
        "missing: root",
    ]


def test_without_python_its_line_says_none(tmp_path):
    status, lines = check(tmp_path, machine(tmp_path, lacks=("python3",)), "base")
    assert status == 1
    assert lines[0].startswith("missing: Python 3.11 or later as python3, found none. ")
    assert "apt-get install python3" in lines[0]


def test_without_root_the_demo_and_the_tests_work_all_the_same(tmp_path):
    programs = machine(tmp_path, id="echo 1000")
    assert check(tmp_path, programs, "base") == (0, [])
    status, lines = check(tmp_path, programs, "cluster")
    assert status == 1
    assert lines[0].startswith("missing: root, ")
    assert lines[1:] == ["What works all the same: make demo, make test, make quick."]


def test_with_a_docker_engine_the_cluster_needs_neither_root_nor_apt(tmp_path):
    programs = machine(tmp_path, lacks=("apt-get",), id="echo 1000")
    (programs / "docker").write_text("#!/bin/sh\nexit 0\n")
    (programs / "docker").chmod(0o755)
    assert check(tmp_path, programs, "cluster") == (0, [])


def test_a_relative_folder_that_does_not_exist_counts_as_the_current_one(tmp_path):
    programs = machine(tmp_path, df="echo head; echo 'fs 9000000 1 3145728 1% /'")
    done = subprocess.run(
        ["/bin/sh", SCRIPT, "base"],
        env={"PATH": str(programs), "HOME": str(tmp_path), "UV_CACHE_DIR": "not-there"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert "missing: 8 GiB of free space in ., which has 3 GiB." in done.stderr


def test_space_is_asked_for_only_before_the_first_installation(tmp_path):
    programs = machine(tmp_path, df="echo head; echo 'fs 9000000 1 3145728 1% /'")
    assert check(tmp_path, programs, "base")[0] == 1
    (tmp_path / ".venv").mkdir()
    assert check(tmp_path, programs, "base") == (0, [])
