"""A folder of checkpoints is read without the script that saved it."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.hang import HANG_SECONDS
from tests.support.shards.folders import damage, write_checkpoint
from tests.support.shards.placements import Tensor

import holdfast
from holdfast.directory.choice import JOB_UID
from holdfast.directory.commit import Committer
from holdfast_core.errors import ConfigError, CorruptionError, NotFoundError
from holdfast_core.ids import CheckpointId, RestartRound, Step
from holdfast_core.node.tier import DiskNodeTier

ROWS = 1 << 15
MESH = [2, 2]
"""Two copies of two halves: ranks 0 and 2 have the first half, ranks 1 and 3 the second."""
WIDE = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
CUBE = np.arange(6 * 10 * 7, dtype=np.int64).reshape(6, 10, 7)
TENSORS: dict[str, tuple[Tensor, np.ndarray]] = {
    "model.rows": (Tensor("F32", WIDE.shape, [None, 0]), WIDE),
    "model.columns": (Tensor("I64", CUBE.shape, [0, 1]), CUBE),
    "model.whole": (Tensor("F32", (4,)), np.arange(4, dtype=np.float32)),
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Return a folder with step 5 of four ranks."""
    write_checkpoint(tmp_path, TENSORS, MESH)
    return tmp_path


class Complete(torch.nn.Module):
    """A module with tensors of types that torch, numpy or safetensors do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
        self.register_buffer("imaginary", torch.randn(4, dtype=torch.complex128))
        self.register_buffer("scales", torch.ones(3).to(torch.float8_e4m3fnuz))
        self.register_buffer("pairs", torch.randint(0, 255, (4, 16), dtype=torch.uint8))
        self.register_buffer("scalar", torch.tensor(3.5))
        self.register_buffer("empty", torch.empty(0, 3))


def train(folder: Path, steps: int) -> dict[str, Any]:
    module = Complete()
    optimizer = torch.optim.Adam([module.weight])
    state = {
        "model": module,
        "optim": optimizer,
        "rng": holdfast.RNG(),
        "curve": np.linspace(0, 1, 5),
        "data": {"epoch": 2, "seen": (1, 2)},
    }
    with holdfast.Checkpointer(folder, interval_steps=2, when_busy="wait") as ckpt:
        for _ in ckpt.steps(steps, state):
            module.weight.sum().backward()
            optimizer.step()
    return state


def test_every_tensor_of_a_training_is_read_as_it_was_saved(tmp_path: Path) -> None:
    state = train(tmp_path / "ckpt", 5)
    with holdfast.open(tmp_path / "ckpt") as folder:
        assert folder.steps() == (2, 4, 5)
        assert folder.list()[-1].step == 5
        with folder.at() as saved:
            assert (saved.step, saved.world_size) == (5, 1)
            tensors = saved.tensors()
            for name, value in state["model"].state_dict().items():
                found = tensors[f"model.{name}"]
                assert (found.dtype, found.shape) == (value.dtype, tuple(value.shape))
                assert torch.equal(found.read(), value)
                assert found.nbytes == value.numel() * value.element_size()
            assert not any(name.startswith("rng") for name in tensors)
            objects = saved.objects()
    moments = state["optim"].state_dict()["state"][0]
    assert objects["data"] == {"epoch": 2, "seen": (1, 2)}
    assert torch.equal(objects["optim"]["state"][0]["exp_avg"].read(), moments["exp_avg"])
    curve = objects["curve"].read()
    assert isinstance(curve, np.ndarray)
    assert curve.tolist() == np.linspace(0, 1, 5).tolist()
    assert objects["curve"].dtype == np.float64


@pytest.mark.parametrize("step", [2, 4])
def test_an_older_step_is_read_by_its_number(tmp_path: Path, step: int) -> None:
    train(tmp_path / "ckpt", 5)
    with holdfast.open(f"file://{tmp_path}/ckpt") as folder:
        assert folder.at(step).step == step
        with pytest.raises(NotFoundError, match=r"expected step 3, found steps 2, 4, 5"):
            folder.at(3)


def test_whole_tensors_are_assembled_from_the_parts_of_ranks(sharded: Path) -> None:
    with holdfast.open(sharded) as folder, folder.at(5) as saved:
        tensors = saved.tensors()
        assert list(tensors) == sorted(TENSORS)
        for name, (_, whole) in TENSORS.items():
            assert np.array_equal(tensors[name].read().numpy(), whole)
        assert len(tensors["model.rows"]) == ROWS


def indices(size: int) -> st.SearchStrategy[Any]:
    bounds = st.none() | st.integers(-size - 2, size + 2)
    return st.integers(-size, size - 1) | st.builds(slice, bounds, bounds)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.tuples(indices(6), indices(10), indices(7)),
    st.sampled_from(["all", "first", "last", "middle"]),
)
def test_a_slice_has_the_elements_that_numpy_gives(
    folder_of_slices: holdfast.SavedCheckpoint, index: tuple[Any, Any, Any], part: str
) -> None:
    used: Any = {
        "all": index,
        "first": index[0],
        "last": (..., index[2]),
        "middle": (index[0], ..., index[2]),
    }[part]
    found = folder_of_slices.tensors()["model.columns"][used]
    assert np.array_equal(found.numpy(), CUBE[used])


@pytest.fixture(scope="module")
def folder_of_slices(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[holdfast.SavedCheckpoint]:
    root = tmp_path_factory.mktemp("slices")
    write_checkpoint(root, TENSORS, MESH)
    with holdfast.open(root) as folder, folder.at() as saved:
        yield saved


@pytest.mark.parametrize(
    "index",
    [6, -7, (0, 0, 0, 0), (..., ...), slice(0, 4, 2), "a", 1.0, [0, 1]],
    ids=repr,
)
def test_an_index_that_does_not_fit_names_the_tensor(sharded: Path, index: Any) -> None:
    with holdfast.open(sharded) as folder, folder.at() as saved:
        with pytest.raises(IndexError, match=r"model\.columns"):
            saved.tensors()["model.columns"][index]


@pytest.mark.parametrize("limit", [8, 100, 4096, 1 << 30])
def test_the_pieces_of_a_tensor_are_its_elements_in_order(sharded: Path, limit: int) -> None:
    with holdfast.open(sharded) as folder, folder.at() as saved:
        for name, (_, whole) in TENSORS.items():
            if name == "model.rows" and limit < 4096:
                continue  # as many reads as rows
            pieces = [piece.numpy() for piece in saved.tensors()[name].pieces(limit)]
            assert np.array_equal(np.concatenate(pieces), whole.reshape(-1))
            assert max(piece.nbytes for piece in pieces) <= max(limit, 8)


def test_a_slice_needs_memory_for_itself_and_not_for_the_tensor(tmp_path: Path) -> None:
    whole = np.zeros((1 << 13, 1 << 10), np.float32)  # 32 MiB
    write_checkpoint(tmp_path, {"big": (Tensor("F32", whole.shape, [0]), whole)}, [2])
    with holdfast.open(tmp_path) as folder, folder.at() as saved:
        tensor = saved.tensors()["big"]
        tracemalloc.start()
        try:
            for start in range(0, 1 << 13, 512):
                assert tensor[start : start + 512].shape == (512, 1 << 10)
            assert tracemalloc.get_traced_memory()[1] < 12 << 20
        finally:
            tracemalloc.stop()


# ------------------------------------------------------------------------ damage


@pytest.mark.fault("A byte of a shard changed, and another rank saved the same part")
def test_a_part_that_another_rank_holds_too_is_read_from_there(sharded: Path) -> None:
    damage(sharded, 1)
    with holdfast.open(sharded) as folder, folder.at() as saved:
        assert np.array_equal(saved.tensors()["model.rows"].read().numpy(), WIDE)


@pytest.mark.fault("A byte of a shard changed, while a checkpoint is read without a training")
def test_a_bad_byte_without_another_copy_names_the_file(sharded: Path) -> None:
    paths = [damage(sharded, rank) for rank in (1, 3)]
    before = sorted(path.name for path in (sharded / "tier").rglob("*"))
    with holdfast.open(sharded) as folder, folder.at() as saved:
        tensors = saved.tensors()
        with pytest.raises(CorruptionError, match=r"model\.rows of step 5") as raised:
            tensors["model.rows"].read()
        assert all(str(path) in str(raised.value) for path in paths)
        # What does not lie in a bad chunk can be read.
        assert np.array_equal(tensors["model.rows"][:100].numpy(), WIDE[:100])
    assert sorted(path.name for path in (sharded / "tier").rglob("*")) == before


def test_a_bad_chunk_makes_only_the_tensors_in_it_unreadable(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, {n: (Tensor(t.dtype, t.shape), a) for n, (t, a) in TENSORS.items()}, [1]
    )
    damage(tmp_path, 0, offset=450_000)
    with holdfast.open(tmp_path) as folder, folder.at() as saved:
        tensors = saved.tensors()
        with pytest.raises(CorruptionError, match="CRC32C of chunk 1"):
            tensors["model.rows"].read()
        assert np.array_equal(tensors["model.columns"].read().numpy(), CUBE)


def test_a_damaged_newest_manifest_is_passed_over_unless_its_step_is_asked_for(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(sharded, TENSORS, MESH, step=9)
    (path,) = sharded.rglob("manifests/s000000000009/*.json")
    path.write_bytes(path.read_bytes().replace(b"5", b"6", 1))
    with holdfast.open(sharded) as folder:
        with pytest.raises(CorruptionError, match=str(path)):
            folder.at(9)
        assert folder.at().step == 5
        assert str(path) in caplog.text


@pytest.mark.parametrize("is_damaged", [False, True], ids=["missing", "damaged"])
def test_a_newest_checkpoint_without_a_shard_is_passed_over_as_a_restore_does(
    sharded: Path, caplog: pytest.LogCaptureFixture, is_damaged: bool
) -> None:
    write_checkpoint(sharded, TENSORS, MESH, step=9)
    (path,) = sharded.rglob("s000000000009-*/rank000001-*.shard")
    if is_damaged:
        path.write_bytes(path.read_bytes()[:-100])
    else:
        path.unlink()
    with holdfast.open(sharded) as folder:
        with folder.at() as saved:
            assert saved.step == 5
        assert "step 9 is passed over: the shards of ranks [1]" in caplog.text
        with folder.at(9) as saved:
            assert np.array_equal(
                saved.tensors()["model.whole"].read().numpy(), TENSORS["model.whole"][1]
            )


def test_the_only_checkpoint_is_opened_though_a_shard_is_missing(sharded: Path) -> None:
    min(sharded.rglob("rank000001-*.shard")).unlink()
    with holdfast.open(sharded) as folder, folder.at() as saved:
        assert saved.step == 5
        assert np.array_equal(saved.tensors()["model.rows"].read().numpy(), WIDE)


def test_a_missing_layout_is_replaced_by_that_of_a_rank_with_the_same_tensors(
    sharded: Path,
) -> None:
    first, *others = sorted((sharded / "tier/layouts").iterdir())
    first.unlink()
    with holdfast.open(sharded) as folder, folder.at() as saved:
        assert list(saved.tensors()) == sorted(TENSORS)
    for path in others:
        path.write_bytes(b"x" * 200)
    with holdfast.open(sharded) as folder, folder.at() as saved:
        with pytest.raises(CorruptionError, match="no layout of the ranks 0 to 3 can be read"):
            saved.tensors()


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_did_not_save_is_refused(sharded: Path, rank: int) -> None:
    with holdfast.open(sharded) as folder, folder.at() as saved:
        with pytest.raises(ConfigError, match="saved by 4 ranks: expected a rank from 0 to 3"):
            saved.objects(rank)


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty folder"])
def test_what_is_not_a_folder_of_checkpoints_is_refused_and_not_created(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "ckpt"
    if what == "a file":
        path.write_text("x")
    elif what == "an empty folder":
        path.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="expected a folder in which a Checkpointer has saved"):
        holdfast.open(path)
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------------ beside a training


def prune_all_but(root: Path, step: int) -> list[int]:
    """Prune as a training does after it has committed `step`. Return the steps that are left."""
    tier = DiskNodeTier(root / "tier", fill_limit=1.0)
    tier.open()
    committer = Committer(tier, root / "records", 4, range(4), keep_last=1)
    committer.prune(CheckpointId(Step(step), RestartRound(0)), (), leader=True)
    return [checkpoint.step for _, checkpoint in tier.list_manifests()]


def test_a_checkpoint_that_is_open_is_not_pruned(sharded: Path) -> None:
    with holdfast.open(sharded) as folder:
        saved = folder.at(5)
        write_checkpoint(sharded, TENSORS, MESH, step=6)
        write_checkpoint(sharded, TENSORS, MESH, step=7)
        assert prune_all_but(sharded, 7) == [5, 7]
        assert np.array_equal(saved.tensors()["model.rows"].read().numpy(), WIDE)
        saved.close()
        assert prune_all_but(sharded, 7) == [7]
    assert not (sharded / "readers").exists()


def test_a_checkpoint_is_kept_while_only_its_tensors_are_in_use(sharded: Path) -> None:
    rows = holdfast.open(sharded).at(5).tensors()["model.rows"]
    gc.collect()
    write_checkpoint(sharded, TENSORS, MESH, step=6)
    assert prune_all_but(sharded, 6) == [5, 6]
    assert np.array_equal(rows.read().numpy(), WIDE)
    del rows
    gc.collect()
    assert prune_all_but(sharded, 6) == [6]


@pytest.mark.fault("A reader of a checkpoint is killed")
def test_a_reader_that_was_killed_keeps_nothing(sharded: Path) -> None:
    stale = sharded / "readers" / "s5-r0.1234-00ff00ff"
    stale.parent.mkdir()
    stale.write_text("process 1234 on a host")
    write_checkpoint(sharded, TENSORS, MESH, step=6)
    assert prune_all_but(sharded, 6) == [6]
    assert not stale.exists()


@pytest.mark.fault("A checkpoint is deleted while it is read")
def test_a_checkpoint_that_is_deleted_while_it_is_read_says_so(sharded: Path) -> None:
    with holdfast.open(sharded) as folder:
        tensors = folder.at(5).tensors()
        tier = DiskNodeTier(sharded / "tier", fill_limit=1.0)
        tier.open()
        tier.delete_checkpoint(JOB_UID, CheckpointId(Step(5), RestartRound(0)))
        with pytest.raises(NotFoundError, match=r"step 5 in .* was deleted while it was read"):
            tensors["model.rows"].read()


def test_a_folder_can_be_read_while_a_training_saves_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    module = torch.nn.Linear(4, 4)
    with holdfast.Checkpointer(
        holdfast.Folder(folder, keep_last=1), interval_steps=1, when_busy="wait"
    ) as ckpt:
        for step in range(1, 8):
            with torch.no_grad():
                module.weight.fill_(step)
            ckpt.save(step, {"model": module}).wait(timeout=HANG_SECONDS)
            with holdfast.open(folder) as opened, opened.at() as saved:
                weight = saved.tensors()["model.weight"].read()
                assert saved.step == step
                assert torch.equal(weight, torch.full((4, 4), float(step)))
