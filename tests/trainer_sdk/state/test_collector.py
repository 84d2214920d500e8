"""The garbage collector is paused only while a state is read, and while torch's own code loads it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
from tests.support.trainer.snapshots import take_snapshot

from holdfast.state.loading.load import load_state
from holdfast.state.snapshot import paused_collector
from holdfast_core.errors import StateDictError
from holdfast_core.ids import Rank


class Part:
    """A part of a state that records whether the collector runs while it is read."""

    def __init__(self, error: Exception | None = None) -> None:
        self.was_enabled: bool | None = None
        self._error = error

    def state_dict(self) -> dict[str, int]:
        self.was_enabled = gc.isenabled()
        if self._error is not None:
            raise self._error
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.was_enabled = gc.isenabled()


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_the_collector_pauses_while_a_state_is_read() -> None:
    part = Part()
    take_snapshot({"part": part}, Rank(0))
    assert part.was_enabled is False
    assert gc.isenabled()


def test_the_collector_runs_again_after_a_state_that_cannot_be_read() -> None:
    with pytest.raises(StateDictError):
        take_snapshot({"part": Part(ValueError("no"))}, Rank(0))
    assert gc.isenabled()


@pytest.mark.fault("A user presses Ctrl-C in a notebook while a state is read or loaded")
def test_the_collector_runs_again_after_an_interrupt_at_the_moment_of_its_pause() -> None:
    """Nothing would free cycles any more, and a notebook keeps its process."""

    def interrupt(_: object, event: str, called: object) -> None:
        if event == "c_return" and called is gc.disable:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt), paused_collector():
        pytest.fail("the interrupt was lost")
    assert gc.isenabled()


def test_a_collector_that_the_script_has_disabled_stays_disabled() -> None:
    gc.disable()
    take_snapshot({"part": Part()}, Rank(0))
    assert not gc.isenabled()


def test_the_collector_runs_while_objects_of_the_script_are_loaded() -> None:
    """A data loader may start processes then, in which a pause would never end."""
    part, seen = Part(), []
    load_state({"part": part}, {"part": {"n": 1}}, before_rng=lambda: seen.append(gc.isenabled()))
    assert part.was_enabled is True
    assert seen == [True]
