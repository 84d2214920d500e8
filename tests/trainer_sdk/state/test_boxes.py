"""Plain tensors with the attributes of torch's CheckpointableTensor are saved and restored as boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.shards.placements import shards_of
from tests.support.trainer.launched import run_two_ranks
from tests.support.trainer.payloads import RANK, stored
from tests.support.trainer.snapshots import take_snapshot

import holdfast
from holdfast.state.loading.load import load_state
from holdfast.state.loading.restore_target import RestoreTarget
from holdfast.state.snapshot import Snapshots, plan_save, read_payload
from holdfast_core.errors import UnsupportedStateError
from holdfast_core.format.rank_layout import parse_rank_layout
from holdfast_core.ids import Rank
from holdfast_core.shards.pack import replica_group

Numbers = tuple[Any, ...]


def boxed(
    tensor: torch.Tensor, shape: Any, start: Any, *, held: Any = None, sizes: Any = None
) -> torch.Tensor:
    box: Any = tensor
    box.global_shape = shape
    box.global_offsets = (start,)
    box.local_offsets = ((0,) * tensor.dim() if held is None else held,)
    box.local_sizes = (tuple(tensor.shape) if sizes is None else sizes,)
    return tensor


def box_in(state: dict[str, Any]) -> tuple[Numbers, Numbers, Numbers]:
    (leaf,) = take_snapshot(state, RANK).leaves
    return leaf.global_shape, leaf.offsets, leaf.shape


def test_a_box_is_saved_as_one() -> None:
    assert box_in({"w": boxed(torch.zeros(2, 3), (7, 3), (4, 0))}) == ((7, 3), (4, 0), (2, 3))
    lists = boxed(torch.zeros(2), [7], [5])
    assert box_in({"w": lists}) == ((7,), (5,), (2,))
    assert box_in({"w": boxed(torch.zeros(0, 3), (7, 3), (7, 0))}) == ((7, 3), (0, 0), (0, 3))
    assert box_in({"w": boxed(torch.tensor(5.0), (), ())}) == ((), (), ())


def test_padding_is_neither_saved_nor_loaded() -> None:
    def padded(value: float) -> torch.Tensor:
        return boxed(torch.full((4, 3), value), (9, 2), (7, 0), held=(1, 1), sizes=(2, 2))

    assert box_in({"w": padded(0)}) == ((9, 2), (7, 0), (2, 2))
    target = padded(0)
    load_state({"w": target}, read_payload(stored({"w": padded(5)})))
    assert target.tolist() == [[0, 0, 0], [0, 5, 5], [0, 5, 5], [0, 0, 0]]


def test_a_tensor_with_some_of_the_attributes_is_a_plain_tensor() -> None:
    other: Any = torch.zeros(2)
    other.global_shape = (4,)
    assert box_in({"w": other}) == ((2,), (0,), (2,))


@pytest.mark.fault("A tensor describes a box outside of its whole tensor")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(
            {"global_offsets": ((-1, 0),)}, r"global_offsets starts at \[-1, 0\]", id="negative"
        ),
        pytest.param({"global_offsets": ((6, 0),)}, r"within global_shape \[7, 3\]", id="outside"),
        pytest.param({"global_shape": (7,)}, r"within global_shape \[7\]", id="dimensions"),
        pytest.param(
            {"local_sizes": ((3, 3),)}, r"within the tensor's shape \[2, 3\]", id="too-large"
        ),
        pytest.param({"local_sizes": ((2, -3),)}, r"sizes \[2, -3\]", id="negative-size"),
        pytest.param({"local_offsets": ((1, 0),)}, "box of local_offsets", id="shifted"),
        pytest.param({"local_offsets": ()}, r"describe \[0, 1\] boxes", id="counts"),
        pytest.param(
            {
                "global_offsets": ((0, 0),) * 2,
                "local_offsets": ((0, 0),) * 2,
                "local_sizes": ((1, 3),) * 2,
            },
            r"\[2\] boxes, expected 1 each: put each box",
            id="two-boxes",
        ),
        pytest.param({"global_shape": (7.5, 3)}, r"'float' object", id="no-integers"),
        pytest.param({"global_offsets": 4}, "expected a tuple of whole numbers", id="no-tuple"),
    ],
)
def test_attributes_that_describe_no_box_are_refused_by_path(
    change: dict[str, Any], text: str
) -> None:
    tensor = boxed(torch.zeros(2, 3), (7, 3), (4, 0))
    for name, value in change.items():
        setattr(tensor, name, value)
    with pytest.raises(UnsupportedStateError, match=rf"^parts\.w: .*{text}"):
        take_snapshot({"parts": {"w": tensor}}, RANK)


def test_later_snapshots_notice_another_box() -> None:
    tensor = boxed(torch.zeros(2), (7,), [5])
    state = {"w": tensor, "plain": torch.zeros(2)}
    snapshots = Snapshots(RANK)
    for _ in range(3):
        snapshots.take(state)
    assert snapshots.take(state).signature == take_snapshot(state, RANK).signature
    changed: Any = tensor
    changed.global_offsets[0][0] = 3
    assert snapshots.take(state).signature == take_snapshot(state, RANK).signature
    for _ in range(3):
        snapshots.take(state)
    boxed(state["plain"], (4,), (2,))
    assert snapshots.take(state).signature == take_snapshot(state, RANK).signature


def test_a_whole_of_another_shape_needs_another_plan() -> None:
    """Only the layout has the shape of the whole tensor. The payload is the same."""
    small = take_snapshot({"w": boxed(torch.zeros(2, 3), (7, 3), (4, 0))}, RANK)
    large = take_snapshot({"w": boxed(torch.zeros(2, 3), (9, 3), (4, 0))}, RANK)
    assert plan_save(small, RANK).fits(small)
    assert not plan_save(small, RANK).fits(large)


def test_equal_boxes_are_stored_once_and_another_box_is_noticed() -> None:
    def layout(rank: int, row: int) -> Any:
        state = {"w": boxed(torch.ones(100, 200), (200, 200), (100 * row, 0))}
        return parse_rank_layout(plan_save(take_snapshot(state, Rank(rank)), Rank(rank)).layout)

    layouts = [layout(rank, rank // 2) for rank in range(4)]
    assert replica_group(shards_of(layouts), Rank(2)) == (2, 3)
    target = RestoreTarget(
        {"w": boxed(torch.ones(100, 200), (200, 200), (0, 0))}, Snapshots(RANK), strict=True
    )
    assert [target.is_as_saved(one) for one in layouts] == [True, True, False, False]


PROGRAM = """
import sys, torch, holdfast
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

class Container:
    def __init__(self, tensor):
        self.tensor = tensor
    def state_dict(self):
        return {"w": self.tensor}
    def load_state_dict(self, state):
        raise AssertionError("nothing is restored here")

def boxed(tensor, shape, start, held, sizes):
    tensor.global_shape, tensor.global_offsets = shape, (start,)
    tensor.local_offsets, tensor.local_sizes = (held,), (sizes,)
    return tensor

whole = torch.arange(15.0).view(5, 3)
rows = torch.full((4, 3), -1.0)
rows[: 3 - rank] = whole[3 * rank : 3 + 2 * rank]
part = boxed(rows, (5, 3), (3 * rank, 0), (0, 0), (3 - rank, 3))
column = whole[:, rank : rank + 2].clone()
shared = boxed(column, (5, 3), (0, rank), (0, 0), (5, 2))
with holdfast.Checkpointer(dir=sys.argv[1]) as ckpt:
    ckpt.save(1, {"part": part, "shared": holdfast.Shared(Container(shared)), "n": rank})
"""


class Container:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["w"])


def test_boxes_of_two_ranks_are_restored_whole_and_in_other_boxes(tmp_path: Path) -> None:
    run_two_ranks(PROGRAM, tmp_path)
    whole = torch.arange(15.0).view(5, 3)
    middle = boxed(torch.zeros(3, 2), (5, 3), (1, 1))
    container = Container(torch.zeros(5, 3))
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        found = ckpt.peek()
        assert found.tensors == dict.fromkeys(
            ["part", "shared.w"], holdfast.TensorInfo("float32", (5, 3))
        )
        state = {"part": torch.zeros(5, 3), "shared": holdfast.Shared(container), "n": -1}
        assert ckpt.restore(state) == 1
        assert torch.equal(state["part"], whole)
        assert torch.equal(container.tensor, whole)
        container.tensor = middle
        state["part"] = boxed(torch.zeros(2, 3), (5, 3), (2, 0))
        assert ckpt.restore(state) == 1
        assert torch.equal(state["part"], whole[2:4])
        assert torch.equal(middle, whole[1:4, 1:3])
