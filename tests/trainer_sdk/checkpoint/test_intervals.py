"""Intervals that are given as a time: in a folder, and in a gang whose ranks agree on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.dict_store import DictStore
from tests.support.trainer.launched import committed_step
from tests.support.trainer.polled import PolledByHand

import holdfast
from holdfast.connection.session import Session
from holdfast.gang.agreement import StepAgreement
from holdfast.gang.store import GangStore
from holdfast_core.errors import ConfigError
from holdfast_core.ids import JobUid, Rank, RestartRound


def train(ckpt: holdfast.Checkpointer, total: int) -> list[int]:
    """Train with a loop of the test's own. Return the steps that were saved."""
    state = {"t": torch.ones(4)}
    saved = []
    for step in range(1, total + 1):
        if ckpt.should_save(step):
            ckpt.save(step, state).wait(timeout=HANG_SECONDS)
            saved.append(step)
    return saved


def test_a_run_whose_steps_are_longer_than_the_interval_saves_each_step(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt", interval_seconds=1e-9) as ckpt:
        assert ckpt.interval_steps == 0
        # The first step is not measured, two are, and the interval is valid after one more.
        assert train(ckpt, 9) == [5, 6, 7, 8, 9]
        assert ckpt.interval_steps == ckpt.interval.steps == 1
        assert ckpt.interval.seconds == 1e-9
        assert ckpt.interval.step_seconds is not None


def test_a_run_that_is_shorter_than_the_interval_saves_its_last_step_only(tmp_path: Path) -> None:
    state = {"t": torch.ones(4)}
    with holdfast.Checkpointer(tmp_path / "ckpt", interval_seconds=1e9) as ckpt:
        for _ in ckpt.steps(9, state):
            pass
        assert ckpt.interval.steps > 1000
    assert committed_step(tmp_path / "ckpt") == 9


def test_auto_states_what_the_interval_follows_from(tmp_path: Path) -> None:
    with holdfast.Checkpointer(
        tmp_path / "ckpt", interval="auto", mtbf_seconds=1e-6, when_busy="wait"
    ) as ckpt:
        assert train(ckpt, 9) == [5, 6, 7, 8, 9]
        assert ckpt.interval.mtbf_seconds == 1e-6
        assert ckpt.interval.save_seconds is not None


def test_the_steps_of_an_interval_have_no_inputs(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt", interval_steps=7) as ckpt:
        assert ckpt.interval == holdfast.Interval(7)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"interval_steps": 5, "interval_seconds": 60}, "at most one of interval_steps"),
        ({"interval_seconds": 60, "interval": "auto"}, "at most one of interval_steps"),
        ({"interval_steps": 0, "interval": "auto"}, "at most one of interval_steps"),
        ({"interval": "often"}, r"interval='often'\): expected 'auto'"),
        ({"interval_seconds": 0}, "interval_seconds=0.: expected a number of seconds above 0"),
        ({"interval_seconds": "60"}, "interval_seconds='60'.: expected a number of seconds"),
        ({"interval_seconds": float("inf")}, "expected a number of seconds above 0"),
        ({"interval": "auto", "mtbf_seconds": -1}, "mtbf_seconds=-1.: expected a number"),
        ({"mtbf_seconds": 60}, "only with"),
    ],
    ids=str,
)
def test_intervals_that_contradict_each_other_are_refused(
    tmp_path: Path, wrong: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        holdfast.Checkpointer(tmp_path / "ckpt", **wrong)
    assert not (tmp_path / "ckpt").exists()


@given(
    st.lists(st.permutations([0, 1, 2]), min_size=24, max_size=24),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 50)), max_size=3),
)
def test_every_rank_changes_the_interval_after_the_same_step(
    orders: list[list[int]], wanted: list[tuple[int, int]]
) -> None:
    """Rank 0 wants another interval at some steps. Within a step, ranks run in any order."""
    store = GangStore(DictStore(), "r0", b"secret")
    proposals = [PolledByHand(store, 3) for _ in range(3)]
    ranks = [
        StepAgreement(Session(JobUid("job"), Rank(n), RestartRound(0)), store, one)
        for n, one in enumerate(proposals)
    ]
    for rank in ranks:
        rank.begin(0, 0)
    found: list[int] = []
    asked: int | None = None
    for step, order in enumerate(orders, start=1):
        asked = next((steps for at, steps in wanted if at == step), asked)
        verdicts = set()
        for number in order:
            verdicts.add(ranks[number].after_step(step))
            if number == 0 and asked is not None:
                ranks[0].propose_interval(asked)
        for one in (*proposals, *proposals):
            one.poll()
        (verdict,) = verdicts
        if verdict.interval_steps is not None:
            found.append(verdict.interval_steps)
            asked = None if verdict.interval_steps == asked else asked
    assert set(found) <= {steps for _, steps in wanted}
    if any(at <= 12 for at, _ in wanted):
        assert found
