"""Which parts of a checkpoint a rank requests. torch's fake process group stands for the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from tests.support.shards.placements import planned, shards_of
from tests.support.trainer.snapshots import take_snapshot
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.snapshot import Snapshots, plan_save
from holdfast.state.tensors import placement
from holdfast_core.errors import StateMismatchError, UnsupportedStateError
from holdfast_core.format.rank_layout import RankLayout, parse_rank_layout
from holdfast_core.ids import Rank
from holdfast_core.reshard.boxes import holders_of, saved_state
from holdfast_core.reshard.plan import home_of


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    rank, size = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


def cut(
    shape: tuple[int, ...], local: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Any]
) -> DTensor:
    return DTensor.from_local(
        torch.zeros(local),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape).stride(),
    )


def layout_of(state: dict[str, Any], rank: int) -> bytes:
    return plan_save(take_snapshot(state, Rank(rank)), Rank(rank)).layout


def saved_by(state: dict[str, Any], ranks: int) -> list[RankLayout]:
    """Return the layouts of a checkpoint whose ranks all have the same state."""
    return [parse_rank_layout(layout_of(state, rank)) for rank in range(ranks)]


def wanted(
    state: dict[str, Any], rank: int, layouts: list[RankLayout], **options: Any
) -> RankLayout:
    groups = holders_of(shards_of(layouts)).items()
    source = saved_state(
        layouts[home_of(Rank(rank), len(layouts))],
        ((layouts[lowest], len(ranks)) for lowest, ranks in groups),
        len(layouts),
    )
    layout = RestoreTarget(state, Snapshots(Rank(rank)), strict=options.get("strict", True)).layout(
        source
    )
    planned(layout, layouts, rank + 1)
    return layout


def boxes(layout: RankLayout) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {fqn: (item.offsets, item.lengths) for fqn, item in layout.tensors.items()}


def trained(parameter: torch.Tensor) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("world", "sizes", "shape", "placements", "local", "offsets"),
    [
        pytest.param((2, 4), (4,), (13, 2), [Shard(0)], (4, 2), (8, 0), id="rows"),
        pytest.param((3, 4), (4,), (13, 2), [Shard(0)], (1, 2), (12, 0), id="the short end"),
        pytest.param((3, 4), (4,), (3, 2), [Shard(0)], (0, 2), (0, 0), id="empty"),
        pytest.param((1, 4), (4,), (2, 13), [Shard(1)], (2, 4), (0, 4), id="columns"),
        pytest.param((3, 4), (2, 2), (4, 6), [Replicate(), Shard(1)], (4, 3), (0, 3), id="copies"),
        pytest.param((3, 4), (2, 2), (4, 6), [Shard(0), Shard(1)], (2, 3), (2, 3), id="tiles"),
        pytest.param(
            (4, 6),
            (3, 2),
            (13, 1),
            [_StridedShard(0, split_factor=2), Shard(0)],
            (1, 1),
            (6, 0),
            id="tensor parallel before fully sharded, uneven",
        ),
        pytest.param(
            (3, 6),
            (3, 2),
            (13, 1),
            [_StridedShard(0, split_factor=2), Shard(0)],
            (2, 1),
            (9, 0),
            id="tensor parallel before fully sharded, its other half",
        ),
    ],
    indirect=["world"],
)
def test_the_offsets_of_a_local_part_are_computed(
    world: None,
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    placements: list[Any],
    local: tuple[int, ...],
    offsets: tuple[int, ...],
) -> None:
    value = cut(shape, local, init_device_mesh("cpu", sizes), placements)
    assert placement(value, "x") == (shape, offsets)


@pytest.mark.parametrize("world", [(1, 2)], indirect=True)
def test_parts_that_are_not_boxes_are_refused(world: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(UnsupportedStateError, match=r"x: .* sums that were not reduced"):
        placement(cut((4,), (4,), mesh, [Partial()]), "x")
    with pytest.raises(
        UnsupportedStateError, match=r"x: .* holds \[3\] on this rank, expected \[2\]"
    ):
        placement(cut((4,), (3,), mesh, [Shard(0)]), "x")


@pytest.mark.parametrize("world", [(2, 3)], indirect=True)
def test_an_optimizer_that_has_no_state_yet_is_cut_as_its_parameters(world: None) -> None:
    weight = torch.nn.Parameter(torch.zeros(7, 2))
    source = saved_by({"w": weight.detach(), "optim": trained(weight)}, 2)
    part = torch.nn.Parameter(cut((7, 2), (1, 2), init_device_mesh("cpu", (3,)), [Shard(0)]))
    found = boxes(wanted({"w": part.detach(), "optim": torch.optim.Adam([part])}, 2, source))
    assert found == {
        "w": ((6, 0), (1, 2)),
        "optim.state.0.exp_avg": ((6, 0), (1, 2)),
        "optim.state.0.exp_avg_sq": ((6, 0), (1, 2)),
        "optim.state.0.step": ((), ()),
    }


@pytest.mark.parametrize("world", [(1, 2)], indirect=True)
def test_ranks_notice_another_sharding_in_the_same_world(world: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = {"w": torch.zeros(4, 2)}
    rows = {"w": cut((4, 2), (2, 2), mesh, [Shard(0)])}
    columns = {"w": cut((4, 2), (4, 1), mesh, [Shard(1)])}
    for state, expected in ((whole, False), (rows, True), (columns, False)):
        saved = parse_rank_layout(layout_of(rows, 1))
        assert RestoreTarget(state, Snapshots(Rank(1)), strict=True).is_as_saved(saved) is expected
    other = {"w": cut((6, 2), (3, 2), mesh, [Shard(0)])}
    assert RestoreTarget(other, Snapshots(Rank(1)), strict=True).is_as_saved(saved), (
        "the load reports it"
    )


def test_rank_local_state_comes_from_the_home_rank() -> None:
    state = {"rng": holdfast.RNG(), "w": torch.zeros(2)}
    source = saved_by(state, 3)
    names = {fqn.rpartition("@")[2] for fqn in wanted(state, 4, source).tensors if "@" in fqn}
    assert names == {"rank1"}


def test_a_complex128_tensor_is_cut_like_any_other() -> None:
    state = {"z": torch.zeros(3, 2, dtype=torch.complex128), "a": [torch.zeros(2)]}
    source = saved_by(state, 2)
    assert source[0].tensors["z"].shape == (3, 2, 16)
    assert boxes(wanted(state, 0, source))["z"] == ((0, 0, 0), (3, 2, 16))


def test_an_error_names_every_tensor_and_loads_nothing() -> None:
    source = saved_by({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, 2)
    now = {
        "a": torch.zeros(2, dtype=torch.float16),
        "b": torch.zeros(4),
        "c": torch.zeros(1),
        "d": torch.zeros(5),
    }
    with pytest.raises(StateMismatchError) as caught:
        wanted(now, 0, source)
    assert str(caught.value).splitlines()[:4] == [
        "the checkpoint of 2 ranks does not fit this state in 3 places:",
        "  a: expected F16 [2], found F32 [2]",
        "  b: expected F32 [4], found F32 [3]",
        "  d: expected F32 [5], found nothing in the checkpoint",
    ]
    loose = boxes(wanted(now, 0, source, strict=False))
    assert loose == {"a": ((0,), (2,)), "b": ((0,), (3,)), "c": ((0,), (1,))}


def test_pipeline_stages_are_refused_by_name() -> None:
    """Optimizers of different stages give the same numbers to different parameters, so a wrong mix would
    fit."""
    stages = []
    for rank in range(2):
        model = torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})
        stages.append({"model": model, "optim": trained(next(iter(model.parameters())))})
    source = [parse_rank_layout(layout_of(stages[rank], rank)) for rank in range(2)]
    for strict in (True, False):
        with pytest.raises(
            StateMismatchError, match=r"model\.layer0\.weight: only 1 of 2 old ranks have it"
        ):
            wanted(stages[0], 0, source, strict=strict)


@pytest.mark.parametrize("world", [(0, 2)], indirect=True)
def test_optimizer_state_that_is_sharded_in_an_unknown_way_is_refused(world: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = torch.optim.SGD([weight])
    source = []
    for rank in range(2):
        optimizer.state[weight] = {"factor": cut((4,), (2,), mesh, [Shard(0)])}
        document = parse_rank_layout(layout_of({"optim": optimizer}, 0))
        item = document.tensors["optim.state.0.factor"]
        tensors = {"optim.state.0.factor": msgspec.structs.replace(item, offsets=(2 * rank,))}
        source.append(replace(document, rank=Rank(rank), tensors=tensors))
    fresh = {"optim": torch.optim.SGD([weight])}
    with pytest.raises(StateMismatchError, match=r"optim\.state\.0\.factor: F32 \[4\] is sharded"):
        wanted(fresh, 2, source)
