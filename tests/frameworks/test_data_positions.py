"""What each data library loses or repeats at a restart, through a checkpoint, with the real library.

Each case trains 5 batches, saves, and restores into new objects. The table of docs/integrations/data.md says
what these tests show.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import webdataset
from tests.support.frameworks.forked import Training, train_forked
from tests.support.hang import HANG_SECONDS
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data import GangSampler

SAMPLES, BATCH, DONE = 60, 4, 5

pytestmark = pytest.mark.timeout(600)


class Stream(IterableDataset[int]):
    """A stream with a position of its own, divided among the workers."""

    def __init__(self) -> None:
        self.index = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        while self.index * workers + worker < SAMPLES:
            self.index += 1
            yield (self.index - 1) * workers + worker
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]


def of_datasets(*, shuffled: bool) -> Any:
    rows = datasets.Dataset.from_dict({"x": list(range(SAMPLES))}).to_iterable_dataset(num_shards=3)
    return rows.shuffle(seed=1, buffer_size=8) if shuffled else rows


def of_tars(folder: Path) -> Any:
    for shard in range(3):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for row in range(SAMPLES // 3):
                text = str(shard * (SAMPLES // 3) + row).encode()
                member = tarfile.TarInfo(f"{row:04d}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    shards = webdataset.WebDataset(f"{folder}/{{0..2}}.tar", shardshuffle=False)
    return shards.decode().to_tuple("txt").map(lambda row: int(row[0]))


def loaders(folder: Path, workers: int) -> dict[str, StatefulDataLoader]:
    """Return a loader for each case, as a script makes them at each start."""
    torch.manual_seed(0)
    numbers: Any = list(range(SAMPLES))

    def loader(data: Any, **options: Any) -> StatefulDataLoader:
        return StatefulDataLoader(data, BATCH, num_workers=workers, **options)

    cases: dict[str, Callable[[], StatefulDataLoader]] = {
        "map": lambda: loader(numbers, shuffle=True),
        "generator": lambda: loader(
            numbers, shuffle=True, generator=torch.Generator().manual_seed(3)
        ),
        "gang": lambda: loader(numbers, sampler=GangSampler(numbers, seed=3)),
        "stream": lambda: loader(Stream()),
        "datasets": lambda: loader(of_datasets(shuffled=False)),
        "shuffled": lambda: loader(of_datasets(shuffled=True)),
        "webdataset": lambda: loader(of_tars(folder)),
    }
    return {name: make() for name, make in cases.items()}


def rows_of(batch: Any) -> list[int]:
    return [int(row) for row in (batch["x"] if isinstance(batch, dict) else batch)]


def epochs(stream: Any, loader: StatefulDataLoader, count: int) -> list[list[int]]:
    """Return the batches that are left in `stream`, and those of `count` further epochs of its loader."""
    found = [rows_of(batch) for batch in stream]
    for _ in range(count):
        found += [rows_of(batch) for batch in loader]
    return found


@pytest.fixture(scope="module", params=[0, 2], ids=lambda workers: f"{workers} workers")
def resumed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[list[int]], list[list[int]], list[list[int]]]]:
    """Return for each case: the batches before the save, those after it, and those after a restore.

    Both have one epoch more than the one under way. With "generator saved" the state holds the generator.
    """
    folder = tmp_path_factory.mktemp("data")
    workers: int = request.param
    later = 1 if workers == 0 else 0
    made = loaders(folder, workers)
    saved = {**made, "generator saved": loaders(folder, workers)["generator"]}
    streams = {name: iter(loader) for name, loader in saved.items()}
    done = {name: [rows_of(next(one)) for _ in range(DONE)] for name, one in streams.items()}
    rng = holdfast.RNG(saved["generator saved"].generator)
    with holdfast.Checkpointer(folder / "ckpt", on_save_error="raise") as ckpt:
        ckpt.save(DONE, {"data": saved, "rng": rng}).wait("local", timeout=HANG_SECONDS)
    rest = {name: epochs(one, saved[name], later) for name, one in streams.items()}

    again = {**loaders(folder, workers), "generator saved": loaders(folder, workers)["generator"]}
    restored: dict[str, Any] = {}

    def start() -> None:
        restored.update({name: iter(loader) for name, loader in again.items()})

    rng = holdfast.RNG(again["generator saved"].generator)
    with holdfast.Checkpointer(folder / "ckpt") as ckpt:
        assert ckpt.restore({"data": again, "rng": rng}, before_rng=start) == DONE
    after = {name: epochs(one, again[name], later) for name, one in restored.items()}
    return {name: (done[name], rest[name], after[name]) for name in saved}


@pytest.mark.parametrize("case", ["map", "gang", "stream", "webdataset", "generator saved"])
def test_a_loader_continues_with_the_same_batches(case: str, resumed: dict[str, Any]) -> None:
    _, rest, after = resumed[case]
    assert rest == after
    assert len(rest) >= SAMPLES // BATCH - DONE


def test_a_generator_that_is_not_saved_changes_the_order_of_later_epochs(
    resumed: dict[str, Any],
) -> None:
    _, rest, after = resumed["generator"]
    left = SAMPLES // BATCH - DONE
    assert rest[:left] == after[:left]
    if len(rest) > left:
        assert rest[left:] != after[left:]


def test_later_epochs_of_datasets_begin_at_the_restored_position(resumed: dict[str, Any]) -> None:
    _, rest, after = resumed["datasets"]
    left = SAMPLES // BATCH - DONE
    assert rest[:left] == after[:left]
    if len(rest) > left:
        assert rest[left] == [0, 1, 2, 3]
        assert after[left] == after[0]


def test_the_shuffle_buffer_of_datasets_is_lost(resumed: dict[str, Any]) -> None:
    done, _, after = resumed["shuffled"]
    seen = {row for batch in (*done, *after[: SAMPLES // BATCH]) for row in batch}
    assert len(seen) < SAMPLES


def test_the_first_save_names_what_cannot_continue_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = loaders(tmp_path, 0)
    generator = loaders(tmp_path, 0)["generator"]
    state = {"data": {**made, "saved": generator}, "rng": holdfast.RNG(generator.generator)}
    with holdfast.Checkpointer(tmp_path / "ckpt", when_busy="wait") as ckpt:
        ckpt.save(1, state)
        ckpt.save(2, state)
    named = [line.partition(":")[0] for line in caplog.messages if line.startswith("data.")]
    assert named == ["data.generator.generator", "data.shuffled"]


def test_a_gang_of_another_size_trains_every_sample_once(tmp_path: Path) -> None:
    """Each run ends one step after a save, so that the next one trains that step's samples again."""
    script = Path(__file__).with_name("scripts") / "gang_samples.py"
    trained: dict[int, list[int]] = {}
    for ranks, steps in ((2, 7), (3, 5), (1, 1000)):
        plan = [Training(tmp_path, (str(steps),), ranks=ranks)]
        (ended,) = train_forked(script, plan, preload=["holdfast.data"])
        first = ended.starts[0]
        trained = {step: rows for step, rows in trained.items() if step < first}
        for file in tmp_path.glob(f"{first}-*"):
            trained[int(file.name.partition("-")[2])] = [int(row) for row in file.open()]
    assert len({len(rows) for rows in trained.values()}) == 3
    assert sorted(row for rows in trained.values() for row in rows) == list(range(240))
