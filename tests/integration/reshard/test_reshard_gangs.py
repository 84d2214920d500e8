"""Restoring on other numbers of ranks, with real processes, gloo and torch's own sharding APIs.

One gang of eight is started once and runs all scenarios, because importing torch takes longer than they do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.trainer.launched import Launched

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from scenarios import SCENARIOS  # type: ignore[import-not-found] # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], str]]:
    folder = tmp_path_factory.mktemp("gang")
    options = ["--nproc-per-node", "8"]
    for module in ("torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        options += ["--preload", module]
    command = [sys.executable, str(HERE / "gang_program.py"), str(folder)]
    with Launched(folder, options, command) as launched:
        launched.wait(880)
        done = folder / "done"
        yield (done.read_text().splitlines() if done.exists() else [], launched.err())


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_bits_are_those_of_the_unsharded_reference(
    name: str, played: tuple[list[str], str]
) -> None:
    done, errors = played
    assert name in done, errors[-8000:]
