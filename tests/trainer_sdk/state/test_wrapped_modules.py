"""Names of tensors are those of the plain module, wherever a part of it is wrapped or compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.trainer.payloads import stored
from tests.support.trainer.snapshots import take_snapshot
from torch import nn

import holdfast
from holdfast.state.loading.load import load_state
from holdfast.state.snapshot import plan_save, read_payload
from holdfast_core.errors import StateMismatchError
from holdfast_core.ids import Rank

Wrap = Callable[[nn.Module], nn.Module]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def parallel(module: nn.Module) -> Any:
    return nn.DataParallel(module)


class Net(nn.Module):
    """Has a shared part, batch norm, extra state, and children whose names look like wrappers."""

    def __init__(self, seed: float, wrap: Wrap) -> None:
        super().__init__()
        self.first = wrap(nn.Sequential(nn.Linear(2, 2), wrap(nn.BatchNorm1d(2))))
        self.module = wrap(nn.Linear(2, 2))
        self.blocks = nn.ModuleList([wrap(nn.Linear(2, 2)), nn.Linear(2, 2)])
        self.again = self.blocks[0]
        for number, value in enumerate(self.state_dict().values()):
            value.fill_(seed + number)


PLAIN = [
    "again.bias",
    "again.weight",
    "blocks.0.bias",
    "blocks.0.weight",
    "blocks.1.bias",
    "blocks.1.weight",
    "first.0.bias",
    "first.0.weight",
    "first.1.bias",
    "first.1.num_batches_tracked",
    "first.1.running_mean",
    "first.1.running_var",
    "first.1.weight",
    "module.bias",
    "module.weight",
]

WRAPS: dict[str, Wrap] = {
    "plain": lambda module: module,
    "compiled": compiled,
    "parallel": parallel,
    "both": lambda module: parallel(compiled(module)),
}


@pytest.mark.parametrize("name", WRAPS)
def test_a_payload_has_the_names_of_the_plain_module(name: str) -> None:
    snapshot = take_snapshot({"net": Net(1, WRAPS[name])}, Rank(0))
    assert sorted(leaf.name for leaf in snapshot.leaves) == [f"net.{one}" for one in PLAIN]


@pytest.mark.fault("A part of a model is compiled or wrapped in one of two runs")
@pytest.mark.parametrize(("before", "after"), list(itertools.product(WRAPS, WRAPS)))
def test_a_module_is_restored_with_and_without_wrappers_inside(before: str, after: str) -> None:
    saved = Net(1, WRAPS[before])
    expected = [value.tolist() for value in saved.state_dict().values()]
    module = Net(100, WRAPS[after])
    load_state({"net": module}, read_payload(stored({"net": saved})))
    assert [value.tolist() for value in module.state_dict().values()] == expected


def test_a_mismatch_has_the_plain_name() -> None:
    saved = read_payload(stored({"net": nn.Sequential(nn.Linear(2, 2))}))
    with pytest.raises(StateMismatchError, match=r"net\.0\.weight: expected float32 \[2, 3\]"):
        load_state({"net": nn.Sequential(compiled(nn.Linear(3, 2)))}, saved)


def test_frozen_parameters_inside_a_wrapper_come_last_in_a_payload() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)

    def order(net: nn.Module) -> list[str]:
        plan = plan_save(take_snapshot({"net": net}, Rank(0)), Rank(0))
        return [tensor.fqn for tensor in plan.payload.tensors]

    assert order(nn.Sequential(compiled(module[0]), module[1])) == order(module)


def test_an_average_of_weights_keeps_its_own_names() -> None:
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    snapshot = take_snapshot({"net": nn.Sequential(average)}, Rank(0))
    assert sorted(leaf.name for leaf in snapshot.leaves) == [
        "net.0.module.bias",
        "net.0.module.weight",
        "net.0.n_averaged",
    ]


def test_own_parameters_of_a_wrapper_do_not_collide_with_those_inside() -> None:
    class Scaled(nn.DataParallel):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.weight = nn.Parameter(torch.full((3,), 7.0))

    saved = nn.Sequential(Scaled(nn.Linear(1, 1)))
    payload = stored({"net": saved})
    module = nn.Sequential(Scaled(nn.Linear(1, 1)))
    nn.init.zeros_(module[0].weight)
    load_state({"net": module}, read_payload(payload))
    for found, expected in zip(module.parameters(), saved.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_saved_files_have_the_plain_names_at_every_save(tmp_path: Path) -> None:
    module = Net(1, compiled)
    with holdfast.Checkpointer(tmp_path, on_save_error="raise", when_busy="wait") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"net": module}).wait("local", timeout=300)
    with holdfast.open(tmp_path) as folder, folder.at(3) as saved:
        assert sorted(saved.tensors()) == [f"net.{one}" for one in PLAIN]
    plain = Net(100, WRAPS["plain"])
    with holdfast.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore({"net": plain}) == 3
    found, expected = plain.state_dict().values(), module.state_dict().values()
    assert all(map(torch.equal, found, expected))
