"""The adapter to Hugging Face's Trainer, with the real Trainer."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.frameworks.devices import train_page
from tests.support.frameworks.forked import Training, train_forked
from tests.support.frameworks.kills import launched, train
from tests.support.gpu import DEVICES
from tests.support.shards.shard_files import flip_bit
from transformers import TrainerCallback, TrainingArguments

import holdfast
from holdfast.integrations.transformers import HoldfastTrainer
from holdfast_core.errors import ConfigError, StateMismatchError

FEATURES = Path(__file__).parent / "scripts" / "transformers_features.py"
PRELOAD = [
    "holdfast.integrations.transformers",
    "transformers.models.gpt2.modeling_gpt2",
    "deepspeed",  # accelerate imports it where it is installed
]

pytestmark = pytest.mark.timeout(600)
CASES = ["plain", "evaluated-passes", "best-model", "grouped", "stream", "keyed"]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the digest of an undisturbed training of each of `CASES`."""
    plan = [Training(tmp_path_factory.mktemp("whole"), (case,)) for case in CASES]
    return [one.digest for one in train_forked(FEATURES, plan, preload=PRELOAD)]


@pytest.mark.fault(
    "A Hugging Face Trainer is killed, with every feature that changes its order of samples"
)
def test_a_killed_training_ends_in_the_same_bits_with_every_feature(
    wholes: list[str], tmp_path: Path
) -> None:
    plan = [
        Training(tmp_path / case, (case,), 1, seed=7, least_steps=6, most_steps=9) for case in CASES
    ]
    killed = train_forked(FEATURES, plan, preload=PRELOAD)
    assert [one.digest for one in killed] == wholes
    assert all(max(one.starts) > 1 for one in killed)


@pytest.mark.fault("A Trainer gets SIGTERM")
def test_a_training_that_is_stopped_saves_and_continues_where_it_was(
    wholes: list[str], tmp_path: Path
) -> None:
    plan = [Training(tmp_path / "stopped", ("plain",), 1, 3, 9, 9, signal.SIGTERM)]
    (stopped,) = train_forked(FEATURES, plan, preload=PRELOAD)
    assert stopped.digest == wholes[0]
    assert stopped.starts[-1] >= 10  # no step before the stop is trained again


def test_a_second_call_of_train_trains_no_step_again(wholes: list[str], tmp_path: Path) -> None:
    plan = [Training(tmp_path / "twice", ("plain", "again"))]
    (twice,) = train_forked(FEATURES, plan, preload=PRELOAD)
    assert twice.digest == wholes[0]


@pytest.mark.parametrize("device", DEVICES)
def test_the_script_of_the_page_survives_kills(device: str, tmp_path: Path) -> None:
    whole, killed = train_page(
        "transformers.md", device, tmp_path, preload=PRELOAD, kills=3, least_steps=3, most_steps=20
    )
    assert killed.digest == whole.digest


@pytest.mark.fault("A gang of two Trainers is killed in the second pass")
def test_two_ranks_survive_a_kill_in_the_second_pass(tmp_path: Path) -> None:
    """The ranks that are killed are those of `holdfast run`."""
    plan = [Training(tmp_path / "whole", ("plain",), ranks=2)]
    (whole,) = train_forked(FEATURES, plan, preload=PRELOAD)
    command = launched(FEATURES, "plain", ranks=2)
    killed = train(command, tmp_path, kills=1, seed=0, most_steps=9)
    assert killed.digest == whole.digest
    assert killed.starts[-1] > 1


class Model(torch.nn.Module):
    """A model that is ready at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


def trainer(folder: Path, ckpt: holdfast.Checkpointer, **options: Any) -> HoldfastTrainer:
    args = TrainingArguments(
        **{
            "output_dir": str(folder / "output"),
            "save_strategy": "no",
            "max_steps": 4,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **options,
        }
    )
    data = [{"x": torch.full((4,), float(i))} for i in range(16)]
    return HoldfastTrainer(Model(), args, train_dataset=data, eval_dataset=data[:2], ckpt=ckpt)


@pytest.mark.fault("A Trainer that evaluates at its start is restarted")
def test_the_evaluation_at_the_start_is_not_repeated_after_a_restart(tmp_path: Path) -> None:
    options = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}
    for steps in (2, 4):
        with holdfast.Checkpointer(tmp_path) as ckpt:
            found = trainer(tmp_path, ckpt, max_steps=steps, **options)
            found.train()
    evaluated = [one["step"] for one in found.state.log_history if "eval_runtime" in one]
    assert evaluated == [0, 2, 4]


class AsksAtStep1(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == 1


@pytest.mark.parametrize("strategy", ["no", "best"])
def test_a_step_that_a_callback_asks_for_is_saved(strategy: str, tmp_path: Path) -> None:
    best: dict[str, Any] = {"save_only_model": True, "metric_for_best_model": "loss"}
    with holdfast.Checkpointer(tmp_path, interval_steps=1000) as ckpt:
        found = trainer(tmp_path, ckpt, save_strategy=strategy, eval_strategy="no", **best)
        found.add_callback(AsksAtStep1())
        found.train()
    with holdfast.Checkpointer(tmp_path) as ckpt:
        steps = [one.step for one in ckpt.list()]
    assert sorted(steps) == [1, 4]
    assert not list(tmp_path.glob("output/checkpoint-*"))


@pytest.mark.fault("The newest checkpoint of a training with Hugging Face's Trainer is damaged")
@pytest.mark.parametrize(
    "offset",
    [
        pytest.param(4100, id="found when the position is read"),
        pytest.param(700_000, id="found when the model is loaded"),
    ],
)
def test_a_damaged_newest_checkpoint_is_replaced_by_an_older_one(
    offset: int, tmp_path: Path
) -> None:
    def trained(folder: Path, steps: int) -> torch.Tensor:
        torch.manual_seed(3)
        options = {"lr_scheduler_type": "constant", "max_steps": steps, "learning_rate": 0.01}
        with holdfast.Checkpointer(folder, interval_steps=1, when_busy="wait") as ckpt:
            found = trainer(folder, ckpt, **options)
            found.model.register_buffer("large", torch.zeros(300_000))
            found.train()
        assert found.state.global_step == steps
        weight: torch.Tensor = found.model.linear.weight.detach()
        return weight

    whole = trained(tmp_path / "whole", 6)
    trained(tmp_path / "damaged", 4)
    flip_bit(next((tmp_path / "damaged").rglob("s000000000004-*/*.shard")), offset)
    assert torch.equal(trained(tmp_path / "damaged", 6), whole)


class EndsAtStep2(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            control.should_training_stop = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.fault("SIGTERM arrives in the step in which a callback ends the training")
def test_a_training_that_a_callback_ends_stays_ended_if_a_stop_is_asked_for_too(
    tmp_path: Path,
) -> None:
    for was_asked in (True, False):
        with holdfast.Checkpointer(tmp_path) as ckpt:
            found = trainer(tmp_path, ckpt)
            found.add_callback(EndsAtStep2())
            found.train()
            assert ckpt.stopping == was_asked
        assert found.state.global_step == 2


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"save_strategy": "steps"}, 'save_strategy="no"'),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_only_model=True"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=False"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=False"),
    ],
)
def test_options_that_save_or_restart_a_training_are_refused_with_the_option_to_set(
    options: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with holdfast.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(ConfigError) as refused:
            trainer(tmp_path, ckpt, **options)
    signal.signal(signal.SIGTERM, before)
    assert remedy in str(refused.value)


def test_a_checkpoint_of_another_kind_of_script_is_refused(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, {"weights": torch.zeros(3)})
    with holdfast.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(StateMismatchError, match="no state of a Trainer, it holds weights"):
            trainer(tmp_path, ckpt).train()
