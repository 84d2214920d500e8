"""An optimizer that does not fit is detected before anything is loaded, or is skipped and listed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.trainer.payloads import stored

from holdfast.state.loading.load import fits, load_state
from holdfast.state.snapshot import read_payload
from holdfast_core.errors import StateMismatchError

Optimizer = torch.optim.Optimizer


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))


def state_with(kind: Any, seed: int, steps: int, **options: Any) -> dict[str, Any]:
    net = model(seed)
    optimizer = kind(net.parameters(), lr=0.1, **options)
    for _ in range(steps):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {"model": net, "optim": optimizer, "word": "new" if seed else "old"}


def bits(state: dict[str, Any]) -> list[Any]:
    found = [value.clone() for value in state["model"].state_dict().values()]
    for entries in state["optim"].state_dict()["state"].values():
        found += [value for value in entries.values() if isinstance(value, torch.Tensor)]
    return [value.tolist() for value in found]


def two_groups(parameters: Any, lr: float) -> Optimizer:
    first, *rest = list(parameters)
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=lr)


def reversed_order(parameters: Any, lr: float) -> Optimizer:
    return torch.optim.AdamW(list(parameters)[::-1], lr=lr)


MISFITS = [
    pytest.param(
        torch.optim.SGD, r"optim: expected the state of SGD, found the state of AdamW", id="sgd"
    ),
    pytest.param(torch.optim.Adam, r"optim: expected the state of Adam, found .*AdamW", id="adam"),
    pytest.param(
        two_groups,
        r"optim: expected \[1, 3\] parameters per group, found \[4\] \(ckpt\.peek\(\)",
        id="groups",
    ),
    pytest.param(
        reversed_order,
        r"optim: expected exp_avg of parameter 0 as .*3\], found .*2, 3\]",
        id="order",
    ),
]


@pytest.mark.fault("An optimizer of another class or other groups is restored")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("kind", "text"), MISFITS)
def test_strict_loads_nothing(kind: Any, text: str, steps: int) -> None:
    saved = read_payload(stored(state_with(torch.optim.AdamW, 0, 2)))
    state = state_with(kind, 1, steps)
    before = bits(state)
    assert not fits(state, saved)
    with pytest.raises(StateMismatchError, match=text):
        load_state(state, saved)
    assert bits(state) == before
    assert state["word"] == "new"
    state["optim"].step()


@pytest.mark.fault("An optimizer does not fit, with strict=False")
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("kind", "text"), MISFITS)
def test_not_strict_skips_and_lists_it(kind: Any, text: str, steps: int) -> None:
    source = state_with(torch.optim.AdamW, 0, 2)
    state = state_with(kind, 1, steps)
    before = bits({**state, "model": torch.nn.Module()})
    skipped = load_state(state, read_payload(stored(source)), strict=False)
    assert len(skipped) == 1
    assert skipped[0].startswith("optim: expected ")
    assert bits({**state, "model": torch.nn.Module()}) == before
    assert state["word"] == "old"
    for one, other in zip(state["model"].parameters(), source["model"].parameters(), strict=True):
        assert torch.equal(one, other)
    state["optim"].step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.LBFGS, {}),
        (torch.optim.Adafactor, {}),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_torchs_own_optimizers_fit_themselves(
    kind: Any, options: dict[str, Any], steps: int
) -> None:
    if kind is torch.optim.LBFGS:
        source, state = ({"optim": kind(model(seed).parameters())} for seed in (0, 1))
    else:
        source = state_with(kind, 0, 2, **options)
        state = state_with(kind, 1, steps, **options)
    saved = read_payload(stored(source))
    assert fits(state, saved)
    assert load_state(state, saved) == ()


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param({}, id="empty"),
        pytest.param([1], id="list"),
        pytest.param({"param_groups": 5, "state": {}}, id="no-groups"),
        pytest.param({"param_groups": [{}], "state": {}}, id="no-params"),
        pytest.param({"param_groups": [{"params": [0, 1, 2, 3]}], "state": {9: {}}}, id="no-such"),
    ],
)
def test_an_optimizer_refuses_a_state_of_another_form(saved: Any) -> None:
    state = {"optim": torch.optim.SGD(model(0).parameters())}
    with pytest.raises(StateMismatchError, match="optim: expected"):
        load_state(state, read_payload(stored({"optim": saved})))


class Refusing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ZeroDivisionError("of its own")


def test_a_refusing_object_is_skipped_or_the_error_names_the_loaded_parts() -> None:
    saved = read_payload(stored({"a": torch.ones(1), "x": Refusing()}))
    state = {"a": torch.zeros(1), "x": Refusing()}
    (line,) = load_state(state, saved, strict=False)
    assert line.startswith("x: Refusing.load_state_dict refused the saved state")
    with pytest.raises(StateMismatchError, match="parts of the state are already loaded"):
        load_state(state, saved)
