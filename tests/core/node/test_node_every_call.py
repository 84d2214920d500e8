"""A sidecar's save is killed at every system call that changes a file, and its writes reach the disk in every
order.

The oracle is crash_programs.check. A fresh process must find the shards of every manifest complete and equal
to the saved ones, no newest step older than the acknowledged one, and no temporary file, and must save again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.crash.crash import report_of
from tests.support.crash.traced import can_fail_calls, can_trace

PROGRAMS = Path(__file__).with_name("crash_programs.py")

pytestmark = pytest.mark.skipif(can_trace() is not None, reason=str(can_trace()))


@pytest.mark.fault("A process is killed at any system call of a save")
def test_a_save_killed_at_any_call_loses_nothing() -> None:
    found = report_of(PROGRAMS, "kills")
    assert found.problems == ()
    called = {call.split()[0] for call in found.calls}
    assert called >= {"openat", "pwrite64", "fsync", "renameat", "linkat", "unlinkat", "mkdirat"}
    assert found.tried == len(found.calls)


@pytest.mark.fault(
    "A save is killed at any system call while it overwrites the file of a deleted shard"
)
def test_saves_into_the_files_of_deleted_shards_killed_at_any_call_lose_nothing() -> None:
    found = report_of(PROGRAMS, "kills-spares")
    assert found.problems == ()
    assert found.tried == len(found.calls) > 50


@pytest.mark.fault(
    "The power fails while the file of a deleted shard is overwritten, in every order of writes"
)
def test_no_order_of_writes_mixes_the_bytes_of_two_shards() -> None:
    """The files of deleted shards are overwritten. Neither name may show bytes of both shards."""
    found = report_of(PROGRAMS, "power-spares")
    assert found.problems == ()
    assert found.tried > 100


@pytest.mark.fault(
    "The power fails after any call, and the disk has kept any part of what no fsync covers"
)
@pytest.mark.fault("The power fails in the middle of a write, so that a file is torn")
def test_no_order_of_writes_loses_what_was_acknowledged() -> None:
    """The power may fail at every moment of three saves, a round and a prune."""
    found = report_of(PROGRAMS, "power")
    assert found.problems == ()
    assert found.tried > 100


@pytest.mark.fault(
    "A process is killed after a rename and before the fsync of the directory, and the power fails "
    "later"
)
def test_what_a_killed_process_left_is_durable_before_it_is_relied_on() -> None:
    """If a kill comes between a rename and its fsync, the next process sees the file, but a power cut
    removes it. That process must not acknowledge anything that depends on the file."""
    found = report_of(PROGRAMS, "again")
    assert found.problems == ()
    assert found.tried > 20


@pytest.mark.fault("The disk has no room at any write of a save")
@pytest.mark.fault("The disk fails any write with an I/O error")
@pytest.mark.fault("The file system becomes read-only")
@pytest.mark.skipif(can_fail_calls() is not None, reason=str(can_fail_calls()))
@pytest.mark.parametrize(
    ("how", "error"),
    [("fails-for-ever", "ENOSPC"), ("fails", "EIO"), ("fails-for-ever", "EROFS")],
    ids=["full", "io-error", "read-only"],
)
def test_a_call_that_fails_costs_at_most_this_save(how: str, error: str) -> None:
    """Only HoldfastErrors are raised, no descriptor and no temporary file is left, and a retry succeeds."""
    found = report_of(PROGRAMS, how, error)
    assert found.problems == ()
    assert found.tried > 50


@pytest.mark.parametrize(
    ("mutant", "symptom"),
    [
        ("no-directory-fsync", "was acknowledged, the disk says None"),
        ("no-file-fsync", "lost [Write"),
        ("rename-before-fsync", "quarantined"),
        ("acknowledged-early", "was acknowledged, the disk says None"),
        ("manifest-before-shards", "cannot be restored"),
        ("shards-deleted-first", "cannot be restored"),
    ],
)
def test_the_replay_of_writes_finds_what_it_is_for(mutant: str, symptom: str) -> None:
    (problem, *_) = report_of(PROGRAMS, "power", mutant).problems
    assert symptom in problem


def test_the_replay_finds_a_file_that_is_overwritten_before_its_deletion_is_durable() -> None:
    (problem, *_) = report_of(PROGRAMS, "power-spares", "overwritten-before-deleted").problems
    assert "quarantined" in problem


@pytest.mark.parametrize("mutant", ["manifest-before-shards", "shards-deleted-first"])
def test_the_kills_find_what_they_are_for(mutant: str) -> None:
    assert any(
        "cannot be restored" in problem for problem in report_of(PROGRAMS, "kills", mutant).problems
    )
