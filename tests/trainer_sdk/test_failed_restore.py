"""A restore that fails keeps nothing of the state in memory."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.hang import HANG_SECONDS
from tests.support.shards.shard_files import flip_bit

import holdfast
from holdfast_core.errors import CorruptionError, HoldfastError, StateMismatchError


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Keep the garbage collector from hiding a cycle, and pytest from keeping errors that are logged."""
    gc.collect()
    gc.disable()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


def damage_the_shards(folder: Path) -> None:
    for shard in folder.rglob("*.shard"):
        flip_bit(shard, 5000)


def keep_all(folder: Path) -> None:
    return


@pytest.mark.fault("A restore fails for good")
@pytest.mark.parametrize(
    ("damage", "wanted", "error"),
    [
        (damage_the_shards, {"t": torch.ones(2000)}, CorruptionError),
        (keep_all, {"t": torch.ones(3)}, StateMismatchError),
    ],
    ids=["damaged", "another shape"],
)
@pytest.mark.usefixtures("without_collection")
def test_the_state_of_a_failed_restore_is_released(
    tmp_path: Path,
    damage: Callable[[Path], None],
    wanted: dict[str, torch.Tensor],
    error: type[HoldfastError],
) -> None:
    with holdfast.Checkpointer(dir=tmp_path) as ckpt:
        ckpt.save(1, {"t": torch.ones(2000)}).wait("local", timeout=HANG_SECONDS)
    damage(tmp_path)
    state = {"t": wanted["t"].clone()}
    failed = False
    released = weakref.ref(state["t"])
    ckpt = holdfast.Checkpointer(dir=tmp_path)
    try:
        ckpt.restore(state)
    except error:
        failed = True
    assert failed
    ckpt.close()
    del state, ckpt
    assert released() is None
