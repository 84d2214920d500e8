"""A gang is killed and its folder is lost, as on another machine. It ends in the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.frameworks.kills import launched, train

SCRIPT = Path(__file__).with_name("train.py")
MODULES = {"PYTHONPATH": str(Path(__file__).parents[3])}


@pytest.mark.fault("A gang is killed and its folder is lost")
def test_a_killed_gang_whose_folder_is_lost_ends_in_the_same_bits(
    tmp_path: Path, any_url: str
) -> None:
    def command(store: str) -> list[str]:
        # The persisters of the killed run may still write into the folder, so that it is moved away.
        move = '[ ! -e ckpt ] || mv ckpt "lost$$"; exec "$@"'
        return ["sh", "-c", move, "sh", *launched(SCRIPT, store, "14", ranks=2)]

    for name in ("reference", "killed"):
        (tmp_path / name).mkdir()
    reference = train(command(f"{any_url}/reference"), tmp_path / "reference", environment=MODULES)
    found = train(
        command(f"{any_url}/killed"),
        tmp_path / "killed",
        kills=2,
        most_steps=5,
        environment=MODULES,
    )
    assert found.digest == reference.digest
    assert max(found.starts) > 1, "no run continued from the store"
