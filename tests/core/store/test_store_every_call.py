"""A folder as the object store: persisted steps survive kills at every call and every order of writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.crash.crash import report_of
from tests.support.crash.traced import can_trace

PROGRAMS = Path(__file__).with_name("store_crash_programs.py")

pytestmark = pytest.mark.skipif(can_trace() is not None, reason=str(can_trace()))


def test_an_upload_killed_at_any_call_loses_nothing() -> None:
    found = report_of(PROGRAMS, "kills")
    assert found.problems == ()
    assert found.tried > 25


@pytest.mark.fault(
    "The power fails after any call, and the disk has kept any part of what no fsync covers"
)
def test_no_order_of_writes_loses_what_was_acknowledged() -> None:
    """The power may fail at every moment of three saves."""
    found = report_of(PROGRAMS, "power")
    assert found.problems == ()
    assert found.tried > 50


def test_leftovers_of_a_killed_upload_are_durable_before_they_are_used() -> None:
    found = report_of(PROGRAMS, "again")
    assert found.problems == ()
    assert found.tried > 20
