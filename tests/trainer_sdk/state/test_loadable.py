"""Each state that a save accepts can be loaded into the same objects. Others are refused with their path."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trainer.payloads import RANK, stored
from tests.support.trainer.snapshots import take_snapshot

from holdfast.state.loading.load import load_state
from holdfast.state.snapshot import read_payload
from holdfast_core.errors import StateDictError, UnsupportedStateError


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def module_with(value: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("table", value)
    return module


def read_only() -> np.ndarray[Any, Any]:
    array = np.ones(3)
    array.flags.writeable = False
    return array


@pytest.mark.fault("A state holds what could be saved and not loaded")
@pytest.mark.fault("An array in another byte order is saved")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(lambda: torch.zeros(1).expand(3), r"s\.x: an expanded", id="expanded"),
        pytest.param(
            lambda: module_with(torch.zeros(1).expand(3)), r"s\.x\.table: an exp", id="buffer"
        ),
        pytest.param(read_only, r"s\.x: a read-only", id="read-only"),
        pytest.param(lambda: np.broadcast_to(np.ones(1), 3), r"s\.x: a read-only", id="broadcast"),
        pytest.param(
            lambda: np.ma.masked_array([1.0, 2.0], [True, False]), r"s\.x: .*mask", id="masked"
        ),
        pytest.param(lambda: np.zeros(2).view(np.recarray), r"s\.x: .*subclass", id="subclass"),
        pytest.param(lambda: np.zeros(2, [("a", "f4")]), r"s\.x: .*dtype", id="structured"),
        pytest.param(
            lambda: np.zeros(2, np.dtype("f4").newbyteorder()),
            r"s\.x: .*byte order",
            id="byte order",
        ),
        pytest.param(lambda: np.zeros(2, "V8"), r"s\.x: .*dtype", id="void"),
        pytest.param(lambda: np.zeros(2, "M8[s]"), r"s\.x: .*dtype", id="dates"),
        pytest.param(lambda: np.array([None, 1]), r"s\.x: .*dtype object", id="objects"),
        pytest.param(lambda: torch.empty(4, dtype=torch.uint4), r"s\.x: .*uint4", id="uint4"),  # type: ignore[attr-defined]
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            r"s\.x: a nested",
            id="nested",
        ),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            r"s\.x: a nested",
            id="jagged",
        ),
        pytest.param(
            lambda: torch.ones(2).as_subclass(Dispatching), r"s\.x: .*Dispatching", id="dispatching"
        ),
        pytest.param(lambda: torch.nn.LazyLinear(2), r"s\.x\.\w+: .*shape", id="lazy"),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
            r"s\.x: .*quint8",
            id="quantised",
        ),
        pytest.param(
            lambda: torch.ones(2, 2).to_sparse_csr(), r"s\.x: .*sparse_csr", id="sparse-csr"
        ),
        pytest.param(
            lambda: defaultdict(lambda: 5), r"s\.x: a defaultdict .*lambda", id="default-factory"
        ),
        pytest.param(lambda: type("Own", (dict,), {})(a=1), r"s\.x: .*Own", id="dict-subclass"),
        pytest.param(lambda: torch.float32, r"s\.x: torch\.dtype", id="dtype"),
    ],
)
def test_a_value_that_could_not_be_loaded_is_refused_at_the_save(value: Any, text: str) -> None:
    with pytest.raises(UnsupportedStateError, match=text):
        take_snapshot({"s": {"x": value()}}, RANK)


@pytest.mark.parametrize("kind", [RuntimeError, KeyError, MemoryError, NotImplementedError])
def test_a_state_dict_that_raises_is_named(kind: type[Exception]) -> None:
    class Failing:
        def state_dict(self) -> dict[str, Any]:
            raise kind("of its own")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(StateDictError, match=rf"data: .*raised {kind.__name__}: .*of its own"):
        take_snapshot({"data": Failing()}, RANK)


def complex_views() -> list[torch.Tensor]:
    plain = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    double = plain.to(torch.complex128)
    return [plain.conj(), double.conj(), double.conj().imag, plain.conj().imag]


@pytest.mark.fault("Conjugate and negative views are saved")
@pytest.mark.parametrize("number", range(4))
def test_conjugate_and_negative_views_keep_their_values(number: int) -> None:
    view = complex_views()[number]
    expected = view.clone()
    payload = stored({"x": view})
    view.zero_()
    load_state({"x": view}, read_payload(payload))
    assert torch.equal(view, expected)


@pytest.mark.parametrize("in_module", [False, True])
def test_tensors_of_inference_mode_are_loaded_in_place(in_module: bool) -> None:
    with torch.inference_mode():
        tensor = torch.arange(4.0)
    state: dict[str, Any] = {"x": module_with(tensor) if in_module else tensor}
    payload = stored(state)
    with torch.inference_mode():
        tensor.zero_()
    load_state(state, read_payload(payload))
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(0, 3), id="empty"),
        pytest.param(torch.zeros(0, 3).expand(2, 0, 3), id="empty-and-expanded"),
        pytest.param(torch.arange(4.0).expand(1, -1), id="one-row"),
        pytest.param(torch.arange(6.0).view(2, 3).t(), id="transposed"),
        pytest.param(torch.arange(6.0)[::2], id="strided"),
        pytest.param(torch.nn.Parameter(torch.arange(3.0)), id="parameter"),
        pytest.param(torch.tensor([1, 2], dtype=torch.uint16), id="uint16"),
        pytest.param(torch.tensor(5), id="scalar"),
        pytest.param(torch.arange(3.0).to(torch.float8_e4m3fnuz), id="float8"),
    ],
)
def test_every_kind_of_tensor_is_loaded_in_place(tensor: torch.Tensor) -> None:
    expected = tensor.detach().clone()
    payload = stored({"x": tensor})
    with torch.no_grad():
        tensor.zero_()
    place = tensor.data_ptr()
    load_state({"x": tensor}, read_payload(payload))
    assert tensor.data_ptr() == place
    assert torch.equal(tensor.detach().to(torch.float64), expected.to(torch.float64))


def test_a_mapped_array_is_loaded_in_place(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "array", np.float32, "w+", shape=(4,))
    array[:] = 3
    payload = stored({"x": array})
    array[:] = 0
    load_state({"x": array}, read_payload(payload))
    assert (array == 3).all()


def test_an_object_may_save_values_that_only_it_can_load() -> None:
    class Loader:
        seen: Any = read_only()

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen, "mask": torch.ones(1).expand(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen, self.mask = state["seen"], state["mask"]

    loader = Loader()
    load_state({"data": loader}, read_payload(stored({"data": loader})))
    assert loader.seen.tolist() == [1, 1, 1]
    assert loader.mask.tolist() == [1, 1, 1]


@pytest.mark.fault("A state holds containers of several types")
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(OrderedDict([("b", 1), ("a", 2)]), id="ordered"),
        pytest.param(Counter({"b": 3, "a": 1}), id="counter"),
        pytest.param(defaultdict(list, {"b": [1], "a": []}), id="default"),
        pytest.param(defaultdict(None, {3: 1}), id="default-none"),
        pytest.param(torch.Size([2, 3]), id="size"),
        pytest.param(bytearray(b"\x00\xff"), id="bytearray"),
        pytest.param({"b": 1, "a": 2}, id="order"),
        pytest.param({2: "x", "2": "y"}, id="keys"),
        pytest.param(1 << 20_000, id="huge"),
        pytest.param(-(1 << 20_000), id="huge-negative"),
        pytest.param("\ud800", id="surrogate"),
        pytest.param({"\ud800": 1}, id="surrogate-key"),
    ],
)
def test_values_come_back_with_their_type(value: Any) -> None:
    for current in ({"x": value}, {"x": None}):
        load_state(current, read_payload(stored({"x": value})))
        found = current["x"]
        assert type(found) is type(value)
        assert found == value
        if isinstance(value, dict):
            assert list(found) == list(value)
            assert getattr(found, "default_factory", 0) == getattr(value, "default_factory", 0)


def test_tensors_in_an_ordered_dict_are_restored_in_order() -> None:
    value = OrderedDict([("b", torch.ones(2)), ("a", torch.zeros(2))])
    state: dict[str, Any] = {"x": {}}
    load_state(state, read_payload(stored({"x": value})))
    assert [*state["x"]] == ["b", "a"]
    assert torch.equal(state["x"]["b"], torch.ones(2))


def test_a_counter_returns_to_its_saved_value() -> None:
    counter: Counter[str] = Counter(a=1)
    history: dict[int, float] = {1: 0.5}
    state: dict[str, Any] = {"text": counter, "loss": history}
    payload = stored(state)
    counter.update("aab")
    history[2] = 0.25
    load_state(state, read_payload(payload))
    assert state["text"] is counter
    assert counter == Counter(a=1)
    assert history == {1: 0.5}


def test_the_order_of_keys_is_that_of_the_save() -> None:
    cache = OrderedDict([("a", 1), ("b", 2), ("c", 3)])
    payload = stored({"cache": cache})
    cache.move_to_end("a")
    load_state({"cache": cache}, read_payload(payload))
    assert list(cache) == ["a", "b", "c"]
