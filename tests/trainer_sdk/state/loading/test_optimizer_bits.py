"""A restored optimizer has the bits that were saved, whatever the dtype of its parameters.

torch's `load_state_dict` casts every tensor of a parameter's state except `step` to the parameter's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trainer.payloads import stored

from holdfast.state.loading.load import load_state
from holdfast.state.snapshot import read_payload

Optimizer = torch.optim.Optimizer
Make = Callable[[Iterable[torch.nn.Parameter]], Optimizer]

WEIGHTS = [torch.bfloat16, torch.float16, torch.float32]


class Own(Optimizer):
    """Base of the optimizers below: each parameter has the state that `first` returns."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.01, **options})

    def first(self, parameter: torch.Tensor) -> dict[str, Any]:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(self.first(parameter))
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        value.mul_(0.9).add_(0.1003)
                parameter.add_(parameter.grad, alpha=-group["lr"])


class MasterWeights(Own):
    """Trains weights of two bytes with moments and a copy of the weights in fp32."""

    def first(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {
            "master": parameter.float() + 1e-4,
            "moment": torch.rand_like(parameter, dtype=torch.float32),
            "seen": torch.tensor(1_000_003),
        }


class EveryDtype(Own):
    def first(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {
            "double": torch.full(parameter.shape, 1 / 3, dtype=torch.float64),
            "half": torch.full(parameter.shape, 1 / 3, dtype=torch.float16),
            "brain": torch.full(parameter.shape, 1 / 3, dtype=torch.bfloat16),
            "bytes": torch.arange(parameter.numel(), dtype=torch.uint8).view(parameter.shape),
            "mask": torch.ones(parameter.shape, dtype=torch.bool),
            "seed": torch.tensor(2**40 + 1),
            "phase": torch.full((2,), 1 / 3 + 1j / 3, dtype=torch.complex64),
        }


class Nested(Own):
    """Values that torch rebuilds from their items, or refuses."""

    def first(self, parameter: torch.Tensor) -> dict[str, Any]:
        wide = torch.full((3,), 1 / 3, dtype=torch.float64)
        return {
            "history": [wide + 1, wide + 2],
            "pair": (wide + 3, None),
            "by_name": {"step": torch.tensor(5), "wide": wide + 4, "deep": [{"wide": wide + 5}]},
            "mode": "warm",
            "blob": b"\x00\xff",
            "array": np.arange(3, dtype=np.int64),
            "flag": True,
            "nothing": None,
        }


class Blockwise(Own):
    """State in 8 bits with scales and a code book, as that of bitsandbytes."""

    def first(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {
            "step": 1,
            "state1": torch.arange(parameter.numel(), dtype=torch.uint8).view(parameter.shape),
            "qmap1": torch.linspace(-1, 1, 256),
            "absmax1": torch.rand(4),
        }


class ScheduleFree(Own):
    """A second copy of the weights, and the numbers of its groups, as in the package schedulefree."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, k=0, weight_sum=0.0, lr_max=-1.0, train_mode=True)

    def first(self, parameter: torch.Tensor) -> dict[str, Any]:
        return {"z": parameter.detach().clone().float(), "exp_avg_sq": torch.rand(3).double()}

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 1 / 3


class CallsTorch(MasterWeights):
    """Has loading code of its own, which calls torch's."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


class Wrapper(Optimizer):
    """Hands everything to another optimizer, as the wrappers of frameworks do."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = [inner]

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner[0].param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner[0].state

    def state_dict(self) -> Any:
        return self.inner[0].state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner[0].load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        self.inner[0].step()


def of_torch() -> dict[str, Make]:
    """Return every optimizer of torch with each implementation that a CPU has."""
    found: dict[str, Make] = {}
    for name in torch.optim.__all__:
        kind = getattr(torch.optim, name, None)
        if not isinstance(kind, type) or not issubclass(kind, Optimizer) or kind is Optimizer:
            continue
        options: dict[str, dict[str, Any]] = {name: {}}
        if name in ("Adam", "AdamW", "Adagrad", "SGD"):
            options[f"{name}, fused"] = {"fused": True}
        if name in ("Adam", "AdamW"):
            options[f"{name}, amsgrad"] = {"amsgrad": True}
        if name in ("Adam", "AdamW", "NAdam", "SGD"):
            options[f"{name}, foreach"] = {"foreach": True}
        if name == "SGD":
            options["SGD, momentum"] = {"momentum": 0.9}
        if name == "RMSprop":
            options["RMSprop, centered"] = {"momentum": 0.9, "centered": True}
        for label, chosen in options.items():
            found[label] = lambda params, kind=kind, chosen=chosen: kind(params, lr=0.01, **chosen)
    return found


OPTIMIZERS: dict[str, Make] = {
    **of_torch(),
    "fp32 state and counter": MasterWeights,
    "every dtype": EveryDtype,
    "nested values": Nested,
    "8 bits": Blockwise,
    "schedule-free": ScheduleFree,
    "own load_state_dict": CallsTorch,
    "wrapped": lambda params: Wrapper(MasterWeights(params)),
}


class Training:
    def __init__(self, make: Make, dtype: torch.dtype, *, is_sparse: bool) -> None:
        torch.manual_seed(7)
        self.is_sparse = is_sparse
        self.weights = [torch.nn.Parameter(torch.randn(4, 3).to(dtype)) for _ in range(2)]
        self.optimizer = make(self.weights)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for weight in self.weights:
                grad = torch.randn(4, 3).to(weight.dtype)
                weight.grad = grad.to_sparse() if self.is_sparse else grad
            self.optimizer.step(lambda: torch.tensor(1.0))

    @property
    def state(self) -> dict[str, Any]:
        return {"weights": [one.data for one in self.weights], "optim": self.optimizer}


def bits(value: Any) -> Any:
    """Return a value that is equal for equal types, dtypes and bits only."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), plain.tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return "dict", {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(item) for item in value]
    return type(value).__name__, value


@pytest.mark.fault("An optimizer keeps state in another dtype than its weights")
@pytest.mark.parametrize("steps_before", [0, 2], ids=["fresh", "trained"])
@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_bits_are_the_saved_bits(name: str, dtype: torch.dtype, steps_before: int) -> None:
    def training() -> Training:
        return Training(OPTIMIZERS[name], dtype, is_sparse=name == "SparseAdam")

    undisturbed = training()
    undisturbed.train(3)
    saved = stored(undisturbed.state)
    expected = copy.deepcopy(bits(undisturbed.optimizer.state_dict()))
    generator = torch.get_rng_state()
    undisturbed.train(2)

    resumed = training()
    resumed.train(steps_before)
    load_state(resumed.state, read_payload(saved))
    assert bits(resumed.optimizer.state_dict()) == expected
    torch.set_rng_state(generator)
    resumed.train(2)
    assert bits(resumed.state["weights"]) == bits(undisturbed.state["weights"])
    assert bits(resumed.optimizer.state_dict()) == bits(undisturbed.optimizer.state_dict())


def test_no_view_of_the_slot_stays_in_the_state() -> None:
    first = Training(MasterWeights, torch.bfloat16, is_sparse=False)
    first.train(1)
    slot = stored(first.state)
    second = Training(MasterWeights, torch.bfloat16, is_sparse=False)
    load_state(second.state, read_payload(slot))
    slot[:] = 0
    assert bits(second.optimizer.state_dict()) == bits(first.optimizer.state_dict())


def test_hooks_and_own_code_see_and_may_change_what_is_loaded() -> None:
    first = Training(MasterWeights, torch.bfloat16, is_sparse=False)
    first.train(1)
    saved = read_payload(stored(first.state))
    seen: list[torch.dtype] = []

    class Upgrading(MasterWeights):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            for entries in self.state.values():
                seen.append(entries["moment"].dtype)
                entries["added"] = 1

    Upgrading.__qualname__ = "MasterWeights"
    second = Training(Upgrading, torch.bfloat16, is_sparse=False)

    def before(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        parts = {k: {**v, "seen": v["seen"] + 1} for k, v in state["state"].items()}
        return {**state, "state": parts}

    def after(optimizer: Optimizer) -> None:
        for entries in optimizer.state.values():
            seen.append(entries["moment"].dtype)

    second.optimizer.register_load_state_dict_pre_hook(before)
    second.optimizer.register_load_state_dict_post_hook(after)
    load_state(second.state, saved)
    assert seen == [torch.float32] * 4
    for weight in second.weights:
        entries = second.optimizer.state[weight]
        assert (entries["seen"].item(), entries["added"]) == (1_000_004, 1)
    copied = copy.deepcopy(second.optimizer)
    assert bits(copied.state_dict()) == bits(second.optimizer.state_dict())
