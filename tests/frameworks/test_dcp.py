"""The script of the page of torch.distributed.checkpoint, as a gang that is killed, and on other numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.frameworks.devices import train_page
from tests.support.frameworks.forked import Training, train_forked
from tests.support.frameworks.kills import Trained
from tests.support.frameworks.pages import script_of
from tests.support.gpu import needs_gpu

PRELOAD = ["torch.distributed.fsdp", "holdfast.integrations.dcp"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    """Train two ranks without and with kills, start the latter's folder on one rank, and the other way."""
    folder = tmp_path_factory.mktemp("dcp")
    script = folder / "train.py"
    script.write_text(script_of("dcp.md"))
    plan = [
        Training(folder / "whole", ranks=2),
        Training(folder / "killed", kills=2, seed=1, least_steps=4, most_steps=6, ranks=2),
        Training(folder / "killed", ranks=1),
        Training(folder / "one", ranks=1),
        Training(folder / "one", ranks=2),
    ]
    return train_forked(script, plan, preload=PRELOAD)


@pytest.mark.fault("Ranks of a DCP training are killed between saves")
def test_killed_ranks_end_in_the_same_bits(trained: list[Trained]) -> None:
    whole, killed, *_ = trained
    assert killed.digest == whole.digest
    assert max(killed.starts) > 1


@needs_gpu
def test_a_killed_training_on_a_gpu_ends_in_the_same_bits(tmp_path: Path) -> None:
    options = {"kills": 2, "least_steps": 4, "most_steps": 6}
    whole, killed = train_page("dcp.md", "cuda", tmp_path, **options)
    assert killed.digest == whole.digest
    assert killed.starts[-1] > 1


def test_the_checkpoint_of_two_ranks_loads_on_one(trained: list[Trained]) -> None:
    _, killed, alone, *_ = trained
    assert alone.digest == killed.digest
    assert alone.starts == ()


def test_the_checkpoint_of_one_rank_loads_on_two(trained: list[Trained]) -> None:
    *_, alone, both = trained
    assert both.digest == alone.digest
    assert both.starts == ()
