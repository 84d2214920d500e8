"""Tensors of a Shared object belong to the gang, and only the object's own code loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.shards.placements import shards_of
from tests.support.trainer.payloads import RANK, stored
from tests.support.trainer.snapshots import take_snapshot

import holdfast
from holdfast.state.loading.load import load_state
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.snapshot import Snapshots, plan_save, read_payload
from holdfast.state.tensors import is_writable
from holdfast_core.errors import StateMismatchError, UnsupportedStateError
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import Rank
from holdfast_core.reshard.boxes import SavedState, SavedTensor
from holdfast_core.shards.pack import replica_group


class Container:
    """Models as torchtitan keeps them: neither a module nor an optimizer."""

    def __init__(self, *models: torch.nn.Module, seen: int = 0) -> None:
        self.models = models
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seen": self.seen}
        for model in self.models:
            found |= model.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state.pop("seen")
        for model in self.models:
            model.load_state_dict(state, strict=False)


def names(state: dict[str, Any], rank: int = 3) -> list[str]:
    return [leaf.name for leaf in take_snapshot(state, Rank(rank)).leaves]


def test_names_of_its_tensors_are_the_same_on_every_rank() -> None:
    container = Container(torch.nn.Linear(1, 1))
    assert names({"m": container}) == ["m.weight@rank3", "m.bias@rank3"]
    assert names({"m": holdfast.Shared(container)}) == ["m.weight", "m.bias"]
    assert names({"m": holdfast.Shared(Inner(container))}) == ["m.inner.weight", "m.inner.bias"]
    assert names({"m": Inner(holdfast.Shared(container))}) == [
        "m.inner.weight@rank3",
        "m.inner.bias@rank3",
    ]


class Inner:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])


def test_equal_copies_are_stored_once() -> None:
    container = Container(torch.nn.Linear(200, 300))
    layouts: list[RankLayout] = []
    for rank in range(3):
        state = {"m": holdfast.Shared(container), "rng": holdfast.RNG()}
        plan = plan_save(take_snapshot(state, Rank(rank)), Rank(rank))
        layouts.append(parse_rank_layout(plan.layout))
    assert replica_group(shards_of(layouts), Rank(0)) == (0, 1, 2)


def test_its_own_code_loads_it() -> None:
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    load_state(
        {"m": holdfast.Shared(loaded := Container(other))},
        read_payload(stored({"m": holdfast.Shared(Container(one, seen=5))})),
    )
    assert torch.equal(one.weight, other.weight)
    assert loaded.seen == 5
    # A copy that turns out to be damaged must not have been written over its tensors.
    leaves = take_snapshot({"m": holdfast.Shared(Container(one))}, RANK).leaves
    assert [is_writable(leaf) for leaf in leaves] == [False, False]


def test_a_shared_module_or_optimizer_is_the_module_or_optimizer() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    plain = {"m": model, "o": optimizer}
    wrapped = {"m": holdfast.Shared(model), "o": holdfast.Shared(optimizer)}
    assert stored(wrapped).tobytes() == stored(plain).tobytes()
    one, other = (
        RestoreTarget(state, Snapshots(RANK), strict=True).needed_bytes()
        for state in (plain, wrapped)
    )
    assert one == other


def test_later_snapshots_are_the_same_and_notice_another_object() -> None:
    model = torch.nn.Linear(2, 2)
    state = {"m": holdfast.Shared(Container(model)), "o": holdfast.Shared(model)}
    snapshots = Snapshots(RANK)
    for _ in range(3):
        snapshots.take(state)
    again = snapshots.take({"m": holdfast.Shared(Container(model)), "o": holdfast.Shared(model)})
    assert again.objects == take_snapshot(state, RANK).objects
    assert [leaf.name for leaf in again.leaves] == names(state)


def test_a_cut_tensor_that_the_object_does_not_have_yet_is_refused() -> None:
    state = {"m": holdfast.Shared(Container(torch.nn.Linear(1, 1)))}
    home = parse_rank_layout(plan_save(take_snapshot(state, RANK), RANK).layout)
    kinds = {f: SavedTensor(t.dtype, t.shape, False, 2) for f, t in home.tensors.items()}
    source = SavedState(2, {**kinds, "m.moment": SavedTensor("F32", (8,), True, 2)}, home)
    with pytest.raises(StateMismatchError, match=r"m\.moment: .* create the object's tensors"):
        RestoreTarget(state, Snapshots(RANK), strict=False).layout(source)


def test_an_object_without_the_methods_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="list has no state_dict"):
        holdfast.Shared([])


def test_a_loop_over_a_state_that_is_wrapped_anew_continues(tmp_path: Path) -> None:
    container = Container(torch.nn.Linear(1, 1))
    with holdfast.Checkpointer(dir=tmp_path) as ckpt:
        assert list(ckpt.steps(2, {"m": holdfast.Shared(container)})) == [0, 1]
        assert list(ckpt.steps(4, {"m": holdfast.Shared(container)})) == [2, 3]
        other = Container(torch.nn.Linear(1, 1))
        assert list(ckpt.steps(6, {"m": holdfast.Shared(other)})) == [4, 5]
    assert other.models[0].weight.equal(container.models[0].weight)
