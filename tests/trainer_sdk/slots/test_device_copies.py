"""Copies from a device run beside training, and later writes wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.hang import HANG_SECONDS
from tests.support.trainer.device_training import (
    MEAN,
    WEIGHT,
    Training,
    write,
    write_unseen,
)
from tests.support.trainer.watched_sidecar import WatchedSidecar
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast_core.errors import SaveFailedError


def test_the_next_step_waits_for_the_copies(training: Training) -> None:
    momentum = training.momentum().clone()
    handle = training.ckpt.save(1, training.state)
    assert not training.device.is_idle
    training.step()
    handle.wait(timeout=HANG_SECONDS)
    assert not torch.equal(training.net.weight, WEIGHT)
    saved = training.saved(1)
    assert torch.equal(saved.weight, WEIGHT)
    assert torch.equal(saved.mean, MEAN)
    assert torch.equal(saved.momentum, momentum)
    assert saved.payload["n"] == 3


def test_a_write_that_is_neither_delayed_nor_counted_changes_the_saved_bytes(
    training: Training,
) -> None:
    """A negative test of the fake: a write that is neither delayed nor counted changes the saved bytes."""
    handle = training.ckpt.save(1, training.state)
    write_unseen(training.net.weight, -1)
    training.device.catch_up()
    handle.wait(timeout=HANG_SECONDS)
    assert torch.equal(training.saved(1).weight, torch.full_like(WEIGHT, -1))


def test_a_write_that_torch_counts_fails_the_save_and_is_expected_from_then_on(
    training: Training,
) -> None:
    handle = training.ckpt.save(1, training.state)
    write(training.net.weight, -1)
    training.step()
    with pytest.raises(SaveFailedError, match=r"model\.weight.*wait_staged\(\) before you write"):
        handle.wait(timeout=HANG_SECONDS)
    assert training.staged == []
    training.step()
    write(training.net.weight, 5)
    handle = training.ckpt.save(2, training.state)
    write(training.net.weight, -1)
    handle.wait(timeout=HANG_SECONDS)
    assert training.ckpt.saves_failed == 1
    assert torch.equal(training.saved(2).weight, torch.full_like(WEIGHT, 5))


def test_a_write_is_noticed_although_no_step_comes_after_it(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    write(training.net.weight, -1)
    training.device.catch_up()
    with pytest.raises(SaveFailedError, match="may contain data of two steps"):
        handle.wait(timeout=HANG_SECONDS)


def test_wait_staged_delays_later_writes_of_the_script(training: Training) -> None:
    momentum = training.momentum().clone()
    handle = training.ckpt.save(1, training.state)
    training.ckpt.wait_staged()
    write(training.net.weight, -1)
    write_unseen(training.momentum(), -1)
    handle.wait(timeout=HANG_SECONDS)
    saved = training.saved(1)
    assert torch.equal(saved.weight, WEIGHT)
    assert torch.equal(saved.momentum, momentum)


def test_a_buffer_may_be_changed_by_the_next_forward(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    training.net()
    training.device.catch_up()
    handle.wait(timeout=HANG_SECONDS)
    assert torch.equal(training.saved(1).mean, MEAN)


def test_a_parameter_in_no_optimizer_may_be_changed_at_once(training: Training) -> None:
    """An average of weights is such a parameter."""
    parameter = torch.nn.Parameter(torch.ones(3))
    training.state["average"] = torch.nn.ParameterDict({"w": parameter})
    handle = training.ckpt.save(1, training.state)
    write_unseen(parameter, -1)
    training.device.catch_up()
    handle.wait(timeout=HANG_SECONDS)
    assert torch.equal(training.saved(1).payload["average"]["w"], torch.ones(3))


def test_a_learning_rate_may_be_changed_by_a_schedule(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.5)
    handle = training.ckpt.save(1, training.state)
    write_unseen(rate, 0.25)
    training.step()
    handle.wait(timeout=HANG_SECONDS)
    assert training.saved(1).payload["optim"]["param_groups"][0]["lr"] == 0.5


def capture(training: Training) -> None:
    """Step as torch.cuda.graph does: hooks run once, at the capture, and not at a replay."""
    training.device.captures = True
    training.step()
    training.device.captures = False
    training.step()


def see_no_step(training: Training) -> None:
    """Save twice without a step. A compiled step calls no hook and looks the same."""
    training.ckpt.save(1, training.state)
    training.ckpt.wait_staged()


@pytest.mark.parametrize("unseen", [capture, see_no_step], ids=["graph", "compiled"])
def test_an_optimizer_that_steps_unseen_is_not_relied_on(
    training: Training, unseen: Callable[[Training], None]
) -> None:
    unseen(training)
    write(training.net.weight, 5)
    handle = training.ckpt.save(2, training.state)
    write_unseen(training.net.weight, -1)
    training.device.catch_up()
    handle.wait(timeout=HANG_SECONDS)
    assert torch.equal(training.saved(2).weight, torch.full_like(WEIGHT, 5))


def test_a_compiled_step_is_traced_without_the_hook(training: Training) -> None:
    training.ckpt.save(1, training.state)
    training.ckpt.wait_staged()
    compiled = torch.compile(training.optimizer.step, backend="eager")
    training.net().backward()
    compiled()
    write(training.net.weight, 5)
    handle = training.ckpt.save(2, training.state)
    write_unseen(training.net.weight, -1)
    handle.wait(timeout=HANG_SECONDS)
    assert torch.equal(training.saved(2).weight, torch.full_like(WEIGHT, 5))


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_sharded_parameter_is_copied_beside_training(sidecar: WatchedSidecar, mesh: Any) -> None:
    with holdfast.Checkpointer() as ckpt:
        training = Training(sidecar, ckpt, lambda t: distribute_tensor(t, mesh, [Shard(0)]))
        handle = ckpt.save(1, training.state)
        assert not training.device.is_idle
        training.step()
        handle.wait(timeout=HANG_SECONDS)
        assert torch.equal(training.saved(1).weight, WEIGHT[:2])
        weight: Any = training.net.weight
        assert not torch.equal(weight.to_local(), WEIGHT[:2])

        handle = ckpt.save(2, training.state)
        write(training.net.weight, -1)
        training.device.catch_up()
        with pytest.raises(SaveFailedError, match="may contain data of two steps"):
            handle.wait(timeout=HANG_SECONDS)
