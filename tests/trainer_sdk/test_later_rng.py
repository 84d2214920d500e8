"""`restore(rng="later")` leaves the random number generators to `restore_rng`, which must then be called."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.hang import HANG_SECONDS

import holdfast
from holdfast_core.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def draws() -> list[Any]:
    return [random.random(), np.random.random(), *torch.rand(3).tolist()]


def new_state() -> dict[str, Any]:
    return {"t": torch.zeros(2), "parts": [holdfast.RNG()]}


def save(folder: Path, step: int = 1) -> list[Any]:
    """Save a step, and return the random numbers that an uninterrupted run draws after it."""
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(step, new_state()).wait(timeout=HANG_SECONDS)
        return draws()


@pytest.mark.parametrize("is_in_place", [True, False])
def test_numbers_drawn_between_the_two_calls_do_not_matter(folder: Path, is_in_place: bool) -> None:
    expected = save(folder)
    state = new_state()
    if not is_in_place:
        state["own"] = OwnLoading(1, 1)
        with holdfast.Checkpointer(dir=folder) as ckpt:
            ckpt.save(2, state).wait(timeout=HANG_SECONDS)
            expected = draws()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        assert ckpt.restore(state, rng="later") == (1 if is_in_place else 2)
        draws()
        ckpt.restore_rng()
        assert draws() == expected


class OwnLoading(torch.nn.Linear):
    """It is loaded from a slot, which later saves overwrite."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


def test_a_loop_loads_its_generators_in_its_first_body(folder: Path) -> None:
    expected = save(folder)
    with holdfast.Checkpointer(dir=folder) as ckpt:
        drawn = []
        for index in ckpt.steps(3, new_state(), rng="later"):
            if index == 1:
                draws()  # the first batch
                ckpt.restore_rng()
            drawn.append(draws())
    assert drawn[0] == expected


def test_a_first_run_makes_the_same_calls(folder: Path) -> None:
    with holdfast.Checkpointer(dir=folder) as ckpt:
        state = new_state()
        assert ckpt.restore(state, rng="later") is None
        torch.manual_seed(5)
        ckpt.restore_rng()
        assert torch.initial_seed() == 5
        assert ckpt.should_save(1) in (True, False)


@pytest.mark.fault("A script forgets to restore its random number generators")
@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("call", ["should_save", "save", "steps"])
def test_a_run_that_forgets_the_second_call_ends_at_its_first_step(
    folder: Path, has_checkpoint: bool, call: str
) -> None:
    if has_checkpoint:
        save(folder)
    state = new_state()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        if call == "steps":
            with pytest.raises(ConfigError, match=r"restore_rng\(\) was not called"):
                list(ckpt.steps(4, state, rng="later"))
            return
        ckpt.restore(state, rng="later")
        with pytest.raises(ConfigError, match=r"restore_rng\(\) was not called"):
            ckpt.should_save(2) if call == "should_save" else ckpt.save(2, state)
        ckpt.restore_rng()
        ckpt.save(2, state).wait(timeout=HANG_SECONDS)


@pytest.mark.fault("A loop is left before its random number generators are restored")
def test_a_loop_that_is_left_before_the_second_call_saves_nothing(folder: Path) -> None:
    expected = save(folder)
    with holdfast.Checkpointer(dir=folder) as ckpt:
        for _ in ckpt.steps(4, new_state(), rng="later"):
            break
    with holdfast.Checkpointer(dir=folder) as ckpt:
        assert ckpt.restore(new_state()) == 1
        assert draws() == expected


@pytest.mark.fault("A loop is left before its generators are loaded, and continued")
@pytest.mark.parametrize("rng", ["now", "later"])
def test_a_loop_after_one_that_was_left_still_loads_the_generators(folder: Path, rng: Any) -> None:
    expected = save(folder)
    state = new_state()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        for _ in ckpt.steps(4, state, rng="later"):
            break
        for _ in ckpt.steps(4, state, rng=rng):
            draws()
            ckpt.restore_rng()
            assert draws() == expected
            break


def test_a_call_that_nothing_expects_is_an_error(folder: Path) -> None:
    save(folder)
    state = new_state()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        with pytest.raises(ConfigError, match="no restore with"):
            ckpt.restore_rng()
        ckpt.restore(state, rng="later")
        ckpt.restore_rng()
        with pytest.raises(ConfigError, match="loaded already"):
            ckpt.restore_rng()
        ckpt.restore(state, rng="later")
        ckpt.restore(state)
        with pytest.raises(ConfigError, match="loaded already"):
            ckpt.restore_rng()


def test_a_second_loop_expects_the_call_again(folder: Path) -> None:
    """It continues without a restore, so that its call changes nothing."""
    state = new_state()
    with holdfast.Checkpointer(dir=folder) as ckpt:
        for total in (2, 4):
            for index in ckpt.steps(total, state, rng="later"):
                if index == total - 2:
                    torch.manual_seed(5)
                    ckpt.restore_rng()
                    assert torch.initial_seed() == 5


@pytest.mark.parametrize(
    ("state", "rng", "text"),
    [
        pytest.param({"t": torch.zeros(1)}, "later", r"holds no holdfast\.RNG", id="no-generators"),
        pytest.param({"rng": holdfast.RNG()}, "soon", "'soon', expected", id="another-word"),
    ],
)
def test_arguments_that_would_restore_no_generators_are_refused(
    folder: Path, state: dict[str, Any], rng: Any, text: str
) -> None:
    with holdfast.Checkpointer(dir=folder) as ckpt:
        with pytest.raises(ConfigError, match=text):
            ckpt.restore(state, rng=rng)
        with pytest.raises(ConfigError, match=text):
            list(ckpt.steps(2, state, rng=rng))


def test_generators_that_do_not_fit_are_skipped_without_strict(folder: Path) -> None:
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, {"rng": holdfast.RNG(torch.Generator())}).wait(timeout=HANG_SECONDS)
    with holdfast.Checkpointer(dir=folder, strict=False) as ckpt:
        assert ckpt.restore({"rng": holdfast.RNG()}, rng="later") == 1
        assert ckpt.skipped == ()
        ckpt.restore_rng()
        assert len(ckpt.skipped) == 1
