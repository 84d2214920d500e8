"""A folder's persister, killed at every system call that changes a file, and its writes in every order.

The oracle (directory_crash_programs.check): a new run restores what was acknowledged, bit by bit, in
a round of its own; every manifest means a whole checkpoint; it saves on and leaves nothing behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.crash.crash import report_of
from tests.support.crash.traced import can_trace

PROGRAMS = Path(__file__).with_name("directory_crash_programs.py")

pytestmark = pytest.mark.skipif(can_trace() is not None, reason=str(can_trace()))


def test_a_save_killed_at_any_call_loses_nothing() -> None:
    found = report_of(PROGRAMS, "kills")
    assert found.problems == ()
    called = {call.split()[0] for call in found.calls}
    assert called >= {"openat", "pwrite64", "fsync", "renameat", "linkat", "unlinkat", "mkdirat"}
    assert any("/ckpt/prepared/" in call for call in found.calls)


def test_a_start_killed_at_any_call_keeps_what_was_prepared() -> None:
    """The run that comes next commits what all ranks had made durable, whoever was killed in doing so."""
    found = report_of(PROGRAMS, "starts")
    assert found.problems == ()
    assert {call.split()[0] for call in found.calls} >= {"linkat", "unlinkat"}


def test_no_order_of_writes_loses_what_was_acknowledged() -> None:
    """F16, from before the folder was there."""
    found = report_of(PROGRAMS, "power")
    assert found.problems == ()
    assert found.tried > 100


def test_what_a_killed_run_left_is_durable_before_it_is_relied_on() -> None:
    found = report_of(PROGRAMS, "again")
    assert found.problems == ()
    assert found.tried > 20
