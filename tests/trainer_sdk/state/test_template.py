"""A snapshot that is taken with a template equals one for which the whole state is encoded."""

from __future__ import annotations

import collections
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.trainer.payloads import RANK
from tests.support.trainer.snapshots import take_snapshot

import holdfast
from holdfast.slots.staging import Copier
from holdfast.state.snapshot import PayloadTarget, Snapshot, Snapshots, plan_save, read_payload
from holdfast.state.tensors import Leaf
from holdfast_core.errors import UnsupportedStateError

State = dict[str, Any]


class Color(Enum):
    RED = 1


class Size(Enum):
    LARGE = 2


class Pair(NamedTuple):
    tensor: torch.Tensor
    number: int


class Loader:
    """An object with a state_dict of its own, whose result the tests change and count."""

    def __init__(self) -> None:
        self.content: Any = {"position": 0, "seen": [], "shuffle": np.arange(4)}
        self.calls = 0

    def state_dict(self) -> Any:
        self.calls += 1
        return self.content

    def load_state_dict(self, content: Any) -> None:
        self.content = content


def make_state() -> State:
    """Return a state with most kinds of values, whose keys are not sorted."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    optim = torch.optim.AdamW(model.parameters())
    plain = torch.optim.SGD(model[0].parameters(), lr=0.1)
    state: State = {
        "model": model,
        "optim": optim,
        "sched": torch.optim.lr_scheduler.StepLR(optim, 2),
        "adapter": plain,
        "rng": holdfast.RNG(),
        "data": Loader(),
        "box": {
            "w": torch.arange(12.0).reshape(3, 4),
            "z": -0.0,
            "a": [1, 2.5, "text", None, True, (1, 2)],
            1: [torch.ones(2), {"deep": torch.zeros(1, dtype=torch.complex128)}],
        },
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "ordered": collections.OrderedDict([("b", torch.ones(2)), ("a", 1)]),
        "counts": collections.Counter("abca"),
        "number": np.float32(2),
        "raw": b"bytes",
        "epoch": 0,
    }
    train(state)
    return state


def train(state: State) -> None:
    model, optim = state["model"], state["optim"]
    model(torch.rand(8, 3)).sum().backward()
    optim.step()
    state["adapter"].step()
    state["sched"].step()
    optim.zero_grad()
    state["epoch"] += 1
    state["data"].content["position"] += 1


def outcome(take: Callable[[State], Snapshot], state: State) -> Any:
    """Return everything of a snapshot that a save or a plan uses, or the error."""
    try:
        snapshot = take(state)
    except UnsupportedStateError as error:
        return str(error)
    leaves = [
        (
            (
                x.name,
                x.dtype,
                x.shape,
                x.global_shape,
                x.offsets,
                x.byte_count,
                x.is_raw,
                x.is_private,
            ),
            type(x.source),
            where_and_what(x),
            id(x.owner),
            id(x.whole),
        )
        for x in snapshot.leaves
    ]
    modules = [(path, id(module)) for path, module in snapshot.modules]
    optimizers = [id(one) for one in snapshot.optimizers]
    return leaves, snapshot.objects, snapshot.keys, snapshot.signature, modules, optimizers


def where_and_what(leaf: Leaf) -> Any:
    """Return the bytes of a leaf, and their address if the object does not make a new tensor at each call."""
    source = leaf.source
    if not torch.is_tensor(source):
        return source.tobytes()
    data = source.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data, None if leaf.name.startswith("rng.") else source.data_ptr()


def full(state: State) -> Snapshot:
    return take_snapshot(state, RANK)


def started(state: State) -> Snapshots:
    """Return Snapshots that have a template for this state."""
    snapshots = Snapshots(RANK)
    for _ in range(2):
        snapshots.take(state)
    return snapshots


def test_a_snapshot_after_each_training_step_is_exact() -> None:
    state = make_state()
    snapshots = Snapshots(RANK)
    for _ in range(6):
        assert outcome(snapshots.take, state) == outcome(full, state)
        train(state)


def set_item(*path: Any) -> Callable[[Any], Callable[[State], None]]:
    def with_value(value: Any) -> Callable[[State], None]:
        def change(state: State) -> None:
            target: Any = state
            for key in path[:-1]:
                target = target.content if isinstance(target, Loader) else target
                target = target[key]
            target = target.content if isinstance(target, Loader) else target
            target[path[-1]] = value

        return change

    return with_value


def reorder(state: State) -> None:
    state["box"] = dict(reversed(state["box"].items()))


def another_model(state: State) -> None:
    state["model"] = torch.nn.Sequential(*state["model"])


def another_optimizer(state: State) -> None:
    before = state["optim"]
    state["optim"] = torch.optim.AdamW(state["model"].parameters())
    state["optim"].load_state_dict(before.state_dict())


def wrapped(state: State) -> None:
    state["model"] = torch.nn.DataParallel(state["model"])


def more_parameters(state: State) -> None:
    extra = torch.nn.Parameter(torch.ones(2))
    state["optim"].add_param_group({"params": [extra], "lr": 0.5})


def learning_rate_tensor(state: State) -> None:
    state["optim"].param_groups[0]["lr"] = torch.tensor(0.5)


def new_buffer(state: State) -> None:
    state["model"].register_buffer("mean", torch.ones(3))


def freed(state: State) -> None:
    state["box"]["w"].untyped_storage().resize_(0)


def other_data(state: State) -> None:
    state["model"][0].weight.data = torch.rand(4, 3)


def transposed_data(state: State) -> None:
    state["model"][0].weight.data = torch.rand(3, 4).t()


box = set_item("box", "w")
item = set_item("box", "a")
seen = set_item("data", "seen")
CHANGES: dict[str, Callable[[State], None]] = {
    "shape": box(torch.zeros(4, 3)),
    "dtype": box(torch.zeros(3, 4, dtype=torch.float16)),
    "strides": box(torch.zeros(4, 3).t()),
    "offset": box(torch.arange(24.0)[12:].reshape(3, 4)),
    "expanded": box(torch.zeros(4).expand(3, 4)),
    "conjugate": box(torch.zeros(3, 4, dtype=torch.complex64).conj()),
    "requires-grad": box(torch.zeros(3, 4, requires_grad=True)),
    "parameter": box(torch.nn.Parameter(torch.zeros(3, 4))),
    "sparse": box(torch.zeros(3, 4).to_sparse()),
    "meta": box(torch.zeros(3, 4, device="meta")),
    "mkldnn": box(torch.zeros(3, 4).to_mkldnn()),
    "freed": freed,
    "tensor-becomes-array": box(np.zeros((3, 4), dtype=np.float32)),
    "tensor-becomes-number": box(3),
    "number-becomes-tensor": item([1, torch.ones(1)]),
    "number-becomes-object": item([Loader()]),
    "array-shape": set_item("data", "shuffle")(np.arange(5)),
    "array-dtype": set_item("data", "shuffle")(np.arange(4, dtype=np.int8)),
    "array-read-only": set_item("data", "shuffle")(np.broadcast_to(np.int64(3), 4)),
    "int-becomes-float": item([1.0, 2.5, "text", None, True, (1, 2)]),
    "int-becomes-bool": item([True, 2.5, "text", None, True, (1, 2)]),
    "negative-zero": set_item("box", "z")(0.0),
    "nan": set_item("box", "z")(float("nan")),
    "tuple-becomes-list": item([1, 2.5, "text", None, True, [1, 2]]),
    "longer-list": seen([1, 2, 3]),
    "bytes-become-bytearray": set_item("raw")(bytearray(b"bytes")),
    "bytes-in-a-list": seen([b"x"]),
    "numpy-scalar": set_item("number")(np.float64(2)),
    "counter": set_item("counts")(collections.Counter("ab")),
    "unsupported": seen({1, 2}),
    "key-order": reorder,
    "new-key": set_item("box", "more")(1),
    "new-part": set_item("more")(torch.ones(1)),
    "dict-becomes-ordered": set_item("box")(collections.OrderedDict(w=torch.ones(1))),
    "another-model": another_model,
    "another-optimizer": another_optimizer,
    "wrapped-model": wrapped,
    "more-parameters": more_parameters,
    "learning-rate-tensor": learning_rate_tensor,
    "new-buffer": new_buffer,
    "other-memory": other_data,
    "transposed-memory": transposed_data,
    "steps": train,
}


@pytest.mark.fault("A state changes between two saves")
@pytest.mark.fault("Memory of a tensor is freed between two saves")
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name: str) -> None:
    state = make_state()
    snapshots = started(state)
    CHANGES[name](state)
    for _ in range(3):
        assert outcome(snapshots.take, state) == outcome(full, state)


def test_a_key_that_is_equal_but_of_another_type_is_noticed() -> None:
    state: State = {"box": {1: torch.ones(1)}}
    snapshots = started(state)
    state["box"] = {True: state["box"][1]}
    assert outcome(snapshots.take, state) == outcome(full, state)


@pytest.mark.parametrize("seed", range(12))
def test_a_snapshot_after_random_changes_equals_a_full_one(seed: int) -> None:
    rng = random.Random(seed)
    state = make_state()
    snapshots = Snapshots(RANK)
    harmless = [
        n
        for n in CHANGES
        if n not in ("unsupported", "expanded", "sparse", "meta", "mkldnn", "freed")
    ]
    for _ in range(30):
        for name in rng.sample(harmless, rng.choice([0, 0, 1, 2])):
            if name not in (
                "array-read-only",
                "number-becomes-object",
                "wrapped-model",
                "other-memory",
            ):
                try:
                    CHANGES[name](state)
                except (KeyError, IndexError, TypeError, ValueError):
                    continue  # an earlier change has removed its target
        assert outcome(snapshots.take, state) == outcome(full, state)


def test_state_dict_is_called_once_for_each_snapshot() -> None:
    state = make_state()
    snapshots = Snapshots(RANK)
    for change in (train, train, train, CHANGES["shape"], CHANGES["new-key"], train):
        change(state)
        before = state["data"].calls
        snapshots.take(state)
        assert state["data"].calls == before + 1


def test_two_entries_may_have_the_same_path() -> None:
    state: State = {"a": {"b.c": 1, "t": torch.ones(1)}, "a.b": {"c": 2, "t": torch.ones(1)}}
    snapshots = started(state)
    state["a.b"]["c"] = 3
    assert outcome(snapshots.take, state) == outcome(full, state)


@pytest.mark.fault("A value has the dotted path of a container with tensors")
def test_a_value_may_have_the_path_of_a_container() -> None:
    state: State = {"a": {"b": {"t": torch.ones(1), "n": 5}}, "a.b": 7}
    assert outcome(started(state).take, state) == outcome(full, state)


def test_no_tensor_is_kept_between_saves() -> None:
    state = make_state()
    snapshots = started(state)
    snapshots.take(state)
    references = [weakref.ref(state[key]) for key in ("model", "optim")]
    references.append(weakref.ref(state["box"]["w"]))
    state.clear()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_one_target_takes_many_saves_of_several_kinds_of_values() -> None:
    state: State = {
        "x": torch.arange(6.0),
        "n": np.arange(3),
        "c": torch.ones(2, dtype=torch.complex128),
    }
    snapshots = Snapshots(RANK)
    plan = plan_save(full(state), RANK)
    memory = np.zeros(plan.payload_bytes, dtype=np.uint8)
    target, copier = PayloadTarget(plan, memory), Copier()
    for round_ in range(4):
        state["x"] = torch.full((6,), float(round_))
        state["n"] = torch.full((3,), round_) if round_ == 2 else np.full(3, round_)
        state["c"] *= 2
        snapshot = snapshots.take(state)
        assert plan.fits(snapshot)
        target.write(snapshot, copier.run)
        back = read_payload(memory)
        assert torch.equal(back["x"], state["x"])
        assert np.array_equal(np.asarray(back["n"]), np.asarray(state["n"]))
        assert torch.equal(back["c"], state["c"])


def test_the_leaves_of_an_unchanged_structure_are_not_read_again() -> None:
    state = make_state()
    snapshots = Snapshots(RANK)
    first = snapshots.take(state)
    train(state)
    assert first.structure is not None
    assert snapshots.take(state).structure is first.structure


def test_a_structure_that_always_changes_is_not_recorded() -> None:
    state: State = {"box": {}}
    snapshots = Snapshots(RANK)
    taken = []
    for number in range(4):
        state["box"][f"x{number}"] = torch.ones(1)
        taken.append(snapshots.take(state))
    assert [one.structure is None for one in taken] == [False, False, True, True]
    assert snapshots.take(state).structure is not None, "it was met twice"
    assert snapshots.take(state).structure is snapshots.take(state).structure


def test_classes_of_a_recorded_structure_are_those_of_the_present_state() -> None:
    state: State = {"x": torch.ones(1), "mode": Color.RED, "pair": Pair(torch.ones(1), 2)}
    snapshots = started(state)
    state["mode"] = Size.LARGE
    found = snapshots.take(state).classes
    expected = full(state).classes
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.fault("Saves inside and outside of inference mode use the same slot")
@pytest.mark.parametrize("elements", [6, 6 << 20], ids=["small", "copied-by-two-threads"])
def test_a_save_works_inside_and_outside_of_inference_mode(elements: int) -> None:
    state: State = {"x": torch.arange(float(elements)), "y": torch.ones(elements)}
    snapshots = Snapshots(RANK)
    plan = plan_save(full(state), RANK)
    memory = np.zeros(plan.payload_bytes, dtype=np.uint8)
    target, copier = PayloadTarget(plan, memory), Copier()
    for inference in (True, False, True):
        state["x"] += 1
        with torch.inference_mode(inference):
            target.write(snapshots.take(state), copier.run)
        assert torch.equal(read_payload(memory)["x"], state["x"])
    copier.close()


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_change_of_the_placement_of_a_distributed_tensor_is_noticed(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    state: State = {"w": distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])}
    snapshots = started(state)
    for placement in (Shard(0), Shard(1), Replicate()):
        state["w"] = distribute_tensor(torch.rand(4, 2), mesh, [placement])
        assert outcome(snapshots.take, state) == outcome(full, state)
