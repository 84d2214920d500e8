"""What the first save says about data that cannot continue exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast import RNG, Checkpointer
from holdfast.training.inexact_data import inexact_data, inexact_loader


class Loader:
    """A loader with a position, such as a StatefulDataLoader."""

    def __init__(self, dataset: Any = None, generator: torch.Generator | None = None) -> None:
        self.dataset = dataset
        self.generator = generator
        self.batch_sampler = None

    def state_dict(self) -> dict[str, int]:
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class BufferShuffledExamplesIterable:
    """Has the name of the class in datasets."""


class Mapped:
    def __init__(self, *inner: Any) -> None:
        self.ex_iterables = list(inner)


class Rows:
    def __init__(self, iterable: Any) -> None:
        self._ex_iterable = iterable


def paths(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_a_generator_that_no_rng_saves_is_named_by_its_path() -> None:
    generator = torch.Generator()
    state = {"data": {"train": Loader(generator=generator)}, "rng": RNG()}
    assert paths(inexact_data(state)) == ["data.train.generator"]
    assert inexact_data({**state, "more": [RNG(generator)]}) == []


def test_a_shuffle_buffer_is_found_below_other_steps() -> None:
    buffered = Rows(Mapped(Mapped(), Mapped(BufferShuffledExamplesIterable())))
    assert paths(inexact_data({"data": [Loader(), Loader(buffered)]})) == ["data.1"]
    assert inexact_data({"data": Loader(Rows(Mapped(Mapped())))}) == []


def test_a_loader_without_a_position_is_named() -> None:
    (line,) = inexact_loader("train", DataLoader([1, 2]), [])  # type: ignore[arg-type]
    assert line.startswith("train: torch.utils.data.dataloader.DataLoader has no state_dict")
    assert inexact_loader("train", Loader(), []) == []


def test_the_first_save_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"data": Loader(generator=torch.Generator())}
    with Checkpointer(tmp_path, when_busy="wait") as ckpt:
        ckpt.save(1, state)
        ckpt.save(2, state)
    assert paths([one for one in caplog.messages if one.startswith("data")]) == ["data.generator"]
