"""What changed between two checkpoints, and how much of them is read to find that out."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import write_checkpoint
from tests.support.shards.placements import Tensor
from tests.support.shards.shard_files import flip_bit

import holdfast
from holdfast.reading.comparing import ChangeKind, CheckpointDiff
from holdfast_core.errors import CorruptionError

ROWS = 1 << 16
WIDE = np.arange(ROWS * 8, dtype=np.float32).reshape(ROWS, 8)
"""2 MiB, eight chunks."""
MESHES = ([1], [2], [3], [2, 2])


def compare(root: Path, before: int, after: int, tensors: str = "*") -> CheckpointDiff:
    with holdfast.open(root) as found, found.at(before) as one, found.at(after) as other:
        return one.compare(other, tensors=tensors)


def write(root: Path, step: int, mesh: list[int], **arrays: np.ndarray[Any, Any]) -> None:
    kinds = {"float32": "F32", "int64": "I64", "uint8": "U8", "float64": "F64", "float16": "F16"}
    placement = [None] * (len(mesh) - 1) + [0]
    tensors = {
        name: (Tensor(kinds[str(a.dtype)], a.shape, placement if a.ndim else None), a)
        for name, a in arrays.items()
    }
    write_checkpoint(root, tensors, mesh, step=step)


def test_equal_payloads_are_not_read(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, [2, 2], wide=WIDE)
    found = compare(tmp_path, 1, 2)
    assert found.is_equal
    assert (found.unchanged, found.changes, found.norm, found.read_bytes) == (1, (), 0.0, 0)
    assert found.shared_bytes == found.payload_bytes > WIDE.nbytes


def test_only_what_the_chunk_tables_do_not_prove_is_read(tmp_path: Path) -> None:
    changed = WIDE.copy()
    changed[5, 3] += 3
    changed[7, 0] -= 4
    frozen = np.arange(1 << 20, dtype=np.int64)
    write(tmp_path, 1, [2], wide=WIDE, frozen=frozen)
    write(tmp_path, 2, [2], wide=changed, frozen=frozen)
    found = compare(tmp_path, 1, 2)
    (change,) = found.changes
    assert (change.name, change.kind) == ("wide", ChangeKind.CHANGED)
    assert change.norm == pytest.approx(5.0)
    assert change.relative_norm == pytest.approx(
        5.0 / math.sqrt(float((WIDE.astype(np.float64) ** 2).sum()))
    )
    assert found.unchanged == 1
    assert found.norm == change.norm
    # All of `wide` for its norm, and of the other one the chunk that changed. It has an end of `frozen`.
    chunk = 256 << 10
    assert WIDE.nbytes < found.read_bytes <= WIDE.nbytes + 6 * chunk
    assert found.shared_bytes == found.payload_bytes - chunk


def test_tensors_come_go_and_get_other_shapes(tmp_path: Path) -> None:
    write(tmp_path, 1, [1], same=WIDE[:9], gone=WIDE[:3], longer=WIDE[:4], wider=WIDE[:5])
    write(
        tmp_path,
        2,
        [1],
        same=WIDE[:9],
        new=WIDE[:2],
        longer=WIDE[:6],
        wider=WIDE[:5].astype(np.float64),
    )
    found = compare(tmp_path, 1, 2)
    assert [(c.name, c.kind) for c in found.changes] == [
        ("gone", ChangeKind.REMOVED),
        ("longer", ChangeKind.RESHAPED),
        ("new", ChangeKind.ADDED),
        ("wider", ChangeKind.RESHAPED),
    ]
    by_name = {c.name: c for c in found.changes}
    assert by_name["gone"].after is None
    longer = by_name["longer"]
    assert longer.before is not None and longer.before.shape == (4, 8)
    assert longer.after is not None and longer.after.shape == (6, 8)
    assert longer.norm is None
    assert found.unchanged == 1
    assert found.entries == ("gone", "new")


def test_a_pattern_chooses_tensors(tmp_path: Path) -> None:
    write(tmp_path, 1, [1], a1=WIDE[:3], a2=WIDE[:3], b=WIDE[:3])
    write(tmp_path, 2, [1], a1=WIDE[1:4], a2=WIDE[:3], b=WIDE[1:4])
    found = compare(tmp_path, 1, 2, "a*")
    assert [c.name for c in found.changes] == ["a1"]
    assert found.unchanged == 1


@settings(max_examples=60, deadline=None)
@given(
    meshes=st.tuples(st.sampled_from(MESHES), st.sampled_from(MESHES)),
    kind=st.sampled_from(["float32", "float16", "int64", "uint8", "float64"]),
    rows=st.integers(0, 70_000),
    places=st.lists(st.integers(0, 10**9), max_size=4),
    seed=st.integers(0, 99),
)
def test_whatever_ranks_saved_them_the_norms_are_those_of_the_whole_tensors(
    meshes: tuple[list[int], list[int]],
    kind: str,
    rows: int,
    places: list[int],
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    before = random.integers(0, 100, (rows, 5)).astype(kind)
    after = before.copy()
    for place in places if rows else ():
        after.flat[place % after.size] += 1
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write(root, 1, meshes[0], x=before)
        write(root, 2, meshes[1], x=after)
        found = compare(root, 1, 2)
    difference = after.astype(np.float64) - before.astype(np.float64)
    if not difference.any():
        assert found.is_equal
        return
    (change,) = found.changes
    assert change.norm == pytest.approx(float(np.linalg.norm(difference)))
    whole = float(np.linalg.norm(before.astype(np.float64)))
    assert change.relative_norm == (pytest.approx(change.norm / whole) if whole else None)


def test_types_without_numbers_in_numpy_and_special_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(64, dtype=torch.float32)
    special = base.clone()
    special[3] = float("nan")
    states = [
        {"bf": base.bfloat16(), "f8": base.to(torch.float8_e4m3fn), "c": base.to(torch.complex128)},
        {
            "bf": (base + 64).bfloat16(),
            "f8": (base + 1).to(torch.float8_e4m3fn),
            "c": base.to(torch.complex128) + 2j,
        },
    ]
    with holdfast.Checkpointer(holdfast.Folder(tmp_path, keep_last=9), when_busy="wait") as ckpt:
        for step, state in enumerate(states, 1):
            ckpt.save(step, {"m": state, "x": base}).wait(timeout=HANG_SECONDS)
        ckpt.save(3, {"m": states[1], "x": special}).wait(timeout=HANG_SECONDS)
    by_name = {c.name: c for c in compare(tmp_path, 1, 2).changes}
    difference = (states[1]["bf"].double() - states[0]["bf"].double()).norm().item()
    assert by_name["m.bf"].norm == pytest.approx(difference)
    assert by_name["m.c"].norm == pytest.approx(16.0)
    assert by_name["m.f8"].kind is ChangeKind.CHANGED
    assert by_name["m.f8"].norm is None
    (change,) = compare(tmp_path, 2, 3).changes
    assert change.name == "x"
    assert change.norm is not None and math.isnan(change.norm)
    assert compare(tmp_path, 3, 3).is_equal


def test_values_that_are_no_tensors_are_compared_by_entry(tmp_path: Path) -> None:
    with holdfast.Checkpointer(holdfast.Folder(tmp_path, keep_last=9), when_busy="wait") as ckpt:
        for step, epoch in ((1, 0), (2, 1)):
            ckpt.save(step, {"data": {"epoch": epoch}, "x": np.ones(3)}).wait(timeout=HANG_SECONDS)
    found = compare(tmp_path, 1, 2)
    assert found.is_equal
    assert found.entries == ("data",)


@pytest.mark.fault("A shard is damaged while two checkpoints are compared")
def test_another_rank_is_read_where_one_is_damaged_and_without_one_it_is_an_error(
    tmp_path: Path,
) -> None:
    changed = WIDE + 1
    write(tmp_path, 1, [2, 1], wide=WIDE)
    write(tmp_path, 2, [2, 1], wide=changed)
    with holdfast.open(tmp_path) as found, found.at(1) as one, found.at(2) as other:
        (first, second) = sorted(tmp_path.rglob("s000000000002-*/rank000000-*.shard")) + sorted(
            tmp_path.rglob("s000000000002-*/rank000001-*.shard")
        )
        flip_bit(first, 100_000)
        assert one.compare(other).changes[0].norm == pytest.approx(math.sqrt(WIDE.size))
        flip_bit(second, 100_000)
        with pytest.raises(CorruptionError, match="wide"):
            one.compare(other)
