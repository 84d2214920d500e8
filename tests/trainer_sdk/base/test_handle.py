"""Handles of saves: levels only rise, a failure belongs to a level, and a level or a failure ends a wait."""

from __future__ import annotations

import pytest

from holdfast import SaveTimeoutError
from holdfast.base.handle import SaveHandle
from holdfast_core.errors import SaveFailedError
from holdfast_core.ids import Level, RestartRound, Step


@pytest.fixture
def handle() -> SaveHandle:
    return SaveHandle(Step(3), RestartRound(1))


def test_levels_include_the_ones_before(handle: SaveHandle) -> None:
    handle.reach(Level.REPLICATED)
    handle.reach(Level.LOCAL)
    assert handle.level is Level.REPLICATED
    handle.wait("local", timeout=0)
    handle.wait("replicated", timeout=0)


def test_a_wait_ends_at_its_time_out(handle: SaveHandle) -> None:
    with pytest.raises(TimeoutError):
        handle.wait("local", timeout=0)
    with pytest.raises(SaveTimeoutError, match="step 3"):
        handle.wait("persisted", timeout=0)


def test_a_failed_level_fails_those_above(handle: SaveHandle) -> None:
    handle.reach(Level.LOCAL)
    handle.fail(Level.REPLICATED, "PeerUnreachable: gone")
    handle.wait("local", timeout=0)
    for level in ("replicated", "persisted"):
        with pytest.raises(SaveFailedError, match="PeerUnreachable"):
            handle.wait(level, timeout=0)
    assert handle.failure == "PeerUnreachable: gone"


def test_an_unknown_level_is_refused(handle: SaveHandle) -> None:
    with pytest.raises(ValueError, match="everywhere"):
        handle.wait("everywhere")


def test_a_wait_for_level_memory_names_what_to_wait_for_instead(handle: SaveHandle) -> None:
    with pytest.raises(ValueError, match="no level 'memory' any more: wait for 'local'"):
        handle.wait("memory")


def test_a_wait_for_an_overtaken_step_raises_an_error(handle: SaveHandle) -> None:
    handle.fail(Level.LOCAL, "Overtaken: by a newer step")
    assert handle.settled
    for level in ("local", "persisted"):
        with pytest.raises(SaveFailedError, match="Overtaken"):
            handle.wait(level, timeout=0)


def test_a_level_that_was_reached_does_not_fail_afterwards() -> None:
    """A sidecar keeps no record of the levels of an old step. It reports the step as overtaken when it
    prunes it."""
    handle = SaveHandle(Step(3), RestartRound(0))
    handle.reach(Level.LOCAL)
    handle.fail(Level.LOCAL, "Overtaken")
    assert handle.failure is None
    handle.fail(Level.REPLICATED, "no peer")
    assert handle.failure == "no peer"


def test_a_level_without_further_reports_ends_its_waits_and_is_no_failure(
    handle: SaveHandle,
) -> None:
    handle.reach(Level.LOCAL)
    handle.report_no_more(Level.PERSISTED, "it was closed")
    with pytest.raises(SaveFailedError, match="it was closed"):
        handle.wait("persisted", timeout=0)
    assert handle.failure is None
    handle.reach(Level.PERSISTED)
    handle.wait("persisted", timeout=0)
