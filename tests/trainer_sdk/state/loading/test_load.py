"""An in-place restore copies what fits and names what does not. The order of its steps keeps training
bit-identical."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trainer.payloads import stored
from tests.support.trainer.snapshots import take_snapshot

from holdfast.slots.staging import Copier
from holdfast.state.loading.load import load_state
from holdfast.state.rng import RNG
from holdfast.state.snapshot import PayloadTarget, plan_save, read_payload
from holdfast_core.errors import StateMismatchError
from holdfast_core.ids import Rank


def saved(state: dict[str, Any]) -> dict[str, Any]:
    return read_payload(stored(state))


def training(seed: int = 0, width: int = 4) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    return {
        "model": model,
        "optim": optimizer,
        "sched": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s),
    }


def train(state: dict[str, Any], steps: int, width: int = 4) -> None:
    for _ in range(steps):
        state["model"](torch.randn(8, width)).square().mean().backward()
        state["optim"].step()
        state["sched"].step()
        state["optim"].zero_grad()


def flat(state: dict[str, Any]) -> list[torch.Tensor]:
    tensors = list(state["model"].state_dict().values())
    for entry in state["optim"].state_dict()["state"].values():
        tensors += [v for v in entry.values() if isinstance(v, torch.Tensor)]
    return tensors


def test_training_continues_bit_identically() -> None:
    one, other = training(0), training(1)
    train(one, 3)
    generators = RNG()
    kept = saved({**one, "rng": generators})
    train(one, 3)
    expected = flat(one)

    load_state({**other, "rng": generators}, kept)
    train(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(flat(other), expected, strict=True))
    assert other["sched"].get_last_lr() == one["sched"].get_last_lr()


def test_memory_is_kept_where_it_fits() -> None:
    one, other = training(0), training(1)
    train(one, 2)
    train(other, 1)
    places = [t.data_ptr() for t in flat(other)]
    load_state(other, saved(one))
    assert [t.data_ptr() for t in flat(other)] == places
    assert all(torch.equal(a, b) for a, b in zip(flat(other), flat(one), strict=True))


def test_nothing_keeps_a_view_of_the_slot() -> None:
    one, other = training(0), training(1)
    train(one, 2)
    snapshot = take_snapshot(one, Rank(0))
    plan = plan_save(snapshot, Rank(0))
    slot = np.zeros(plan.payload_bytes, dtype=np.uint8)
    PayloadTarget(plan, slot).write(snapshot, Copier().run)
    load_state(other, read_payload(slot))
    slot[:] = 0xFF
    assert all(torch.equal(a, b) for a, b in zip(flat(other), flat(one), strict=True))


def test_optimizer_keeps_int_keys_and_group_options() -> None:
    one, other = training(0), training(1)
    train(one, 1)
    load_state(other, saved(one))
    state = other["optim"].state_dict()
    assert list(state["state"]) == [0, 1, 2, 3]
    assert state["param_groups"] == one["optim"].state_dict()["param_groups"]


def test_ddp_and_compile_wrappers_are_not_in_the_names() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    inner = torch.nn.Linear(2, 2)
    kept = saved({"m": Wrapper(inner)})
    assert sorted(kept["m"]) == ["bias", "weight"]
    target = torch.nn.Linear(2, 2)
    load_state({"m": torch.nn.DataParallel(target)}, kept)
    assert torch.equal(target.weight, inner.weight)


def test_plain_values_get_the_saved_values() -> None:
    state: dict[str, Any] = {
        "t": torch.zeros(2),
        "a": np.zeros(2),
        "n": {"epoch": 0, "history": [1.0]},
        "pair": (torch.zeros(1), 0),
    }
    tensor, inner = state["t"], state["n"]
    load_state(
        state,
        saved(
            {
                "t": torch.ones(2),
                "a": np.ones(2),
                "n": {"epoch": 3, "history": [1.0, 2.0], "more": torch.ones(1)},
                "pair": (torch.ones(1), 7),
            }
        ),
    )
    assert state["t"] is tensor
    assert state["n"] is inner
    assert tensor.tolist() == [1.0, 1.0]
    assert state["a"].tolist() == [1.0, 1.0]
    assert inner["epoch"] == 3
    assert inner["history"] == [1.0, 2.0]
    assert inner["more"].tolist() == [1.0]
    assert state["pair"][0].tolist() == [1.0]
    assert state["pair"][1] == 7


@pytest.mark.parametrize(
    ("state", "message"),
    [
        pytest.param(
            {"w": torch.zeros(3), "k": 1},
            r"w: expected float32 \[3\], found float32 \[2\]",
            id="shape",
        ),
        pytest.param(
            {"w": torch.zeros(2, dtype=torch.int32), "k": 1},
            r"w: expected int32 \[2\], found float32 \[2\]",
            id="dtype",
        ),
        pytest.param(
            {"w": torch.zeros(2), "k": 1, "x": torch.zeros(1)}, r"x: .*nothing in the", id="missing"
        ),
        pytest.param({"w": torch.zeros(2)}, r"k: expected nothing", id="unexpected"),
        pytest.param({"w": {"a": torch.zeros(1)}, "k": 1}, r"w: expected a dict", id="kind"),
        pytest.param(
            {"w": [torch.zeros(1)], "k": 1}, r"w: expected 1 entries, found Tensor", id="list"
        ),
    ],
)
def test_mismatch_is_named_and_nothing_is_loaded(state: dict[str, Any], message: str) -> None:
    state["other"] = torch.zeros(1)
    kept = saved({"w": torch.ones(2), "k": 5, "other": torch.ones(1)})
    with pytest.raises(StateMismatchError, match=message):
        load_state(state, kept)
    assert state["other"].item() == 0.0


def test_not_strict_lists_what_was_skipped() -> None:
    state = {"w": torch.zeros(3), "b": torch.zeros(2)}
    skipped = load_state(
        state, saved({"w": torch.ones(2), "b": torch.ones(2), "c": 1}), strict=False
    )
    assert state["b"].tolist() == [1.0, 1.0]
    assert state["w"].tolist() == [0.0, 0.0, 0.0]
    assert len(skipped) == 2
    assert any(line.startswith("w: ") for line in skipped)


def test_modules_compare_names_both_ways() -> None:
    kept = saved({"m": torch.nn.Linear(2, 2)})
    with pytest.raises(StateMismatchError, match=r"m\.bias: expected nothing"):
        load_state({"m": torch.nn.Linear(2, 2, bias=False)}, kept)
    target = torch.nn.Linear(2, 2, bias=False)
    assert load_state({"m": target}, kept, strict=False) == (
        "m.bias: expected nothing, found an entry of the checkpoint",
    )


def test_optimizers_compare_their_groups() -> None:
    kept = saved({"o": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)})
    two = [torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(StateMismatchError, match=r"o: expected \[2\] parameters per group"):
        load_state({"o": torch.optim.SGD(two, lr=1.0)}, kept)


def test_generators_are_restored_last() -> None:
    order: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            order.append(self.name)

    class Loader(Part):
        def __iter__(self) -> Any:
            return iter(())

    class Generators(RNG):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            order.append("rng")

    class Model(torch.nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            order.append("model")
            return super().load_state_dict(*args, **kwargs)

    state = {
        "rng": Generators(),
        "other": Part("other"),
        "data": Loader("loader"),
        "model": Model(1, 1),
    }
    load_state(state, saved(state), before_rng=lambda: order.append("before_rng"))
    assert order == ["model", "loader", "other", "before_rng", "rng"]


def test_generators_continue_where_they_were() -> None:
    own, numpys = torch.Generator().manual_seed(3), np.random.default_rng(4)
    generators = RNG(own, numpys)

    def draw() -> list[float]:
        return [
            random.random(),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(1)),
            float(torch.rand(1, generator=own)),
            float(numpys.random()),
        ]

    draw()
    kept = saved({"rng": generators})
    expected = draw()
    load_state({"rng": generators}, kept)
    assert draw() == expected


def test_a_module_without_code_of_its_own_is_loaded_without_a_search_for_each_submodule() -> None:
    """torch's load_state_dict reads all keys once for each submodule. Here they are read a few times."""
    module = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(50)])
    reads = 0

    class Key(str):
        __slots__ = ()

        def startswith(self, *arguments: Any) -> bool:
            nonlocal reads
            reads += 1
            return str.startswith(self, *arguments)

    saved = {Key(name): torch.full_like(value, 3.0) for name, value in module.state_dict().items()}
    load_state({"model": module}, {"model": saved})
    assert all(bool((value == 3).all()) for value in module.state_dict().values())
    assert reads <= 2 * len(saved)


def test_an_optimizer_of_torch_is_loaded_without_a_search_for_each_tensor() -> None:
    """torch searches a parameter's number in its group for each tensor of its state."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(50)]
    optimizer = torch.optim.AdamW([{"params": parameters[:30]}, {"params": parameters[30:]}])
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    optimizer.step()
    searches = 0

    class Numbers(list[int]):
        def __contains__(self, number: object) -> bool:
            nonlocal searches
            searches += 1
            return list.__contains__(self, number)

    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["params"] = Numbers(group["params"])
        group["lr"] = 0.25
    load_state({"optim": optimizer}, {"optim": saved}, is_ours=True)
    assert searches == 0
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert optimizer.param_groups[1]["params"] == parameters[30:]


class Scaled(torch.nn.Linear):
    """Its extra state is a tensor of which it gives copies away, as layers for 8-bit training do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.history = torch.zeros(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.history.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.history = state.clone()


@pytest.mark.fault("A module's extra state is a tensor that only the module can load")
def test_extra_state_that_is_a_tensor_is_loaded_by_its_module() -> None:
    model = torch.nn.Sequential(Scaled(), torch.nn.Linear(2, 2))
    model[0].history.fill_(7.0)
    kept = saved({"model": model})
    other = torch.nn.Sequential(Scaled(), torch.nn.Linear(2, 2))
    load_state({"model": other}, kept)
    assert other[0].history.tolist() == [7.0, 7.0, 7.0]
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.fault("A hook of a module runs after a restore")
def test_a_hook_that_runs_after_the_load_misses_no_tensor() -> None:
    missing: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_load_state_dict_post_hook(lambda _, keys: missing.extend(keys.missing_keys))
    load_state({"model": model}, saved({"model": model}))
    assert missing == []


@pytest.mark.fault("A script replaces load_state_dict of one instance")
def test_a_load_method_of_an_instance_gets_every_tensor() -> None:
    model, given = torch.nn.Linear(2, 2), list[str]()
    kept = saved({"model": model})
    load = model.load_state_dict

    def load_state_dict(state: Any, strict: bool = True) -> Any:
        given.extend(state)
        return load(state, strict=strict)

    model.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]
    load_state({"model": model}, kept)
    assert sorted(given) == ["bias", "weight"]


@pytest.mark.fault("A module keeps the tensor that set_extra_state receives")
def test_extra_state_that_its_module_keeps_is_no_view_of_the_slot() -> None:
    class Keeping(Scaled):
        def set_extra_state(self, state: torch.Tensor) -> None:
            self.history = state

    one, other = Keeping(), Keeping()
    one.history.fill_(7.0)
    kept = saved({"model": one})
    load_state({"model": other}, kept)
    kept["model"]["_extra_state"].zero_()
    assert other.history.tolist() == [7.0, 7.0, 7.0]


@pytest.mark.fault("Extra state has another shape than when the model was built")
def test_extra_state_that_grew_in_training_is_loaded() -> None:
    one, other = Scaled(), Scaled()
    one.history = torch.full((5,), 7.0)
    load_state({"model": other}, saved({"model": one}))
    assert other.history.tolist() == [7.0] * 5
