"""A state becomes a payload that every safetensors reader can open, and is restored bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors_torch
from tests.support.trainer.payloads import RANK, stored
from tests.support.trainer.snapshots import take_snapshot

from holdfast.slots.staging import Copier
from holdfast.state.snapshot import (
    PayloadTarget,
    SavePlan,
    plan_save,
    read_payload,
    run_device_copies,
)
from holdfast_core.errors import FormatError, UnsupportedStateError
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import Rank

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5), (40, 1001)], ids=str)
def test_a_tensor_of_every_dtype_and_shape_is_restored(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = (torch.randn(shape) * 10).to(dtype)
    back = read_payload(stored({"odd": torch.ones(3, dtype=torch.int8), "x": value}))["x"]
    assert back.dtype == dtype
    assert back.shape == value.shape
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (back, value))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_a_device_write_the_same_bytes(dtype: torch.dtype) -> None:
    base = (torch.randn(4, 6) * 10).to(dtype)
    state = {"x": base, "t": base.t(), "0": base[0, 0], "e": base[:0], "n": np.arange(3)}
    snapshot = take_snapshot(state, RANK)
    plan = plan_save(snapshot, RANK)
    target = np.zeros(plan.payload_bytes, dtype=np.uint8)
    payload = PayloadTarget(plan, target)
    copies = payload.device_copies(snapshot, torch.is_tensor)
    payload.write(snapshot, Copier().run, torch.is_tensor)
    assert not np.array_equal(target, stored(state))
    assert [copy.leaf.name for copy in copies] == ["x", "t", "0"]
    run_device_copies(copies, non_blocking=True)
    assert np.array_equal(target, stored(state))


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint64", "bool", "complex128"])
def test_numpy_arrays_come_back_as_arrays(dtype: str) -> None:
    value = np.arange(12).reshape(3, 4).astype(dtype)
    back = read_payload(stored({"x": value}))["x"]
    assert isinstance(back, np.ndarray)
    np.testing.assert_array_equal(back, value)


def test_views_that_are_not_contiguous_are_restored() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    back = read_payload(stored({"t": base.t(), "s": base[:, ::2]}))
    assert torch.equal(back["t"], base.t())
    assert torch.equal(back["s"], base[:, ::2])


@pytest.mark.parametrize("count", [7, 40_001])
def test_views_whose_values_are_not_in_memory_are_restored(count: int) -> None:
    conjugate = torch.randn(count, dtype=torch.complex64).conj()
    negative = torch.randn(count, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    back = read_payload(stored({"conjugate": conjugate, "negative": negative}))
    assert torch.equal(back["conjugate"], conjugate)
    assert torch.equal(back["negative"], negative)


def test_tensors_of_all_sizes_keep_their_places() -> None:
    counts = [1, 40_000, 32_768, 32_769, 2_000_000, 9_000_000, 5, 300_000]
    state = {f"t{number}": torch.randn(count) for number, count in enumerate(counts)}
    state["parameter"] = torch.nn.Parameter(torch.randn(50_000), requires_grad=False)
    back = read_payload(stored(state))
    assert {name: torch.equal(back[name], value) for name, value in state.items()} == dict.fromkeys(
        state, True
    )


def test_payload_is_a_safetensors_file() -> None:
    payload = stored({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 4})
    tensors = safetensors_torch.load(payload.tobytes())
    assert torch.equal(tensors["model.w"], torch.arange(6.0).reshape(2, 3))


def test_the_layout_has_the_place_of_each_tensor() -> None:
    snapshot = take_snapshot({"w": torch.ones(2, 3), "n": 1}, RANK)
    plan = plan_save(snapshot, RANK)
    layout = parse_rank_layout(plan.layout)
    assert layout.tensors["w"].shape == (2, 3)
    assert set(layout.objects) == {"n", "w"}
    assert layout.payload_bytes == plan.payload_bytes


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        pytest.param({"n": 12345}, True, id="another-number"),
        pytest.param({"w": torch.zeros(2, 3)}, True, id="other-values"),
        pytest.param({"w": torch.zeros(3, 2)}, False, id="another-shape"),
        pytest.param({"w": torch.zeros(2, 3, dtype=torch.int32)}, False, id="another-dtype"),
        pytest.param({"m": 1}, False, id="another-entry"),
        pytest.param({"n": "x" * 100_000}, False, id="objects-outgrow-their-room"),
    ],
)
def test_a_plan_is_kept_while_the_structure_is_the_same(change: dict[str, Any], fits: bool) -> None:
    state: dict[str, Any] = {"w": torch.ones(2, 3), "n": 1}
    plan = plan_save(take_snapshot(state, RANK), RANK)
    assert plan.fits(take_snapshot({**state, **change}, RANK)) is fits


def test_objects_fit_up_to_the_last_byte_of_their_room() -> None:
    """One byte more would be written over the first tensor."""
    plan = plan_save(take_snapshot({"w": torch.ones(2), "text": ""}, RANK), RANK)
    used = len(take_snapshot({"w": torch.ones(2), "text": ""}, RANK).objects)
    free = plan.payload.objects.length_bytes - used
    assert plan.fits(take_snapshot({"w": torch.ones(2), "text": "x" * free}, RANK))
    assert not plan.fits(take_snapshot({"w": torch.ones(2), "text": "x" * (free + 1)}, RANK))


@pytest.mark.parametrize("state", [[1], {1: 2}, {"": 1}], ids=["list", "int-key", "empty-key"])
def test_the_state_is_a_dict_of_named_parts(state: Any) -> None:
    with pytest.raises(UnsupportedStateError):
        take_snapshot(state, RANK)


@pytest.mark.parametrize("position", [0, 8, 20, 100])
def test_a_damaged_payload_is_refused(position: int) -> None:
    payload = stored({"w": torch.ones(64)})
    payload[position : position + 8] = 255
    with pytest.raises(FormatError):
        read_payload(payload)


def test_frozen_parameters_are_stored_together() -> None:
    """By name, adapters stand between the layers that they adapt. They must get chunks of their own."""
    model = torch.nn.ModuleDict()
    for layer in range(20):
        model[f"layer{layer}"] = torch.nn.Linear(64, 64).requires_grad_(False)
        model[f"layer{layer}_adapter"] = torch.nn.Linear(64, 2, bias=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained)

    def save() -> tuple[SavePlan, bytes]:
        for parameter in trained:
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        snapshot = take_snapshot({"model": model, "optim": optimizer}, Rank(0))
        plan = plan_save(snapshot, Rank(0))
        target = np.zeros(plan.payload_bytes, dtype=np.uint8)
        PayloadTarget(plan, target).write(snapshot, lambda jobs: [job() for _, job in jobs])
        return plan, target.tobytes()

    plan, before = save()
    _, after = save()
    changed = sum(before[i : i + 4096] != after[i : i + 4096] for i in range(0, len(before), 4096))
    trained_bytes = 3 * sum(p.numel() * 4 for p in trained)
    assert changed <= trained_bytes / 4096 + 6, "values, first and second moments"
    frozen = [t.fqn for t in plan.payload.tensors if "adapter" not in t.fqn and "model." in t.fqn]
    places = [i for i, t in enumerate(plan.payload.tensors) if t.fqn in frozen]
    assert places == list(range(places[0], places[0] + 40))
