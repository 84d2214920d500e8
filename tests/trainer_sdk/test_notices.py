"""What the SDK prints in a script without a logging configuration, and the warning about lazy iterators."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from tests.support import zygote
from tests.support.hang import HANG_SECONDS
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.base.settings import current_environment

SCRIPT = """
import sys, holdfast, numpy as np
{before}
with holdfast.Checkpointer(dir="ckpt", interval_steps=2, when_busy="wait") as ckpt:
    for _ in ckpt.steps(int(sys.argv[1]), {{"w": np.zeros(4)}}):
        pass
"""


def run(folder: Path, total: int, before: str = "", **environment: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    done = zygote.run(
        [sys.executable, "-c", SCRIPT.format(before=before), str(total)],
        cwd=folder,
        env={**current_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.fault("A script that configured no logging starts, resumes and is done")
def test_notices_appear_without_a_logging_configuration(tmp_path: Path) -> None:
    assert run(tmp_path, 4) == ["[holdfast] nothing to restore from ckpt: starting at step 0"]
    assert run(tmp_path, 6) == ["[holdfast] restored step 4 from ckpt (1 older exists)"]
    assert run(tmp_path, 6) == [
        "[holdfast] restored step 6 from ckpt (2 older exist)",
        "[holdfast] all steps were done before (6 of 6): there is nothing left to do",
    ]


@pytest.mark.fault("A script has a logging configuration of its own, and resumes")
@pytest.mark.parametrize(
    ("before", "lines"),
    [
        pytest.param("import logging; logging.basicConfig()", 1, id="warnings"),
        pytest.param("import logging; logging.basicConfig(level=20)", 1, id="infos"),
        pytest.param("import logging; logging.getLogger('holdfast').setLevel(30)", 0, id="off"),
    ],
)
def test_notices_follow_the_logging_configuration_of_the_script(
    tmp_path: Path, before: str, lines: int
) -> None:
    said = run(tmp_path, 2, before)
    assert sum("nothing to restore" in line for line in said) == lines


def loader(generator: torch.Generator | None = None) -> DataLoader[tuple[torch.Tensor, ...]]:
    data = TensorDataset(torch.arange(64.0))
    return DataLoader(data, batch_size=2, shuffle=True, generator=generator)


@pytest.mark.fault("An iterator is made after the generators were restored")
@pytest.mark.parametrize("made", ["late", "before_rng", "own generator", "none"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_an_iterator_that_is_created_late_causes_a_warning(
    tmp_path: Path, made: str, by_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"t": torch.zeros(1), "rng": holdfast.RNG()}
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=1, when_busy="wait") as ckpt:
        for _ in ckpt.steps(1, state):
            pass
    own = loader(torch.Generator()) if made == "own generator" else loader()
    batches = iter(own) if made == "before_rng" else None

    def start() -> None:
        nonlocal batches
        batches = iter(own)

    before = start if made == "before_rng" else None
    with holdfast.Checkpointer(dir=tmp_path / "ckpt", interval_steps=1, when_busy="wait") as ckpt:
        if by_hand:
            assert ckpt.restore(state, before_rng=before) == 1
            for step in (2, 3):
                if made != "none":
                    batches = batches or iter(own)
                    next(batches)
                ckpt.should_save(step)
        else:
            for _ in ckpt.steps(3, state, before_rng=before):
                if made != "none":
                    batches = batches or iter(own)
                    next(batches)
    warnings = [record for record in caplog.records if "before_rng" in record.getMessage()]
    assert len(warnings) == (1 if made == "late" else 0)


README = Path(__file__).resolve().parents[2] / "README.md"
AROUND = """
import os, sys, torch, json
from torchdata.stateful_dataloader import StatefulDataLoader
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optim = torch.optim.AdamW(model.parameters())
sched = torch.optim.lr_scheduler.ConstantLR(optim)
loader = StatefulDataLoader(TensorDataset(torch.arange(32.0)), batch_size=2, shuffle=True)
seen = open("seen", "a", buffering=1)
steps = 0

def train_step(batch):
    global steps
    steps += 1
    if steps == int(sys.argv[1]):
        os.kill(os.getpid(), 9)
    x = batch[0].unsqueeze(1)
    loss = (model(x) * torch.rand(1)).square().mean()
    loss.backward()
    optim.step()
    optim.zero_grad()
    print(json.dumps([batch[0].tolist(), loss.item()]), file=seen)
    return loss

"""


@pytest.mark.fault("README's script is killed and resumed")
@pytest.mark.parametrize("interval", [7, 8], ids=["within an epoch", "at its end"])
def test_the_readmes_script_repeats_the_order_of_data(interval: int, tmp_path: Path) -> None:
    """The script is the README's, except for the folder and the number of steps.

    It trains for two epochs and a half, and continues after step 14, or after the last step of the first one.
    """
    text = README.read_text()
    code = text[text.index("```python\n") + 10 :]
    code = code[: code.index("```")]
    assert "10_000" in code
    code = code.replace("10_000", "40").replace(
        "holdfast.Checkpointer()",
        f'holdfast.Checkpointer(dir="ckpt", interval_steps={interval}, when_busy="wait")',
    )
    seen: dict[str, list[str]] = {}
    for name, kills in {"calm": ["0"], "killed": ["20", "0"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        for kill in kills:
            zygote.run(
                [sys.executable, "-c", AROUND + code, kill],
                cwd=folder,
                env=dict(os.environ),
                timeout=HANG_SECONDS,
                check=kill == "0",
            )
        seen[name] = (folder / "seen").read_text().splitlines()
    assert len(seen["calm"]) == 40
    assert seen["killed"][:19] == seen["calm"][:19]
    assert seen["killed"][19:] == seen["calm"][len(seen["calm"]) - len(seen["killed"][19:]) :]
    assert len(seen["killed"]) > 40 - 1
