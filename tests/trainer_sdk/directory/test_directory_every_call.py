"""The persister of a folder is killed at every system call that changes a file, and its writes reach the disk
in every order.

The oracle is directory_crash_programs.check: a new run has a new round and restores the last acknowledged
step bit by bit, each manifest belongs to a complete checkpoint, and further saves leave no other files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.crash.crash import report_of
from tests.support.crash.traced import can_trace

PROGRAMS = Path(__file__).with_name("directory_crash_programs.py")

pytestmark = pytest.mark.skipif(can_trace() is not None, reason=str(can_trace()))


@pytest.mark.fault("A process is killed at any system call of a save")
@pytest.mark.fault("The process that commits is killed before the manifest")
def test_a_save_killed_at_any_call_loses_nothing() -> None:
    found = report_of(PROGRAMS, "kills")
    assert found.problems == ()
    called = {call.split()[0] for call in found.calls}
    assert called >= {"openat", "pwrite64", "fsync", "renameat", "linkat", "unlinkat", "mkdirat"}
    assert any("/ckpt/records/" in call for call in found.calls)


def test_a_start_killed_at_any_call_keeps_what_was_prepared() -> None:
    """The next run commits what all ranks had made durable, also after a kill during such a commit."""
    found = report_of(PROGRAMS, "starts")
    assert found.problems == ()
    assert {call.split()[0] for call in found.calls} >= {"linkat", "unlinkat"}


@pytest.mark.fault(
    "The power fails after any call, and the disk has kept any part of what no fsync covers"
)
def test_no_order_of_writes_loses_what_was_acknowledged() -> None:
    """The power may fail at every moment, from before the folder exists."""
    found = report_of(PROGRAMS, "power")
    assert found.problems == ()
    assert found.tried > 100


def test_leftovers_of_a_killed_run_are_durable_before_they_are_used() -> None:
    found = report_of(PROGRAMS, "again")
    assert found.problems == ()
    assert found.tried > 20


@pytest.mark.fault("The power fails after a folder began to use a store")
def test_no_power_cut_makes_a_folder_forget_the_training_of_its_store() -> None:
    """A folder with checkpoints that does not name it is refused by the store."""
    found = report_of(PROGRAMS, "training")
    assert found.problems == ()
    assert found.tried > 5
