"""The position of a StreamingDataLoader of mosaicml-streaming: `make test-streaming` runs these tests.

Its releases need older releases of libraries that the adapters use, so it has an environment of its own.
The other targets leave this file out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import streaming

SCRIPT = Path(__file__).parent / "scripts/streaming_train.py"
SAMPLES, BATCH = 64, 4
EPOCH = SAMPLES // BATCH


def make_data(folder: Path) -> Path:
    folder.mkdir()
    with streaming.MDSWriter(out=str(folder / "data"), columns={"i": "int"}) as out:
        for number in range(SAMPLES):
            out.write({"i": number})
    return folder


def train(folder: Path, steps: int, killed_after: int, *, ranks: int = 1, restarts: int = 0) -> int:
    """Train with `holdfast run`, and return its exit code."""
    launch = ["run", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--"]
    script = [sys.executable, str(SCRIPT), str(folder), str(steps), str(killed_after)]
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *launch, *script], timeout=300
    ).returncode


def seen(folder: Path, rank: int = 0) -> list[tuple[int, list[int]]]:
    """Return the steps and the samples of a rank in the order in which it trained them."""
    lines = (folder / f"seen-{rank}").read_text().splitlines()
    return [(step, samples) for step, samples in map(json.loads, lines)]


@pytest.mark.parametrize("killed_after", [7, EPOCH + 5], ids=["first epoch", "second epoch"])
def test_a_killed_training_continues_with_the_same_samples(
    tmp_path: Path, killed_after: int
) -> None:
    """It is restored two steps before the kill, and trains to the end of the third epoch."""
    whole, killed = make_data(tmp_path / "whole"), make_data(tmp_path / "killed")
    assert train(whole, 3 * EPOCH, -1) == 0
    assert train(killed, 3 * EPOCH, killed_after, restarts=1) == 0
    steps = [step for step, _ in seen(killed)]
    assert steps == [*range(killed_after + 1), *range(killed_after - 1, 3 * EPOCH)]
    samples = dict(seen(whole))
    assert [samples[step] for step in steps] == [found for _, found in seen(killed)]


def test_a_training_of_two_ranks_continues_on_one_and_trains_each_sample_once(
    tmp_path: Path,
) -> None:
    folder = make_data(tmp_path / "gang")
    assert train(folder, EPOCH, 4, ranks=2) != 0
    of_two = [samples for rank in (0, 1) for step, samples in seen(folder, rank) if step <= 2]
    (folder / "seen-0").unlink()
    assert train(folder, 3 + EPOCH - 2 * 3, 4) == 0
    of_one = [samples for _, samples in seen(folder)]
    trained = [sample for samples in (*of_two, *of_one) for sample in samples]
    assert sorted(trained) == list(range(SAMPLES))
