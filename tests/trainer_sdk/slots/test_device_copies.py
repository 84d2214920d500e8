"""Staging from a device whose copies are delayed as far as possible: saved bytes are those of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.trainer.fake_device import FakeDevice
from tests.support.trainer.launched import until
from tests.support.trainer.slot_files import SlotCopy, slot_of, slots_below
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.slots.device_copies import DeviceCopies
from holdfast.slots.staging import Copier, SlotRing
from holdfast.state.snapshot import read_payload
from holdfast.testing import FakeSidecar
from holdfast_core.errors import ConfigError, SaveFailedError
from holdfast_core.ids import Rank, RestartRound
from holdfast_core.messages.schema import Progress, Restore, Stage
from holdfast_core.shm.slot_header import HEADER_BYTES, SlotHeader, SlotState

WEIGHT = torch.full((4, 3), 7.0)
MEAN = torch.full((4,), 7.0)


class Net(torch.nn.Module):
    """A module with a parameter, and a buffer that forward changes, as in batch norm."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.register_buffer("mean", MEAN.clone())

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            self.mean += 1
        return self.weight.sum()


class WatchedCopies(DeviceCopies):
    """Device copies that count the threads that wait for them."""

    waiting = 0

    def wait(self, timeout_seconds: float | None = None) -> bool:
        self.waiting += 1
        try:
            return super().wait(timeout_seconds)
        finally:
            self.waiting -= 1


class Training:
    """A model, its optimizer and a Checkpointer with a fake device. One step was done, so that the
    Checkpointer has a record of the optimizer; then weight and mean were set to WEIGHT and MEAN."""

    def __init__(
        self,
        sidecar: FakeSidecar,
        ckpt: holdfast.Checkpointer,
        shard: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> None:
        self.sidecar = sidecar
        self.ckpt = ckpt
        self.device = FakeDevice()
        self.net = Net(shard(WEIGHT))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.net, "optim": self.optimizer, "n": 3}
        self.copies = WatchedCopies(self.device)
        ckpt.open()
        assert ckpt._opened is not None
        ckpt._opened.saver.use(self.copies)  # a Checkpointer itself only looks for CUDA devices
        self._slots_dir = ckpt._opened.ring.directory
        self.step()
        with torch.no_grad():
            self.net.weight.copy_(shard(WEIGHT))
            self.net.mean.copy_(MEAN)

    def step(self) -> None:
        self.net().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def header(self, step: int) -> SlotHeader | None:
        """Return the header of the slot that contains `step`."""
        slot = self._slot(step)
        return None if slot is None else slot.header

    def saved(self, step: int) -> Saved:
        """Return the contents of the slot of `step`. The next save does not overwrite them."""
        slot = self._slot(step)
        assert slot is not None
        payload = read_payload(slot.payload[: slot.header.payload_bytes])
        model = payload["model"]
        momentum = payload["optim"]["state"][0]["momentum_buffer"]
        return Saved(model["weight"], model["mean"], momentum, payload)

    def momentum(self) -> torch.Tensor:
        return self.optimizer.state[self.net.weight]["momentum_buffer"]

    @property
    def staged(self) -> list[int]:
        return [message.step for message in self.sidecar.messages(Stage)]

    @property
    def slots(self) -> list[SlotCopy]:
        return slots_below(self._slots_dir)

    def _slot(self, step: int) -> SlotCopy | None:
        return slot_of(self._slots_dir, step)


@dataclass(frozen=True)
class Saved:
    weight: torch.Tensor
    mean: torch.Tensor
    momentum: torch.Tensor
    payload: dict[str, Any]


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSidecar]:
    with FakeSidecar(tmp_path / "shared", tmp_path / "node") as fake:
        for name, value in fake.environment(HOLDFAST_ROUND="0").items():
            monkeypatch.setenv(name, value)
        yield fake


@pytest.fixture
def training(sidecar: FakeSidecar) -> Iterator[Training]:
    with holdfast.Checkpointer() as ckpt:
        running = Training(sidecar, ckpt)
        yield running
        running.device.is_lagging = False
        running.device.catch_up()


def blocked(training: Training) -> bool:
    """Return whether a thread waits for the copies."""
    return training.copies.waiting > 0


def until_blocked(thread: Thread, training: Training) -> None:
    """Wait until the thread waits for the copies. Fail if it ends without waiting."""
    until(lambda: blocked(training) or not thread.is_alive(), "the thread")
    assert thread.is_alive()


def catch_up_when_blocked(training: Training) -> None:
    until(lambda: blocked(training), "the main thread")
    training.device.catch_up()


def write(tensor: torch.Tensor, value: float) -> None:
    """Write in a way that torch counts."""
    with torch.no_grad():
        tensor.fill_(value)


def write_unseen(tensor: torch.Tensor, value: float) -> None:
    """Write in a way that torch does not count."""
    tensor.data.fill_(value)


def test_the_next_step_waits_for_the_copies(training: Training) -> None:
    momentum = training.momentum().clone()
    handle = training.ckpt.save(1, training.state)
    assert not training.device.is_idle
    training.step()
    handle.wait(timeout=60)
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
    handle.wait(timeout=60)
    assert torch.equal(training.saved(1).weight, torch.full_like(WEIGHT, -1))


def test_a_write_that_torch_counts_fails_the_save_and_is_expected_from_then_on(
    training: Training,
) -> None:
    handle = training.ckpt.save(1, training.state)
    write(training.net.weight, -1)
    training.step()
    with pytest.raises(SaveFailedError, match=r"model\.weight.*wait_staged\(\) before you write"):
        handle.wait(timeout=60)
    assert training.staged == []
    training.step()
    write(training.net.weight, 5)
    handle = training.ckpt.save(2, training.state)
    write(training.net.weight, -1)
    handle.wait(timeout=60)
    assert training.ckpt.saves_failed == 1
    assert torch.equal(training.saved(2).weight, torch.full_like(WEIGHT, 5))


def test_a_write_is_noticed_although_no_step_comes_after_it(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    write(training.net.weight, -1)
    training.device.catch_up()
    with pytest.raises(SaveFailedError, match="may contain data of two steps"):
        handle.wait(timeout=60)


def test_wait_staged_delays_later_writes_of_the_script(training: Training) -> None:
    momentum = training.momentum().clone()
    handle = training.ckpt.save(1, training.state)
    training.ckpt.wait_staged()
    write(training.net.weight, -1)
    write_unseen(training.momentum(), -1)
    handle.wait(timeout=60)
    saved = training.saved(1)
    assert torch.equal(saved.weight, WEIGHT)
    assert torch.equal(saved.momentum, momentum)


def test_a_buffer_may_be_changed_by_the_next_forward(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    training.net()
    training.device.catch_up()
    handle.wait(timeout=60)
    assert torch.equal(training.saved(1).mean, MEAN)


def test_a_parameter_in_no_optimizer_may_be_changed_at_once(training: Training) -> None:
    """An average of weights is such a parameter."""
    parameter = torch.nn.Parameter(torch.ones(3))
    training.state["average"] = torch.nn.ParameterDict({"w": parameter})
    handle = training.ckpt.save(1, training.state)
    write_unseen(parameter, -1)
    training.device.catch_up()
    handle.wait(timeout=60)
    assert torch.equal(training.saved(1).payload["average"]["w"], torch.ones(3))


def test_a_learning_rate_may_be_changed_by_a_schedule(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.5)
    handle = training.ckpt.save(1, training.state)
    write_unseen(rate, 0.25)
    training.step()
    handle.wait(timeout=60)
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
    handle.wait(timeout=60)
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
    handle.wait(timeout=60)
    assert torch.equal(training.saved(2).weight, torch.full_like(WEIGHT, 5))


def test_a_slot_is_full_when_the_copies_are_done(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    header = training.header(1)
    assert header is not None
    assert header.state is SlotState.FILLING
    assert (training.staged, handle.settled) == ([], False)
    training.device.catch_up()
    handle.wait(timeout=60)
    assert training.staged == [1]


def test_two_saves_in_a_row_have_the_bytes_of_their_step(training: Training) -> None:
    first = training.ckpt.save(1, training.state)
    second = training.ckpt.save(2, training.state)
    training.step()
    for handle in (first, second):
        handle.wait(timeout=60)
    assert training.staged == [1, 2]
    assert torch.equal(training.saved(1).weight, WEIGHT)
    assert torch.equal(training.saved(2).weight, WEIGHT)


def test_slots_are_not_replaced_while_copies_run(training: Training) -> None:
    training.ckpt.save(1, training.state)
    training.state["more"] = torch.ones(100_000)
    growing = Thread(target=training.ckpt.save, args=(2, training.state))
    growing.start()
    until_blocked(growing, training)
    assert all(slot.header.capacity_bytes < 400_000 for slot in training.slots)
    training.device.catch_up()
    growing.join()
    assert all(slot.header.capacity_bytes >= 400_000 for slot in training.slots)
    until(lambda: training.staged == [1, 2], "both saves")


def test_a_copy_that_fails_is_a_failed_save(training: Training) -> None:
    training.device.fails = "CUDA error: an illegal memory access was encountered"
    handle = training.ckpt.save(1, training.state)
    training.step()
    with pytest.raises(SaveFailedError, match="illegal memory access"):
        handle.wait(timeout=60)
    assert training.header(1) is None
    training.device.fails = None
    handle = training.ckpt.save(2, training.state)
    training.step()
    handle.wait(timeout=60)
    assert training.ckpt.saves_failed == 1
    assert training.staged == [2]


def test_a_device_that_refuses_a_copy_is_a_failed_save(training: Training) -> None:
    training.device.refuses = "out of resources"
    for step in range(1, 4):  # more saves than slots
        handle = training.ckpt.save(step, training.state)
        assert handle.failure == "DeviceError: out of resources"
    assert training.ckpt.saves_failed == 3
    training.device.refuses = None
    handle = training.ckpt.save(4, training.state)
    training.device.catch_up()
    handle.wait(timeout=60)


def test_a_device_that_cannot_be_waited_for_does_not_stop_the_step(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    training.device.refuses_to_block = "CUDA error: device-side assert triggered"
    training.step()
    training.device.catch_up()
    with pytest.raises(SaveFailedError, match="device-side assert"):
        handle.wait(timeout=60)


def test_a_failed_save_frees_its_slot_only_after_the_device_is_done(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(copier: Copier, jobs: object) -> None:
        raise OSError("the host's copy failed")

    monkeypatch.setattr(Copier, "run", fail)
    training.device.is_lagging = False
    handle = training.ckpt.save(1, training.state)
    assert handle.failure == "OSError: the host's copy failed"
    assert training.device.is_idle
    assert [slot.header.state for slot in training.slots] == [SlotState.FREE] * 2


def test_a_crash_before_the_copies_are_done_leaves_no_valid_slot(training: Training) -> None:
    training.ckpt.save(1, training.state)
    slots = training.slots
    assert {slot.header.state for slot in slots} == {SlotState.FILLING, SlotState.FREE}
    next_life = SlotRing(slots[0].path.parent, Rank(0), len(slots))
    next_life.ensure(slots[0].header.capacity_bytes, RestartRound(0))
    headers = [slot.header() for slot in next_life.slots]
    assert [(header.state, header.step) for header in headers] == [(SlotState.FREE, None)] * 2
    next_life.close()


def test_a_restore_waits_for_the_copies(training: Training) -> None:
    """A restore would write into tensors that are still being copied. In a pod, the first restore may
    follow a save of step 0; a later one is refused."""
    training.ckpt.save(0, training.state)
    loop = training.ckpt.steps(1, training.state)
    restoring = Thread(target=next, args=(loop,))
    restoring.start()
    until_blocked(restoring, training)
    training.device.catch_up()
    restoring.join()
    assert [type(m) for m in training.sidecar.received if isinstance(m, Stage | Restore)] == [
        Stage,
        Restore,
    ]


def test_a_restore_after_a_save_is_refused_in_a_pod(training: Training) -> None:
    training.ckpt.save(1, training.state)
    training.device.catch_up()
    with pytest.raises(ConfigError, match="in a worker pod all ranks of a round start from"):
        training.ckpt.restore(training.state)
    assert training.sidecar.messages(Restore) == []
    assert torch.equal(training.net.weight, WEIGHT)


def test_a_roll_back_waits_for_the_copies(tmp_path: Path) -> None:
    with holdfast.Checkpointer(dir=tmp_path / "ckpt") as ckpt:
        unused = FakeSidecar(
            tmp_path / "shared", tmp_path / "node"
        )  # not started, because a folder needs no sidecar
        training = Training(unused, ckpt)
        ckpt.save(1, training.state)
        restoring = Thread(target=ckpt.restore, args=(training.state,))
        restoring.start()
        until_blocked(restoring, training)
        assert not training.device.is_idle
        training.device.catch_up()
        restoring.join()
        assert torch.equal(training.net.weight, WEIGHT)
    assert ckpt.last_committed_step == 1


def test_the_end_waits_for_the_copies(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    catching_up = Thread(target=catch_up_when_blocked, args=(training,))
    catching_up.start()
    training.ckpt.close()
    catching_up.join()
    assert training.staged == [1]
    assert training.device.pinned == {}
    assert handle.failure is None


def test_slots_of_copies_that_never_end_stay_mapped(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.checkpoint.opened._COPIES_AFTER_ERROR_SECONDS", 0.0)
    training.ckpt.save(1, training.state)
    training.ckpt.close(wait=False)
    assert len(training.device.pinned) == 2
    assert "a save is lost" in caplog.text


def test_copies_beside_training_are_not_blocked_time(training: Training) -> None:
    handle = training.ckpt.save(1, training.state)
    spent = training.ckpt.blocked_seconds
    training.device.catch_up()
    handle.wait(timeout=60)
    assert training.ckpt.blocked_seconds == spent > 0
    training.ckpt.close()
    training.sidecar.wait_for(Progress)
    assert sum(message.blocked_seconds for message in training.sidecar.messages(Progress)) == spent


def test_slots_are_page_locked_while_they_exist(training: Training) -> None:
    training.ckpt.allocate(training.state)
    size = training.slots[0].header.capacity_bytes + HEADER_BYTES
    assert list(training.device.pinned.values()) == [size, size]
    training.ckpt.allocate({"more": torch.ones(100_000)})
    assert len(training.device.pinned) == 2
    assert min(training.device.pinned.values()) > 400_000
    training.ckpt.close()
    assert training.device.pinned == {}


def test_slots_that_cannot_be_page_locked_are_logged_once_and_copied_synchronously(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.device.refuses_pins = "cudaHostRegister answered 801"
    handles = []
    for step in (1, 2):
        write(training.net.weight, step)
        handles.append(training.ckpt.save(step, training.state))
        write_unseen(training.net.weight, -1)
    for handle in handles:
        handle.wait(timeout=60)
    assert caplog.text.count("cudaHostRegister answered 801") == 1
    for step in (1, 2):
        assert torch.equal(training.saved(step).weight, torch.full_like(WEIGHT, step))


def test_close_removes_the_hook(training: Training) -> None:
    training.ckpt.save(1, training.state)
    training.device.catch_up()
    training.ckpt.close()
    asked = training.device.capture_checks
    training.step()
    assert training.device.capture_checks == asked


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_sharded_parameter_is_copied_beside_training(sidecar: FakeSidecar, mesh: Any) -> None:
    with holdfast.Checkpointer() as ckpt:
        training = Training(sidecar, ckpt, lambda t: distribute_tensor(t, mesh, [Shard(0)]))
        handle = ckpt.save(1, training.state)
        assert not training.device.is_idle
        training.step()
        handle.wait(timeout=60)
        assert torch.equal(training.saved(1).weight, WEIGHT[:2])
        assert not torch.equal(training.net.weight.to_local(), WEIGHT[:2])

        handle = ckpt.save(2, training.state)
        write(training.net.weight, -1)
        training.device.catch_up()
        with pytest.raises(SaveFailedError, match="may contain data of two steps"):
            handle.wait(timeout=60)
