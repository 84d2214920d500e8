"""The sidecar receives each finished step, whichever calls a training loop uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import holdfast
from holdfast.testing import FakeSidecar
from holdfast_core.messages.schema import Hello, Progress

STEPS = 7
INTERVAL = 3
Loop = Callable[[holdfast.Checkpointer, dict[str, Any]], None]


@pytest.fixture
def interval_steps() -> int:
    return INTERVAL


def train(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    state["t"] += 1
    ckpt.report(loss=0.5)


def with_steps(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    for _ in ckpt.steps(STEPS, state):
        train(ckpt, state)


def with_should_save(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    start = ckpt.restore(state) or 0
    for step in range(start + 1, STEPS + 1):
        train(ckpt, state)
        if ckpt.should_save(step):
            ckpt.save(step, state)


def without_the_saves(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    """Train as a script that calls `should_save` and then does not save."""
    ckpt.restore(state)
    for step in range(1, STEPS + 1):
        train(ckpt, state)
        ckpt.should_save(step)


def with_its_own_interval(ckpt: holdfast.Checkpointer, state: dict[str, Any]) -> None:
    for step in range(1, STEPS + 1):
        train(ckpt, state)
        ckpt.save(step, state).wait("local", timeout=60)


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        pytest.param(with_steps, [1, 2, 3, 4, 5, 6, 7], id="steps"),
        pytest.param(with_should_save, [1, 2, 3, 4, 5, 6, 7], id="should_save and save"),
        # Steps 3 and 6 were due. Their saves would have reported them; the next step does so instead.
        pytest.param(without_the_saves, [1, 2, 4, 5, 7], id="should_save alone"),
        pytest.param(with_its_own_interval, [1, 2, 3, 4, 5, 6, 7], id="save alone"),
    ],
)
def test_every_kind_of_loop_reports_its_steps(
    sidecar: FakeSidecar, loop: Loop, expected: list[int]
) -> None:
    with holdfast.Checkpointer(when_busy="wait") as ckpt:
        loop(ckpt, {"t": torch.zeros(1)})
    sidecar.wait_for(Progress, len(expected))
    reported = sidecar.messages(Progress)
    assert list(dict.fromkeys(message.step for message in reported)) == expected
    assert all(message.metrics == {"loss": 0.5} for message in reported)


def test_a_due_step_without_a_save_is_reported_at_the_end(sidecar: FakeSidecar) -> None:
    with holdfast.Checkpointer() as ckpt:
        for step in range(1, 2 * INTERVAL + 1):
            ckpt.should_save(step)
    assert sidecar.wait_for(Progress, 5).step == 2 * INTERVAL


def test_skipped_saves_are_counted_once(
    sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar adds the counts up, so each message contains only the new ones."""
    sidecar.faults.delay_seconds["Stage"] = 1.0
    with holdfast.Checkpointer() as ckpt:
        state = {"t": torch.zeros(1)}
        for step in range(1, 9):
            ckpt.save(step, state)
        skipped = ckpt.saves_skipped
        assert skipped > 0
        sidecar.wait_for(Progress, 8)
    assert sum(message.saves_skipped for message in sidecar.messages(Progress)) == skipped


def test_a_sidecar_that_restarts_receives_the_step_again(sidecar: FakeSidecar) -> None:
    """No other message would report the step between two steps or after the last one."""
    with holdfast.Checkpointer() as ckpt:
        ckpt.should_save(1)
        sidecar.wait_for(Progress)
        round_ = sidecar.round
        sidecar.die()
        sidecar.start(round_)
        sidecar.wait_for(Hello, 2)
        again = sidecar.wait_for(Progress, 2)
    assert (again.step, again.blocked_seconds, again.saves_skipped) == (1, 0.0, 0)
