"""Forked children, such as a data loader's workers, neither hold a Checkpointer's connection open nor
ignore SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.crash.failpoints import in_every_python
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.launched import committed_step, persisters_of

import holdfast
from holdfast_core.errors import ConfigError

FORK: ForkContext = multiprocessing.get_context("fork")


@contextmanager
def living_child() -> Iterator[Any]:
    """Fork a child that lives until it is killed."""
    began = FORK.Event()

    def live() -> None:
        began.set()
        signal.pause()

    child = FORK.Process(target=live, daemon=True)
    child.start()
    try:
        assert began.wait(HANG_SECONDS)
        yield child
    finally:
        child.kill()
        child.join()


@pytest.mark.fault("A data loader's worker lives when a Checkpointer is closed")
def test_close_does_not_wait_for_a_live_child(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ckpt"
    with holdfast.Checkpointer(dir=folder) as ckpt:
        ckpt.save(1, {"t": torch.ones(4)})
        with living_child() as child:
            assert len(persisters_of(os.getpid(), folder)) == 1
            ckpt.close()
            assert child.is_alive()
            assert persisters_of(os.getpid(), folder) == []
            assert list(memory.iterdir()) == []
    assert "still being written" not in caplog.text
    assert committed_step(tmp_path / "ckpt") == 1


def test_close_does_not_wait_for_the_workers_of_a_data_loader(tmp_path: Path, memory: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=2) as ckpt:
        state = {"t": torch.zeros(1)}
        batches = iter(loader)
        for _ in ckpt.steps(5, state):
            state["t"] += next(batches)[0].sum()
    assert list(memory.iterdir()) == []
    assert committed_step(tmp_path / "ckpt") == 5
    del batches


@pytest.mark.fault("A trainer is killed while its forked child lives")
def test_the_persister_ends_with_its_trainer_although_a_child_lives(tmp_path: Path) -> None:
    """The connection of a killed trainer ends although the child still lives."""
    read, write = os.pipe()

    def train() -> None:
        ckpt = holdfast.Checkpointer(dir=tmp_path / "ckpt")
        ckpt.save(1, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)
        child = os.fork()
        if child == 0:
            signal.pause()
        (persister,) = persisters_of(os.getpid(), tmp_path / "ckpt")
        os.write(write, f"{persister} {child}\n".encode())
        signal.pause()

    trainer = FORK.Process(target=train)
    trainer.start()
    persister, child = (int(word) for word in os.read(read, 64).split())
    try:
        watched = os.pidfd_open(persister)
        trainer.kill()
        trainer.join()
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        assert poller.poll(1000 * HANG_SECONDS), "the persister lives on"
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.fault("A forked child gets SIGTERM")
@pytest.mark.parametrize("from_thread", [False, True])
def test_sigterm_ends_a_forked_child(tmp_path: Path, from_thread: bool) -> None:
    with (
        holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt,
        ExitStack() as stack,
        ThreadPoolExecutor(1) as pool,
    ):
        if from_thread:
            child = pool.submit(stack.enter_context, living_child()).result()
        else:
            child = stack.enter_context(living_child())
        child.terminate()
        child.join(HANG_SECONDS)
        assert child.exitcode == -signal.SIGTERM
        assert not ckpt.stopping
        os.kill(os.getpid(), signal.SIGTERM)  # the handler of the parent is still installed
        assert ckpt.should_save(1)
        assert ckpt.stopping


def test_a_handler_of_the_users_own_stays_in_the_child(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt"):
        previous = signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        try:
            with living_child() as child:
                child.terminate()
                child.join(HANG_SECONDS)
                assert child.exitcode == 7
        finally:
            signal.signal(signal.SIGTERM, previous)


@pytest.mark.fault("A forked child leaves the block of a Checkpointer")
def test_a_child_that_leaves_the_block_closes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is running when the child leaves the block. A close in the child would count it as lost."""
    written = tmp_path / "written"
    rules = f"directory.write_shard=wait:{written}"
    for name, value in in_every_python(tmp_path, rules).items():
        monkeypatch.setenv(name, value)
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        handle = ckpt.save(1, {"t": torch.ones(4)})
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with pytest.raises(ConfigError, match="forked child"):
                    ckpt.save(2, {"t": torch.ones(4)})
                ckpt.close()
                ckpt.__exit__(None, None, None)
                status = ckpt.saves_failed
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        written.touch()
        handle.wait(timeout=HANG_SECONDS)
        ckpt.save(2, {"t": torch.ones(4)}).wait(timeout=HANG_SECONDS)
    assert committed_step(tmp_path / "ckpt") == 2


@pytest.mark.fault("A forked child fails while its parent has left a loop")
def test_a_failing_child_does_not_affect_the_loop_of_its_parent(tmp_path: Path) -> None:
    """The slot with the state in which a loop was left is in memory that parent and child share."""
    state = {"t": torch.zeros(4)}
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=100) as ckpt:
        for index in ckpt.steps(9, state):
            state["t"] += 1
            if index == 3:
                break
        pid = os.fork()
        if pid == 0:
            ckpt.__exit__(RuntimeError, RuntimeError("in the child"), None)
            os._exit(0)
        os.waitpid(pid, 0)
    assert committed_step(tmp_path / "ckpt") == 4
