"""A folder's shard is read directly into tensors. If that fails in any way, it is read into a slot."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.hang import HANG_SECONDS

import holdfast
from holdfast.checkpoint import restoring
from holdfast.connection.link import Link
from holdfast_core.errors import CorruptionError, NotFoundError, StateMismatchError
from holdfast_core.messages.schema import Fill, Filled, ShardFile
from holdfast_core.shm.slot_file import HEADER_BYTES

ELEMENTS = 6 << 20
"""The size is 24 MiB, so that several pieces are stored before the last chunk is read."""


pytestmark = pytest.mark.usefixtures("memory")


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Collect the persister's answer to each Fill."""
    found: list[Any] = []
    request = Link.request

    def observed(link: Link, message: Any, timeout_seconds: float) -> Any:
        reply = request(link, message, timeout_seconds)
        if isinstance(message, Fill):
            found.append(reply)
        return reply

    monkeypatch.setattr(Link, "request", observed)
    yield found


def state_of(value: float) -> dict[str, Any]:
    return {"t": torch.full((ELEMENTS,), float(value)), "n": int(value)}


def save(root: Path, *steps: int) -> None:
    with holdfast.Checkpointer(holdfast.Folder(root, keep_last=10)) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(step)).wait(timeout=HANG_SECONDS)


def save_and_leave_memory(root: Path, memory: Path, state: dict[str, Any]) -> None:
    """Save step 1 and leave the slots behind, as a process that is killed does."""
    kept = memory.with_name("kept")
    with holdfast.Checkpointer(dir=root) as ckpt:
        ckpt.allocate(state)
        ckpt.save(1, state).wait(timeout=HANG_SECONDS)
        shutil.copytree(memory, kept)
    shutil.copytree(kept, memory, dirs_exist_ok=True)


def damage(root: Path, step: int) -> None:
    """Flip a bit in the last third of the tensor, which is read when the other thirds are in the state."""
    (shard,) = root.rglob(f"s{step:012d}-*/*.shard")
    with open(shard, "r+b") as file:
        file.seek(4096 + 4096 + 3 * ELEMENTS)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_restore_in_place_fills_no_slot(tmp_path: Path, memory: Path, replies: list[Any]) -> None:
    save(tmp_path / "ckpt", 1)
    state = state_of(0)
    place = state["t"].data_ptr()
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore(state) == 1
        pages = [p.read_bytes()[HEADER_BYTES:] for p in memory.rglob("*.slot")]
    assert [type(reply) for reply in replies] == [ShardFile]
    assert len(pages) == 2
    assert not any(any(page) for page in pages)
    assert state["n"] == 1
    assert state["t"].eq(1).all()
    assert state["t"].data_ptr() == place


def test_a_bad_copy_is_quarantined_and_an_older_one_overwrites_it(
    tmp_path: Path, replies: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "ckpt", 1, 2)
    damage(tmp_path / "ckpt", 2)
    state = state_of(0)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore(state) == 1
    assert (state["n"], state["t"].eq(1).all()) == (1, True)
    assert "does not match" in caplog.text
    assert "it is read again" in caplog.text
    assert [type(reply) for reply in replies] == [ShardFile, ShardFile]
    assert list((tmp_path / "ckpt/tier/quarantine").iterdir())


@pytest.mark.parametrize("strict", [True, False])
def test_an_older_checkpoint_must_overwrite_all_that_a_bad_one_wrote(
    tmp_path: Path, strict: bool
) -> None:
    """Otherwise the state would keep parts of the damaged checkpoint."""
    with holdfast.Checkpointer(holdfast.Folder(tmp_path / "ckpt", keep_last=10)) as ckpt:
        ckpt.save(1, {"n": 1}).wait(timeout=HANG_SECONDS)
        ckpt.save(2, state_of(2)).wait(timeout=HANG_SECONDS)
    damage(tmp_path / "ckpt", 2)
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt", strict=strict) as ckpt,
        pytest.raises(CorruptionError, match="s2-r0 was found damaged after parts of it"),
    ):
        ckpt.restore(state_of(0))


def test_a_state_with_its_own_loading_code_is_restored_through_a_slot(
    tmp_path: Path, replies: list[Any]
) -> None:
    class Counts(torch.nn.Linear):
        def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
            self.before = self.weight.detach().clone()
            return super().load_state_dict(*arguments, **options)

    model = Counts(4, 4)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        ckpt.save(1, {"model": model}).wait(timeout=HANG_SECONDS)
    other = Counts(4, 4)
    expected = other.weight.detach().clone()
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore({"model": other}) == 1
    assert torch.equal(other.before, expected)
    assert torch.equal(other.weight, model.weight)
    assert [type(reply) for reply in replies] == [Filled]


def test_a_state_can_be_restored_twice(tmp_path: Path) -> None:
    """A successful load before does not count as the rest of a failed one."""
    save(tmp_path / "ckpt", 1)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", strict=False) as ckpt:
        assert ckpt.restore(state_of(0)) == 1
        assert ckpt.restore({"t": torch.zeros(3)}) == 1
        assert len(ckpt.skipped) == 2


def test_no_good_copy_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", 1)
    damage(tmp_path / "ckpt", 1)
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt,
        pytest.raises(CorruptionError, match="none that can be restored"),
    ):
        ckpt.restore(state_of(0))


def test_a_file_that_the_rank_cannot_read_is_restored_through_a_slot(
    tmp_path: Path, replies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "ckpt", 1)

    def not_there(*_: Any) -> None:
        raise NotFoundError("the shard is not there")

    monkeypatch.setattr(restoring, "read_in_place", not_there)
    state = state_of(0)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore(state) == 1
    assert state["t"].eq(1).all()
    assert [type(reply) for reply in replies] == [ShardFile, Filled]


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path, replies: list[Any]) -> None:
    save(tmp_path / "ckpt", 1)
    state = {**state_of(0), "more": torch.zeros(3)}
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt,
        pytest.raises(StateMismatchError, match="more: expected Tensor, found nothing"),
    ):
        ckpt.restore(state)
    assert (state["n"], state["t"].any()) == (0, False)
    assert [type(reply) for reply in replies] == [ShardFile, Filled]


def test_parts_that_do_not_fit_may_be_skipped(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", 1)
    state = {"t": torch.zeros(ELEMENTS), "n": torch.zeros(3)}
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", strict=False) as ckpt:
        assert ckpt.restore(state) == 1
        assert len(ckpt.skipped) == 1
    assert state["t"].eq(1).all()
    assert not state["n"].any()


def test_a_shard_in_memory_is_used_before_the_disk(
    tmp_path: Path, memory: Path, replies: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A slot that already contains the shard is used before the disk."""
    caplog.set_level(logging.INFO)
    save_and_leave_memory(tmp_path / "ckpt", memory, state_of(1))
    state = state_of(0)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore(state) == 1
    assert state["t"].eq(1).all()
    assert state["n"] == 1
    assert replies[-1].slot is not None
    assert "restored step 1 from memory" in caplog.text


@pytest.mark.parametrize("where", [0, 0.3, 0.9], ids=["header", "first half", "second half"])
def test_a_slot_that_no_longer_has_the_shard_is_not_used(
    tmp_path: Path,
    memory: Path,
    replies: list[Any],
    caplog: pytest.LogCaptureFixture,
    where: float,
) -> None:
    caplog.set_level(logging.INFO)
    save_and_leave_memory(tmp_path / "ckpt", memory, state_of(1))
    for path in memory.rglob("*.slot"):
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 100 + int(where * 4 * ELEMENTS))
            file.write(b"\x55")
    state = state_of(0)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        assert ckpt.restore(state) == 1
    assert state["t"].eq(1).all()
    assert replies[-1].slot is not None
    assert "restored step 1 from node" in caplog.text


def test_a_shard_in_memory_is_used_where_the_file_is_missing(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    save_and_leave_memory(tmp_path / "ckpt", memory, state_of(1))
    state = state_of(0)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        for shard in (tmp_path / "ckpt").rglob("*.shard"):
            shard.unlink()
        assert ckpt.restore(state) == 1
    assert state["t"].eq(1).all()
    assert "restored step 1 from memory" in caplog.text
