"""The calls that copy a state write each tensor to its place, however many pieces or batches it takes.

A piece of a few bytes shows the same arithmetic as one of 32 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from tests.support.trainer.payloads import RANK
from tests.support.trainer.snapshots import take_snapshot

from holdfast.state.snapshot import Places, copies_into, plan_save

PIECE_BYTES = 64
BATCH_BYTES = 96
UNWRITTEN = 0xA5


def copied(
    state: Mapping[str, torch.Tensor], piece_bytes: int = PIECE_BYTES
) -> tuple[list[int], dict[str, bytes]]:
    """Return the byte counts of the calls, and the bytes at the place of each tensor."""
    snapshot = take_snapshot(dict(state), RANK)
    plan = plan_save(snapshot, RANK)
    memory = np.full(plan.payload_bytes, UNWRITTEN, dtype=np.uint8)
    places = Places(memory)
    calls = list(
        copies_into(
            (
                (position, leaf, places.of(leaf, plan.ranges[leaf.name].start))
                for position, leaf in enumerate(snapshot.leaves)
            ),
            piece_bytes,
            BATCH_BYTES,
        )
    )
    for _, copy in calls:
        copy(snapshot.sources)
    named = {name: memory[r.start : r.stop].tobytes() for name, r in plan.ranges.items()}
    return [size for size, _ in calls], named


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str
)
@pytest.mark.parametrize("rest", [0, 1, -1], ids=["whole pieces", "one element more", "one less"])
def test_every_piece_of_a_large_tensor_is_copied_from_its_own_place(
    rest: int, dtype: torch.dtype
) -> None:
    for pieces in range(1, 10):
        count = pieces * PIECE_BYTES // dtype.itemsize + rest
        tensor = (torch.arange(count) % 251).to(dtype)
        sizes, found = copied({"large": tensor})
        assert found == {"large": bytes_of(tensor)}
        assert sum(sizes) == tensor.nbytes
        assert max(sizes) <= PIECE_BYTES
        assert len(sizes) == -(-tensor.nbytes // PIECE_BYTES)


def test_pieces_follow_the_order_of_a_matrix() -> None:
    matrix = torch.arange(7 * 11, dtype=torch.float32).reshape(7, 11)
    sizes, found = copied({"matrix": matrix})
    assert len(sizes) == 5
    assert found == {"matrix": bytes_of(matrix)}


def test_an_element_that_is_larger_than_a_piece_is_copied_whole() -> None:
    tensor = torch.arange(5, dtype=torch.float64)
    sizes, found = copied({"large": tensor}, piece_bytes=3)
    assert sizes == [8] * 5
    assert found == {"large": bytes_of(tensor)}


def test_small_tensors_are_batched_in_order_and_each_is_copied_once() -> None:
    state = {f"t{n}": torch.arange(n * 100, n * 100 + 5, dtype=torch.float32) for n in range(10)}
    sizes, found = copied(state)
    assert found == {name: bytes_of(tensor) for name, tensor in state.items()}
    assert sizes == [80, 80, 40], "no batch of two or more is above 96 bytes"


def test_large_and_small_tensors_do_not_disturb_one_another() -> None:
    state = {
        "a": torch.arange(3, dtype=torch.float32),
        "b": torch.arange(100, 200, dtype=torch.float32),
        "c": torch.arange(200, 206, dtype=torch.int64),
        "d": torch.arange(300, 390, dtype=torch.float32).reshape(9, 10),
        "e": torch.arange(24, dtype=torch.float32).reshape(4, 6).t(),
    }
    sizes, found = copied(state)
    assert found == {name: bytes_of(tensor) for name, tensor in state.items()}
    assert sum(sizes) == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("is_piece", [False, True], ids=["a batch", "a piece"])
def test_a_later_state_of_the_same_structure_is_copied_by_the_same_calls(is_piece: bool) -> None:
    count = 50 if is_piece else 5
    first, later = torch.zeros(count), torch.arange(float(count))
    snapshot = take_snapshot({"x": first}, RANK)
    plan = plan_save(snapshot, RANK)
    memory = np.full(plan.payload_bytes, UNWRITTEN, dtype=np.uint8)
    (leaf,) = snapshot.leaves
    place = Places(memory).of(leaf, plan.ranges["x"].start)
    for _, copy in copies_into([(0, leaf, place)], PIECE_BYTES, BATCH_BYTES):
        copy([later])
    where = plan.ranges["x"]
    assert memory[where.start : where.stop].tobytes() == bytes_of(later)
