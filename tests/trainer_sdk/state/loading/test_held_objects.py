"""Objects that another object's `state_dict` holds are loaded themselves, or refused before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.trainer.payloads import stored
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import holdfast
from holdfast.state.loading.load import load_state
from holdfast.state.snapshot import read_payload
from holdfast_core.errors import StateMismatchError


class Warmup(LRScheduler):
    """Holds another schedule, as in the package pytorch-gradual-warmup-lr."""

    def __init__(self, optimizer: Any, steps: int, after: Any) -> None:
        self.steps, self.after = steps, after
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        if self.last_epoch <= self.steps:
            return [base * (self.last_epoch + 1) / self.steps for base in self.base_lrs]
        self.after.step()
        return self.after.get_last_lr()


class Holder:
    """Returns its attributes, as the state_dict of many classes does."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Counter:
    """An own class with an own state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class WithExtra(torch.nn.Linear):
    def __init__(self, count: int) -> None:
        super().__init__(1, 1)
        self.extra = {"counter": Counter(count)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Options(torch.optim.SGD):
    """Has an object among the options of its group."""

    def __init__(self, count: int) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        self.param_groups[0]["counter"] = Counter(count)


def linear(value: float) -> torch.nn.Linear:
    module = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(module.weight, value)
    return module


def stepped(steps: int) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(steps):
        parameter.grad = torch.ones(2)
        optimizer.step()
    return optimizer


def scaler(scale: float) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale, enabled=True)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CASES: dict[str, Any] = {
    "a grad scaler": lambda n: Holder(one=scaler(2.0**n)),
    "a module": lambda n: Holder(one=linear(n)),
    "an optimizer": lambda n: Holder(one=stepped(n)),
    "generators": lambda n: Holder(one=holdfast.RNG(generator(n))),
    "an own class": lambda n: Holder(one=Counter(n)),
    "a list": lambda n: Holder(one=[Counter(n), linear(n + 1), 7]),
    "a tuple in a dict": lambda n: Holder(one={"deep": (Counter(n), {4: Counter(n + 2)})}),
    "a holder in a holder": lambda n: Holder(one=Holder(one=Holder(one=Counter(n)))),
    "a wrapped module": lambda n: Holder(one=torch.nn.DataParallel(linear(n))),
    "a shared object": lambda n: holdfast.Shared(Holder(one=holdfast.Shared(Counter(n)))),
    "the extra state of a module": WithExtra,
    "an option of an optimizer": Options,
}


def shape_of(value: Any) -> Any:
    """Return the types of a value and of what it holds, with the bits of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if callable(getattr(value, "state_dict", None)):
        return type(value), shape_of(value.state_dict())
    if isinstance(value, dict):
        return type(value), {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [shape_of(item) for item in value]
    return getattr(value, "tolist", lambda: value)()


@pytest.mark.fault("The state_dict of an object holds other objects")
@pytest.mark.parametrize("name", CASES)
def test_an_object_in_the_state_of_another_comes_back_as_that_object(name: str) -> None:
    saved = {"part": CASES[name](5)}
    payload = stored(saved)
    expected = shape_of(saved["part"])
    state = {"part": CASES[name](2)}
    assert shape_of(state["part"]) != expected
    load_state(state, read_payload(payload))
    assert shape_of(state["part"]) == expected


def test_what_else_refers_to_the_object_sees_its_state() -> None:
    payload = stored({"part": Holder(one=Counter(5), many=[Counter(6)])})
    one, other = Counter(0), Counter(0)
    part = Holder(one=one, many=[other])
    load_state({"part": part}, read_payload(payload))
    held = part.state_dict()
    assert held["one"] is one
    assert held["many"][0] is other
    assert (one.count, other.count) == (5, 6)


REFUSED = {
    "an object that is not there": (
        Holder(one=None),
        r"part\.one: expected NoneType, found .*Counter",
    ),
    "an entry that is not there": (Holder(), r"part\.one: expected nothing, found .*Counter"),
    "a plain dict in its place": (
        Holder(one={"count": 1}),
        r"part\.one: expected dict, found .*Counter",
    ),
}


@pytest.mark.fault("The state_dict of an object holds other objects")
@pytest.mark.parametrize("name", REFUSED)
def test_an_object_that_is_missing_is_refused_by_its_path(name: str) -> None:
    part, message = REFUSED[name]
    payload = stored({"part": Holder(one=Counter(5)), "word": "saved"})
    before = shape_of(part)
    state = {"part": part, "word": "own"}
    with pytest.raises(StateMismatchError, match=message):
        load_state(state, read_payload(payload))
    assert (state["word"], shape_of(part)) == ("own", before)
    (skipped,) = load_state(state, read_payload(payload), strict=False)
    assert "part.one" in skipped
    assert (state["word"], shape_of(part)) == ("saved", before)


def test_a_shorter_list_and_an_unfit_module_are_refused_by_their_paths() -> None:
    payload = stored({"part": Holder(many=[Counter(1), Counter(2)], net=linear(1))})
    state = {"part": Holder(many=[Counter(0)], net=torch.nn.Linear(2, 1))}
    with pytest.raises(StateMismatchError) as error:
        load_state(state, read_payload(payload))
    assert "part.many.1: expected nothing, found the state of Counter" in str(error.value)
    assert "part.net.weight: expected float32 [1, 2], found float32 [1, 1]" in str(error.value)


def test_an_entry_of_a_dict_that_only_the_checkpoint_has_is_plain() -> None:
    payload = stored({"parts": {"one": Holder(inner=Counter(5))}})
    for is_ours in (False, True):
        state: dict[str, Any] = {"parts": {}}
        load_state(state, read_payload(payload), is_ours=is_ours)
        assert state == {"parts": {"one": {"inner": {"count": 5}}}}


def trained(folder: Path, total: int) -> Warmup:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = Warmup(optimizer, 3, CosineAnnealingLR(optimizer, 20))
    state = {"model": model, "optim": optimizer, "sched": schedule}
    options: dict[str, Any] = {"when_busy": "wait", "on_save_error": "raise"}
    with holdfast.Checkpointer(folder, interval_steps=2, **options) as ckpt:
        for _ in ckpt.steps(total, state):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return schedule


def test_a_schedule_in_a_schedule_continues_and_readers_see_its_values(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 8)
    trained(tmp_path / "parts", 6)
    resumed = trained(tmp_path / "parts", 8)
    assert type(resumed.after) is CosineAnnealingLR
    assert resumed.after.last_epoch == whole.after.last_epoch
    assert resumed.get_last_lr() == whole.get_last_lr()
    with holdfast.open(tmp_path / "parts") as folder, folder.at(8) as step:
        assert step.objects()["sched"]["after"]["last_epoch"] == whole.after.last_epoch
    with holdfast.Checkpointer(tmp_path / "parts") as ckpt:
        point = ckpt.peek()
    assert point.objects["sched"]["after"]["last_epoch"] == whole.after.last_epoch
