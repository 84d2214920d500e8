"""The adapter to accelerate, with the real Accelerator."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tests.support.frameworks.devices import train_page
from tests.support.frameworks.forked import Training, train_forked
from tests.support.gpu import DEVICES
from torch.utils.data import DataLoader

import holdfast
from holdfast.integrations.accelerate import AcceleratorRun
from holdfast_core.errors import ConfigError

LOOP = Path(__file__).parent / "scripts" / "accelerate_loop.py"
PRELOAD = ["holdfast.integrations.accelerate", "deepspeed", "torchdata.stateful_dataloader"]
STEPS_OF_A_PASS = 7
LOADERS: list[tuple[str, ...]] = [(), ("seedable",), ("stateful",), ("stateful", "seedable")]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """Return the digest of an undisturbed training with each of these options."""
    cases: list[tuple[str, ...]] = [*LOADERS, ("generator",), ("looks",), ("stateful", "pairs")]
    plan = [Training(tmp_path_factory.mktemp("whole"), options) for options in cases]
    found = train_forked(LOOP, plan, preload=PRELOAD)
    return {options: one.digest for options, one in zip(cases, found, strict=True)}


@pytest.mark.fault("A training with accelerate is killed, with every kind of loader")
def test_a_killed_training_ends_in_the_same_bits_with_every_loader(
    wholes: dict[tuple[str, ...], str], tmp_path: Path
) -> None:
    plan = [
        Training(tmp_path / str(number), options, 2, 2, 8, 10, kept_steps=STEPS_OF_A_PASS)
        for number, options in enumerate(LOADERS)
    ]
    killed = train_forked(LOOP, plan, preload=PRELOAD)
    assert [one.digest for one in killed] == [wholes[options] for options in LOADERS]
    assert all(one.starts[1] > STEPS_OF_A_PASS for one in killed)


@pytest.mark.fault("A training with accelerate restarts exactly between two passes over the data")
def test_a_restart_after_the_last_batch_of_a_pass_begins_the_next_pass(
    wholes: dict[tuple[str, ...], str], tmp_path: Path
) -> None:
    cases = [*LOADERS, ("generator",)]
    plan = []
    for number, options in enumerate(cases):
        plan.append(Training(tmp_path / str(number), (*options, "one-pass")))
        plan.append(Training(tmp_path / str(number), options))
    found = train_forked(LOOP, plan, preload=PRELOAD)
    assert [one.starts for one in found[1::2]] == [(8,)] * len(cases)
    assert [one.digest for one in found[1::2]] == [wholes[options] for options in cases]


@pytest.mark.fault("A training with accelerate restarts in its first pass, with any loaders")
def test_a_restart_in_the_first_pass_continues_in_its_order_with_any_loaders(
    wholes: dict[tuple[str, ...], str], tmp_path: Path
) -> None:
    cases = [("stateful",), ("looks",), ("stateful", "pairs")]
    plan = []
    for number, options in enumerate(cases):
        plan.append(Training(tmp_path / str(number), (*options, "first-steps")))
        plan.append(Training(tmp_path / str(number), options))
    found = train_forked(LOOP, plan, preload=PRELOAD)
    assert [one.starts for one in found[1::2]] == [(4,)] * len(cases)
    assert [one.digest for one in found[1::2]] == [wholes[options] for options in cases]


def test_a_training_that_is_stopped_saves_and_continues_where_it_was(
    wholes: dict[tuple[str, ...], str], tmp_path: Path
) -> None:
    plan = [Training(tmp_path / "stopped", (), 1, 0, 9, 9, signal.SIGTERM)]
    (stopped,) = train_forked(LOOP, plan, preload=PRELOAD)
    assert stopped.digest == wholes[()]
    assert stopped.starts[-1] >= 10  # no step before the stop is trained again


@pytest.mark.parametrize("device", DEVICES)
def test_the_script_of_the_page_survives_kills(device: str, tmp_path: Path) -> None:
    whole, killed = train_page(
        "accelerate.md", device, tmp_path, preload=PRELOAD, kills=3, least_steps=8, most_steps=15
    )
    assert killed.digest == whole.digest
    assert killed.starts[-1] > 1


def test_two_ranks_survive_kills(tmp_path: Path) -> None:
    plan = [
        Training(tmp_path / "whole", ranks=2),
        Training(
            tmp_path / "killed",
            kills=1,
            least_steps=10,
            most_steps=12,
            kept_steps=STEPS_OF_A_PASS,
            ranks=2,
        ),
    ]
    whole, killed = train_forked(LOOP, plan, preload=PRELOAD)
    assert killed.digest == whole.digest
    assert killed.starts[-1] > STEPS_OF_A_PASS


def test_accelerates_own_saver_is_refused_with_what_to_call_instead(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        AcceleratorRun(accelerator, ckpt)
        with pytest.raises(ConfigError, match=r"call AcceleratorRun\.after_step instead"):
            accelerator.save_state(str(tmp_path / "saved"))


def test_a_loader_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        run = AcceleratorRun(Accelerator(cpu=True), ckpt)
        run.restore()
        with pytest.raises(ConfigError, match=r"pass what accelerator\.prepare\(loader\) returns"):
            next(run.batches(DataLoader([1, 2])))
