"""A state whose own code raises, or that cannot be saved, fails the save and never the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import committed_step

import holdfast
from holdfast_core.errors import SaveFailedError, StateDictError, UnsupportedStateError

ERRORS = [RuntimeError, KeyError, MemoryError, ZeroDivisionError]


class Moody:
    """A module that raises from state_dict while `error` is set."""

    def __init__(self) -> None:
        self.error: type[Exception] | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error("of its own")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.fault("A state_dict() raises any exception while training")
@pytest.mark.parametrize("error", ERRORS)
def test_training_continues_and_later_saves_succeed(tmp_path: Path, error: type[Exception]) -> None:
    moody = Moody()
    state: dict[str, Any] = {"t": torch.zeros(4), "data": moody}
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=1, when_busy="wait") as ckpt:
        for index in ckpt.steps(6, state):
            moody.error = error if index in (2, 3) else None
        assert ckpt.saves_failed == 2
    assert committed_step(tmp_path / "ckpt") == 6


class MoodyMapping(dict[str, Any]):
    """A state whose own container raises, so that the error can name no part of it."""

    error: type[Exception] | None = None

    def items(self) -> Any:
        if self.error is not None:
            raise self.error("of the mapping")
        return super().items()


@pytest.mark.fault("An exception of a place concerns a state that has no name")
@pytest.mark.parametrize("error", ERRORS)
def test_an_exception_of_any_kind_and_place_costs_one_save(
    tmp_path: Path, error: type[Exception]
) -> None:
    state = MoodyMapping(t=torch.zeros(4))
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        ckpt.save(1, state).wait(timeout=HANG_SECONDS)
        state.error = error
        with pytest.raises(SaveFailedError, match="of the mapping"):
            ckpt.save(2, state).wait(timeout=0)
        state.error = None
        ckpt.save(3, state).wait(timeout=HANG_SECONDS)
        assert ckpt.saves_failed == 1
    assert committed_step(tmp_path / "ckpt") == 3


@pytest.mark.fault("A state_dict() raises before the first step")
def test_a_state_dict_may_raise_before_the_first_step(tmp_path: Path) -> None:
    moody = Moody()
    moody.error = RuntimeError
    state: dict[str, Any] = {"t": torch.zeros(4), "data": moody}
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=2, when_busy="wait") as ckpt:
        for _ in ckpt.steps(4, state):
            moody.error = None
        assert ckpt.saves_failed == 0
    assert committed_step(tmp_path / "ckpt") == 4


def test_the_handle_has_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    moody = Moody()
    moody.error = KeyError
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        for step in (1, 2):
            handle = ckpt.save(step, {"data": moody})
            with pytest.raises(SaveFailedError, match=r"data: Moody\.state_dict\(\) raised Key"):
                handle.wait(timeout=0)
        assert ckpt.saves_failed == 2
    assert caplog.text.count("training continues") == 1


@pytest.mark.parametrize("error", ERRORS)
def test_the_error_is_raised_where_the_script_asks_for_errors(
    tmp_path: Path, error: type[Exception]
) -> None:
    moody = Moody()
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", on_save_error="raise") as ckpt:
        moody.error = error
        with pytest.raises(StateDictError, match="of its own"):
            ckpt.save(1, {"data": moody})
        moody.error = None
        ckpt.save(2, {"data": moody}).wait(timeout=HANG_SECONDS)


@pytest.mark.fault("A tensor's memory was freed when it is saved")
def test_freed_memory_is_a_failed_save(tmp_path: Path) -> None:
    """A copy of freed memory would end the process."""
    tensor = torch.zeros(4)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        ckpt.save(1, {"t": tensor}).wait(timeout=HANG_SECONDS)
        tensor.untyped_storage().resize_(0)
        assert "t: the memory" in (ckpt.save(2, {"t": tensor}).failure or "")
        assert ckpt.saves_failed == 1
        ckpt.save(3, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
        pytest.param(torch.zeros(1).expand(3), id="expanded"),
        pytest.param(torch.empty(2, dtype=torch.uint4), id="uint4"),  # type: ignore[attr-defined]
    ],
)
def test_a_value_that_cannot_be_saved_is_named_at_the_first_save(
    tmp_path: Path, value: Any
) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert "model.x: " in (ckpt.save(1, {"model": {"x": value}}).failure or "")
        assert ckpt.saves_failed == 1
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt", on_save_error="raise") as ckpt,
        pytest.raises(UnsupportedStateError, match=r"model\.x: "),
    ):
        ckpt.save(1, {"model": {"x": value}})
