"""The CheckpointEngine for DeepSpeed: kills with ZeRO stages 1 and 2, and engines that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.frameworks import deepspeed_cpu
from tests.support.frameworks.devices import train_page
from tests.support.frameworks.forked import Training, train_forked
from tests.support.frameworks.kills import Trained
from tests.support.frameworks.pages import script_of
from tests.support.gpu import needs_gpu

import holdfast
from holdfast.integrations.deepspeed import HoldfastEngine

PRELOAD = [
    deepspeed_cpu.__name__,
    "holdfast.integrations.deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # `initialize` imports it, and torch's compiler with it
]

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Stage:
    """Trainings of two ranks with one ZeRO stage, without and with kills."""

    script: Path
    folder: Path
    whole: Trained
    killed: Trained


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Stage]:
    return {
        stage: trained(stage, kills, tmp_path_factory.mktemp(f"stage{stage}"))
        for stage, kills in ((1, 2), (2, 1))
    }


def trained(stage: int, kills: int, folder: Path) -> Stage:
    script = folder / "train.py"
    script.write_text(script_of("deepspeed.md").replace('"stage": 1', f'"stage": {stage}'))
    plan = [
        Training(folder / "whole", ranks=2),
        Training(folder / "killed", kills=kills, least_steps=7, most_steps=9, ranks=2),
    ]
    whole, killed = train_forked(script, plan, preload=PRELOAD)
    return Stage(script, folder, whole, killed)


@pytest.mark.fault("Two ranks of DeepSpeed are killed (ZeRO stages 1 and 2)")
@pytest.mark.parametrize("stage", [1, 2])
def test_two_killed_ranks_end_in_the_same_bits(stage: int, stages: dict[int, Stage]) -> None:
    whole, killed = stages[stage].whole, stages[stage].killed
    assert killed.digest == whole.digest
    assert len(set(killed.starts)) == killed.kills + 1  # every start continued from a later step


@needs_gpu
def test_a_killed_training_on_a_gpu_ends_in_the_same_bits(tmp_path: Path) -> None:
    options = {"kills": 2, "least_steps": 4, "most_steps": 6}
    whole, killed = train_page("deepspeed.md", "cuda", tmp_path, **options)
    assert killed.digest == whole.digest
    assert killed.starts[-1] > 1


def test_another_number_of_ranks_is_refused(stages: dict[int, Stage]) -> None:
    alone = [Training(stages[1].folder / "whole", ranks=1)]
    with pytest.raises(AssertionError, match="saved by 2 ranks, and these are 1"):
        train_forked(stages[1].script, alone, preload=PRELOAD)


# ---------------------------------------------------------------------- in this process


@pytest.fixture
def gang_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")  # DeepSpeed asks for it
    torch.distributed.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def engine_of(stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    initialize: Any = deepspeed_cpu.deepspeed.initialize
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    return engine


@pytest.mark.usefixtures("gang_of_one")
def test_a_second_saver_and_other_stages_are_refused(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "ckpt") as ckpt:
        engine = engine_of(1)
        HoldfastEngine(engine, ckpt)
        with pytest.raises(holdfast.ConfigError, match=r"call HoldfastEngine\.step_done instead"):
            engine.save_checkpoint(str(tmp_path / "own"))
        with pytest.raises(holdfast.ConfigError, match="expected ZeRO stage 1 or 2, found 0"):
            HoldfastEngine(engine_of(0), ckpt)
        with pytest.raises(holdfast.ConfigError, match="the names module are used"):
            HoldfastEngine(engine_of(1), ckpt, {"module": torch.nn.Linear(1, 1)})
