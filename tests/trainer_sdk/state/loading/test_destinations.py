"""Bytes of a payload that are read directly into a state's tensors give the same state as a load from a
slot."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainer.payloads import RANK, stored
from tests.support.trainer.snapshots import take_snapshot

from holdfast.state.loading.destinations import Destinations
from holdfast.state.loading.load import fits, load_state
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.rng import RNG
from holdfast.state.snapshot import Snapshots, read_payload
from holdfast.state.tensors import is_in_host_memory
from holdfast_core.errors import CorruptionError
from holdfast_core.format.payload import LENGTH_BYTES, PayloadPlan, header_bytes, parse_payload

PIECE_BYTES = 1 << 14


def planned(payload: np.ndarray[Any, Any]) -> PayloadPlan:
    size = header_bytes(payload[:LENGTH_BYTES].tobytes(), payload.size)
    return parse_payload(payload[:size].tobytes(), payload.size)


def destinations(payload: np.ndarray[Any, Any], state: dict[str, Any]) -> Destinations:
    plan = planned(payload)
    objects = payload[plan.objects.start : plan.objects.stop].tobytes()
    return Destinations(plan, objects, take_snapshot(state, RANK).leaves)


def put_all(found: Destinations, payload: np.ndarray[Any, Any]) -> None:
    done = 0
    for start in range(0, payload.size, PIECE_BYTES):
        done += found.put(start, memoryview(payload[start : start + PIECE_BYTES]))
    assert done == found.wanted_bytes


def loaded(state: dict[str, Any], payload: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Load the payload as a restore from a folder does."""
    found = destinations(payload, state)
    assert fits(state, found.saved)
    put_all(found, payload)
    load_state(state, found.saved, is_ours=True)
    return state


def bits(value: Any) -> bytes:
    array = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes(array.tobytes())


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.lists(st.floats(0, 1), max_size=9)
)
def test_pieces_of_any_length_give_every_bit(sizes: list[int], cuts: list[float]) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]
    state: dict[str, Any] = {
        str(9 - index): torch.randint(0, 2, (size,)).to(kinds[index % len(kinds)])
        for index, size in enumerate(sizes)
    }
    state["array"] = np.arange(sizes[0], dtype=np.int16)
    payload = stored(state)
    other = {k: torch.zeros_like(v) for k, v in state.items() if k != "array"}
    target = {**other, "array": np.zeros(sizes[0], dtype=np.int16), "new": 1}
    found = destinations(payload, target)
    positions = sorted({0, payload.size, *(int(cut * payload.size) for cut in cuts)})
    put = [
        found.put(start, memoryview(payload[start:stop]))
        for start, stop in itertools.pairwise(positions)
    ]
    assert sum(put) == found.wanted_bytes
    for name, expected in read_payload(payload).items():
        if name == "array":
            assert np.array_equal(found.saved[name], expected)
            assert np.array_equal(target[name], expected)
        else:
            assert bits(found.saved[name]) == bits(expected) == bits(target[name])


def test_a_tensor_is_written_in_place_and_only_by_its_bytes() -> None:
    payload = stored({"t": torch.arange(1000.0), "n": {"scalar": torch.tensor(3)}})
    state: dict[str, Any] = {"t": torch.zeros(1000), "n": {"scalar": torch.tensor(0)}}
    found = destinations(payload, state)
    assert found.saved["t"].data_ptr() == state["t"].data_ptr()
    assert not state["t"].any()
    put_all(found, payload)
    assert state["t"][-1] == 999
    assert state["n"]["scalar"] == 3


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s)
    return {"model": model, "optim": optimizer, "sched": scheduler}


def train(state: dict[str, Any], steps: int) -> None:
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        inputs = torch.randn(8, 5, generator=generator)
        state["model"](inputs).square().mean().backward()
        state["optim"].step()
        state["sched"].step()
        state["optim"].zero_grad()


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    found = list(state["model"].state_dict().values())
    for entry in state["optim"].state_dict()["state"].values():
        found += [v for v in entry.values() if isinstance(v, torch.Tensor)]
    return found


@pytest.mark.parametrize("steps_before", [0, 1], ids=["fresh optimizer", "optimizer with state"])
def test_training_continues_bit_identically(steps_before: int) -> None:
    one, other = training(0), training(1)
    train(one, 3)
    payload = stored(one)
    train(other, steps_before)
    places = [t.data_ptr() for t in tensors(other)]
    loaded(other, payload)
    assert [t.data_ptr() for t in tensors(other)][: len(places)] == places
    payload.fill(0)  # the loaded state must keep no reference to the payload
    train(one, 3)
    train(other, 3)
    assert [bits(t) for t in tensors(other)] == [bits(t) for t in tensors(one)]
    assert other["sched"].get_last_lr() == one["sched"].get_last_lr()


def test_the_tensor_that_is_loaded_last_decides_shared_memory() -> None:
    saved = {"a": torch.full((8,), 1.0), "b": torch.full((8,), 2.0), "c": torch.full((4,), 3.0)}
    payload = stored(saved)

    def tied() -> dict[str, Any]:
        memory = torch.zeros(8)
        return {"a": memory, "b": memory.view(8), "c": memory[4:]}

    expected = tied()
    load_state(expected, read_payload(payload))
    assert bits(loaded(tied(), payload)["a"]) == bits(expected["a"])


def by_slot(state: dict[str, Any], payload: np.ndarray[Any, Any]) -> dict[str, Any]:
    load_state(state, read_payload(payload))
    return state


def test_a_tensor_without_elements_hides_no_other() -> None:
    """Both begin at the same byte. The payload lists the empty tensor first, the state lists it last."""
    payload = stored({"m": {"weight": torch.arange(100_000.0), "empty": torch.zeros(0)}})
    state = loaded({"m": {"weight": torch.zeros(100_000), "empty": torch.zeros(0)}}, payload)
    assert torch.equal(state["m"]["weight"], torch.arange(100_000.0))


def test_memory_shared_in_another_element_order_is_restored() -> None:
    payload = stored({"t": torch.full((2, 3), 1.0), "w": torch.full((3, 2), 2.0)})

    def state() -> dict[str, Any]:
        memory = torch.zeros(3, 2)
        return {"t": memory.t(), "w": memory}

    assert bits(loaded(state(), payload)["w"]) == bits(by_slot(state(), payload)["w"])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(1000).astype(np.clongdouble),
        np.arange(9, dtype=np.float32)[1:].view(np.complex64),
        np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(2, 0, 1),
        np.arange(10.0)[::-1],
    ],
    ids=["wider than its alignment", "beside its alignment", "transposed", "reversed"],
)
def test_arrays_of_every_memory_layout_are_restored(array: np.ndarray[Any, Any]) -> None:
    payload = stored({"array": array})
    target = array.copy() if array.flags.c_contiguous else np.zeros_like(array)
    if array.dtype == np.complex64:
        target = np.zeros(9, np.float32)[1:].view(np.complex64)
    target[...] = 0
    assert np.array_equal(loaded({"array": target}, payload)["array"], array)
    found = destinations(payload, {})
    put_all(found, payload)
    assert np.array_equal(found.saved["array"], array)


def test_two_paths_with_the_same_name_are_restored_apart() -> None:
    """Both paths give the same name; the order of the keys decides which of them gets a number appended."""
    one, two = torch.full((4,), 1.0), torch.full((4,), 2.0)
    payload = stored({"s": {"a": {"b.c": one}, "a.b": {"c": two}}})
    state = {"s": {"a.b": {"c": torch.zeros(4)}, "a": {"b.c": torch.zeros(4)}}}
    loaded(state, payload)
    assert (state["s"]["a"]["b.c"][0], state["s"]["a.b"]["c"][0]) == (1, 2)
    fewer: dict[str, Any] = {"s": {"a.b": {"c": torch.zeros(4)}}}
    loaded(fewer, payload)
    assert (fewer["s"]["a"]["b.c"][0], fewer["s"]["a.b"]["c"][0]) == (1, 2)


def test_a_learning_rate_that_is_a_tensor_is_replaced_and_not_written() -> None:
    def made(rate: float) -> tuple[torch.Tensor, dict[str, Any]]:
        lr = torch.tensor(rate)
        parameter = torch.nn.Parameter(torch.zeros(3))
        return lr, {"optim": torch.optim.Adam([parameter], lr=lr)}

    payload = stored(made(0.5)[1])
    mine, state = made(0.125)
    loaded(state, payload)
    assert mine == 0.125
    assert state["optim"].param_groups[0]["lr"] == 0.5


def test_an_optimizer_of_an_object_of_its_own_code_is_not_written() -> None:
    class Owner:
        def __init__(self, value: float) -> None:
            self.parameter = torch.nn.Parameter(torch.full((3,), value))
            self.optimizer = torch.optim.AdamW([self.parameter])
            self.parameter.sum().backward()
            self.optimizer.step()

        def state_dict(self) -> dict[str, Any]:
            return {"optimizer": self.optimizer}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    leaves = take_snapshot({"owner": Owner(1.0)}, RANK).leaves
    assert len(leaves) == 3
    assert all(leaf.is_private for leaf in leaves)


def test_lists_of_tensors_in_an_optimizer_are_replaced() -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        parameter = torch.nn.Parameter(torch.randn(3))
        optimizer = torch.optim.LBFGS([parameter], history_size=3)
        for _ in range(3):
            optimizer.step(lambda: _squares(optimizer, parameter))
        return {"p": parameter, "optim": optimizer}

    one = made(0)
    payload = stored(one)
    other = made(1)
    before = other["optim"].state_dict()["state"][0]["old_dirs"]
    kept = [t.clone() for t in before]
    loaded(other, payload)
    assert [bits(t) for t in before] == [bits(t) for t in kept]
    after = other["optim"].state_dict()["state"][0]["old_dirs"]
    expected = one["optim"].state_dict()["state"][0]["old_dirs"]
    assert [bits(t) for t in after] == [bits(t) for t in expected]


def _squares(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = (parameter**4).sum()
    loss.backward()
    return loss


def test_the_default_device_is_not_used_for_new_memory() -> None:
    payload = stored({"t": torch.ones(5)})
    with torch.device("meta"):
        found = destinations(payload, {})
        put_all(found, payload)
    assert torch.equal(found.saved["t"], torch.ones(5))


class Loader:
    """An object that is neither module nor optimizer. Others may use the tensors that it returns."""

    def __init__(self) -> None:
        self.kept = torch.zeros(6)
        self.seen: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["kept"]


def test_values_that_cannot_be_written_in_place_are_loaded() -> None:
    values = torch.arange(6.0)
    grid = values.reshape(2, 3)
    payload = stored({"t": grid, "long": values, "array": values.numpy(), "loader": Loader()})
    loader = Loader()
    state: dict[str, Any] = {
        "t": torch.zeros(3, 2).t(),
        "long": torch.zeros(12)[::2],
        "array": np.zeros(12, dtype=np.float32)[::2],
        "loader": loader,
    }
    before = [state["t"].data_ptr(), state["long"].data_ptr()]
    found = destinations(payload, state)
    assert found.saved["t"].data_ptr() not in before
    assert found.saved["long"].data_ptr() not in before
    put_all(found, payload)
    assert not state["t"].any()
    load_state(state, found.saved, is_ours=True)
    assert torch.equal(state["t"], grid)
    assert torch.equal(state["long"], values)
    assert np.array_equal(state["array"], values.numpy())
    assert loader.seen.data_ptr() != loader.kept.data_ptr()


def test_the_count_of_writes_rises() -> None:
    """Autograd, and saves from a device, use this count to detect writes to a tensor."""
    payload = stored({"t": torch.ones(10)})
    state = {"t": torch.zeros(10)}
    before = state["t"]._version
    loaded(state, payload)
    assert state["t"]._version > before


@pytest.mark.parametrize("where", ["header", "objects"])
def test_a_payload_that_changes_between_two_reads_is_corrupt(where: str) -> None:
    payload = stored({"t": torch.ones(10), "word": "yes"})
    plan = planned(payload)
    found = destinations(payload, {"t": torch.zeros(10), "word": ""})
    changed = payload.copy()
    changed[20 if where == "header" else plan.objects.start + 3] ^= 1
    with pytest.raises(CorruptionError, match="changed between two reads"):
        put_all(found, changed)


def test_a_state_without_tensors_is_restored() -> None:
    payload = stored({"epoch": 3, "names": ["a", "b"]})
    assert loaded({"epoch": 0, "names": []}, payload) == {"epoch": 3, "names": ["a", "b"]}


def wished(**state: Any) -> bool:
    return RestoreTarget(state, Snapshots(RANK), strict=True).is_read_in_place()


def test_a_tensor_on_a_device_is_not_host_memory() -> None:
    leaves = take_snapshot({"t": torch.zeros(3), "a": np.zeros(3)}, RANK).leaves
    assert is_in_host_memory(leaves)

    class OnDevice(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    on_device = dataclasses.replace(leaves[0], source=torch.zeros(3).as_subclass(OnDevice))
    assert not is_in_host_memory([on_device, *leaves[1:]])


class Zeroes(torch.nn.Linear):
    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        self.weight.data.zero_()
        return super().load_state_dict(*arguments, **options)


class Refuses(torch.nn.Linear):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


def with_hook(register: str) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    getattr(model[0], register)(lambda *_: None)
    return model


def test_only_what_torch_loads_is_written_before_it_is_loaded() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LSTM(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    assert wished(model=model, optim=optimizer, t=torch.zeros(2), rng=RNG())
    assert not wished(model=torch.nn.Sequential(Zeroes(2, 2)))
    assert not wished(model=torch.nn.Sequential(Refuses(2, 2)))
    for register in (
        "register_load_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
    ):
        assert not wished(model=with_hook(register)), register
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    assert not wished(model=model, optim=optimizer)
